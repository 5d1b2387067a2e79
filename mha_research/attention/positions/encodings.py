"""Where a token is: embeddings added to the input, rotations of query and key, and bucketed distances.

A scheme of a module is a value: `Alibi(...)`, `Rotary(...)`, `RelativeBias(...)` in `schemes.py`. Here are the
functions; `t5_bucket` is the algebra's own.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mha_kernels import t5_bucket
from mha_research.attention.arguments import as_array, check_integers, check_numbers

__all__ = ["Learned", "log_time", "rotate", "sinusoidal", "sinusoidal_at", "t5_bucket"]


def sinusoidal_at(positions: jax.Array, features: int, base: float = 10000.0) -> jax.Array:
    """PE[p, 2i] = sin(p / base^(2i/D)), PE[p, 2i+1] = cos of the same; (..., D) for positions (...), which may be
    fractions.

    float64 for positions in float64, else float32. Raises ValueError or TypeError for a width below 1 or a base that is
    not positive.
    """
    check_integers("sinusoidal", features=features)
    check_numbers("sinusoidal", positive=True, base=base)
    positions = jnp.asarray(positions)
    compute = jnp.promote_types(positions.dtype, jnp.float32)
    frequency = float(base) ** (-jnp.arange(0, features, 2, dtype=compute) / features)
    angle = jnp.multiply.outer(positions.astype(compute), frequency)
    pairs = jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1)
    return pairs.reshape(*positions.shape, -1)[..., :features]


def sinusoidal(length: int, features: int, base: float = 10000.0, dtype: Any = jnp.float32) -> jax.Array:
    """PE[p, 2i] = sin(p / base^(2i/D)), PE[p, 2i+1] = cos(p / base^(2i/D)); (L, D) of `dtype`, to be added to the
    embeddings.

    Each row has norm sqrt(D / 2). Vaswani et al. 2017, section 3.5. Raises ValueError or TypeError for sizes below 1.
    """
    check_integers("sinusoidal", length=length)
    return sinusoidal_at(_arange(length, dtype), features, base).astype(dtype)


def log_time(length: int, features: int, base: float = 10000.0, dtype: Any = jnp.float32) -> jax.Array:
    """Sinusoids at (L - 1) log(1 + p) / log(L): the same range as plain positions, fine at the start and coarse at the
    end; (L, D).

    Distances lose their meaning (the encoding of p + k is no longer a rotation of that of p); offered to be tested.
    Raises ValueError or TypeError for sizes below 1.
    """
    check_integers("log_time", length=length)
    fraction = jnp.log1p(_arange(length, dtype)) / math.log(max(length, 2))
    return sinusoidal_at((length - 1) * fraction, features, base).astype(dtype)


def _arange(length: int, dtype: Any) -> jax.Array:
    """Positions 0 ... L - 1 in the type that a table of `dtype` is computed in."""
    return jnp.arange(length, dtype=jnp.promote_types(dtype, jnp.float32))


class Learned(nnx.Module):
    """PE[p] = table[p], one trained row for every position; table (length, D) ~ N(0, std^2). Vaswani et al. 2017, table
    3 row E.
    """

    def __init__(
        self, length: int, features: int, *, std: float = 0.02, rngs: nnx.Rngs, param_dtype: Any = jnp.float32
    ):
        check_integers("Learned", length=length, features=features)
        check_numbers("Learned", std=std)
        self.table = nnx.Param(float(std) * jax.random.normal(rngs.params(), (length, features), param_dtype))

    def __call__(self, length: int, start: int | jax.Array = 0) -> jax.Array:
        """Rows start ... start + length - 1, (length, D). Raises ValueError when the table does not have them; a traced
        start gives NaN.
        """
        check_integers("Learned", length=length)
        table = self.table[...]
        end = start + length
        if not isinstance(end, jax.core.Tracer) and (start < 0 or end > table.shape[0]):
            raise ValueError(
                f"Learned: positions {int(start)} to {int(end) - 1} were asked for, the table has {table.shape[0]} rows"
            )
        rows = jax.lax.dynamic_slice_in_dim(table, start, length)
        return jnp.where((start >= 0) & (end <= table.shape[0]), rows, jnp.nan)


def rotate(x: jax.Array, positions: jax.Array, base: float = 10000.0, interleaved: bool = False) -> jax.Array:
    """Turn pair i of x (B, L, H, E) at position p by the angle p * base^(-2i/E), so that q_m . k_n depends on m - n
    alone.

    `positions` is (L,) or (B, L). A pair is (x_i, x_{i+E/2}) as in GPT-NeoX and Llama, or (x_2i, x_2i+1) with
    `interleaved`, as in the paper and GPT-J: the same up to a permutation of the E axis, which is not free to change
    once weights are trained. Computed in at least float32, returned in the type of x. Su et al. 2021, "RoFormer",
    equation 34.

    Raises ValueError when E is odd, a shape does not fit or base is not positive; TypeError for an x of integers.
    """
    x, positions = jnp.asarray(as_array("rotate: x", x)), as_array("rotate: positions", positions)
    if x.ndim != 4 or 0 in x.shape or not jnp.issubdtype(x.dtype, jnp.floating):
        kind = TypeError if x.ndim == 4 and x.size else ValueError
        raise kind(f"rotate: x must be (B, L, H, E) of floats, got {x.shape} of {x.dtype}")
    width = x.shape[-1]
    if width % 2:
        raise ValueError(f"rotate: the head width must be even, got {width}")
    if positions.shape not in (x.shape[1:2], x.shape[:2]):
        raise ValueError(f"rotate: positions must be {x.shape[1:2]} or {x.shape[:2]}, got {positions.shape}")
    check_numbers("rotate", positive=True, base=base)
    compute = jnp.promote_types(x.dtype, jnp.float32)
    frequency = float(base) ** (-jnp.arange(0, width, 2, dtype=compute) / width)
    angle = jnp.multiply.outer(jnp.asarray(positions, compute), frequency)[..., None, :]
    angle = angle.reshape((-1, *angle.shape[-3:]))
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    wide = x.astype(compute)
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = jnp.split(wide, 2, axis=-1)
    turned = (first * cos - second * sin, first * sin + second * cos)
    joined = jnp.stack(turned, axis=-1).reshape(x.shape) if interleaved else jnp.concatenate(turned, axis=-1)
    return joined.astype(x.dtype)
