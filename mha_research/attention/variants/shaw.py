"""Relative positions in keys and values."""

from __future__ import annotations

from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import nnx

from mha_kernels import Dense
from mha_research.attention.kind import ORDERED
from mha_research.attention.arguments import check_integers
from mha_research.attention.variants.dense import DenseAttention


class ShawAttention(DenseAttention):
    """e_ij = scale q_i (k_j + a^K_r)^T, z_i = sum_j p_ij (v_j + a^V_r), r = clip(j - i, -k, k). Shaw et al. 2018, eq.
    3-5.

    The tables (2 k + 1, E) and (2 k + 1, V) are shared by all heads, as in the paper, whose k is 16; either may be left
    out. The term of a^K is added after a softcap. O(Q K) memory: the value table needs the probabilities themselves.
    (2 k + 1)(E + V) more parameters.

    Args:
        max_distance: k; offsets beyond it share a row of the tables
        key_table: relative positions in the keys
        value_table: relative positions in the values
    """

    allowed = (ORDERED,)

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *sizes: Any,
        max_distance: Annotated[int, "[1, inf)"] = 16,
        key_table: bool = True,
        value_table: bool = True,
        rngs: nnx.Rngs,
        **choices: Any,
    ):
        check_integers("ShawAttention", max_distance=max_distance)
        super().__init__(in_features, num_heads, *sizes, rngs=rngs, **choices)
        self.max_distance = max_distance

        def table(width: int) -> nnx.Param:
            shape = (2 * max_distance + 1, width)
            return nnx.Param(jax.nn.initializers.xavier_uniform()(rngs.params(), shape, self.param_dtype))

        self.key_table = table(self.head_dim) if key_table else None
        self.value_table = table(self.value_head_dim) if value_table else None

    def _row(self, problem: Dense) -> jax.Array:
        """Row of the tables that each pair reads, (1, 1, Q, K)."""
        return jnp.clip(problem.distance, -self.max_distance, self.max_distance) + self.max_distance

    def key_term(self, query: jax.Array, problem: Dense) -> jax.Array:
        """scale q_i a^K_r, (B, H, Q, K), at least float32."""
        assert self.key_table is not None
        wide = jnp.promote_types(query.dtype, jnp.float32)
        by_row = self.scale * jnp.einsum("bqhe,re->bhqr", query.astype(wide), self.key_table[...].astype(wide))
        row = jnp.broadcast_to(self._row(problem), (*by_row.shape[:3], problem.shape[-1]))
        return jnp.take_along_axis(by_row, row, axis=-1)

    def scores_to_weights(self, scores: jax.Array, query: jax.Array, problem: Dense) -> jax.Array:
        return problem.softmax(scores if self.key_table is None else scores + self.key_term(query, problem))

    def mix_values(self, weights: jax.Array, value: jax.Array, problem: Dense) -> jax.Array:
        heads = super().mix_values(weights, value, problem)
        if self.value_table is None:
            return heads
        table = self.value_table[...].astype(weights.dtype)
        member = jax.nn.one_hot(self._row(problem)[0, 0], table.shape[0], dtype=weights.dtype)
        by_row = jnp.einsum("bhqk,qkr->bhqr", weights, member, precision=self.precision)
        return heads + jnp.einsum("bhqr,rv->bhqv", by_row, table, precision=self.precision)
