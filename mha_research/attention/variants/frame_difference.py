"""Queries from the change between frames."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from mha_research.attention.kind import NO_SEGMENTS, ORDERED
from mha_research.attention.arguments import as_padding
from mha_research.attention.cache import DecodeCache
from mha_research.attention.multi_head import MultiHeadAttention


def frame_difference(x: jax.Array) -> jax.Array:
    """d_t = x_t - x_(t-1), d_0 = 0; x (B, L, D)."""
    return jnp.diff(x, axis=1, prepend=x[:, :1])


class FrameDifferenceAttention(MultiHeadAttention):
    """Q = W_Q [x; d] ("concatenate") or Q = W_Q d ("replace") with d_t = x_t - x_(t-1); key and value as ever.

    "replace" throws the content of a frame away and is offered to be tested; "concatenate" has D H E more parameters
    and begins with the columns of x and of d drawn alike. Delta features are appended in speech recognition (Furui
    1986). Cannot `decode`, since the cache does not keep the last frame.

    Args:
        difference: the change since the token before joins it or replaces it
    """

    allowed = (ORDERED, NO_SEGMENTS)

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *sizes: Any,
        difference: Literal["concatenate", "replace"] = "concatenate",
        query_init: Any = jax.nn.initializers.xavier_uniform(),  # noqa: B008
        rngs: nnx.Rngs,
        **choices: Any,
    ):
        if difference not in ("concatenate", "replace"):
            raise ValueError(
                f"FrameDifferenceAttention: difference must be 'concatenate' or 'replace', got {difference!r}"
            )
        if choices.get("packed") or choices.get("joint_init"):
            raise ValueError("FrameDifferenceAttention takes no packed and no joint_init")
        super().__init__(in_features, num_heads, *sizes, query_init=query_init, rngs=rngs, **choices)
        self.difference = difference
        if difference == "concatenate":
            self.query = nnx.LinearGeneral(
                2 * in_features, (self.num_heads, self.head_dim), kernel_init=query_init, use_bias=self.key.use_bias,
                dtype=self.dtype, param_dtype=self.param_dtype, precision=self.precision, rngs=rngs,
            )  # fmt: skip

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array | None = None,
        value: jax.Array | None = None,
        *,
        key_padding_mask: jax.Array | None = None,
        **call: Any,
    ) -> Any:
        """As `MultiHeadAttention`; in self attention the first real frame after padding has difference zero."""
        is_self = key is None
        query, key, value = self._check_inputs(query, key, value)
        if is_self and key_padding_mask is not None:
            following = jnp.concatenate([query[:, 1:], query[:, -1:]], axis=1)
            query = jnp.where(as_padding(key_padding_mask, *query.shape[:2])[..., None], query, following)
        return super().__call__(query, key, value, key_padding_mask=key_padding_mask, **call)

    def project(
        self, query: jax.Array, key: jax.Array, value: jax.Array, start: int | jax.Array = 0
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        change = frame_difference(query)
        query = change if self.difference == "replace" else jnp.concatenate([query, change], axis=-1)
        return super().project(query, key, value, start)

    def decode(self, *arguments: Any, **options: Any) -> tuple[jax.Array, DecodeCache]:
        raise ValueError("FrameDifferenceAttention cannot decode: its queries need the frame before")
