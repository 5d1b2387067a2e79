"""Runs tile functions in the registers of a GPU warpgroup, in either orientation.

Tile functions are written for tiles (Qt, Kt), rows (Qt, 1) and columns (1, Kt). On a GPU a tile is spread over 128
threads in the layout of a tensor-core product, its rows and columns are vectors in layouts of their own, and arrays
with axes of size one do not exist. So a function is traced once on the shapes it was written for, and the trace is
evaluated on what lies in registers: a value carries the letters of the axes it really has, broadcasting and reducing
follow the letters, and everything else is elementwise. With `key_first` the tile lies transposed, as the gradients of
keys want it, and nothing in the tile functions changes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core


class Value(NamedTuple):
    """An array in registers, and for each axis of the shape it stands for: "q", "k", or None where that has size
    one.
    """

    array: Any
    axes: tuple[str | None, ...]


class Deferred:
    """An array that is made where it is used: a compiler that finds no use for a value cannot choose its layout
    either.
    """

    def __init__(self, make: Callable[[], Any], dtype: Any) -> None:
        self.make, self.dtype = make, dtype


def scalar(value: Any) -> Value:
    return Value(value, ())


def rows(array: Any) -> Value:
    """One number a query, standing for (Qt, 1)."""
    return Value(array, ("q", None))


def columns(array: Any) -> Value:
    """One number a key, standing for (1, Kt)."""
    return Value(array, (None, "k"))


def full(array: Any) -> Value:
    """A whole tile, standing for (Qt, Kt)."""
    return Value(array, ("q", "k"))


class Orientation(NamedTuple):
    """How tiles of query_tile x key_tile lie in registers; `layout(array, letters)` tells the compiler the same."""

    query_tile: int
    key_tile: int
    layout: Callable[[Any, tuple[str, ...]], Any]
    key_first: bool = False

    def size(self, letter: str | None) -> int:
        return {"q": self.query_tile, "k": self.key_tile, None: 1}[letter]

    def order(self, axes: tuple[str | None, ...]) -> tuple[str, ...]:
        """The letters in the order in which they lie in registers."""
        return tuple(letter for letter in ("kq" if self.key_first else "qk") if letter in axes)

    def shape(self, axes: tuple[str | None, ...]) -> tuple[int, ...]:
        return tuple(self.size(letter) for letter in self.order(axes))

    def logical(self, value: Value) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(self.size(letter) for letter in value.axes), value.array.dtype)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """function(*arguments), where arguments and results are pytrees of `Value`."""
        values, structure = jax.tree.flatten(arguments, is_leaf=is_value)
        values = [value if is_value(value) else scalar(jnp.asarray(value)) for value in values]
        results: list[Any] = []

        def flat(*leaves: Any) -> list[Any]:
            found, tree = jax.tree.flatten(function(*jax.tree.unflatten(structure, leaves)))
            results.append(tree)
            return found

        traced = jax.make_jaxpr(flat)(*(self.logical(value) for value in values))
        return jax.tree.unflatten(results[0], self._evaluate(traced.jaxpr, traced.consts, values))

    def _evaluate(self, jaxpr: Any, constants: Any, arguments: list[Value]) -> list[Value]:
        known: dict[Any, Value] = {}
        known.update(zip(jaxpr.constvars, map(scalar, constants), strict=True))
        known.update(zip(jaxpr.invars, arguments, strict=True))

        def read(atom: Any) -> Value:
            if isinstance(atom, core.Literal):
                of: Any = atom.aval
                return scalar(jnp.asarray(atom.val, of.dtype))
            if isinstance(known[atom].array, Deferred):
                known[atom] = known[atom]._replace(array=known[atom].array.make())
            return known[atom]

        for equation in eliminate_dead_code(jaxpr):
            inner = _inner(equation)
            if inner is None:
                results = self._apply(equation, [read(atom) for atom in equation.invars])
            else:
                given = [read(atom) if isinstance(atom, core.Literal) else known[atom] for atom in equation.invars]
                results = self._evaluate(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), given)
            known.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _apply(self, equation: Any, values: list[Value]) -> list[Value]:
        name, parameters = equation.primitive.name, equation.params
        if name == "broadcast_in_dim":
            return [self._broadcast(values[0], parameters["shape"], parameters["broadcast_dimensions"])]
        if name in ("reshape", "squeeze"):
            return [self._reshape(values[0], equation.outvars[0].aval.shape)]
        if name.startswith("reduce_"):
            return [self._reduce(name, values[0], parameters["axes"])]
        return self._elementwise(equation, values)

    def _broadcast(self, value: Value, shape: tuple[int, ...], dimensions: tuple[int, ...]) -> Value:
        axes: list[str | None] = [None] * len(shape)
        for dimension, letter in zip(dimensions, value.axes, strict=True):
            axes[dimension] = letter
        for dimension, size in enumerate(shape):
            if size > 1 and axes[dimension] is None:
                if len(shape) != 2:
                    raise NotImplementedError(f"a tile function makes an array of shape {shape}; expected rank 2")
                axes[dimension] = "qk"[dimension]
        return Value(self.spread(value, tuple(axes)), tuple(axes))

    def _reshape(self, value: Value, shape: tuple[int, ...]) -> Value:
        letters = iter(letter for letter in value.axes if letter is not None)
        return Value(value.array, tuple(next(letters) if size > 1 else None for size in shape))

    def _reduce(self, name: str, value: Value, dimensions: tuple[int, ...]) -> Value:
        order = self.order(value.axes)
        gone = [value.axes[dimension] for dimension in dimensions if value.axes[dimension] is not None]
        array = value.array
        if len(gone) > 1:
            raise NotImplementedError("a tile function reduces a whole tile to one number; expected rows or columns")
        if gone:
            array = getattr(jnp, name.removeprefix("reduce_"))(array, axis=order.index(gone[0]))
            array = self.layout(array, tuple(letter for letter in order if letter != gone[0]))
        return Value(array, tuple(letter for dimension, letter in enumerate(value.axes) if dimension not in dimensions))

    def _elementwise(self, equation: Any, values: list[Value]) -> list[Value]:
        shape = equation.outvars[0].aval.shape
        together: list[str | None] = [None] * len(shape)
        for value in values:
            for dimension, letter in enumerate(value.axes):
                together[dimension] = together[dimension] or letter
        axes = tuple(together)
        arrays = [self.spread(value, axes) for value in values]
        replacement = SPELLED_OUT.get(equation.primitive.name)
        results = replacement(*arrays) if replacement else equation.primitive.bind(*arrays, **equation.params)
        return [Value(result, axes) for result in (results if equation.primitive.multiple_results else [results])]

    def spread(self, value: Value, axes: tuple[str | None, ...]) -> Any:
        """The array of `value` repeated along the axes it does not have."""
        have, want = self.order(value.axes), self.order(axes)
        if have == want:
            return value.array
        wide = lax.broadcast_in_dim(value.array, self.shape(axes), tuple(want.index(letter) for letter in have))
        return self.layout(wide, want)


# Primitives that compile on no warpgroup, by ones that do. log1p is only used where 1 + x is far from rounding to 1
# in a sum with something larger (logaddexp).
SPELLED_OUT: dict[str, Callable[..., Any]] = {
    "logistic": lambda x: 1 / (1 + jnp.exp(-x)),
    "log1p": lambda x: jnp.log(1 + x),
    "copy": lambda x: x,
    "stop_gradient": lambda x: x,
    "is_finite": lambda x: jnp.abs(x) < jnp.inf,
}


def _inner(equation: Any) -> Any:
    """The trace that an equation calls (a jitted function, one with a derivative of its own), or None."""
    return next((equation.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in equation.params), None)


def eliminate_dead_code(jaxpr: Any) -> list[Any]:
    """The equations that the results depend on: what a gradient traces and does not need would fill registers."""
    needed = {atom for atom in jaxpr.outvars if not isinstance(atom, core.Literal)}
    kept = []
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            kept.append(equation)
            needed.update(atom for atom in equation.invars if not isinstance(atom, core.Literal))
    return kept[::-1]


def is_value(leaf: Any) -> bool:
    return isinstance(leaf, Value)
