"""Talking heads: logits and weights mixed across heads."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mha_kernels import Dense
from mha_research.attention.variants.dense import DenseAttention


class TalkingHeadsAttention(DenseAttention):
    """W = P_w^T softmax(P_l^T S): scores S mixed over heads before the softmax, probabilities after it. Shazeer et al.
    2020.

    P_l and P_w, each (H, H), are the identity at the start, so the module starts as plain attention. A key that a
    head's own mask or bias forbids counts as score 0 in the mixture and is forbidden to that head after it; the weights
    that `return_weights` gives are those after P_w and need not sum to 1. 2 H^2 more parameters; O(Q K) memory.
    """

    def __init__(self, in_features: int, num_heads: int, *sizes: Any, **choices: Any):
        super().__init__(in_features, num_heads, *sizes, **choices)
        self.mix_logits = nnx.Param(jnp.eye(num_heads, dtype=self.param_dtype))
        self.mix_weights = nnx.Param(jnp.eye(num_heads, dtype=self.param_dtype))

    def scores_to_weights(self, scores: jax.Array, query: jax.Array, problem: Dense) -> jax.Array:
        allowed = scores != -jnp.inf
        finite = jnp.where(allowed, scores, 0.0)
        logits = jnp.einsum("bhqk,hm->bmqk", finite, self.mix_logits[...].astype(scores.dtype))
        weights = problem.softmax(jnp.where(allowed, logits, -jnp.inf))
        return jnp.einsum("bmqk,mh->bhqk", weights, self.mix_weights[...].astype(scores.dtype))
