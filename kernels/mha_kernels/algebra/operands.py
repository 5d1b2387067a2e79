"""How masks, biases and every other operand of the algebra are laid out, sliced and carried through transforms.

An operand is a small frozen dataclass and a pytree. Each of its array fields names its axes with the project's
alphabet:

    class AlibiBias(Bias):
        slopes: jax.Array = axes("H")

B batch, H heads, Q query length, K key length; any other letter is a trailing axis of the operand's own (the entries of
a table). Because every field says what its axes mean, one generic rule serves all operands: `align` gives every array
the shape (B|1, H|1, Q|1, K|1, ...), and from there broadcasting (reference), slicing to a tile (blockwise, kernels),
folding under `vmap` and sharding are each one `tree.map` with no knowledge of the operand at hand.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

ALIGNED_AXES = "BHQK"
REACH = 2**30  # how far positions and offsets may go: their sums then fit in int32
Lookup = Callable[[jax.Array, jax.Array], jax.Array]


def axes(letters: str, kind: str = "float", optional: bool = False, **keywords: Any) -> Any:
    """Declares an array field of an operand: `letters` name its axes, `kind` is "float", "int" or "bool".

    E.g. ``slopes: jax.Array = axes("H")``. `optional`: None may stand in its place. Further keywords go to
    `dataclasses.field`, e.g. a default.
    """
    return dataclasses.field(metadata={"axes": letters, "kind": kind, "optional": optional}, **keywords)


def joined() -> Any:
    """Declares the field that holds the operands a sum or a conjunction is joined from."""
    return dataclasses.field(metadata={"joined": True})


@dataclass_transform(eq_default=False, frozen_default=True, field_specifiers=(axes, joined))
class Operand:
    """Base of masks, biases and `Dropout`: subclasses become frozen dataclasses and pytrees when they are defined.

    Fields declared with `axes` are the leaves; all other fields are static and must be hashable.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        dataclasses.dataclass(frozen=True, eq=False)(cls)
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        arrays = [field.name for field in fields if field.metadata.keys() & {"axes", "joined"}]
        static = [field.name for field in fields if field.name not in arrays]
        jax.tree_util.register_dataclass(cls, data_fields=arrays, meta_fields=static)

    def parts(self) -> tuple[Any, ...]:
        """The operands this one is joined from; itself for a simple one."""
        return (self,)

    def check(self) -> None:
        """Raises ValueError where the fields, aligned by now, do not fit each other."""


class Tile(NamedTuple):
    """Where the entries of a tile of scores lie in the whole problem, origin included.

    batch, head: int32, one per tile (shape broadcastable to the tile). query, key: int32 positions that broadcast to
    the tile, e.g. (Qt, 1) and (1, Kt). query_span, key_span: first and last position as scalars, for deciding what kind
    of tile this is. lookup(table, index): entries of a table by index; each driver gives the form its machine can run.
    end, query_end: one past the last real key and query position, where the tile may hold padding beyond it.
    """

    batch: Any
    head: Any
    query: Any
    key: Any
    query_span: tuple[Any, Any]
    key_span: tuple[Any, Any]
    lookup: Lookup
    end: Any = None
    query_end: Any = None

    def distance_span(self) -> tuple[Any, Any]:
        """Smallest and largest key - query on the tile."""
        return self.key_span[0] - self.query_span[1], self.key_span[1] - self.query_span[0]

    def corner(self) -> "Tile":
        """The first entry alone: enough wherever a bias is constant on the tile."""
        query, key = self.query[..., :1, :], self.key[..., :, :1]
        return self._replace(query=query, key=key)


def lookup_by_gather(table: jax.Array, index: jax.Array) -> jax.Array:
    """table[..., index] for a table (..., 1, 1, N) and indices that broadcast against its leading axes."""
    shape = jnp.broadcast_shapes(table.shape[:-1], index.shape)
    if table.ndim > 1 and any(size > 1 for size in table.shape[:-1]):
        table = jnp.broadcast_to(table, (*shape[:-2], 1, 1, table.shape[-1])).reshape(*shape[:-2], -1)
        flat = jnp.broadcast_to(index, shape).reshape(*shape[:-2], -1)
        return jnp.take_along_axis(table, flat, axis=-1).reshape(shape)
    return jnp.take(table.reshape(-1), jnp.broadcast_to(index, shape), axis=0)


