"""Reads the arguments of `attention`: checks each, says what is wrong, and builds an `AttentionSpec` of them."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_kernels.algebra.biases import Bias, DenseBias
from mha_kernels.algebra.dropout import Dropout, seed_of
from mha_kernels.algebra.masks import DenseMask, Mask
from mha_kernels.algebra.operands import Operand, align, align_array, known, within_reach
from mha_kernels.algebra.spec import STATISTICS, AttentionSpec, Origin, Positions, accumulation_dtype

FLOATS = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)


def check_arrays(query: Any, key: Any, *value: Any) -> tuple[jax.Array, ...]:
    """Query (B, Q, H, E), key (B, K, G, E) and, if there is one, value (B, K, G, V) as arrays that fit each other.

    Raises:
        ValueError: a rank, size or head grouping does not fit. TypeError: a type is not floating.
    """
    arrays = dict(zip(("query", "key", "value"), (query, key, *value)))
    for name, array in arrays.items():
        array = known(array, name)
        if array.ndim != 4:
            axes = "(B, Q, H, E)" if name == "query" else f"(B, K, G, {'E' if name == 'key' else 'V'})"
            raise ValueError(f"{name} has shape {array.shape}; expected rank 4, {axes}")
        if array.dtype not in FLOATS:
            raise TypeError(f"{name} has dtype {array.dtype}; expected float16, bfloat16, float32 or float64")
        if 0 in array.shape:
            raise ValueError(f"{name} has shape {array.shape}; expected no empty axis")
        arrays[name] = jnp.asarray(array)
    _check_sizes(arrays)
    return tuple(arrays.values())


def _check_sizes(arrays: dict[str, jax.Array]) -> None:
    query, key = arrays["query"], arrays["key"]
    if key.shape[0] != query.shape[0]:
        raise ValueError(f"key has batch size {key.shape[0]}; expected {query.shape[0]}, that of query")
    if key.shape[3] != query.shape[3]:
        raise ValueError(f"key has width {key.shape[3]}; expected {query.shape[3]}, that of query")
    if query.shape[2] % key.shape[2]:
        raise ValueError(
            f"query has {query.shape[2]} heads and key has {key.shape[2]}; expected a multiple: H = n G. "
            "Arrays are (batch, length, heads, width)"
        )
    if "value" in arrays and arrays["value"].shape[:3] != key.shape[:3]:
        raise ValueError(f"value has shape {arrays['value'].shape}; expected {key.shape[:3]} + (V,), as key")


def build_spec(
    query: jax.Array,
    key: jax.Array,
    *,
    mask: Any = None,
    bias: Any = None,
    scale: Any = None,
    softcap: Any = None,
    sink: Any = None,
    head_gate: Any = None,
    dropout: Any = None,
    origin: Any = None,
) -> AttentionSpec:
    """All other arguments, checked and aligned.

    Raises:
        ValueError or TypeError: names the argument, what came and what was expected.
    """
    batch, length_q, heads, width = query.shape
    dtype = accumulation_dtype(query, key)
    sizes = {"B": batch, "H": heads, "Q": length_q, "K": key.shape[1]}
    return AttentionSpec(
        positions=_positions(Origin() if origin is None else origin, batch, heads),
        scale=_scalar("scale", 1 / math.sqrt(width) if scale is None else scale, dtype),
        softcap=None if softcap is None else _scalar("softcap", softcap, dtype, positive=True),
        mask=align(_operand("mask", mask, Mask, DenseMask), sizes, "mask"),
        bias=align(_operand("bias", bias, Bias, DenseBias), sizes, "bias"),
        sink=align_array(sink, "H", "float", sizes, "sink"),
        head_gate=None
        if head_gate is None
        else align_array(head_gate, _gate_axes(head_gate), "float", sizes, "head_gate"),
        dropout=_dropout(dropout, sizes),
    )


def _operand(name: str, given: Any, kind: type[Operand], dense: Callable[[Any], Operand]) -> Any:
    if given is None or isinstance(given, kind):
        return given
    if isinstance(given, Operand):
        raise TypeError(f"{name} is a {type(given).__name__}; expected a {kind.__name__} or an array")
    try:
        array = known(given, name)
    except TypeError as error:
        raise TypeError(f"{name} is {type(given).__name__}; expected a {kind.__name__} or an array") from error
    if kind is Mask and array.dtype != jnp.bool_:
        raise TypeError(
            f"mask has dtype {array.dtype}; expected bool (True = may attend), or pass numbers to add as bias"
        )
    return dense(array)


def _gate_axes(gate: Any) -> str:
    array = known(gate, "head_gate")
    if array.ndim not in (1, 2):
        raise ValueError(f"head_gate has shape {array.shape}; expected (H,) or (B, H)")
    return "H" if array.ndim == 1 else "BH"


def _scalar(name: str, value: Any, dtype: Any, positive: bool = False) -> jax.Array:
    """A real number in the type of the scores, (1, 1, 1, 1): a Python number is float64 under x64, which no kernel
    takes."""
    array = known(value, name)
    if array.shape != ():
        raise ValueError(f"{name} has shape {array.shape}; expected a number")
    if not jnp.issubdtype(array.dtype, jnp.number) or jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"{name} has dtype {array.dtype}; expected a real number")
    array = array.astype(dtype)
    if isinstance(array, np.ndarray) and (not np.isfinite(array) or (positive and array <= 0)):
        raise ValueError(f"{name} is {value!r}; expected a {'positive, ' if positive else ''}finite number")
    return array.reshape(1, 1, 1, 1)


def _dropout(dropout: Any, sizes: dict[str, int]) -> Dropout | None:
    if dropout is None:
        return None
    if not isinstance(dropout, Dropout):
        raise TypeError(f"dropout is {dropout!r}; expected a Dropout(rate, key)")
    if dropout.rate == 0:
        return None
    return align(Dropout(dropout.rate, seed_of(dropout.key)), sizes, "dropout")


def _positions(origin: Any, batch: int, heads: int) -> Positions:
    if not isinstance(origin, Origin):
        raise TypeError(f"origin is {origin!r}; expected an Origin(batch, head, query, key)")
    starts = []
    for name, value in origin._asdict().items():
        start = known(value, f"origin.{name}")
        if start.shape != () or not jnp.issubdtype(start.dtype, jnp.integer):
            raise TypeError(f"origin.{name} has dtype {start.dtype} and shape {start.shape}; expected an integer")
        starts.append(within_reach(start, f"origin.{name}").reshape(1, 1, 1, 1))
    batches = starts[0] + np.arange(batch, dtype=np.int32).reshape(-1, 1, 1, 1)
    indices = starts[1] + np.arange(heads, dtype=np.int32).reshape(1, -1, 1, 1)
    return Positions(batches, indices, starts[2], starts[3])


def statistic_names(names: Any) -> tuple[str, ...]:
    """The requested statistics in canonical order; None asks for all.

    Raises:
        ValueError: an unknown name. TypeError: neither a name nor several.
    """
    if names is None:
        return STATISTICS
    if not isinstance(names, Iterable):
        raise TypeError(f"statistics is {names!r}; expected names among {', '.join(STATISTICS)}")
    names = (names,) if isinstance(names, str) else tuple(names)
    for name in names:
        if name not in STATISTICS:
            raise ValueError(f"statistics has {name!r}; expected names among {', '.join(STATISTICS)}")
    return tuple(name for name in STATISTICS if name in names)
