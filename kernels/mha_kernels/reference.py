"""The dense implementation: the whole problem as one tile. Short, readable, and the oracle in float64.

O(Q K) memory. Plain differentiable JAX, so it has every transform: grad, jvp, grad of grad, vmap.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mha_kernels import tile
from mha_kernels.algebra import Algebra, HeadStatistics, accumulation_dtype
from mha_kernels.operands import Tile, lookup_by_gather


def whole(algebra: Algebra, length_q: int, length_k: int) -> Tile:
    """The positions of all Q x K entries as one tile; batch and head broadcast as (B, H, 1, 1)."""
    place = algebra.positions
    query = place.query + jnp.arange(length_q, dtype=jnp.int32).reshape(1, 1, -1, 1)
    key = place.key + jnp.arange(length_k, dtype=jnp.int32).reshape(1, 1, 1, -1)
    spans = (place.query, place.query + length_q - 1), (place.key, place.key + length_k - 1)
    return Tile(place.batch, place.head, query, key, *spans, lookup_by_gather)


def dense_scores(query: Any, key: Any, algebra: Algebra, precision: Any) -> tuple[Any, Tile]:
    """Scores (B, H, Q, K), -inf where forbidden, and the positions they lie at."""
    (batch, length_q, heads, _), (_, length_k, groups, _) = query.shape, key.shape
    dtype = accumulation_dtype(query, key)
    at = whole(algebra, length_q, length_k)
    allowed = tile.tile_allowed(at, algebra)
    if allowed is not None:
        everywhere = jnp.broadcast_to(allowed, (batch, heads, length_q, length_k))
        query = tile.keep_used(query.swapaxes(1, 2), everywhere, axis=-1).swapaxes(1, 2)
        key = clean_keys(key, everywhere)
    grouped = query.reshape(batch, length_q, groups, heads // groups, -1).astype(dtype)
    product = jnp.einsum("bqgre,bkge->bgrqk", grouped, key.astype(dtype), precision=precision)
    return tile.tile_scores(product.reshape(batch, heads, length_q, length_k), at, algebra), at


def clean_keys(rows: Any, allowed: Any) -> Any:
    """Key or value rows (B, K, G, ...) with those that no query of their group may attend set to zero."""
    batch, heads, length_q, length_k = allowed.shape
    groups = rows.shape[2]
    together = allowed.reshape(batch, groups, heads // groups * length_q, length_k)
    return tile.keep_used(rows.swapaxes(1, 2), together, axis=-2).swapaxes(1, 2)


@dataclasses.dataclass(frozen=True)
class Reference:
    """The implementation named "reference"."""

    def declines(self, query: Any, key: Any, value: Any, algebra: Algebra, statistics: tuple[str, ...]) -> str | None:
        """It can do everything."""
        return None

    def attend(
        self, query: Any, key: Any, value: Any, algebra: Algebra, statistics: tuple[str, ...], precision: Any
    ) -> tuple[jax.Array, HeadStatistics]:
        """Output (B, Q, H, V) in the query's type, and the requested statistics (B, H, Q)."""
        (batch, _, heads, _), (_, _, groups, width) = query.shape, value.shape
        scores, at = dense_scores(query, key, algebra, precision)
        value = clean_keys(value, scores > -jnp.inf).astype(scores.dtype)
        start = tile.softmax_start((*scores.shape[:-1], 1), scores.dtype, statistics)
        state, weights, _ = tile.softmax_update(start, scores, at)
        weights = tile.dropped(weights, at, algebra).reshape(batch, groups, heads // groups, *scores.shape[2:])
        values = jnp.einsum("bgrqk,bkgv->bgrqv", weights, value, precision=precision)
        values = values.reshape(batch, heads, -1, width)
        output, results = tile.softmax_finish(state, values, algebra, statistics)
        return output.swapaxes(1, 2).astype(query.dtype), tile.statistics_of(results, statistics, algebra)


def weights(query: Any, key: Any, algebra: Algebra, precision: Any) -> jax.Array:
    """Probabilities (B, H, Q, K), before gate and dropout."""
    scores, at = dense_scores(query, key, algebra, precision)
    state, exponentials, _ = tile.softmax_update(
        tile.softmax_start((*scores.shape[:-1], 1), scores.dtype, ()), scores, at
    )
    share, _ = tile.softmax_finish(state, jnp.ones_like(state.total), algebra, ())
    return exponentials * share
