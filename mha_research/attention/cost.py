"""What one example's pass through a module costs, counted in multiplications of its matrix products."""

from __future__ import annotations

import functools
from typing import Any

import jax
from flax import nnx

from mha_research.attention.multi_head import MultiHeadAttention
from mha_research.attention.performer import CHUNK
from mha_research.attention.variants.differential import DifferentialAttention
from mha_research.attention.variants.multi_scale import MultiScaleAttention
from mha_research.attention.variants.performer import PerformerAttention
from mha_research.attention.variants.shaw import ShawAttention
from mha_research.attention.variants.talking_heads import TalkingHeadsAttention


def multiplications(module: Any, queries: int, keys: int, causal: bool = False) -> int:
    """Q times the weights applied to queries, K times those applied to keys and values, and what pairs of tokens cost.

    Pairs of a causal mask are not subtracted; a Performer forms other products with one (`causal`). As the tables of
    docs/modules.md, without what `add_bias_kv` adds.
    """
    if isinstance(module, MultiScaleAttention):
        parts = zip(module.levels, module.patch_sizes)
        levels = sum(multiplications(level, queries, -(-keys // size)) for level, size in parts)
        return queries * module.fusion.kernel.size + levels
    total = _pairs(module, queries, keys, causal)
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(module, nnx.Param))):
        if path[-1].key == "kernel":
            total += leaf.size * (keys if path[0].key in ("key", "value") else queries)
    return total


@functools.singledispatch
def _pairs(module: MultiHeadAttention, queries: int, keys: int, causal: bool) -> int:
    """Scores and their sums of values: Q K H (E + V), but for the kinds below."""
    return queries * keys * module.num_heads * (module.head_dim + module.value_head_dim)


@_pairs.register
def _(module: TalkingHeadsAttention, queries: int, keys: int, causal: bool) -> int:
    heads = module.num_heads
    return queries * keys * heads * (module.head_dim + module.value_head_dim + 2 * heads)


@_pairs.register
def _(module: ShawAttention, queries: int, keys: int, causal: bool) -> int:
    rows = (2 * module.max_distance + 1) * queries * module.num_heads
    by_key = 0 if module.key_table is None else rows * module.head_dim
    by_value = 0 if module.value_table is None else rows * (module.value_head_dim + keys)
    return queries * keys * module.num_heads * (module.head_dim + module.value_head_dim) + by_key + by_value


@_pairs.register
def _(module: DifferentialAttention, queries: int, keys: int, causal: bool) -> int:
    return queries * keys * module.num_heads * (module.head_dim + 2 * module.value_head_dim)


@_pairs.register
def _(module: PerformerAttention, queries: int, keys: int, causal: bool) -> int:
    width = module.value_head_dim + 1  # the values, and the ones that count
    features = module.num_features * (1 if module.feature_kind == "positive" else 2)
    drawn = (queries + keys) * module.num_heads * module.num_features * module.head_dim
    if not causal:
        return drawn + module.num_heads * features * (keys * module.value_head_dim + queries * width)
    chunk = min(CHUNK, queries)
    whole = -(-queries // chunk) * chunk
    return drawn + whole * module.num_heads * (chunk * (features + width) + 2 * features * width)
