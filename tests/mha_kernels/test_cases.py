"""Public bug reports of other libraries, restated as small inputs with the values that must come out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_kernels as mk
from mha_kernels.pallas.tpu.forward import PallasTPU
from tests.mha_kernels.problems import normal

SMALL = mk.Blockwise(query_tile=3, key_tile=2)
KERNEL = PallasTPU(128, 128, interpret=True)  # that of the GPU needs a newer JAX: test_pallas_gpu.py
implementations = pytest.mark.parametrize("implementation", ["reference", SMALL, KERNEL], ids=str)
TYPES = {"reference": ("float32", "bfloat16", "float16"), SMALL: ("float32", "float16"), KERNEL: ("bfloat16",)}
typed_implementations = pytest.mark.parametrize(
    "implementation, dtype", [(each, jnp.dtype(name)) for each, names in TYPES.items() for name in names], ids=str
)


def both(function: Any, *arrays: Any) -> Any:
    """What `function` gives as one compiled program, which must be the same bits as when it is called without."""
    found = jax.jit(function)(*arrays)
    jax.tree.map(np.testing.assert_array_equal, function(*arrays), found)
    return found


def even(values: Any, queries: int, dtype: Any = jnp.float32, heads: int = 1, **options: Any) -> np.ndarray:
    """Output (Q, H) of zero scores, one example, values (K,) or (K, G): means that one can check by hand."""
    values = np.asarray(values, dtype)
    values = values.reshape(1, len(values), -1, 1)
    arrays = np.zeros((1, queries, heads, 1), dtype), np.zeros_like(values), values
    output = both(lambda *x: mk.attention(*x, **options), *arrays)
    assert output.dtype == dtype
    return np.asarray(output, np.float64)[0, :, :, 0]


def weights_of(mask: Any, queries: int, keys: int, **options: Any) -> np.ndarray:
    query, key = (np.zeros((1, length, 1, 1), np.float32) for length in (queries, keys))
    return np.asarray(jax.jit(lambda *x: mk.attention_weights(*x, mask=mask, **options))(query, key))[0, 0]


@implementations
@pytest.mark.parametrize("compiled", [True, False])
def test_rows_without_keys_are_zero_and_pass_no_gradient(implementation: Any, compiled: bool) -> None:
    """pytorch #41508: a local mask and key padding together leave some query with no key."""
    mask = mk.WindowMask(left=1, right=0) & mk.KeyPaddingMask(jnp.array([[False, False, True, True]]))
    value = jnp.array([[0.0, 1], [1, 0], [2, 3], [4, 5]]).reshape(1, 4, 1, 2)
    zeros = jnp.zeros((1, 4, 1, 2))
    wrap = jax.jit if compiled else lambda f: f

    def context(q: Any, k: Any, v: Any) -> Any:
        output = mk.attention(q, k, v, mask=mask, implementation=implementation)
        return output.sum(), output

    with jax.debug_nans(True), jax.disable_jit(not compiled and implementation == "reference"):
        run = wrap(jax.value_and_grad(context, argnums=(0, 1, 2), has_aux=True))
        (_, output), (_, _, of_v) = run(zeros, zeros, value)
        _, (of_q, of_k, _) = run(*(jnp.asarray(normal(n, 1, 4, 1, 2), jnp.float32) for n in (0, 1)), value)
    np.testing.assert_array_equal(output[0, :, 0], [[0, 0], [0, 0], [2, 3], [3, 4]])
    np.testing.assert_array_equal(of_v[0, :, 0], np.repeat([[0], [0], [1.5], [0.5]], 2, axis=1))
    np.testing.assert_array_equal(of_q[0, :2], 0)
    assert np.isfinite(of_q).all()
    assert np.isfinite(of_k).all()


@implementations
def test_rows_forbidden_entirely_by_a_boolean_or_an_additive_mask(implementation: Any) -> None:
    """pytorch #103963: NaN in whole rows; the mean over all keys, as jax.nn gives, is as wrong."""
    keep = np.zeros((8, 8), bool)
    keep[:4, :4] = True
    expected = np.array([[1.5]] * 4 + [[0.0]] * 4)
    boolean = even(np.arange(8), 8, mask=jnp.asarray(keep), implementation=implementation)
    additive = even(np.arange(8), 8, bias=jnp.where(keep, 0.0, -jnp.inf), implementation=implementation)
    np.testing.assert_array_equal(boolean, expected)
    np.testing.assert_array_equal(additive, expected)
    np.testing.assert_array_equal(weights_of(jnp.asarray(keep), 8, 8), keep / 4)


