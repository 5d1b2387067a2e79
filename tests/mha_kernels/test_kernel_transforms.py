"""vmap of the drivers of the kernels against a loop."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mha_kernels as mk
from tests.mha_kernels import test_transforms as transforms
from tests.mha_kernels.kernel_drivers import TPU, attend, drivers
from tests.mha_kernels.problems import normal


@drivers
def test_vmap_over_every_argument_at_once_and_of_the_gradient(driver: Any, dtype: Any, bound: float) -> None:
    """A folded axis visits the same tiles in the same order: what differs is how XLA sums outside the kernel."""
    x = transforms.inputs()
    x |= {name: x[name].astype(dtype) for name in ("query", "key", "value")}
    both = functools.partial(transforms.gradient_and_results, driver)
    one = jax.jit(both)
    parts = [one(jax.tree.map(lambda leaf: leaf[n], x)) for n in range(transforms.N)]  # noqa: B023
    found = jax.jit(jax.vmap(both))(x)
    transforms.close(found, jax.tree.map(lambda *rows: jnp.stack(rows), *parts))


@drivers
def test_vmap_of_one_argument_alone(driver: Any, dtype: Any, bound: float) -> None:
    """Shared operands stay shared: only the values are mapped."""
    query, key = (jnp.asarray(normal(n, 1, 5, 2, 8), dtype) for n in range(2))
    values = jnp.asarray(normal(2, 3, 1, 5, 2, 8), dtype)
    found = jax.vmap(lambda value: attend(driver, query, key, value, mask=mk.CausalMask())[0])(values)
    for value, row in zip(values, found, strict=True):
        expected = attend(driver, query, key, value, mask=mk.CausalMask())[0]
        np.testing.assert_array_equal(row.astype(np.float32), expected.astype(np.float32))


def test_64_bit_types_of_the_caller_change_nothing() -> None:
    """Numbers given in Python are float64 there, and loops count in int64: neither reaches a kernel.

    On TPUs' interpreter alone: JAX's own for GPUs fails there.
    """
    query, key, value = (jnp.asarray(normal(n, 1, 5, 2, 8), jnp.float32) for n in range(3))
    table = jnp.asarray(normal(3, 2, 8), jnp.float32)

    def loss(query: jax.Array, table: jax.Array) -> tuple[jax.Array, jax.Array]:
        choices = {"bias": mk.T5Bias(table, max_distance=4), "scale": 0.3, "softcap": 2.0, "implementation": TPU}
        output = mk.attention(query, key, value, **choices)
        return jnp.sum(output**2), output

    expected = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(query, table)
    with jax.enable_x64(True):
        found = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(query, table)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
