"""The flattened product and its gradients against NumPy's contraction; what it cannot do is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mha_research.attention.layers.product import flat_dot_general, product

CONTRACTIONS = [((2, 3, 5), (5, 7), 1), ((2, 3, 5, 7), (5, 7, 11), 2), ((2, 5), (5, 3, 7), 1), ((3, 5), (5,), 1)]


@pytest.mark.parametrize("inputs,kernel,axes", CONTRACTIONS)
def test_values_and_gradients(inputs: tuple[int, ...], kernel: tuple[int, ...], axes: int) -> None:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=inputs), rng.normal(size=kernel)
    expected = np.tensordot(x, w, axes)
    cotangent = rng.normal(size=expected.shape)
    numbers = ((tuple(range(x.ndim - axes, x.ndim)), tuple(range(axes))), ((), ()))
    x32, w32, c32 = (jnp.asarray(array, jnp.float32) for array in (x, w, cotangent))
    output, pull_back = jax.vjp(jax.jit(lambda x, w: flat_dot_general(x, w, numbers)), x32, w32)
    of_inputs, of_kernel = pull_back(c32)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)
    outer = cotangent.ndim - (w.ndim - axes)
    np.testing.assert_allclose(
        of_inputs, np.tensordot(cotangent, w, (range(outer, cotangent.ndim), range(axes, w.ndim))), atol=1e-5
    )
    np.testing.assert_allclose(of_kernel, np.tensordot(x, cotangent, (range(outer), range(outer))), atol=1e-5)
    if axes == 1:
        np.testing.assert_array_equal(product(x32, w32), output)


def test_it_stands_in_a_linear_layer_and_goes_through_transforms() -> None:
    layer = nnx.LinearGeneral(5, (3, 2), dot_general=flat_dot_general, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    plain = nnx.LinearGeneral(5, (3, 2), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(7, 4, 5)), jnp.float32)
    np.testing.assert_array_equal(layer(x), plain(x))
    np.testing.assert_array_equal(jax.vmap(layer)(x[:, None]), plain(x)[:, None])
    direction = jnp.ones_like(x)
    np.testing.assert_allclose(jax.jvp(layer, (x,), (direction,))[1], jax.jvp(plain, (x,), (direction,))[1])


@pytest.mark.parametrize("numbers", [(((0,), (0,)), ((), ())), (((1,), (0,)), ((0,), (1,))), (((1,), (1,)), ((), ()))])
def test_other_axes_are_refused(numbers: tuple) -> None:
    with pytest.raises(ValueError, match="flat_dot_general: last axes with first ones"):
        flat_dot_general(jnp.ones((3, 3)), jnp.ones((3, 3)), numbers)
