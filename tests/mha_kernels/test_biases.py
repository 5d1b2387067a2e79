"""Biases of every shape and rule against formulas written out, and a user's own."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_kernels as mk
from tests.mha_kernels import oracle
from tests.mha_kernels.problems import normal


@pytest.mark.parametrize(
    "bidirectional, buckets, max_distance",
    list(itertools.product((True, False), (8, 16, 32, 64), (32 + 5, 128, 500))),
)
def test_t5_buckets_are_the_published_ones(bidirectional: bool, buckets: int, max_distance: int) -> None:
    distances = np.arange(-600, 601)
    found = mk.t5_bucket(distances, bidirectional, buckets, max_distance)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, oracle.t5_bucket(distances, bidirectional, buckets, max_distance))


@pytest.mark.parametrize("buckets, max_distance, bidirectional", [(3, 128, True), (1, 128, False), (32, 8, True)])
def test_t5_refuses_impossible_buckets(buckets: int, max_distance: int, bidirectional: bool) -> None:
    with pytest.raises(ValueError, match=f"num_buckets {buckets}, max_distance {max_distance}: expected"):
        mk.t5_bucket(np.arange(3), bidirectional, buckets, max_distance)


def test_alibi_slopes_for_any_number_of_heads() -> None:
    """mlx #343: one geometric series is wrong for six heads."""
    exponents = {
        1: [-8],
        2: [-4, -8],
        3: [-4, -8, -2],
        6: [-2, -4, -6, -8, -1, -3],
        8: [-1, -2, -3, -4, -5, -6, -7, -8],
        12: [-1, -2, -3, -4, -5, -6, -7, -8, -0.5, -1.5, -2.5, -3.5],
    }
    for heads, powers in exponents.items():
        slopes = mk.alibi_slopes(heads)
        assert slopes.dtype == jnp.float32
        np.testing.assert_allclose(slopes, 2.0 ** np.array(powers), rtol=1e-6)
    for wrong in (0, -1, 2.0, True, "8"):
        with pytest.raises(ValueError, match=r"num_heads is .*; expected a positive integer"):
            mk.alibi_slopes(wrong)  # type: ignore[arg-type]


B, Q, K, H, E = 2, 4, 6, 2, 3
SHAPES = [(Q, K), (1, K), (Q, 1), (1, 1), *itertools.product((1, B), (1, H), (1, Q), (1, K))]


@pytest.mark.parametrize("implementation", ["reference", mk.Blockwise(2, 3)], ids=str)
def test_a_dense_bias_of_every_shape_and_its_gradient(implementation: Any, x64: None) -> None:
    q, v = normal(0, B, Q, H, E), normal(1, B, K, H, E)
    values = [normal(2 + n, *shape) / 4 for n, shape in enumerate(SHAPES)]
    of_output = normal(99, B, Q, H, E)
    forward = oracle.attend(q, v, v, bias=sum(values))
    of_bias = oracle.gradients(forward, of_output, {})["bias"]

    @jax.jit
    def run(values: list) -> Any:
        def context(values: list) -> Any:
            bias = mk.DenseBias(values[0])
            for more in values[1:]:
                bias = bias + mk.DenseBias(more)
            return mk.attention(*map(jnp.asarray, (q, v, v)), bias=bias, implementation=implementation)

        output, pull_back = jax.vjp(context, values)
        return output, pull_back(jnp.asarray(of_output))[0]

    output, gradients = run([jnp.asarray(value) for value in values])
    np.testing.assert_allclose(output, forward.output, rtol=0, atol=1e-12)
    for shape, gradient in zip(SHAPES, gradients):
        whole = (1,) * (4 - len(shape)) + shape
        expected = of_bias.sum(tuple(n for n in range(4) if whole[n] == 1)).reshape(shape)
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("bias, table", [(mk.T5Bias, (H, 8)), (mk.ClippedBias, (H, 5)), (mk.DistanceBias, (H, 3))])
def test_tiles_far_from_the_diagonal_take_the_constant_path(bias: Any, table: Any) -> None:
    """Far tiles hold one value: 16 queries and keys in tiles of 2 reach it on both sides, with its gradient."""
    length, options = 16, {"max_distance": 5} if bias is mk.T5Bias else {}
    q, k, v, of_output = (jnp.asarray(normal(n, 1, length, H, E), jnp.float32) for n in range(4))

    def run(implementation: Any) -> Any:
        def context(entries: Any) -> Any:
            return mk.attention(q, k, v, bias=bias(entries, **options), implementation=implementation)

        output, pull_back = jax.vjp(context, jnp.asarray(normal(5, *table), jnp.float32))
        return output, pull_back(of_output)[0]

    for found, expected in zip(jax.jit(lambda: run(mk.Blockwise(2, 2)))(), jax.jit(lambda: run("reference"))()):
        np.testing.assert_allclose(found, expected, rtol=0, atol=3e-6)
        assert np.abs(expected[..., -1]).min() > 0  # the entry of everything far away


def test_only_biases_join() -> None:
    with pytest.raises(TypeError, match=r"bias \+ ArrayImpl: expected a Bias on both sides"):
        mk.AlibiBias(mk.alibi_slopes(2)) + jnp.zeros((2, 2))  # type: ignore[operator]
    with pytest.raises(TypeError, match="mask & ArrayImpl: expected a Mask on both sides"):
        mk.CausalMask() & jnp.ones((2, 2), bool)  # type: ignore[operator]
