"""What is logged of every head while a model trains."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from mha_kernels import DenseBias, HeadStatistics, Mask, attention_with_statistics
from mha_research.attention import CollaborativeAttention, MultiHeadAttention, PerformerAttention, ShawAttention
from mha_research.attention.options import HeadOptions

Heads = tuple[jax.Array, jax.Array, jax.Array]

HEAD_STATISTICS = ("entropy", "max_probability", "distance", "sink_mass", "previous_mass")  # nats, shares, and tokens


def head_statistics(
    attention: Any, query: jax.Array, key: jax.Array, value: jax.Array, mask: Mask | None = None
) -> HeadStatistics:
    """`HEAD_STATISTICS` of the heads of an attention module at each query, (B, H, Q) each.

    Before any dropout, and in memory linear in the length on the tiled path; a Performer's and a `ShawAttention`'s
    take O(Q K). The inputs are those of the module's call. Raises ValueError for a module whose weights are no
    probabilities of tokens.
    """
    if not isinstance(attention, MultiHeadAttention):
        raise ValueError(f"{type(attention).__name__} has no weight for each token, so its heads have no statistics")
    heads = attention.project(query, key, value)
    heads, call = _softmax(attention, heads, attention.options(query.shape[0], mask=mask))
    call |= {"statistics": HEAD_STATISTICS, "implementation": attention.implementation}
    return attention_with_statistics(*heads, **call)[1]


@functools.singledispatch
def _softmax(module: MultiHeadAttention, heads: Heads, options: HeadOptions) -> tuple[Heads, dict[str, Any]]:
    """Heads and arguments with which `mha_kernels` has the probabilities of a module."""
    if type(module).attend is not MultiHeadAttention.attend:
        raise ValueError(
            f"the weights of {type(module).__name__} are no probabilities, so its heads have no statistics"
        )
    return heads, module.scoring(options)


@_softmax.register
def _(module: CollaborativeAttention, heads: Heads, options: HeadOptions) -> tuple[Heads, dict[str, Any]]:
    query, key, value = heads
    return (*module.spread(query, key), value), module.scoring(options)


@_softmax.register
def _(module: ShawAttention, heads: Heads, options: HeadOptions) -> tuple[Heads, dict[str, Any]]:
    query, key, _ = heads
    call = module.scoring(options)
    if module.key_table is not None:
        term = DenseBias(module.key_term(query, module.problem(query, key, options)))
        call["bias"] = term if call["bias"] is None else call["bias"] + term
    return heads, call


@_softmax.register
def _(module: PerformerAttention, heads: Heads, options: HeadOptions) -> tuple[Heads, dict[str, Any]]:
    """Its estimate p of the probabilities as softmax(0 + log p)."""
    if module.feature_kind == "trigonometric":
        raise ValueError("trigonometric features estimate negative probabilities, so the heads have no statistics")
    query, key, value = heads
    weights = module.weights(*heads, options)
    logarithm = jnp.log(jnp.maximum(weights, jnp.finfo(weights.dtype).tiny))
    return (jnp.zeros_like(query), jnp.zeros_like(key), value), {"mask": options.mask, "bias": DenseBias(logarithm)}
