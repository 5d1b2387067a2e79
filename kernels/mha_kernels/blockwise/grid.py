"""How the blockwise implementation cuts a problem into tiles and moves data between them. No attention mathematics.

A problem has B * H programs, one per (batch, head) pair. A block of them is worked on together (several when they are
small), and each visits tiles of queries and tiles of keys. `Grid` holds the sizes; `Programs` is one block.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mha_kernels.algebra.masks import Mask
from mha_kernels.algebra.operands import Tile, lookup_by_gather
from mha_kernels.algebra.spec import AttentionSpec, simplest
from mha_kernels.tiled.sizes import Sizes, pad
from mha_kernels.tiled.transforms import mark_varying, varying_axes

Work = Callable[..., Any]


def loop(first: Any, last: Any, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """`fori_loop` over int32, whether or not 64-bit types are enabled; a single round needs no loop."""
    if isinstance(first, int) and isinstance(last, int) and last - first == 1:
        return body(jnp.int32(first), carry)
    return lax.fori_loop(jnp.int32(first), jnp.int32(last), body, carry)


WRITTEN_OUT = 8


def one_by_one(count: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """body(n, carry) for each n < count: written out where they are few, else a loop.

    XLA optimises what is written out best, but takes minutes to compile it for a hundred programs.
    """
    if count > WRITTEN_OUT:
        return loop(0, count, body, carry)
    for n in range(count):
        carry = body(n, carry)
    return carry


def _starts(*indices: Any) -> tuple[jax.Array, ...]:
    return tuple(jnp.asarray(index, jnp.int32) for index in indices)


class Programs(NamedTuple):
    """A block of P programs: `members` (P,) count (b, h) pairs as b * H + h; `start` is the first of a range."""

    grid: "Grid"
    members: jax.Array
    start: Any

    def batch(self) -> jax.Array:
        return self.members // self.grid.heads

    def head(self) -> jax.Array:
        return self.members % self.grid.heads

    def shared(self) -> jax.Array:
        """(P,): which key/value head, counted as b * G + g, each program reads."""
        return self.batch() * self.grid.groups + self.head() // (self.grid.heads // self.grid.groups)

    def rows(self, array: jax.Array) -> jax.Array:
        """(P, L, ...) from (B H, L, ...)."""
        if self.start is None:
            return _take(array, self.members)
        return lax.dynamic_slice_in_dim(array, self.start, len(self.members))

    def shared_rows(self, array: jax.Array) -> jax.Array:
        """(P, L, ...) from (B G, L, ...)."""
        return self.rows(array) if self.grid.heads == self.grid.groups else _take(array, self.shared())

    def load(self, arrays: Any, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query, key and value (P, L, ...) of the block, in the type of the accumulation."""
        query, key, value = arrays
        return (
            self.rows(query).astype(dtype),
            self.shared_rows(key).astype(dtype),
            self.shared_rows(value).astype(dtype),
        )

    def store(self, arrays: Any, tiles: Any, row: Any) -> Any:
        """Writes tiles (P, T, ...) at (program, row) of arrays (B H, L, ...)."""
        return jax.tree.map(
            lambda array, new: _store(array, new.astype(array.dtype), self.members, self.start, row), arrays, tiles
        )

    def add_shared(self, array: jax.Array, tiles: jax.Array, row: Any) -> jax.Array:
        """Adds tiles (P, T, ...) at (key/value head, row) of an array (B G, L, ...): heads of a group are summed."""
        if self.grid.heads == self.grid.groups:
            return _store(array, tiles.astype(array.dtype), self.members, self.start, row)
        places = self.shared()

        def add(n: Any, array: jax.Array) -> jax.Array:
            where = _starts(places[n], row, *(0 for _ in array.shape[2:]))
            old = lax.dynamic_slice(array, where, (1, *tiles.shape[1:]))
            return lax.dynamic_update_slice(array, old + lax.dynamic_slice_in_dim(tiles, n, 1), where)

        return one_by_one(len(places), add, array)


def _take(array: jax.Array, index: jax.Array) -> jax.Array:
    if len(index) == 1:
        return lax.dynamic_slice_in_dim(array, index[0], 1)
    return jnp.take(array, index, axis=0, mode="clip")


