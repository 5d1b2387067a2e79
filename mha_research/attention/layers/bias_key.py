"""One learned key and value that every query may attend, as `bias_k` and `bias_v` of `torch.nn.MultiheadAttention`.

Masks and biases do not apply to it. The softmax over K + 1 keys is put together from the softmax over K keys and its
log-sum-exp, so nothing of size Q x K is made and masks keep their structure:

    share = exp(lse - logaddexp(lse, s)), s = softcap(scale q . b_k); output = share * output_K + (1 - share) b_v
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import mha_kernels
from mha_kernels import Dropout


def new_bias_key(rngs: nnx.Rngs, num_kv_heads: int, width: int, dtype: Any) -> nnx.Param:
    """A key or value (G, width) to be trained, N(0, 1 / (G width)): PyTorch's xavier_normal on (1, 1, G width)."""
    return nnx.Param(jax.random.normal(rngs.params(), (num_kv_heads, width), dtype) / math.sqrt(num_kv_heads * width))


def beside_bias_key(
    query: jax.Array, key: jax.Array, value: jax.Array, bias_key: jax.Array, call: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
    """Head outputs (B, Q, H, V) over the real keys by `mha_kernels.attention(..., **call)`, and the probability
    (B, H, Q) that the bias key leaves to them.
    """
    heads, statistics = mha_kernels.attention_with_statistics(query, key, value, statistics=("lse",), **call)
    assert statistics.lse is not None
    return heads, real_share(statistics.lse, bias_key_score(query, bias_key, call["scale"], call["softcap"]))


def bias_key_score(query: jax.Array, bias_key: jax.Array, scale: float, softcap: float | None) -> jax.Array:
    """s (B, H, Q), at least float32, of query (B, Q, H, E) with the key (G, E)."""
    groups = query.shape[2] // bias_key.shape[0]
    wide = jnp.promote_types(query.dtype, jnp.float32)
    key = jnp.repeat(bias_key, groups, axis=0)
    score = scale * jnp.einsum("bqhe,he->bhq", query.astype(wide), key.astype(wide))
    return score if softcap is None else softcap * jnp.tanh(score / softcap)


def real_share(lse: jax.Array, score: jax.Array) -> jax.Array:
    """Probability (B, H, Q) that stays on the real keys, exact zero for a row that has none."""
    empty = jnp.isneginf(lse)
    return jnp.where(empty, 0.0, jax.nn.sigmoid(jnp.where(empty, 0.0, lse) - score))


def with_bias_value(heads: jax.Array, share: jax.Array, bias_value: jax.Array, dropout: Dropout | None) -> jax.Array:
    """Head outputs (B, Q, H, V) over K + 1 keys from those over K keys; the new probability takes its own dropout
    decision.
    """
    extra = 1 - share
    if dropout is not None:
        keep = jax.random.bernoulli(jax.random.fold_in(dropout.key, 1), jnp.float32(1 - dropout.rate), extra.shape)
        extra = extra * keep / (1 - dropout.rate)
    value = jnp.repeat(bias_value, heads.shape[2] // bias_value.shape[0], axis=0)[None, None]
    share, extra = (jnp.moveaxis(p, 1, 2)[..., None] for p in (share, extra))
    return (share * heads + extra * value).astype(heads.dtype)
