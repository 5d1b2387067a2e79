"""More public bug reports (see test_cases.py): types, grouped heads, tiles and statistics."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_kernels as mk
from tests.mha_kernels import oracle
from tests.mha_kernels.problems import normal
from tests.mha_kernels.test_cases import both, even, implementations, typed_implementations


@implementations
def test_dropout_follows_normalisation(implementation: Any) -> None:
    """nki-samples #80: the denominator was accumulated after dropout, so a row dropped whole divided by zero."""
    dropout = mk.Dropout(0.5, jax.random.key(0))
    output = even([1, 1, 1, 1], 200, dropout=dropout, implementation=implementation)
    assert set(np.unique(output)) <= {0, 0.5, 1, 1.5, 2}
    assert len(np.unique(output)) >= 3
    assert 0.9 < output.mean() < 1.1
    causal = even([1, 1, 1, 1], 200, dropout=dropout, mask=mk.CausalMask(), implementation=implementation)
    assert causal[0, 0] in (0, 2)
    assert np.isfinite(causal).all()


@typed_implementations
def test_masks_hold_in_every_type(implementation: Any, dtype: Any) -> None:
    """flax #982: a mask constant of -1e10 is -inf in float16."""
    value = jnp.array([1, 2, 3], dtype).reshape(1, 3, 1, 1)
    key = jnp.array([50, -50, 50], dtype).reshape(1, 3, 1, 1)
    keep = jnp.array([[True, True, False], [True, True, False], [False, False, False]])

    def run(query: Any) -> Any:
        return mk.attention(query, key, value, mask=keep, implementation=implementation)

    for either in (jax.jit(run), run):
        output, large = either(jnp.zeros_like(value)), either(jnp.ones_like(value))
        assert output.dtype == dtype
        np.testing.assert_array_equal(np.asarray(output, np.float32)[0, :, 0, 0], [1.5, 1.5, 0])
        np.testing.assert_array_equal(np.asarray(large, np.float32)[0, :, 0, 0], [1, 1, 0])


@implementations
@pytest.mark.parametrize(
    "heads, groups, expected",
    [(4, 2, [10, 10, 20, 20]), (6, 2, [10, 10, 10, 20, 20, 20]), (4, 1, [10] * 4)],
)
def test_query_head_h_reads_key_head_h_over_their_ratio(
    implementation: Any, heads: int, groups: int, expected: list[int]
) -> None:
    """axlearn #842: tiled where it should have been repeated."""
    values = np.tile(10 * (np.arange(groups) + 1), (3, 1))
    np.testing.assert_allclose(even(values, 2, heads=heads, implementation=implementation), [expected] * 2, rtol=1e-6)


@implementations
def test_grouped_heads_equal_repeated_heads(implementation: Any) -> None:
    query, key, value = (jnp.asarray(normal(n, 1, 5, heads, 3), jnp.float32) for n, heads in enumerate((6, 2, 2)))

    @jax.jit
    def run(*arrays: Any) -> Any:
        output, pull_back = jax.vjp(
            lambda *x: mk.attention(*x, mask=mk.CausalMask(), implementation=implementation), *arrays
        )
        return output, *pull_back(query)

    repeated = run(query, jnp.repeat(key, 3, axis=2), jnp.repeat(value, 3, axis=2))
    output, *gradients = run(query, key, value)
    np.testing.assert_allclose(output, repeated[0], rtol=0, atol=1e-6)
    for gradient, each in zip(gradients, repeated[1:]):
        expected = each.reshape(*each.shape[:2], gradient.shape[2], -1, 3).sum(3)
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=2e-6)


@implementations
def test_the_layout_is_batch_length_heads_width(implementation: Any) -> None:
    """jax #35916: arrays in another layout gave plausible numbers."""
    arrays = [normal(seed, 1, 32, 4, 64) for seed in (42, 1, 2)]
    found = both(lambda *x: mk.attention(*x, implementation=implementation), *map(jnp.float32, arrays))
    output = np.asarray(found, np.float64).ravel()
    expected = oracle.attend(*arrays).output.ravel()
    assert output @ expected / np.linalg.norm(output) / np.linalg.norm(expected) > 0.99999
    swapped = [jnp.float32(array.swapaxes(1, 2)) for array in arrays]
    for mask in (jnp.ones((1, 1, 32, 32), bool), mk.KeyPaddingMask(jnp.ones((1, 32), bool))):
        with pytest.raises(ValueError, match=r"mask: .* has shape .*32.*; expected"):
            mk.attention(*swapped, mask=mask, implementation=implementation)


