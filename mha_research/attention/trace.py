"""A look inside one call of a module: every array on the way, with the names of its axes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

import mha_kernels
from mha_research.attention.multi_head import MultiHeadAttention
from mha_research.attention.options import HeadOptions
from mha_research.attention.variants.dense import DenseAttention


@functools.partial(jax.tree_util.register_dataclass, data_fields=("array",), meta_fields=("axes",))
@dataclasses.dataclass(frozen=True)
class Traced:
    """An array and its axes, letters of the project's alphabet: B, Q, K, H, G, D (model width), E, V."""

    array: jax.Array
    axes: str


def trace_attention(
    module: MultiHeadAttention,
    query: jax.Array,
    key: jax.Array | None = None,
    value: jax.Array | None = None,
    **call: Any,
) -> tuple[jax.Array, dict[str, Traced]]:
    """The output of ``module(query, key, value, **call)``, the very same, and what it was made of.

    query, key, value (heads, rotated): BQHE, BKGE, BKGV; scores: BHQK, -inf where forbidden (where the module has
    scores of one softmax); probabilities: BHQK, before dropout and gates; heads: BQHV, after both; contributions: BQHD,
    heads times their rows of W_O, whose sum over H plus the output bias is the output (before an adapter); query_norm,
    key_norm, value_norm, head_norm, contribution_norm: Euclidean norms over the last axis of each.

    Dense, O(Q K), for looking at. Also takes every variant that derives from `MultiHeadAttention` and overrides neither
    the call's inputs nor the output; raises TypeError for others.
    """
    if not isinstance(module, MultiHeadAttention) or type(module).__call__ is not MultiHeadAttention.__call__:
        raise TypeError(
            f"trace_attention: {type(module).__name__} changes inputs or output of the call, it has no one trace"
        )
    if call.pop("return_weights", False):
        raise ValueError(
            "trace_attention: return_weights is for the module's own call, the trace has the probabilities"
        )
    query, key, value = module._check_inputs(query, key, value)
    heads = module.project(query, key, value)
    options = module.options(query.shape[0], **call)
    outputs = module.attend(*heads, options)
    trace = dict(zip(("query", "key", "value"), map(Traced, heads, ("BQHE", "BKGE", "BKGV"))))
    scores = _scores(module, heads[0], heads[1], options)
    if scores is not None:
        trace["scores"] = Traced(scores, "BHQK")
    trace["probabilities"] = Traced(module.weights(*heads, options), "BHQK")
    trace["heads"] = Traced(outputs, "BQHV")
    if module.output is not None:
        gated = outputs if module.gate is None else outputs * jax.nn.sigmoid(module.gate(query))
        contributions = jnp.einsum("bqhv,hvd->bqhd", gated, module.output.kernel[...], precision=module.precision)
        trace["contributions"] = Traced(contributions, "BQHD")
    named = {"query": "query", "key": "key", "value": "value", "heads": "head", "contributions": "contribution"}
    for name, short in named.items():
        if name in trace:
            part = trace[name]
            wide = jnp.promote_types(part.array.dtype, jnp.float32)
            norm = jnp.linalg.norm(part.array.astype(wide), axis=-1)
            trace[f"{short}_norm"] = Traced(norm, part.axes[:-1])
    return module.combine(outputs, query), trace


def _scores(module: MultiHeadAttention, query: jax.Array, key: jax.Array, options: HeadOptions) -> jax.Array | None:
    """Scores of the plain module and of the dense variants, which start from them; None where there is no one
    matrix.
    """
    plain = type(module).attend is MultiHeadAttention.attend
    if not plain and not isinstance(module, DenseAttention):
        return None
    problem = mha_kernels.dense(query, key, **module.scoring(options), origin=options.origin)
    return problem.scores(query, key, module.precision)
