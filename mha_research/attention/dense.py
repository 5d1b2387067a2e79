"""Base of the variants whose mathematics is no bias on a tile and one softmax: O(Q K) memory, the algebra's own parts.

Scores, masks, dropout and gates are the functions that every implementation of `mha_kernels` runs, on one tile of Q x
K.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mha_kernels import reference, tile
from mha_kernels.algebra import Algebra
from mha_kernels.checks import bundle
from mha_kernels.operands import Tile
from mha_research.attention.multi_head import MultiHeadAttention
from mha_research.attention.options import HeadOptions


def dense_softmax(scores: jax.Array, at: Tile, algebra: Algebra) -> jax.Array:
    """Probabilities (B, H, Q, K) of scores, -inf where forbidden; rows with no allowed key are zero, a sink takes
    mass.
    """
    start = tile.softmax_start((*scores.shape[:-1], 1), scores.dtype, ())
    state, exponentials, _ = tile.softmax_update(start, scores, at)
    return exponentials * tile.softmax_finish(state, jnp.ones_like(state.total), algebra, ())[0]


class DenseAttention(MultiHeadAttention):
    """Multi-head attention by an explicit matrix of weights; a variant overrides `scores_to_weights` or `mix_values`.

    O(Q K) memory whatever `implementation` says, for which nothing but "auto" and "reference" is accepted.
    """

    def _bundle(self, query: jax.Array, key: jax.Array, options: HeadOptions) -> Algebra:
        if self.implementation not in ("auto", "reference"):
            raise ValueError(
                f"{type(self).__name__} is dense, O(Q K): implementation must be 'auto' or 'reference', "
                f"got {self.implementation!r}"
            )
        if self.bias_key is not None:
            raise ValueError(f"{type(self).__name__} takes no add_bias_kv")
        return bundle(query, key, **self.scoring(options), dropout=options.dropout, origin=options.origin)

    def scores_to_weights(self, scores: jax.Array, query: jax.Array, at: Tile, algebra: Algebra) -> jax.Array:
        """Weights (B, H, Q, K) from scores (B, H, Q, K), which are -inf where forbidden."""
        return dense_softmax(scores, at, algebra)

    def mix_values(self, weights: jax.Array, value: jax.Array, at: Tile) -> jax.Array:
        """Head outputs (B, H, Q, V) from weights (B, H, Q, K), dropout applied, and value (B, K, H, V)."""
        return jnp.einsum("bhqk,bkhv->bhqv", weights, value, precision=self.precision)

    def _weights(
        self, query: jax.Array, key: jax.Array, options: HeadOptions
    ) -> tuple[jax.Array, jax.Array, Tile, Algebra]:
        algebra = self._bundle(query, key, options)
        scores, at = reference.dense_scores(query, key, algebra, self.precision)
        return self.scores_to_weights(scores, query, at, algebra), scores, at, algebra

    def weights(self, query: jax.Array, key: jax.Array, value: jax.Array, options: HeadOptions) -> jax.Array:
        return self._weights(query, key, options)[0]

    def attend(self, query: jax.Array, key: jax.Array, value: jax.Array, options: HeadOptions) -> jax.Array:
        weights, scores, at, algebra = self._weights(query, key, options)
        value = reference.clean_keys(value, scores > -jnp.inf).astype(weights.dtype)
        value = jnp.repeat(value, self.num_heads // value.shape[2], axis=2)
        heads = self.mix_values(tile.dropped(weights, at, algebra), value, at)
        if options.head_gate is not None:
            heads = heads * jnp.atleast_2d(options.head_gate)[..., None, None].astype(heads.dtype)
        return heads.swapaxes(1, 2).astype(query.dtype)
