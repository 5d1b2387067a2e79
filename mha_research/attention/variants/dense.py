"""Base of the variants whose mathematics is no bias on a tile and one softmax: O(Q K) memory, the algebra's own parts.

Scores, masks, the softmax and dropout are those of `mha_kernels.dense`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import mha_kernels
from mha_kernels import Dense
from mha_research.attention.multi_head import MultiHeadAttention
from mha_research.attention.options import HeadOptions, gated


class DenseAttention(MultiHeadAttention):
    """Multi-head attention by an explicit matrix of weights; a variant overrides `scores_to_weights` or `mix_values`.

    O(Q K) memory whatever `implementation` says, for which nothing but "auto" and "reference" is accepted.
    """

    def problem(self, query: jax.Array, key: jax.Array, options: HeadOptions) -> Dense:
        if self.implementation not in ("auto", "reference"):
            raise ValueError(
                f"{type(self).__name__} is dense, O(Q K): implementation must be 'auto' or 'reference', "
                f"got {self.implementation!r}"
            )
        if self.bias_key is not None:
            raise ValueError(f"{type(self).__name__} takes no add_bias_kv")
        return mha_kernels.dense(query, key, **self.scoring(options), dropout=options.dropout, origin=options.origin)

    def scores_to_weights(self, scores: jax.Array, query: jax.Array, problem: Dense) -> jax.Array:
        """Weights (B, H, Q, K) from scores (B, H, Q, K), which are -inf where forbidden."""
        return problem.softmax(scores)

    def mix_values(self, weights: jax.Array, value: jax.Array, problem: Dense) -> jax.Array:
        """Head outputs (B, H, Q, V) from weights (B, H, Q, K), dropout applied, and value (B, K, H, V)."""
        return jnp.einsum("bhqk,bkhv->bhqv", weights, value, precision=self.precision)

    def weights(self, query: jax.Array, key: jax.Array, value: jax.Array, options: HeadOptions) -> jax.Array:
        problem = self.problem(query, key, options)
        return self.scores_to_weights(problem.scores(query, key, self.precision), query, problem)

    def attend(self, query: jax.Array, key: jax.Array, value: jax.Array, options: HeadOptions) -> jax.Array:
        problem = self.problem(query, key, options)
        weights = problem.dropped(self.weights(query, key, value, options))
        value = problem.used(value).astype(weights.dtype)
        value = jnp.repeat(value, self.num_heads // value.shape[2], axis=2)
        heads = self.mix_values(weights, value, problem).swapaxes(1, 2)
        return gated(heads, options.head_gate).astype(query.dtype)
