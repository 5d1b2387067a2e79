"""The problem that every implementation solves: one bundle of operands, and what statistics are.

`AttentionSpec` holds everything beside query, key and value, each array aligned to (B|1, H|1, Q|1, K|1, ...): a driver
slices the whole bundle to a tile with one `tree.map` and hands it to the tile functions.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mha_kernels.algebra.biases import Bias, CornerBias
from mha_kernels.algebra.dropout import Dropout
from mha_kernels.algebra.masks import Mask
from mha_kernels.algebra.operands import Tile, lookup_by_gather


class Origin(NamedTuple):
    """Offsets of these arrays within the full problem: ints or traced scalars added to the four indices.

    Positional masks, biases, dropout and statistics see index + origin; arrays are never indexed with it. Cached
    decoding (query = tokens so far) and shards use it, so that a part computes what the whole would.
    """

    batch: Any = 0
    head: Any = 0
    query: Any = 0
    key: Any = 0


class Positions(NamedTuple):
    """Aligned int32: indices batch (B, 1, 1, 1) and head (1, H, 1, 1), first positions query and key (1, 1, 1, 1)."""

    batch: Any
    head: Any
    query: Any
    key: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Every operand beside query, key and value, aligned; None is absent.

    scale, softcap: (1, 1, 1, 1). sink: (1, H, 1, 1). head_gate: (B|1, H, 1, 1). positions: `Positions`.
    """

    positions: Positions
    scale: Any
    softcap: Any
    mask: Mask | None
    bias: Bias | None
    sink: Any
    head_gate: Any
    dropout: Dropout | None


def whole(algebra: AttentionSpec, length_q: int, length_k: int) -> Tile:
    """The positions of all Q x K entries as one tile; batch and head broadcast as (B, H, 1, 1)."""
    place = algebra.positions
    query = place.query + jnp.arange(length_q, dtype=jnp.int32).reshape(1, 1, -1, 1)
    key = place.key + jnp.arange(length_k, dtype=jnp.int32).reshape(1, 1, 1, -1)
    spans = (place.query, place.query + length_q - 1), (place.key, place.key + length_k - 1)
    return Tile(place.batch, place.head, query, key, *spans, lookup_by_gather)


def partition(algebra: AttentionSpec, wanted: tuple[bool, ...]) -> tuple[list, Callable[[Any], AttentionSpec]]:
    """The leaves marked in `wanted` (one flag a leaf), and the function that puts others in their place."""
    leaves, structure = jax.tree.flatten(algebra)
    chosen = [leaf for leaf, flag in zip(leaves, wanted, strict=True) if flag]

    def rebuild(replacements: Any) -> AttentionSpec:
        new = iter(replacements)
        return jax.tree.unflatten(
            structure, [next(new) if flag else leaf for leaf, flag in zip(leaves, wanted, strict=True)]
        )

    return chosen, rebuild


def simplest(algebra: AttentionSpec) -> AttentionSpec:
    """The algebra on a tile of open heads that is full and on which the bias is constant."""
    bias = None if algebra.bias is None else CornerBias(algebra.bias)
    return dataclasses.replace(running(algebra), mask=None, bias=bias)


def running(algebra: AttentionSpec) -> AttentionSpec:
    """The algebra on a tile of heads that are known to be open: the gate only multiplies, and that after the tiles."""
    return dataclasses.replace(algebra, head_gate=None)


def sum_to_leaf(found: jax.Array, leaf: jax.Array) -> jax.Array:
    """Sums the gradients of all programs, (B, H, q, k, ...), to the shape of the leaf they share; cuts padding off."""
    rows, heads, length_q, length_k = leaf.shape[:4]
    found = found.reshape(rows, -1, *found.shape[1:]).sum(axis=1)
    for axis, size in ((1, heads), (2, length_q), (3, length_k)):
        if size == 1:
            found = found.sum(axis=axis, keepdims=True)
    return found[:, :, :length_q, :length_k].reshape(leaf.shape).astype(leaf.dtype)


STATISTICS = (
    "lse",
    "entropy",
    "max_probability",
    "max_logit",
    "distance",
    "sink_mass",
    "diagonal_mass",
    "previous_mass",
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadStatistics:
    """What each head did at each query, (B, H, Q), float32 (float64 for float64 input); None where not asked for.

    Of the probabilities p before gate and dropout: `lse` = log sum_j exp(s_j), the sink included; `entropy` = -sum_j
    p_j ln p_j over keys, in nats; `max_probability`; `max_logit`; `distance` = sum_j p_j |i - j|; `sink_mass` = p on
    key 0; `diagonal_mass` = p on key i; `previous_mass` = p on key i - 1. A query with no allowed key has 0 everywhere,
    except -inf for lse (the sink's logit, if there is a sink) and max_logit. NaN for a head whose gate is zero: it did
    not run. `max_probability` and `max_logit` carry no gradient; all others do.
    """

    lse: jax.Array | None = None
    entropy: jax.Array | None = None
    max_probability: jax.Array | None = None
    max_logit: jax.Array | None = None
    distance: jax.Array | None = None
    sink_mass: jax.Array | None = None
    diagonal_mass: jax.Array | None = None
    previous_mass: jax.Array | None = None


def accumulation_dtype(*arrays: Any) -> Any:
    """float64 if any input is float64, else float32: the type of scores, softmax and accumulation."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)
