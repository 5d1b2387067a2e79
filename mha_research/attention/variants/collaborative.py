"""Collaborative attention: all heads share one query and one key projection."""

from __future__ import annotations

from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import nnx

from mha_research.attention.kind import POSITION, AllowedValues
from mha_research.attention.arguments import check_integers
from mha_research.attention.multi_head import MultiHeadAttention
from mha_research.attention.options import HeadOptions, scale_factor


class CollaborativeAttention(MultiHeadAttention):
    """head_h = softmax(scale X W_Q diag(m_h) W_K^T Y^T) Y W_V,h: shared W_Q, W_K (D, S) and mixing vectors m_h (S,).

    Cordonnier, Loukas & Jaggi 2020. `shared_dim` S is D unless given; S = H E with m_h the indicator of block h is
    plain attention, which is how the mixing starts (S / H entries a head; the last head takes what is left). `scale` is
    of S / H. Query and key have 2 D S + H S parameters in place of 2 D H E; the scores cost H S in place of H E.

    Args:
        shared_dim: width S that all heads share in query and key; D unless given
    """

    allowed = (
        AllowedValues(
            POSITION, ("none", "alibi", "relative"), "mixing the turned numbers of a pair unlike is not relative"
        ),
    )

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        shared_dim: Annotated[int | None, "[1, inf)"] = None,
        scale: str | float = "inverse_sqrt",
        value_head_dim: int | None = None,
        **choices: Any,
    ):
        sizes: dict[str, Any] = {"in_features": in_features, "num_heads": num_heads, "value_head_dim": value_head_dim}
        check_integers("CollaborativeAttention", **sizes, shared_dim=shared_dim)
        shared_dim = in_features if shared_dim is None else shared_dim
        if shared_dim < num_heads:
            raise ValueError(f"CollaborativeAttention: shared_dim={shared_dim} is less than num_heads={num_heads}")
        for name in ("num_kv_heads", "head_dim", "packed", "joint_init", "normalize_qk", "add_bias_kv"):
            if choices.pop(name, None):
                raise ValueError(f"CollaborativeAttention takes no {name}")
        if value_head_dim is None and in_features % num_heads:
            raise ValueError(
                f"CollaborativeAttention: {in_features=} is no multiple of {num_heads=}; give value_head_dim"
            )
        super().__init__(
            in_features,
            num_heads,
            head_dim=shared_dim,
            value_head_dim=in_features // num_heads if value_head_dim is None else value_head_dim,
            scale=scale_factor(scale, shared_dim / num_heads),
            **choices,
        )
        owner = jnp.minimum(jnp.arange(shared_dim) // (shared_dim // num_heads), num_heads - 1)
        self.mixing = nnx.Param(jax.nn.one_hot(owner, num_heads, axis=0, dtype=self.param_dtype))

    def _query_heads(self) -> int:
        return 1

    def _key_heads(self) -> int:
        return 1

    def spread(self, query: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Query (B, Q, H, S), mixed for each head, and key (B, K, H, S) from one head of each."""
        mixed = query * self.mixing[...].astype(query.dtype)[None, None]
        return mixed, jnp.broadcast_to(key, (*key.shape[:2], self.num_heads, key.shape[3]))

    def attend(self, query: jax.Array, key: jax.Array, value: jax.Array, options: HeadOptions) -> jax.Array:
        return super().attend(*self.spread(query, key), value, options)

    def weights(self, query: jax.Array, key: jax.Array, value: jax.Array, options: HeadOptions) -> jax.Array:
        return super().weights(*self.spread(query, key), value, options)
