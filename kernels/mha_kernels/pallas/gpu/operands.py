"""The operands of an algebra in a GPU kernel: arrays in global memory, and their values on one tile in registers."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mha_kernels.algebra.operands import Tile
from mha_kernels.algebra.spec import AttentionSpec, running, simplest
from mha_kernels.pallas import kernel_tiles
from mha_kernels.pallas.gpu import mosaic
from mha_kernels.pallas.gpu.registers import Deferred, Orientation, columns, full, is_value, rows, scalar
from mha_kernels.pallas.kernel_tiles import Table, form
from mha_kernels.tiled.sizes import Sizes


class Operands:
    """The leaves of a padded algebra as a GPU kernel takes them, for tiles in one orientation.

    arrays: what the kernel is given, one a leaf; a whole Q x K array is turned where tiles are.
    """

    def __init__(self, sizes: Sizes, algebra: AttentionSpec, orientation: Orientation) -> None:
        self.sizes, self.orientation = sizes, orientation
        self.leaves, self.structure = jax.tree.flatten(algebra)
        self.forms = [form(leaf) for leaf in self.leaves]
        self.arrays = [self._array(leaf, kind) for leaf, kind in zip(self.leaves, self.forms, strict=True)]

    def _array(self, leaf: jax.Array, kind: str) -> jax.Array:
        if leaf.dtype == jnp.bool_:
            leaf = leaf.astype(jnp.int8 if kind == "full" else jnp.int32)
        if kind == "full":
            return leaf.swapaxes(2, 3) if self.orientation.key_first else leaf
        if kind in ("scalar", "table") and jnp.issubdtype(leaf.dtype, jnp.floating):
            leaf = leaf.astype(jnp.float32)
        return leaf.reshape(leaf.shape[0] * leaf.shape[1], -1)

    def read(self, refs: list, b: Any, h: Any, first_q: Any, first_k: Any) -> AttentionSpec:
        """The algebra on the tile at (first_q, first_k) as an `AttentionSpec` of `Value`, tables as lists of them."""
        values = [self._value(n, ref, b, h, first_q, first_k) for n, ref in enumerate(refs)]
        return jax.tree.unflatten(self.structure, values)

    def read_rows(self, refs: list, b: Any, h: Any) -> AttentionSpec:
        """What acts on the rows of a head, tiles aside: scale, sink and gate."""
        scalars = [n if kind == "scalar" else None for n, kind in enumerate(self.forms)]
        values = [None if n is None else self._value(n, refs[n], b, h, 0, 0) for n in scalars]
        algebra = jax.tree.unflatten(self.structure, values)
        return dataclasses.replace(algebra, mask=None, bias=None, dropout=None)

    def _value(self, which: int, ref: Any, b: Any, h: Any, first_q: Any, first_k: Any) -> Any:
        leaf, kind = self.leaves[which], self.forms[which]
        row, head = self.sizes.row(leaf, b), h if leaf.shape[1] > 1 else 0
        line = row * leaf.shape[1] + head
        if kind == "scalar":
            return scalar(_truth(leaf, ref[line, 0]))
        if kind == "table":
            return [scalar(ref[line, entry]) for entry in range(leaf.shape[-1])]
        along_q, along_k = pl.ds(first_q, self.orientation.query_tile), pl.ds(first_k, self.orientation.key_tile)
        if kind == "row":
            return rows(self._loaded(leaf, ref.at[line, along_q], mosaic.layout_of(self.orientation, "q")))
        if kind == "column":
            return columns(self._loaded(leaf, ref.at[line, along_k], mosaic.layout_of(self.orientation, "k")))
        place = (along_k, along_q) if self.orientation.key_first else (along_q, along_k)
        return full(self._loaded(leaf, ref.at[row, head, *place], mosaic.plgpu.Layout.WGMMA))

    @staticmethod
    def _loaded(leaf: jax.Array, ref: Any, layout: Any) -> Deferred:
        """What lies at `ref`, brought to registers where it is used."""
        return Deferred(lambda: _truth(leaf, mosaic.load(ref, layout)), leaf.dtype)

    def at(self, algebra: AttentionSpec, first_q: Any, first_k: Any) -> "Place":
        """Positions of the tile at (first_q, first_k) of a padded problem."""
        place, orientation = algebra.positions, self.orientation
        start_q, start_k = place.query.array + first_q, place.key.array + first_k

        def along(letter: str, start: Any) -> Deferred:
            size, layout = orientation.size(letter), mosaic.layout_of(orientation, letter)
            return Deferred(
                lambda: start + mosaic.plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout), jnp.int32
            )

        spans = (start_q, start_q + orientation.query_tile - 1), (start_k, start_k + orientation.key_tile - 1)
        absent: Any = None  # functions are no values: `looked_up` brings the lookup
        end = None
        if self.sizes.padded[1] != self.sizes.length_k:
            end = scalar(place.key.array + self.sizes.length_k)
        query, key = rows(along("q", start_q)), columns(along("k", start_k))
        span_q, span_k = jax.tree.map(scalar, spans)
        return Place(place.batch, place.head, query, key, span_q, span_k, absent, end)

    def by_kind(
        self, kinds: Any, at: "Place", algebra: AttentionSpec, where: tuple, work: Callable[..., Any], carry: Any
    ) -> Any:
        """work(at, simplify, carry) in the form that the kind of the tile needs; the carry itself where it is empty.

        kinds: of `TileSchedule`. where: example, head, tile of queries and tile of keys.
        """
        branches = (
            lambda carry: carry,
            functools.partial(work, at, running),
            functools.partial(work, at._replace(end=None), simplest),
        )
        kind = self._kind(kinds, at, algebra, *where)
        return branches[kind](carry) if isinstance(kind, int) else lax.switch(kind, branches, carry)

    def _kind(self, kinds: Any, at: "Place", algebra: AttentionSpec, b: Any, h: Any, i: Any, j: Any) -> Any:
        """0 nothing to do, 1 the general case, 2 simple; a number where it is always the same."""
        entry = None
        if kinds is not None:
            count, heads, *_ = kinds.shape
            row = b * count // self.sizes.batch if count > 1 else 0
            entry = kinds[row, h if heads > 1 else 0, i, 0, j]
        at, algebra = jax.tree.map(lambda value: value.array, (at, algebra), is_leaf=is_value)
        some, plain = kernel_tiles.kind_of(*looked_up(at, algebra), entry)
        if isinstance(some, bool) and isinstance(plain, bool):
            return 1 + plain if some else 0
        some, plain = jnp.asarray(some), jnp.asarray(plain)
        return jnp.where(some, jnp.where(plain, 2, 1), 0)


class Place(Tile):
    """A `Tile` whose corner is known without slicing."""

    def corner(self) -> Tile:
        return self._replace(query=self.query_span[0], key=self.key_span[0])


def looked_up(at: Tile, algebra: Any) -> tuple[Tile, Any]:
    """Tile and algebra as tile functions take them: lists of entries as tables, with the lookup that can read them."""

    def wrap(leaf: Any) -> Any:
        return Table(leaf.__getitem__, len(leaf), jnp.float32) if type(leaf) is list else leaf

    algebra = jax.tree.map(wrap, algebra, is_leaf=lambda leaf: type(leaf) is list)
    return at._replace(lookup=kernel_tiles.lookup), algebra


def _truth(leaf: jax.Array, value: Any) -> Any:
    return value != 0 if leaf.dtype == jnp.bool_ else value


def width_of(query: Any, value: Any) -> int:
    """The width heads are padded to: both products then have one shape, and the output fits where the query lay."""
    return -(-max(query.shape[-1], value.shape[-1]) // 64) * 64
