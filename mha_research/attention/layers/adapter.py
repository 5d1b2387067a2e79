"""Bottleneck adapter: a small residual network after a module."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mha_research.attention.arguments import check_integers


class Adapter(nnx.Module):
    """x + gelu(x W_down + b_down) W_up + b_up, the identity at the start (W_up and biases are zero). Houlsby et al.
    2019.

    x (..., D); 2 D width + D + width parameters.
    """

    def __init__(
        self,
        features: int,
        width: int,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        rngs: nnx.Rngs,
    ):
        check_integers("Adapter", features=features, width=width)
        types = {"dtype": dtype, "param_dtype": param_dtype, "precision": precision, "rngs": rngs}
        self.down = nnx.Linear(features, width, kernel_init=jax.nn.initializers.xavier_uniform(), **types)
        self.up = nnx.Linear(width, features, kernel_init=jax.nn.initializers.zeros, **types)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.up(jax.nn.gelu(self.down(x)))
