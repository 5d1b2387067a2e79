"""What a module is given, checked, and what one call adds to it, in the form that `mha_kernels` takes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mha_kernels import Bias, DenseBias, DenseMask, Dropout, KeyPaddingMask, Mask, Origin
from mha_research.attention.arguments import check_integers, check_numbers, check_rates


@dataclasses.dataclass(frozen=True)
class HeadOptions:
    """Arguments of `mha_kernels.attention` that differ from call to call."""

    mask: Mask | None = None
    bias: Bias | None = None
    head_gate: jax.Array | None = None
    dropout: Dropout | None = None
    origin: Origin = dataclasses.field(default_factory=Origin)
    step: int | jax.Array | None = None


def check_sizes(where: str, dropout_rate: float, *, in_features: int, num_heads: int, **sizes: Any) -> None:
    """Raises ValueError or TypeError where the sizes of a `MultiHeadAttention` or the rate do not fit."""
    check_integers(where, in_features=in_features, num_heads=num_heads, **sizes)
    for name, size in (("in_features", in_features), ("num_heads", num_heads)):
        if size is None:
            raise TypeError(f"{where}: {name} must be an integer, got None")
    num_kv_heads = sizes["num_kv_heads"]
    if num_kv_heads is not None and num_heads % num_kv_heads:
        raise ValueError(f"{where}: num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}")
    if sizes["head_dim"] is None and in_features % num_heads:
        raise ValueError(
            f"{where}: in_features={in_features} is no multiple of num_heads={num_heads}; give head_dim to free it"
        )
    check_rates(where, dropout_rate=dropout_rate)


def scale_factor(scale: str | float, width: float) -> float:
    """What scores are multiplied by for heads of a width: "inverse_sqrt", "inverse" (muP), "none", or a number as it
    is. Raises ValueError for another name, NaN or infinity and TypeError for what is neither.
    """
    if not isinstance(scale, str):
        check_numbers("MultiHeadAttention", scale=scale)
        return float(scale)
    named = {"inverse_sqrt": width**-0.5, "inverse": 1 / width, "none": 1.0}
    if scale not in named:
        raise ValueError(f"scale must be a number or one of {', '.join(named)}, got {scale!r}")
    return named[scale]


def gated(heads: jax.Array, gate: jax.Array | None) -> jax.Array:
    """Heads (B, Q, H, V) times gate, (H,) or (B, H); a closed head is zero, and its gate's gradient too, whatever it
    holds.
    """
    if gate is None:
        return heads
    gate = jnp.atleast_2d(gate)[:, None, :, None].astype(heads.dtype)
    return jnp.where(gate == 0, 0, gate * jnp.where(gate == 0, 0, heads))


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
