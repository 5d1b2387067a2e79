"""Differential attention: the difference of two softmaxes."""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

import mha_kernels
from mha_research.attention.arguments import check_integers
from mha_research.attention.multi_head import MultiHeadAttention
from mha_research.attention.options import HeadOptions, gated, scale_factor


class DifferentialAttention(MultiHeadAttention):
    """head = (1 - lambda_0) RMSNorm((softmax(s Q1 K1^T) - lambda softmax(s Q2 K2^T)) V), Ye et al. 2024.

    lambda = exp(lq1 . lk1) - exp(lq2 . lk2) + lambda_0, lambda_0 = 0.8 - 0.6 exp(-0.3 (layer - 1)), layers counted
    from 1. A head of width E has two queries and two keys of width E and values of width 2 E, so D / (2 E) heads cost
    what D / E plain heads do; `head_dim` is both queries side by side, 2 E, and `scale` is of E. The norm has a trained
    scale (2 E,) shared by the heads, lambda four vectors (E,) ~ N(0, 0.1^2). Two calls of `mha_kernels.attention`, so
    every implementation serves.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        key_features: int | None = None,
        value_features: int | None = None,
        head_dim: int | None = None,
        *sizes: Any,
        layer: int = 1,
        scale: Literal["inverse_sqrt", "inverse", "none"] | float = "inverse_sqrt",
        rngs: nnx.Rngs,
        **choices: Any,
    ):
        if choices.get("normalize_qk") or choices.get("add_bias_kv"):
            raise ValueError("DifferentialAttention takes no normalize_qk and no add_bias_kv")
        check_integers(
            "DifferentialAttention", in_features=in_features, num_heads=num_heads, head_dim=head_dim, layer=layer
        )
        both = in_features // num_heads if head_dim is None else head_dim
        if both % 2:
            raise ValueError(f"DifferentialAttention: head_dim holds two queries and must be even, got {both}")
        super().__init__(
            in_features, num_heads, num_kv_heads, key_features, value_features, head_dim, *sizes,
            scale=scale, rngs=rngs, **choices,
        )  # fmt: skip
        width = self.head_dim // 2
        self.scale = scale_factor(scale, width)
        self.lambda_start = 0.8 - 0.6 * math.exp(-0.3 * (layer - 1))
        self.lambdas = nnx.Param(0.1 * jax.random.normal(rngs.params(), (4, width), self.param_dtype))
        self.head_norm = nnx.RMSNorm(self.value_head_dim, epsilon=1e-5, param_dtype=self.param_dtype, rngs=rngs)

    def lambda_value(self) -> jax.Array:
        """lambda, a scalar of at least float32."""
        lambdas = self.lambdas[...]
        q1, k1, q2, k2 = lambdas.astype(jnp.promote_types(lambdas.dtype, jnp.float32))
        return jnp.exp(jnp.sum(q1 * k1)) - jnp.exp(jnp.sum(q2 * k2)) + self.lambda_start

    def _rotate(self, x: jax.Array, start: int | jax.Array) -> jax.Array:
        first, second = (super(DifferentialAttention, self)._rotate(half, start) for half in jnp.split(x, 2, axis=-1))
        return jnp.concatenate([first, second], axis=-1)

    def attend(self, query: jax.Array, key: jax.Array, value: jax.Array, options: HeadOptions) -> jax.Array:
        gate, wide = options.head_gate, jnp.promote_types(query.dtype, jnp.float32)
        # The norm would undo a gate before it, so inside a gate only says which heads run.
        call = {
            **self.scoring(options),
            "head_gate": None if gate is None else (gate != 0).astype(wide),
            "dropout": options.dropout,
            "origin": options.origin,
            "precision": self.precision,
            "implementation": self.implementation,
        }
        first, second = (
            mha_kernels.attention(q, k, value, **call).astype(wide)
            for q, k in zip(jnp.split(query, 2, axis=-1), jnp.split(key, 2, axis=-1))
        )
        heads = (1 - self.lambda_start) * self.head_norm(first - self.lambda_value() * second)
        return gated(heads, gate).astype(query.dtype)

    def weights(self, query: jax.Array, key: jax.Array, value: jax.Array, options: HeadOptions) -> jax.Array:
        """The difference of the two softmaxes: entries may be negative and rows sum to 1 - lambda."""
        first, second = (
            mha_kernels.attention_weights(q, k, **self.scoring(options))
            for q, k in zip(jnp.split(query, 2, axis=-1), jnp.split(key, 2, axis=-1))
        )
        return first - self.lambda_value() * second
