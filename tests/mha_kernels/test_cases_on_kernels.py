"""Public bug reports of other libraries on the kernels of accelerators, with the values that must come out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_kernels as mk
from mha_kernels.arguments import build_spec
from mha_kernels.pallas.gpu.forward import PallasGPU
from mha_kernels.pallas.tpu.forward import PallasTPU
from tests.mha_kernels import oracle
from tests.mha_kernels.kernel_drivers import OLD, TPU, attend, drivers, even, gpu, typed_drivers
from tests.mha_kernels.problems import normal


def arrays(length: int, width: int, dtype: Any) -> list[Any]:
    """Query, key, value and the cotangent of the output, rounded to the type at hand."""
    return [jnp.asarray(normal(seed, 1, length, 1, width), dtype) for seed in range(4)]


def close(found: Any, expected: np.ndarray, bound: float) -> None:
    np.testing.assert_allclose(
        np.asarray(found, np.float64), expected, rtol=0, atol=bound * max(1, abs(expected).max())
    )


def same_as_numpy(driver: Any, dtype: Any, bound: float, length: int, width: int, **arguments: Any) -> None:
    """Output and gradients of random arrays, causal where there is a mask, against NumPy in float64."""
    query, key, value, cotangent = arrays(length, width, dtype)
    output, pull_back = jax.vjp(lambda *x: attend(driver, *x, **arguments)[0], query, key, value)
    allowed = np.tril(np.ones((length, length), bool)) if "mask" in arguments else True
    expected = oracle.attend(*(np.asarray(x, np.float64) for x in (query, key, value)), allowed=allowed)
    close(output, expected.output, bound)
    gradients = oracle.gradients(expected, np.asarray(cotangent, np.float64), {})
    for name, found in zip(("query", "key", "value"), pull_back(cotangent), strict=True):
        close(found, gradients[name], bound)


@drivers
def test_rows_without_keys_are_zero_and_pass_no_gradient(driver: Any, dtype: Any, bound: float) -> None:
    """S02: a boolean mask and the additive one that says the same; NaN elsewhere, or the mean over all keys."""
    keep = (jnp.arange(8)[:, None] < 4) & (jnp.arange(8)[None, :] < 4)
    for arguments in ({"mask": keep}, {"bias": jnp.where(keep, 0.0, -jnp.inf)}):
        found = even(driver, dtype, np.arange(8), 8, **arguments)
        np.testing.assert_array_equal(found[:, 0], [1.5] * 4 + [0] * 4)
    query, key, value, cotangent = arrays(8, 4, dtype)
    _, pull_back = jax.vjp(lambda *x: attend(driver, *x, mask=keep)[0], query, key, value)
    for found in pull_back(cotangent):
        assert jnp.isfinite(found).all()
        np.testing.assert_array_equal(found[:, 4:].astype(np.float32), 0)


@typed_drivers
@pytest.mark.parametrize("score", [0, -20])
def test_two_masks_of_finite_minimums(driver: Any, dtype: Any, score: float) -> None:
    """S05: causal and padding as additive masks of finfo.min, which overflow to -inf where they meet."""
    keep, least = jnp.asarray([False, False, False, True, True]), jnp.finfo(dtype).min
    causal = jnp.where(jnp.tril(jnp.ones((5, 5), bool)), 0, least).astype(dtype).reshape(1, 1, 5, 5)
    padding = jnp.where(keep, 0, least).astype(dtype).reshape(1, 1, 1, 5)
    value = jnp.asarray([9, 9, 9, 1, 3], dtype).reshape(1, 5, 1, 1)
    query, key = jnp.full_like(value, score), jnp.ones_like(value)
    bias = mk.DenseBias(causal) + mk.DenseBias(padding)
    output, pull_back = jax.vjp(lambda *x: attend(driver, *x, bias=bias)[0], query, key, value)
    np.testing.assert_array_equal(output[0, 3:, 0, 0].astype(np.float32), [1, 2])
    assert all(jnp.isfinite(found).all() for found in (output, *pull_back(output)))
    masks = mk.CausalMask() & mk.KeyPaddingMask(keep[None])
    np.testing.assert_array_equal(
        attend(driver, query, key, value, mask=masks)[0][0, :, 0, 0].astype(np.float32), [0, 0, 0, 1, 2]
    )


@drivers
@pytest.mark.parametrize("exponents", [[-2, -4, -6, -8, -1, -3]], ids=["six heads"])
def test_slopes_of_heads_that_are_no_power_of_two(driver: Any, dtype: Any, bound: float, exponents: list[int]) -> None:
    """S09: two keys and zero scores: the far key weighs 1 / (1 + exp(slope))."""
    bias = mk.AlibiBias(mk.alibi_slopes(len(exponents)))
    found = even(driver, dtype, [0.0, 1.0], 1, heads=len(exponents), bias=bias)
    np.testing.assert_allclose(found[0], 1 / (1 + np.exp(2.0 ** np.asarray(exponents))), rtol=min(bound, 8e-3))


@drivers
def test_dropout_follows_normalisation(driver: Any, dtype: Any, bound: float) -> None:
    """S13: four equal weights, half of them dropped: multiples of 1/2, with mean near 1; never exactly 1 throughout."""
    dropout = mk.Dropout(0.5, jax.random.key(0))
    found = even(driver, dtype, np.ones(4), 200, dropout=dropout)
    assert set(found[:, 0]) <= {0, 0.5, 1, 1.5, 2}
    assert len(set(found[:, 0])) >= 3
    assert 0.9 <= found.mean() <= 1.1
    causal = even(driver, dtype, np.ones(4), 200, dropout=dropout, mask=mk.CausalMask())
    assert causal[0, 0] in (0, 2)
    assert np.isfinite(causal).all()


WITH_TILES = [(PallasTPU(*tiles, interpret=True), jnp.float32, 2e-5) for tiles in ((128, 256), (256, 128), (128, 128))]
if not OLD:
    WITH_TILES += [(gpu(tile), jnp.bfloat16, 3e-2) for tile in (128, 192)]


@pytest.mark.parametrize("driver, dtype, bound", WITH_TILES, ids=lambda x: str(x) if isinstance(x, PallasTPU) else None)
def test_the_newest_keys_of_a_tile_of_queries_are_seen(driver: Any, dtype: Any, bound: float) -> None:
    """S18: tiles of queries larger and smaller than those of keys: row i is the mean i / 2 of the values 0 to i."""
    length = 384
    steps = np.arange(length) % 128  # what bfloat16 holds exactly
    found = even(driver, dtype, steps, length, mask=mk.CausalMask())
    np.testing.assert_allclose(found[:, 0], np.cumsum(steps) / np.arange(1, length + 1), rtol=4e-3)
    same_as_numpy(driver, dtype, bound, length, 64, mask=mk.CausalMask())


@drivers
@pytest.mark.parametrize("length", [1, 5, 7, 127, 129, 192])
def test_any_length(driver: Any, dtype: Any, bound: float, length: int) -> None:
    """S19: the tail of a ragged tile is undefined memory: constant values come back as they are, and twice the same."""
    np.testing.assert_array_equal(even(driver, dtype, np.ones(length), length), 1)
    steps = np.arange(length) % 128
    found = even(driver, dtype, steps, length)
    np.testing.assert_allclose(found, steps.mean(), rtol=4e-3)
    np.testing.assert_array_equal(found, even(driver, dtype, steps, length))


@drivers
@pytest.mark.parametrize("length, width", [(5, 20), (129, 20), (67, 200)])
def test_gradients_of_any_length_and_width(driver: Any, dtype: Any, bound: float, length: int, width: int) -> None:
    """S19, with head widths that are multiples of nothing; the widest take their gradients in halves on a GPU."""
    same_as_numpy(driver, dtype, bound, length, width)


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.int8], ids=["float64", "int8"])
def test_a_type_the_kernels_do_not_multiply_is_refused(dtype: Any, x64: None) -> None:
    query = jnp.zeros((1, 5, 1, 4), dtype)
    for driver in (TPU, PallasGPU(interpret=True)):
        reason = driver.unsupported_reason(query, query, query, build_spec(query, query), ())
        assert reason is not None
        assert f"query is {query.dtype}" in reason or (OLD and "needs JAX 0.11" in reason)
