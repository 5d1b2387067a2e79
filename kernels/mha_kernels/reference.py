"""The dense implementation: the whole problem as one tile. Short, readable, and the oracle in float64.

O(Q K) memory. Plain differentiable JAX, so it has every transform: grad, jvp, grad of grad, vmap.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mha_kernels.algebra import tile
from mha_kernels.algebra.operands import Tile
from mha_kernels.algebra.spec import AttentionSpec, HeadStatistics, accumulation_dtype, running, whole


@dataclasses.dataclass(frozen=True)
class Dense:
    """All Q x K entries of a problem as one tile, step by step; made by `api.dense`.

    For looking at a step, and for variants of attention that are no bias and one softmax: they bring their own middle
    and keep the masks, the positions, dropout, and the rule that nothing forbidden is ever seen.
    """

    algebra: AttentionSpec
    shape: tuple[int, int, int, int]  # B, H, Q, K

    @property
    def at(self) -> Tile:
        """Positions of all entries."""
        return whole(self.algebra, *self.shape[2:])

    @property
    def distance(self) -> jax.Array:
        """key - query position, (1, 1, Q, K) int32."""
        return self.at.key - self.at.query

    @property
    def attendable(self) -> jax.Array | None:
        """(B, H, Q, K) boolean: which entries mask, bias and head gate leave; None where they leave all."""
        allowed = tile.tile_allowed(self.at, self.algebra)
        return None if allowed is None else jnp.broadcast_to(allowed, self.shape)

    def scores(self, query: jax.Array, key: jax.Array, precision: Any = None) -> jax.Array:
        """(B, H, Q, K) of query (B, Q, H, E) and key (B, K, G, E), scaled, softcapped, biased, -inf where forbidden."""
        batch, heads, length_q, _ = self.shape
        dtype, groups = accumulation_dtype(query, key), key.shape[2]
        grouped = self.used_queries(query).reshape(batch, length_q, groups, heads // groups, -1).astype(dtype)
        product = jnp.einsum("bqgre,bkge->bgrqk", grouped, self.used(key).astype(dtype), precision=precision)
        return tile.tile_scores(product.reshape(self.shape), self.at, self.algebra)

    def softmax(self, scores: jax.Array) -> jax.Array:
        """Probabilities (B, H, Q, K), zero in rows that allow no key; a sink takes its share."""
        start = tile.softmax_start((*self.shape[:3], 1), scores.dtype, ())
        state, exponentials, _ = tile.softmax_update(start, scores, self.at)
        share, _ = tile.softmax_finish(state, jnp.ones_like(state.denominator), running(self.algebra), ())
        return exponentials * share

    def dropped(self, weights: jax.Array) -> jax.Array:
        """Weights (B, H, Q, K) after dropout."""
        return tile.apply_dropout(weights, self.at, self.algebra)

    def used(self, rows: jax.Array) -> jax.Array:
        """Keys or values (B, K, G, ...) with those that no query of their group may attend set to zero."""
        allowed = self.attendable
        if allowed is None:
            return rows
        batch, heads, length_q, length_k = self.shape
        groups = rows.shape[2]
        together = allowed.reshape(batch, groups, heads // groups * length_q, length_k)
        return tile.zero_unattended_rows(rows.swapaxes(1, 2), together, axis=-2).swapaxes(1, 2)

    def used_queries(self, query: jax.Array) -> jax.Array:
        """Queries (B, Q, H, E) with those that may attend no key set to zero."""
        allowed = self.attendable
        return (
            query
            if allowed is None
            else tile.zero_unattended_rows(query.swapaxes(1, 2), allowed, axis=-1).swapaxes(1, 2)
        )


@dataclasses.dataclass(frozen=True)
class Reference:
    """The implementation named "reference"."""

    def unsupported_reason(
        self, query: jax.Array, key: jax.Array, value: jax.Array, algebra: AttentionSpec, statistics: tuple[str, ...]
    ) -> str | None:
        """It can do everything."""
        return None

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        algebra: AttentionSpec,
        statistics: tuple[str, ...],
        precision: Any,
    ) -> tuple[jax.Array, HeadStatistics]:
        """Output (B, Q, H, V) in the query's type, and the requested statistics (B, H, Q)."""
        (batch, length_q, heads, _), (_, length_k, groups, width) = query.shape, value.shape
        dense = Dense(algebra, (batch, heads, length_q, length_k))
        scores = dense.scores(query, key, precision)
        value = dense.used(value).astype(scores.dtype)
        start = tile.softmax_start((*scores.shape[:-1], 1), scores.dtype, statistics)
        state, weights, _ = tile.softmax_update(start, scores, dense.at)
        weights = dense.dropped(weights).reshape(batch, groups, heads // groups, length_q, length_k)
        values = jnp.einsum("bgrqk,bkgv->bgrqv", weights, value, precision=precision)
        values = values.reshape(batch, heads, length_q, width)
        output, results = tile.softmax_finish(state, values, algebra, statistics)
        return output.swapaxes(1, 2).astype(query.dtype), tile.statistics_of(results, statistics, algebra)