@implementations
def test_the_rank_of_a_mask_does_not_matter_beside_padding(implementation: Any) -> None:
    """pytorch #63271: a mask for each head plus padding gave NaN, a common mask plus padding did not."""
    causal = np.tril(np.ones((4, 4), bool))
    padding = mk.KeyPaddingMask(jnp.array([[True, True, True, False]] * 2))
    zeros = jnp.zeros((2, 4, 2, 1))
    value = jnp.broadcast_to(jnp.array([1.0, 2, 4, 1000]).reshape(1, 4, 1, 1), (2, 4, 2, 1))
    expected = np.array([1, 1.5, 7 / 3, 7 / 3])
    for shape in ((4, 4), (1, 1, 4, 4), (2, 1, 4, 4), (2, 2, 4, 4)):
        mask = mk.DenseMask(np.broadcast_to(causal, shape)) & padding
        output = both(lambda *x: mk.attention(*x, mask=mask, implementation=implementation), zeros, zeros, value)  # noqa: B023
        np.testing.assert_allclose(output[..., 0], np.broadcast_to(expected[None, :, None], (2, 4, 2)), rtol=1e-6)
    row = [1 / 3, 1 / 3, 1 / 3, 0]
    weights = jax.jit(lambda *x: mk.attention_weights(*x, mask=mask))(zeros, zeros)
    np.testing.assert_allclose(weights[1, 1], [[1, 0, 0, 0], [1 / 2, 1 / 2, 0, 0], row, row], rtol=1e-6)


@implementations
def test_booleans_select_floats_are_added_integers_are_refused(implementation: Any) -> None:
    """pytorch #21518: a 0/1 float mask did nothing."""
    options = {"implementation": implementation}
    added = jnp.array([[1.0, 0.0]])
    np.testing.assert_allclose(even([0, 1], 1, bias=added, **options), 0.2689414, rtol=1e-6)
    np.testing.assert_allclose(weights_of(None, 1, 2, bias=added), [[0.7310586, 0.2689414]], rtol=1e-6)
    assert even([0, 1], 1, mask=jnp.array([[True, False]]), **options) == 0
    with pytest.raises(TypeError, match="mask has dtype int32; expected bool"):
        even([0, 1], 1, mask=jnp.array([[1, 0]]), **options)
    with pytest.raises(TypeError, match="mask has dtype float32; expected bool"):
        even([0, 1], 1, mask=jnp.array([[0.0, -jnp.inf]]), **options)


@typed_implementations
def test_two_masks_of_finite_minimums_do_not_overflow(implementation: Any, dtype: Any) -> None:
    """transformers #27114: causal and padding planes of finfo.min were added to -inf."""
    keep, lowest = np.array([False, False, False, True, True]), jnp.finfo(dtype).min
    causal = np.tril(np.ones((5, 5), bool))
    value = jnp.array([9, 9, 9, 1, 3], dtype).reshape(1, 5, 1, 1)
    planes = [jnp.where(jnp.asarray(plane), 0, lowest).astype(dtype) for plane in (causal, keep[None])]
    booleans = mk.CausalMask() & mk.KeyPaddingMask(jnp.asarray(keep[None]))
    key = jnp.ones_like(value)

    def context(query: Any, value: Any) -> Any:
        bias = mk.DenseBias(planes[0]) + mk.DenseBias(planes[1])
        return mk.attention(query, key, value, bias=bias, implementation=implementation)

    @jax.jit
    def run(query: Any) -> Any:
        output, pull_back = jax.vjp(context, query, value)
        masked = mk.attention(query, key, value, mask=booleans, implementation=implementation)
        return output, pull_back(output), masked

    for score in (0, -20):
        query = jnp.full_like(value, score)
        output, gradients, masked = run(query)
        np.testing.assert_array_equal(context(query, value), output)
        np.testing.assert_array_equal(np.asarray(output, np.float32)[0, 3:, 0, 0], [1, 2])
        np.testing.assert_array_equal(np.asarray(masked, np.float32)[0, :, 0, 0], [0, 0, 0, 1, 2])
        assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in (output, *gradients))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "statistics": {"statistics": None},
    "dropout": {"dropout": mk.Dropout(0.5, jax.random.key(3))},
    "padding": {"padding": True},
    "bias": {"bias": mk.AlibiBias(mk.alibi_slopes(2))},
}


