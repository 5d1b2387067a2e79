"""Sigmoid attention: every key is weighed by itself, nothing is normalised over keys."""

from __future__ import annotations

import math
from typing import Any

import jax

from mha_kernels import Dense
from mha_research.attention.arguments import check_integers, check_numbers
from mha_research.attention.variants.dense import DenseAttention


class SigmoidAttention(DenseAttention):
    """w_ij = sigmoid(s_ij + b), b = -log K unless `logit_bias` is given. Ramapuram et al. 2024.

    b = -log K makes the weights of equal zero scores sum to about 1; in `decode` K is the capacity of the cache. A
    forbidden key has weight 0. Sinks do not apply. O(Q K) memory. (The softmax with 1 in the denominator is no variant:
    ``add_zero_attention=True``.)

    Args:
        logit_bias: b, added to the scores before the sigmoid
        length: tokens of a training window; -log of it is b unless that is given
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *sizes: Any,
        logit_bias: float | None = None,
        length: int | None = None,
        **choices: Any,
    ):
        check_integers("SigmoidAttention", length=length)
        if logit_bias is None and length is not None:
            logit_bias = -math.log(length)  # not of each call's keys: held-out windows may be longer
        if logit_bias is not None:
            check_numbers("SigmoidAttention", logit_bias=logit_bias)
        super().__init__(in_features, num_heads, *sizes, **choices)
        if self.sink is not None or self.add_zero_attention:
            raise ValueError("SigmoidAttention has no softmax for a sink or add_zero_attention to join")
        self.logit_bias = None if logit_bias is None else float(logit_bias)

    def scores_to_weights(self, scores: jax.Array, query: jax.Array, problem: Dense) -> jax.Array:
        bias = -math.log(scores.shape[-1]) if self.logit_bias is None else self.logit_bias
        return jax.nn.sigmoid(scores + bias)
