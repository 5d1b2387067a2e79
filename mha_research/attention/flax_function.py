"""`attention_fn` for Flax's own modules, so that an existing codebase gets the kernels by changing one argument."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_kernels import CausalMask, DenseMask, Dropout, Mask, attention, attention_weights
from mha_research.attention.arguments import as_array


def flax_attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    promote_dtype: Any = None,
    is_causal: bool = False,
    force_fp32_for_softmax: bool = False,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    implementation: Any = "auto",
) -> jax.Array:
    """softmax(Q K^T / sqrt(E) + bias) V over the keys that mask allows, as flax.nnx and flax.linen call it.

    ``nnx.MultiHeadAttention(..., attention_fn=flax_attention_fn)``, and the same for linen's
    MultiHeadDotProductAttention. Linen drops every argument that this signature does not name, so all that either
    passes are named.

    Args:
      query, key, value: (batch..., Q, H, E), (batch..., K, G, E), (batch..., K, G, V), any number of batch axes.
      bias, mask: broadcast to (batch..., H, Q, K). Flax makes masks of numbers: exactly 1 allows a key, anything else
        forbids it, so a float mask meant to be added gives zeros and no plausible output. -inf in bias forbids as well.
      broadcast_dropout: accepted; each example and head drops its own probabilities, as the algebra defines it.
      dropout_rng, dropout_rate, deterministic: dropout is on where not deterministic and the rate is above zero.
      module: sows the probabilities before dropout as ``attention_weights`` where Flax asks for that.
      force_fp32_for_softmax: always so.
      implementation: of `mha_kernels.attention`; set it by `functools.partial`.

    A query with no allowed key gives zeros, where Flax averages every key. Raises ValueError for einsum overrides, for
    dropout without a key or with a rate outside [0, 1] (deterministic or not), and for shapes that do not fit;
    TypeError for what is no array.
    """
    del broadcast_dropout, promote_dtype, force_fp32_for_softmax
    if qk_attn_weights_einsum is not None or attn_weights_value_einsum is not None:
        raise ValueError("flax_attention_fn: the einsums of attention cannot be replaced, it is not made of einsums")
    query, key, value = (
        as_array(f"flax_attention_fn: {name}", x) for name, x in (("query", query), ("key", key), ("value", value))
    )
    if not query.ndim == key.ndim == value.ndim >= 3:
        raise ValueError(
            f"flax_attention_fn: query, key and value must be (batch..., length, heads, width), "
            f"got {query.shape}, {key.shape}, {value.shape}"
        )
    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    batch = query.shape[:-3]
    scores = (*batch, query.shape[-2], query.shape[-3], key.shape[-3])

    def flat(x: jax.Array) -> jax.Array:
        return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:]).astype(dtype)

    def flat_scores(x: jax.Array, name: str) -> jax.Array:
        """As (B|1, H|1, Q|1, K|1): broadcast over batch axes only where there are several and they differ."""
        if x.ndim > len(scores) or any(n not in (1, m) for n, m in zip(x.shape[::-1], scores[::-1])):
            raise ValueError(f"flax_attention_fn: {name} has shape {x.shape}, which does not broadcast to {scores}")
        x = x.reshape((1,) * (len(scores) - x.ndim) + x.shape)
        if any(size != 1 for size in x.shape[:-3]):
            x = jnp.broadcast_to(x, (*batch, *x.shape[-3:]))
        return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])

    masks: Mask | None = None
    if mask is not None:
        masks = DenseMask(flat_scores(jnp.asarray(as_array("flax_attention_fn: mask", mask)) == 1, "mask"))
    if is_causal:
        masks = CausalMask() if masks is None else masks & CausalMask()
    number = isinstance(dropout_rate, (int, float, np.integer, np.floating)) and not isinstance(dropout_rate, bool)
    if not number or not 0 <= dropout_rate <= 1:
        raise (ValueError if number else TypeError)(
            f"flax_attention_fn: dropout_rate must be in [0, 1], got {dropout_rate!r}"
        )
    dropout = None
    if not deterministic and dropout_rate > 0:
        if dropout_rng is None:
            raise ValueError(f"flax_attention_fn: dropout_rate={dropout_rate} needs dropout_rng, got None")
        dropout = Dropout(float(dropout_rate), dropout_rng)
    query, key, value = flat(query), flat(key), flat(value)
    added = None if bias is None else flat_scores(jnp.asarray(as_array("flax_attention_fn: bias", bias)), "bias")
    if module is not None:
        _sow(module, attention_weights(query, key, mask=masks, bias=added).reshape(scores))
    output = attention(
        query, key, value, mask=masks, bias=added, dropout=dropout, precision=precision, implementation=implementation
    )
    return output.reshape(*batch, *output.shape[1:])


def _sow(module: Any, weights: jax.Array) -> None:
    from flax import nnx

    collection = nnx.Intermediate if isinstance(module, nnx.Module) else "intermediates"
    module.sow(collection, "attention_weights", weights)
