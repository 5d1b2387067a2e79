"""What one call adds to a module's own choices, in the form that `mha_kernels` takes."""

from __future__ import annotations

import dataclasses

import jax
from flax import nnx

from mha_kernels import Bias, DenseBias, DenseMask, Dropout, KeyPaddingMask, Mask, Origin


@dataclasses.dataclass(frozen=True)
class HeadOptions:
    """Arguments of `mha_kernels.attention` that differ from call to call."""

    mask: Mask | None = None
    bias: Bias | None = None
    head_gate: jax.Array | None = None
    dropout: Dropout | None = None
    origin: Origin = dataclasses.field(default_factory=Origin)
    step: int | jax.Array | None = None


def as_mask(mask: Mask | jax.Array) -> Mask:
    """A mask as it is, a boolean array as a `DenseMask`."""
    return mask if isinstance(mask, Mask) else DenseMask(mask)


def join_masks(mask: Mask | jax.Array | None, key_padding_mask: jax.Array | None) -> Mask | None:
    """mask & padding, arrays made into masks; None where nothing is forbidden."""
    padding = None if key_padding_mask is None else KeyPaddingMask(key_padding_mask)
    if mask is None or padding is None:
        return padding if mask is None else as_mask(mask)
    return as_mask(mask) & padding


def join_biases(bias: Bias | jax.Array | None, own: Bias | None) -> Bias | None:
    """bias + own, an array made into a bias; None where nothing is added."""
    if bias is not None and not isinstance(bias, Bias):
        bias = DenseBias(bias)
    if bias is None or own is None:
        return own if bias is None else bias
    return bias + own


def dropout_key(rngs: nnx.Rngs | jax.Array | None) -> jax.Array:
    """One key from the dropout stream of `rngs`, or `rngs` itself when it is a key. Raises ValueError when it is
    missing.
    """
    if rngs is None:
        raise ValueError("dropout or DropHead with deterministic=False needs rngs, got None")
    return rngs.dropout() if isinstance(rngs, nnx.Rngs) else rngs
