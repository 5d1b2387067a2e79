"""The algebra as the arrays that attention.cc reads."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mha_kernels.algebra.biases import RelativeBias
from mha_kernels.algebra.masks import CausalMask, KeyPaddingMask, Mask, SegmentMask, WindowMask
from mha_kernels.algebra.spec import AttentionSpec
from mha_kernels.tiled.relative import ToeplitzBias
from mha_kernels.tiled.sizes import Sizes, pad

PANEL = 64  # arrays along keys are padded to a multiple of it, which every machine's panels divide
UNBOUNDED = np.iinfo(np.int32).min
MASKS = (CausalMask, WindowMask, KeyPaddingMask, SegmentMask)  # these alone: a subclass may allow something else


class Operands(NamedTuple):
    """What attention.cc reads beside query, key and value, in its order; an empty array stands for none.

    scale (B,). places (B, 4): bounds low and high of key - query, and the positions of the first query and key. keep
    (B, K): 1 for a key that may be attended, else 0. query_ids (B, Q), key_ids (B, K): segments. line (B|1, H|1, N):
    the bias at key - query from -(Q - 1) on. is_open (B, H). K is padded to whole panels.
    """

    scale: jax.Array
    places: jax.Array
    keep: jax.Array
    query_ids: jax.Array
    key_ids: jax.Array
    line: jax.Array
    is_open: jax.Array


def declined(algebra: AttentionSpec) -> str | None:
    """Why the algebra has no such form, or None."""
    for name in ("softcap", "dropout"):
        if getattr(algebra, name) is not None:
            return f"{name} is not in it"
    masks = () if algebra.mask is None else algebra.mask.parts()
    biases = () if algebra.bias is None else algebra.bias.parts()
    for operand in (*masks, *biases):
        if not (type(operand) in MASKS or _is_line(operand)):
            return f"{type(operand).__name__} is not in it"
    segments = [mask for mask in masks if isinstance(mask, SegmentMask)]
    if len(segments) > 1:
        return "it takes one SegmentMask, not several"
    if any(ids.dtype.itemsize > 4 for mask in segments for ids in (mask.query_ids, mask.key_ids)):
        return "segment ids have 64 bits"
    return None


def _is_line(operand: Any) -> bool:
    """Whether it is a bias of which a line of values, one for each distance, says everything."""
    return isinstance(operand, RelativeBias) and type(operand).tile is RelativeBias.tile and not operand.forbids


def operands(algebra: AttentionSpec, sizes: Sizes) -> Operands:
    """Of an algebra whose leaves have 1 or B rows, and whose biases are `ToeplitzBias`es for these sizes."""
    return Operands(
        _rows(algebra.scale, sizes.batch, 1).astype(jnp.float32)[:, 0],
        _places(algebra, sizes.batch),
        *_masks(algebra.mask, sizes),
        _line(algebra),
        _open(algebra.head_gate, sizes),
    )


def _rows(leaf: Any, batch: int, length: int, padded: int = 1) -> jax.Array:
    """(B, padded) from an aligned leaf with at most one axis beside the first, of the given length."""
    flat = jnp.broadcast_to(leaf.reshape(leaf.shape[0], -1), (batch, length))
    return pad(flat, {1: max(length, padded)})


def _places(algebra: AttentionSpec, batch: int) -> jax.Array:
    bounds = (None, None) if algebra.mask is None else algebra.mask.distances()
    ends = *(UNBOUNDED if bound is None else bound for bound in bounds), algebra.positions.query, algebra.positions.key
    columns = [_rows(jnp.asarray(end, jnp.int32).reshape(-1, 1), batch, 1) for end in ends]
    return jnp.concatenate(columns, axis=1)


def _masks(mask: Mask | None, sizes: Sizes) -> tuple[jax.Array, jax.Array, jax.Array]:
    """keep, query_ids and key_ids."""
    batch, length_q, length_k, padded = sizes.batch, sizes.length_q, sizes.length_k, sizes.padded[1]
    keep, query_ids, key_ids = jnp.zeros((0, 0)), jnp.zeros((0, 0), jnp.int32), jnp.zeros((0, 0), jnp.int32)
    for part in () if mask is None else mask.parts():
        if isinstance(part, KeyPaddingMask):
            new = _rows(part.keep, batch, length_k, padded)
            keep = keep * new if keep.size else new.astype(jnp.float32)
        if isinstance(part, SegmentMask):
            query_ids = _rows(part.query_ids, batch, length_q).astype(jnp.int32)
            key_ids = _rows(part.key_ids, batch, length_k, padded).astype(jnp.int32)
    return keep.astype(jnp.float32), query_ids, key_ids


def _line(algebra: AttentionSpec) -> jax.Array:
    line = jnp.zeros((0, 0, 0), jnp.float32)
    for part in () if algebra.bias is None else algebra.bias.parts():
        assert isinstance(part, ToeplitzBias)
        values = part.values.reshape(*part.values.shape[:2], part.values.shape[-1])
        line = line + values if line.size else values
    return line


def _open(gate: Any, sizes: Sizes) -> jax.Array:
    if gate is None:
        return jnp.zeros((0, 0), jnp.uint8)
    return jnp.broadcast_to(gate.reshape(gate.shape[0], -1) != 0, (sizes.batch, sizes.heads)).astype(jnp.uint8)