def _store(array: jax.Array, new: jax.Array, index: jax.Array, start: Any, row: Any) -> jax.Array:
    tail = (0,) * (array.ndim - 2)
    if start is not None:
        return lax.dynamic_update_slice(array, new, _starts(start, row, *tail))

    def put(n: Any, array: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(array, lax.dynamic_slice_in_dim(new, n, 1), _starts(index[n], row, *tail))

    return one_by_one(len(index), put, array)


@dataclasses.dataclass(frozen=True)
class Grid(Sizes):
    """The sizes, how many programs are worked on together, and the mesh axes that arrays vary over in `shard_map`."""

    programs: int
    axes: frozenset[str]

    def is_one_tile(self) -> bool:
        """Whether all programs are worked on together, in one tile each."""
        return self.tiles_q == self.tiles_k == 1 and self.programs == self.batch * self.heads

    def mark_varying(self, array: jax.Array) -> jax.Array:
        return mark_varying(array, self.axes)

    def full(self, shape: tuple[int, ...], value: float, dtype: Any) -> jax.Array:
        return self.mark_varying(jnp.full(shape, value, dtype))

    def fold(self, array: jax.Array, length: int, fill: float = 0) -> jax.Array:
        """(B, H, L, ...) to (B H, length, ...), padded with `fill`."""
        array = array.reshape(-1, *array.shape[2:])
        return pad(array, {1: length}, fill)

    def unfold(self, array: jax.Array, length: int) -> jax.Array:
        """(B n, padded, ...) to (B, n, length, ...)."""
        return array[:, :length].reshape(self.batch, -1, length, *array.shape[2:])

    def for_each_block(self, algebra: AttentionSpec, work: Callable[[Programs, Any], Any], carry: Any) -> Any:
        """Runs work(programs, carry) over all blocks; programs whose head gate is zero are left out."""
        total = self.batch * self.heads

        def ranged(block: Any, carry: Any) -> Any:
            start = block * self.programs
            return work(Programs(self, start + jnp.arange(self.programs, dtype=jnp.int32), start), carry)

        if algebra.head_gate is None:
            return loop(0, total // self.programs, ranged, carry)
        gate = algebra.head_gate
        closed = jnp.broadcast_to((gate == 0)[:, None], (gate.shape[0], self.batch // gate.shape[0], self.heads, 1, 1))
        order = jnp.argsort(closed.reshape(-1), stable=True).astype(jnp.int32)
        count = total - closed.sum(dtype=jnp.int32)

        def gathered(block: Any, carry: Any) -> Any:
            index = lax.dynamic_slice_in_dim(order, block * self.programs, self.programs)
            return work(Programs(self, index, None), carry)

        return loop(0, -(-count // self.programs), gathered, carry)

    def part(self, algebra: AttentionSpec, programs: Programs, i: Any, j: Any) -> AttentionSpec:
        """The algebra on tile (i, j) of a block: leaves (P|1, Qt|1, Kt|1, ...)."""
        return jax.tree.map(lambda leaf: self._part(leaf, programs, i, j), algebra)

    def _part(self, leaf: jax.Array, programs: Programs, i: Any, j: Any) -> jax.Array:
        rows, heads = leaf.shape[:2]
        examples = self.programs // self.heads
        together = programs.start is not None and examples * self.heads == self.programs
        if together and rows in (1, self.batch) and rows * heads > 1:
            # The programs are all heads of some examples: one slice holds what they read.
            sizes = (examples if rows > 1 else 1, heads, *self._sizes(leaf))
            first = programs.start // self.heads if rows > 1 else 0
            piece = lax.dynamic_slice(leaf, _starts(first, 0, *self._tail(sizes, i, j)), sizes)
            return jnp.broadcast_to(piece, (examples, self.heads, *sizes[2:])).reshape(-1, *sizes[2:])
        count, start, sizes = self._place(leaf, programs, i, j)
        if count > WRITTEN_OUT:
            pieces = jax.vmap(lambda n: lax.dynamic_slice(leaf, start(n), sizes))(jnp.arange(count, dtype=jnp.int32))
            return pieces.reshape(count, *sizes[2:])
        written = [lax.dynamic_slice(leaf, start(n), sizes).reshape(1, *sizes[2:]) for n in range(count)]
        return written[0] if count == 1 else jnp.concatenate(written)

    def add_part(self, leaf: jax.Array, new: jax.Array, programs: Programs, i: Any, j: Any) -> jax.Array:
        """Adds the gradient of `part` to that of the whole leaf."""
        count, start, sizes = self._place(leaf, programs, i, j)

        def add(n: Any, leaf: jax.Array) -> jax.Array:
            piece = lax.dynamic_slice_in_dim(new, n, 1).reshape(sizes).astype(leaf.dtype)
            return lax.dynamic_update_slice(leaf, lax.dynamic_slice(leaf, start(n), sizes) + piece, start(n))

        return one_by_one(count, add, leaf)

    def _place(
        self, leaf: jax.Array, programs: Programs, i: Any, j: Any
    ) -> tuple[int, Callable[[Any], tuple[jax.Array, ...]], tuple[int, ...]]:
        """How many programs read places of their own in an aligned leaf (one where all share it), where tile (i, j) of
        the n-th starts, and its sizes.
        """
        rows, heads = leaf.shape[:2]
        sizes = (1, 1, *self._sizes(leaf))
        tail = self._tail(sizes, i, j)
        if rows == heads == 1:
            return 1, lambda n: _starts(0, 0, *tail), sizes
        row, head = (
            programs.batch() * rows // self.batch,
            programs.head() if heads > 1 else jnp.zeros_like(programs.members),
        )
        return self.programs, lambda n: _starts(row[n], head[n], *tail), sizes

    def _sizes(self, leaf: jax.Array) -> tuple[int, ...]:
        """Of a tile of the leaf: all axes but the first two."""
        _, _, length_q, length_k, *rest = leaf.shape
        return (self.query_tile if length_q > 1 else 1, self.key_tile if length_k > 1 else 1, *rest)

    @staticmethod
    def _tail(sizes: tuple[int, ...], i: Any, j: Any) -> tuple[Any, ...]:
        """Where tile (i, j) of these sizes starts, on all axes but the first two."""
        return (i * sizes[2], j * sizes[3], *(0 for _ in sizes[4:]))

    def rows_q(self, array: jax.Array, i: Any) -> jax.Array:
        """Rows (P, Qt, ...) of query tile i from (P, padded Q, ...)."""
        return lax.dynamic_slice_in_dim(array, i * self.query_tile, self.query_tile, axis=1)

    def rows_k(self, array: jax.Array, j: Any) -> jax.Array:
        """Rows (P, Kt, ...) of key tile j from (P, padded K, ...)."""
        return lax.dynamic_slice_in_dim(array, j * self.key_tile, self.key_tile, axis=1)

    def add_rows_q(self, array: jax.Array, new: jax.Array, i: Any) -> jax.Array:
        """Adds rows (P, Qt, ...) of query tile i to (P, padded Q, ...)."""
        return lax.dynamic_update_slice_in_dim(array, self.rows_q(array, i) + new, i * self.query_tile, axis=1)

    def key_range(self, algebra: AttentionSpec, programs: Programs, i: Any) -> tuple[Any, Any]:
        """First and one past the last tile of keys that queries of tile i may attend."""
        return self._range(algebra, programs, i, self.query_tile, self.key_tile, self.tiles_k, keys=True)

    def query_range(self, algebra: AttentionSpec, programs: Programs, j: Any) -> tuple[Any, Any]:
        """First and one past the last tile of queries that may attend keys of tile j."""
        return self._range(algebra, programs, j, self.key_tile, self.query_tile, self.tiles_q, keys=False)

    def _range(
        self, algebra: AttentionSpec, programs: Programs, tile: Any, size: int, other_size: int, count: int, keys: bool
    ) -> tuple[Any, Any]:
        if algebra.mask is None or count == 1:
            return 0, count
        part = self.part(dataclasses.replace(algebra, bias=None), programs, 0, 0)
        assert part.mask is not None
        low, high = part.mask.distances()  # of key - query, in positions
        shift = part.positions.key - part.positions.query
        first: Any = 0
        last: Any = count
        if not keys:
            low, high, shift = None if high is None else -high, None if low is None else -low, -shift
        if low is not None:
            first = jnp.clip((tile * size + jnp.min(low - shift)) // other_size, 0, count)
        if high is not None:
            last = jnp.clip((tile * size + size - 1 + jnp.max(high - shift)) // other_size + 1, first, count)
        return first, last

    def at(self, part: AttentionSpec, i: Any, j: Any) -> Tile:
        """Positions of tile (i, j)."""
        place = part.positions
        first_q, first_k = place.query + i * self.query_tile, place.key + j * self.key_tile
        query = first_q + jnp.arange(self.query_tile, dtype=jnp.int32).reshape(1, -1, 1)
        key = first_k + jnp.arange(self.key_tile, dtype=jnp.int32).reshape(1, 1, -1)
        spans = (first_q, first_q + self.query_tile - 1), (first_k, first_k + self.key_tile - 1)
        end = None if self.padded[1] == self.length_k else place.key + self.length_k
        query_end = None if self.padded[0] == self.length_q else place.query + self.length_q
        return Tile(place.batch, place.head, query, key, *spans, lookup_by_gather, end, query_end)

    def visit(self, algebra: AttentionSpec, programs: Programs, i: Any, j: Any, work: Work, carry: Any) -> Any:
        """work(at, part, simplify, carry) on tile (i, j), which is skipped when empty.

        `simplify` maps the part to what has to be computed: without mask where the tile is full and with the bias at
        one entry where it is constant, else itself.
        """
        part = self.part(algebra, programs, i, j)
        at = self.at(part, i, j)
        some, every = (True, True) if part.mask is None else part.mask.kind(at)
        complete = True if at.end is None else at.key_span[1] < at.end
        constant = True if part.bias is None else part.bias.constant(at)
        is_open = True if part.head_gate is None else part.head_gate != 0
        plain = _every(every, complete, constant, is_open)

        def simple(carry: Any) -> Any:
            return work(at._replace(end=None, query_end=None), part, simplest, carry)

        def general(carry: Any) -> Any:
            return work(at, part, lambda algebra: algebra, carry)

        def skip(carry: Any) -> Any:
            return carry

        if plain is True:
            return simple(carry)
        if self.tiles_q == self.tiles_k == 1:  # there is nothing to skip
            return general(carry)
        if part.mask is None:
            return general(carry) if plain is False else lax.cond(plain, simple, general, carry)
        some = jnp.any(some)
        if plain is False:
            return lax.cond(some, general, skip, carry)
        return lax.switch(jnp.where(some, 1 + plain.astype(jnp.int32), 0), [skip, general, simple], carry)


def _every(*flags: Any) -> Any:
    """Whether all flags hold for all programs: a bool where that is known while tracing, else a traced scalar."""
    if any(flag is False for flag in flags):
        return False
    traced = [jnp.all(flag) for flag in flags if flag is not True]
    if not traced:
        return True
    return jnp.stack(traced).all()


LARGEST = {"whole": (1024, 512), "diagonal": (512, 512)}


def choose(
    requested: Any, query: jax.Array, key: jax.Array, mask: Mask | None = None, programs: int | None = None
) -> Grid:
    """The grid for query (B, Q, H, E) and key (B, K, G, E): tile sizes as requested, else by rule.

    The rule: as few tiles as a largest size allows, all of one size (a multiple of 8 where there are several); and as
    many programs together as keep a block of score tiles within 2^18 entries, so that small problems do not pay for
    loops. Large tiles keep the matrix products efficient; under a mask that bounds the distance between key and query,
    smaller ones waste less work on the edge of what it allows. docs/speed.md has the measurements.
    """
    (batch, length_q, heads, _), (_, length_k, groups, _) = query.shape, key.shape
    bounded = mask is not None and any(bound is not None for bound in mask.distances())
    largest_q, largest_k = LARGEST["diagonal" if bounded else "whole"]
    query_tile = _tile(length_q, requested.query_tile, largest_q)
    key_tile = _tile(length_k, requested.key_tile, largest_k)
    if programs is None:
        room = max(1, 2**18 // (query_tile * key_tile))
        programs = max(count for count in range(1, min(room, batch * heads) + 1) if batch * heads % count == 0)
    return Grid(batch, heads, groups, length_q, length_k, query_tile, key_tile, programs, varying_axes(query))


def _tile(length: int, requested: int | None, largest: int) -> int:
    if requested is not None:
        return min(requested, length)
    count = -(-length // largest)
    even = -(-length // count)
    return even if count == 1 else -(-even // 8) * 8