def lookup_by_select(table: jax.Array, index: jax.Array) -> jax.Array:
    """As `lookup_by_gather`, by comparisons and selects alone: accelerators compile no gather inside a kernel."""
    result = table[..., 0]
    for entry in range(1, table.shape[-1]):
        result = jnp.where(index == entry, table[..., entry], result)
    return result


def align(operand: Any, sizes: dict[str, int], name: str) -> Any:
    """Gives every field of an operand the shape (B|1, H|1, Q|1, K|1, ...).

    Args:
        operand: an `Operand` or None.
        sizes: the sizes of B, H, Q and K.
        name: what the caller calls it, for messages.

    Raises:
        ValueError: a field's rank or size does not fit, naming operand, field, what came and what was expected.
        TypeError: a field's type does not fit, or it is None and not declared optional.
    """
    if operand is None:
        return None
    values = {}
    for field in dataclasses.fields(operand):
        value = getattr(operand, field.name)
        if "axes" in field.metadata:
            label = f"{name}: {type(operand).__name__}.{field.name}"
            if value is None and not field.metadata["optional"]:
                raise TypeError(f"{label} is None; expected {field.metadata['kind']}")
            values[field.name] = align_array(value, field.metadata["axes"], field.metadata["kind"], sizes, label)
        elif "joined" in field.metadata:
            values[field.name] = tuple(align(part, sizes, name) for part in value)
    aligned = dataclasses.replace(operand, **values)
    aligned.check()
    return aligned


def known(value: Any, label: str) -> Any:
    """A JAX array as it is; anything else as a NumPy array of JAX's default type: known while tracing.

    Raises:
        TypeError: it is no array of numbers. ValueError: an integer does not fit in that type.
    """
    if isinstance(value, jax.Array):
        return value
    if hasattr(value, "__jax_array__"):
        return value.__jax_array__()
    try:
        array = np.asarray(value)
    except jax.errors.TracerArrayConversionError:  # a list of traced numbers
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{label} is a {type(value).__name__}; expected an array of numbers") from error
    if array.dtype.kind in "OUSMm":  # objects, text, bytes, times
        raise TypeError(f"{label} is a {type(value).__name__} ({array.dtype}); expected an array of numbers")
    result = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
    if array.dtype.kind in "iu" and not np.array_equal(array, result):
        raise ValueError(f"{label} goes from {array.min()} to {array.max()}; expected what fits in {result.dtype}")
    return result


def within_reach(array: Any, label: str) -> Any:
    """An integer position or offset as int32. Raises ValueError when it is known and beyond `REACH`."""
    if isinstance(array, np.ndarray) and abs(int(array)) > REACH:
        raise ValueError(f"{label} is {array}; expected an integer between -2**30 and 2**30")
    return array.astype(np.int32)


KINDS: dict[str, Any] = {"float": jnp.floating, "int": jnp.integer, "bool": jnp.bool_}


def align_array(value: Any, letters: str, kind: str, sizes: dict[str, int], label: str) -> Any:
    """Reshapes one array whose axes are `letters` to (B|1, H|1, Q|1, K|1, ...); see `align`."""
    if value is None:
        return None
    array = known(value, label)
    if not jnp.issubdtype(array.dtype, KINDS[kind]):
        raise TypeError(f"{label} has dtype {array.dtype}; expected {kind}")
    if letters == ALIGNED_AXES and array.ndim == 2:
        letters = "QK"
    if array.ndim != len(letters):
        expected = "rank 2 (Q, K) or 4 (B, H, Q, K)" if letters == ALIGNED_AXES else f"axes ({', '.join(letters)})"
        raise ValueError(f"{label} has shape {array.shape}; expected {expected}")
    if 0 in array.shape:
        raise ValueError(f"{label} has shape {array.shape}; expected no empty axis")
    if kind == "int" and not letters:
        array = within_reach(array, label)
    for letter, size in zip(letters, array.shape, strict=True):
        if letter in sizes and size not in (1, sizes[letter]):
            wanted = ", ".join(f"{other} = {sizes[other]}" if other in sizes else other for other in letters)
            raise ValueError(f"{label} has shape {array.shape}; expected ({wanted}), with 1 where it is shared")
    shape = [array.shape[letters.index(letter)] if letter in letters else 1 for letter in ALIGNED_AXES]
    rest = [size for letter, size in zip(letters, array.shape, strict=True) if letter not in ALIGNED_AXES]
    return array.reshape(*shape, *rest)