def test_the_newest_keys_of_a_tile_of_queries_are_seen() -> None:
    """jax #17314: the causal bound came from the first row of the tile."""
    tiles = mk.Blockwise(query_tile=3, key_tile=1)
    output = even(np.arange(6), 6, mask=mk.CausalMask(), implementation=tiles)
    np.testing.assert_allclose(output[:, 0], np.arange(6) / 2, rtol=1e-6)


@pytest.mark.parametrize("tiles", [(128, 64), (64, 128), (128, 128)])
def test_causal_tiles_of_all_proportions(tiles: tuple[int, int]) -> None:
    q, k, v, of_output = (normal(seed, 1, 384, 1, 64) for seed in range(4))
    forward = oracle.attend(q, k, v, allowed=np.tril(np.ones((384, 384), bool)))
    expected = oracle.gradients(forward, of_output, {})

    def run(*arrays: Any) -> Any:
        implementation = mk.Blockwise(*tiles)
        output, pull_back = jax.vjp(
            lambda *x: mk.attention(*x, mask=mk.CausalMask(), implementation=implementation), *arrays
        )
        return output, pull_back(jnp.float32(of_output))

    output, found = jax.jit(run)(*map(jnp.float32, (q, k, v)))
    np.testing.assert_allclose(output, forward.output, rtol=0, atol=2e-5)
    for name, gradient in zip(("query", "key", "value"), found):
        np.testing.assert_allclose(gradient, expected[name], rtol=0, atol=2e-5)


@pytest.mark.parametrize("length, tile", [(1, 4), (5, 4), (7, 4), (127, 128), (129, 128), (192, 128)])
def test_any_length_works(length: int, tile: int) -> None:
    """jax #27224: lengths that are no multiple of the tile gave a wrong tail, or differed between two calls."""
    implementation = mk.Blockwise(tile, tile)
    value = np.stack([np.arange(length), np.ones(length), *normal(0, 18, length)], -1).reshape(1, length, 1, 20)
    q, k, of_output = (normal(seed, 1, length, 1, 20) for seed in (1, 2, 3))

    @jax.jit
    def run(*arrays: Any) -> Any:
        output, pull_back = jax.vjp(lambda *x: mk.attention(*x, implementation=implementation), *arrays)
        return output, pull_back(jnp.float32(of_output))

    output, _ = run(jnp.zeros_like(q, jnp.float32), jnp.float32(k), jnp.float32(value))
    np.testing.assert_allclose(output[0, :, 0, 0], (length - 1) / 2, rtol=2e-6)
    np.testing.assert_allclose(output[0, :, 0, 1], 1, rtol=1e-6)
    value[..., 0] /= length
    first, second = (run(*map(jnp.float32, (q, k, value))) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    forward = oracle.attend(q, k, value)
    expected = oracle.gradients(forward, of_output, {})
    np.testing.assert_allclose(first[0], forward.output, rtol=0, atol=2e-5)
    for name, gradient in zip(("query", "key", "value"), first[1]):
        np.testing.assert_allclose(gradient, expected[name], rtol=0, atol=2e-5)


@typed_implementations
def test_entropy_counts_allowed_keys_only(implementation: Any, dtype: Any) -> None:
    """entropix #62, trl #7221: 0 log 0, and averages over keys that a query cannot see."""
    keep = np.tril(np.ones((5, 4), bool))
    keep[4] = False
    zeros = jnp.zeros((1, 5, 1, 1), dtype), jnp.zeros((1, 4, 1, 1), dtype)

    @jax.jit
    @jax.grad
    def run(bias: Any) -> Any:
        options = {"bias": bias, "implementation": implementation, "statistics": "entropy"}
        _, statistics = mk.attention_with_statistics(*zeros, zeros[1], **options)
        return statistics.entropy.sum() / 4

    logits = jnp.where(keep, 0.0, -jnp.inf)
    options = {"mask": jnp.asarray(keep), "implementation": implementation, "statistics": "entropy"}
    _, statistics = both(lambda *x: mk.attention_with_statistics(*x, **options), *zeros, zeros[1])
    entropy = np.asarray(statistics.entropy)[0, 0]
    np.testing.assert_allclose(entropy, [0, 0.6931472, 1.0986123, 1.3862944, 0], rtol=1e-6)
    assert entropy.sum() / 4 == pytest.approx(0.7945135, rel=1e-6)
    gradient = np.asarray(run(logits))
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[~keep], 0)
    np.testing.assert_allclose(gradient, 0, atol=1e-7)  # even weights are where entropy is largest