@implementations
@pytest.mark.parametrize("name", OPTIONS)
def test_causality_depends_on_no_other_option(implementation: Any, name: str) -> None:
    """keras #23038: the causal flag was dropped as soon as another option left the fused path."""
    options = {"statistics": (), **OPTIONS[name]}
    mask: mk.Mask = mk.CausalMask()
    if options.pop("padding", False):
        mask = mask & mk.KeyPaddingMask(jnp.array([[True, True, False, True]]))
    arrays = [normal(n, 1, 4, 2, 4).astype(np.float32) for n in range(3)]
    shift = np.float32([0, 0, 0, 100]).reshape(1, 4, 1, 1)

    def run(*arrays: Any) -> Any:
        return mk.attention_with_statistics(*arrays, mask=mask, implementation=implementation, **options)

    for either in (jax.jit(run), run):
        (before, rows), (after, moved_rows) = either(*arrays), either(*(x + shift for x in arrays))
        np.testing.assert_array_equal(before[:, :3], after[:, :3])
        assert np.abs(before[:, 3] - after[:, 3]).max() > 1
        for row, moved in zip(jax.tree.leaves(rows), jax.tree.leaves(moved_rows)):
            np.testing.assert_array_equal(row[..., :3], moved[..., :3])


def test_causal_weights() -> None:
    np.testing.assert_allclose(weights_of(mk.CausalMask(), 4, 4), np.tril(np.ones((4, 4))) / np.c_[1:5], rtol=1e-6)


@implementations
@pytest.mark.parametrize("causal", [True, False])
def test_decoding_sees_all_tokens_so_far(implementation: Any, causal: bool) -> None:
    """flax #5591: in a cache of capacity 6 the position comes from the cache, so causal or not is the same."""

    def step(t: Any) -> Any:
        used = mk.KeyPaddingMask(jnp.arange(6)[None] <= t)
        mask = mk.CausalMask() & used if causal else used
        cache = jnp.where(jnp.arange(6) <= t, jnp.arange(6.0), jnp.nan).reshape(1, 6, 1, 1)
        origin = mk.Origin(query=t)
        query = jnp.zeros((1, 1, 1, 1))
        return mk.attention(query, cache, cache, mask=mask, origin=origin, implementation=implementation)

    for either in (jax.jit(step), step):
        found = [either(t)[0, 0, 0, 0] for t in range(6)]
        np.testing.assert_allclose(found, [0, 0.5, 1, 1.5, 2, 2.5], rtol=1e-6)


@implementations
def test_the_triangle_is_aligned_top_left(implementation: Any) -> None:
    """pytorch #108108: alignment of the triangle when Q differs from K; an offset of K - Q gives the other one."""
    for queries, keys, offset, expected in (
        (2, 5, 0, [1, 1.5]),
        (2, 5, 3, [2.5, 3]),
        (5, 2, 0, [1, 1.5, 1.5, 1.5, 1.5]),
        (5, 2, -3, [0, 0, 0, 1, 1.5]),
    ):
        output = even(np.arange(keys) + 1, queries, mask=mk.CausalMask(offset), implementation=implementation)
        np.testing.assert_allclose(output[:, 0], expected, rtol=1e-6)


@implementations
def test_alibi_measures_from_the_position_in_the_cache(implementation: Any) -> None:
    """keras-hub #2861: the bias was built over the query window, so that decoding ran without it."""
    values = jnp.broadcast_to(jnp.arange(4.0).reshape(1, 4, 1, 1), (1, 4, 2, 1))
    bias = mk.AlibiBias(mk.alibi_slopes(2))

    def run(queries: int, t: Any) -> Any:
        query = jnp.zeros((1, queries, 2, 1))
        options = {"mask": mk.CausalMask(), "bias": bias, "implementation": implementation}
        return mk.attention(query, jnp.zeros_like(values), values, origin=mk.Origin(query=t), **options)[0, :, :, 0]

    for either in (jax.jit(run, static_argnums=0), run):
        steps = np.concatenate([either(1, t) for t in range(4)])
        np.testing.assert_allclose(steps[3], [1.5780387, 1.5048828], rtol=0, atol=1e-6)
        np.testing.assert_allclose(steps, either(4, 0), rtol=0, atol=1e-6)
