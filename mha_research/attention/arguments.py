"""Checks of what a researcher hands over: each names the argument, what came and what was expected."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mha_kernels.algebra.operands import align_array, known


def check_integers(where: str, least: int = 1, **numbers: Any) -> None:
    """Raises TypeError for one that is no integer, ValueError for one below `least`; None is passed over."""
    for name, number in numbers.items():
        if number is None:
            continue
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)):
            raise TypeError(f"{where}: {name} must be an integer, got {number!r}")
        if number < least:
            raise ValueError(f"{where}: {name} must be at least {least}, got {number}")


def check_numbers(where: str, positive: bool = False, **numbers: Any) -> None:
    """Raises TypeError for one that is no number, ValueError for NaN, infinity and, if `positive`, anything <= 0."""
    kind = "positive and finite" if positive else "finite"
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, (int, float, np.integer, np.floating)):
            raise TypeError(f"{where}: {name} must be a {kind} number, got {number!r}")
        if not math.isfinite(number) or (positive and number <= 0):
            raise ValueError(f"{where}: {name} must be {kind}, got {number}")


def check_rates(where: str, **rates: Any) -> None:
    """Raises TypeError for one that is no number, ValueError for one outside [0, 1), NaN included."""
    for name, rate in rates.items():
        number = isinstance(rate, (int, float, np.integer, np.floating)) and not isinstance(rate, bool)
        if not number or not 0 <= rate < 1:
            raise (ValueError if number else TypeError)(f"{where}: {name} must be in [0, 1), got {rate}")


def check_kinds(where: str, kind: Any, optional: bool = False, **given: Any) -> None:
    """Raises TypeError for one that is not of `kind`, nor None if `optional`."""
    for name, value in given.items():
        if not isinstance(value, kind) and not (optional and value is None):
            raise TypeError(f"{where}: {name} must be a {kind.__name__}, got {value!r}")


def check_rngs(where: str, rngs: Any) -> None:
    """Raises TypeError where `rngs` is no `nnx.Rngs`, ValueError where it has no stream to draw parameters from."""
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(f"{where}: rngs must be an nnx.Rngs, got {rngs!r}")
    _check_stream(where, rngs, "params")


def _check_stream(where: str, rngs: nnx.Rngs, name: str) -> None:
    if name not in rngs and "default" not in rngs:
        raise ValueError(f"{where}: rngs has neither a stream {name!r} nor a default one")


def one_key(where: str, rngs: Any, stream: str = "dropout") -> jax.Array:
    """One key from a stream of `rngs`, or `rngs` itself when it is a key. Raises ValueError when it is missing and
    TypeError for anything else.
    """
    if rngs is None:
        raise ValueError(f"{where} needs rngs, got None")
    if isinstance(rngs, nnx.Rngs):
        _check_stream(where, rngs, stream)
        return getattr(rngs, stream)()
    shape, dtype = getattr(rngs, "shape", None), getattr(rngs, "dtype", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ()
    if not typed and not (dtype == jnp.uint32 and len(shape or ()) == 1):
        raise TypeError(f"{where} needs rngs, an nnx.Rngs or one jax key, got {rngs!r}")
    return rngs


def as_grid(where: str, grid: Any) -> tuple[int, int] | None:
    """A grid as two ints, which can be hashed, or None. Raises TypeError where `grid` is neither None nor (rows,
    columns), ValueError for one below 1.
    """
    if grid is None:
        return None
    if not isinstance(grid, tuple | list) or len(grid) != 2:
        raise TypeError(f"{where}: grid must be (rows, columns), got {grid!r}")
    check_integers(where, rows=grid[0], columns=grid[1])
    return int(grid[0]), int(grid[1])


def as_array(name: str, x: Any) -> Any:
    """Arrays as they are, lists and the like as one. Raises TypeError where there are no numbers in it."""
    numeric = isinstance(x, jax.Array) or (isinstance(x, np.ndarray) and x.dtype.kind not in "OUSMm")
    return x if numeric else known(x, name)


def as_gate(gate: Any, batch_size: int, num_heads: int) -> jax.Array | None:
    """A head gate, (H,) or (B, H), as (B|1, H). Raises ValueError or TypeError where it does not fit."""
    if gate is None:
        return None
    array = as_array("head_gate", gate)
    if array.ndim not in (1, 2):
        raise ValueError(f"head_gate has shape {array.shape}; expected (H,) or (B, H)")
    axes, sizes = "H" if array.ndim == 1 else "BH", {"B": batch_size, "H": num_heads}
    gates = jnp.asarray(align_array(array, axes, "float", sizes, "head_gate"))[:, :, 0, 0]
    return jnp.broadcast_to(gates, (gates.shape[0], num_heads))


def as_padding(padding: Any, batch_size: int, length: int) -> jax.Array:
    """A key padding mask as boolean (B, K). Raises ValueError or TypeError where it does not fit."""
    sizes = {"B": batch_size, "K": length}
    array = jnp.asarray(align_array(padding, "BK", "bool", sizes, "key_padding_mask"))
    return jnp.broadcast_to(array[:, 0, 0], (batch_size, length))


def check_inputs(where: str, widths: tuple[int, int, int], query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """Query, key (the query unless given) and value (the key unless given) as arrays (B, L, width) that fit each other.

    Raises ValueError or TypeError where they do not.
    """
    if key is None and value is not None:
        raise ValueError(f"{where}: value was given without key")
    query = as_array(f"{where}: query", query)
    key = query if key is None else as_array(f"{where}: key", key)
    value = key if value is None else as_array(f"{where}: value", value)
    for name, width, x in zip(("query", "key", "value"), widths, (query, key, value)):
        if x.ndim != 3 or x.shape[-1] != width or 0 in x.shape:
            raise ValueError(f"{where}: {name} must be (batch, length, {width}), none of them 0, got {x.shape}")
    if not query.shape[0] == key.shape[0] == value.shape[0] or key.shape[1] != value.shape[1]:
        raise ValueError(
            f"{where}: batch sizes or key and value lengths differ: "
            f"query {query.shape}, key {key.shape}, value {value.shape}"
        )
    return query, key, value
