"""What the Pallas drivers share: the forms an operand takes in a kernel, and which tiles are visited.

A kernel is one program for each (batch, head, tile) and walks over the tiles of the other length. Nothing here knows
which machine it runs on, and nothing here is attention mathematics: masks say themselves which tiles are empty.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mha_kernels import reference
from mha_kernels.algebra import tile
from mha_kernels.algebra.operands import Tile, lookup_by_select
from mha_kernels.algebra.spec import AttentionSpec, partition
from mha_kernels.tiled.sizes import Sizes

LONGEST_TABLE = 512  # entries; each costs a comparison and a select at every score


def form(leaf: Any) -> str:
    """What an aligned leaf is to one tile: "scalar", "table" (scalars), "row" (per query), "column" (per key) or
    "full".
    """
    _, _, length_q, length_k, *rest = leaf.shape
    if rest:
        return "table" if length_q == length_k == 1 else "unknown"
    return {(False, False): "scalar", (True, False): "row", (False, True): "column"}.get(
        (length_q > 1, length_k > 1), "full"
    )


def shaped(shape: tuple[int, ...], dtype: Any, like: Any) -> jax.ShapeDtypeStruct:
    """The type of a kernel's result, varying over the same mesh axes as `like`."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).mat)


class Table:
    """The entries of a table in a kernel, where no array has a third axis: `table[..., e]` is one scalar (or a
    per-row copy).

    probe: (e, rows) makes entry e take the values `rows` wherever it is looked up; differentiating with respect to
    `rows` gives the gradient of that entry alone.
    """

    def __init__(self, entry: Any, count: int, dtype: Any, probe: Any = None) -> None:
        self.entry, self.dtype, self.probe = entry, dtype, probe
        self.shape, self.ndim = (1, 1, count), 3

    def __getitem__(self, index: Any) -> Any:
        if not (isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis):
            raise TypeError(f"a table in a kernel is read as table[..., e]; came [{index!r}]")
        return self.entry(index[1])


def lookup(table: Any, index: jax.Array) -> jax.Array:
    """`lookup_by_select`, seeing the probe."""
    found = lookup_by_select(table, index)
    if table.probe is None:
        return found
    entry, rows = table.probe
    fixed = jax.lax.stop_gradient(rows)
    return found + jnp.where(index == entry, rows - fixed, 0)


def unsupported(algebra: AttentionSpec) -> str | None:
    """Why no kernel can hold an operand of the algebra; None where it can."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(algebra):
        name = jax.tree_util.keystr(path).lstrip(".")
        if form(leaf) == "unknown":
            return f"{name} has trailing axes and one per query or key, shape {leaf.shape}"
        if form(leaf) == "table" and leaf.shape[-1] > LONGEST_TABLE:
            return (
                f"{name} has {leaf.shape[-1]} entries; a kernel compares every score with each, at most {LONGEST_TABLE}"
            )
        if leaf.dtype == jnp.float64:
            return f"{name} is float64"
    return None


class TileSchedule(NamedTuple):
    """Which tiles of the other length each program visits.

    first, steps: int32 (B, H, tiles): it visits `steps` tiles from `first` on; none where the gate is closed.
    kinds: int32 (R|1, H|1, tiles of queries, 1, tiles of keys), 0 empty, 1 mixed, 2 full; None where positions alone
    decide.
    """

    first: jax.Array
    steps: jax.Array
    kinds: Any


def schedule_tiles(algebra: AttentionSpec, sizes: Sizes, keys: bool) -> TileSchedule:
    """The visits of tiles of keys by tiles of queries (`keys`), or the other way round; `algebra` is padded."""
    some, every = _kinds(algebra, sizes)
    some = some & jnp.ones((sizes.tiles_q, sizes.tiles_k, 1, 1), bool)
    axis, tiles = (1, sizes.tiles_k) if keys else (0, sizes.tiles_q)
    place = jnp.arange(tiles, dtype=jnp.int32).reshape((1, -1, 1, 1) if keys else (-1, 1, 1, 1))
    first = jnp.where(some, place, tiles).min(axis=axis)
    count = jnp.maximum(jnp.where(some, place + 1, 0).max(axis=axis) - first, 0)
    first, count = (_by_program(bound, sizes) for bound in (jnp.where(count > 0, first, 0), count))
    if algebra.head_gate is not None:
        gate = _by_program(algebra.head_gate.reshape(1, *algebra.head_gate.shape[:2]), sizes)
        count = jnp.where(gate == 0, 0, count)
    kinds = None
    if any(form(leaf) != "scalar" for leaf in jax.tree.leaves(algebra.mask)):
        kinds = jnp.where(some, 1 + every.astype(jnp.int32), 0).transpose(2, 3, 0, 1)[:, :, :, None, :]
    return TileSchedule(first, count, kinds)


def _by_program(array: jax.Array, sizes: Sizes) -> jax.Array:
    """(n, R, H|1) to (B, H, n)."""
    n, rows, _ = array.shape
    shape = (n, rows, sizes.batch // rows, sizes.heads)
    return jnp.broadcast_to(array[:, :, None, :], shape).reshape(n, sizes.batch, sizes.heads).transpose(1, 2, 0)


def _kinds(algebra: AttentionSpec, sizes: Sizes) -> tuple[jax.Array, jax.Array]:
    """(some, every) of the mask on all tiles at once, each (tiles_q|1, tiles_k|1, R|1, H|1)."""
    if algebra.mask is None:
        true = jnp.ones((1, 1, 1, 1), bool)
        return true, true

    def split(leaf: jax.Array) -> jax.Array:
        rows, heads, length_q, length_k, *rest = leaf.shape
        cut_q = (sizes.tiles_q, sizes.query_tile) if length_q > 1 else (1, 1)
        cut_k = (sizes.tiles_k, sizes.key_tile) if length_k > 1 else (1, 1)
        leaf = leaf.reshape(rows, heads, *cut_q, *cut_k, *rest)
        return leaf.transpose(2, 4, 0, 1, 3, 5, *range(6, leaf.ndim))

    place = algebra.positions
    first_q = place.query.reshape(-1) + sizes.query_tile * jnp.arange(sizes.tiles_q, dtype=jnp.int32)
    first_k = place.key.reshape(-1) + sizes.key_tile * jnp.arange(sizes.tiles_k, dtype=jnp.int32)
    first_q, first_k = first_q.reshape(-1, 1, 1, 1, 1, 1), first_k.reshape(1, -1, 1, 1, 1, 1)
    within_q = jnp.arange(sizes.query_tile, dtype=jnp.int32).reshape(1, 1, 1, 1, -1, 1)
    within_k = jnp.arange(sizes.key_tile, dtype=jnp.int32).reshape(1, 1, 1, 1, 1, -1)
    spans = (first_q, first_q + sizes.query_tile - 1), (first_k, first_k + sizes.key_tile - 1)
    at = Tile(None, None, first_q + within_q, first_k + within_k, *spans, lookup)
    flags = jax.tree.map(split, algebra.mask).kind(at)
    some, every = (
        jnp.broadcast_to(jnp.asarray(f), (1,) * (6 - jnp.ndim(f)) + jnp.shape(f)).squeeze((4, 5)) for f in flags
    )
    return some, every


def reduce_all(flag: Any) -> Any:
    """A promise of an operand as a scalar: those of one tile have at most one entry."""
    return flag if isinstance(flag, bool) or jnp.ndim(flag) == 0 else flag.reshape(())


def kind_of(at: Tile, algebra: AttentionSpec, kind: Any) -> tuple[Any, Any]:
    """(some, plain) of one tile: is there anything to do, and is it so simple that `simplest` will do.

    kind: the entry of `TileSchedule.kinds`, None where positions alone decide.
    """
    some: Any = True
    plain: Any = True
    if kind is not None:
        some, plain = kind > 0, kind == 2
    elif algebra.mask is not None:
        some, plain = (reduce_all(flag) for flag in algebra.mask.kind(at))
    if at.end is not None:
        plain = plain & (at.key_span[1] < at.end)
    if algebra.bias is not None:
        plain = plain & reduce_all(algebra.bias.constant(at))
    return some, plain


def is_table(leaf: Any) -> bool:
    return isinstance(leaf, Table)


def tile_gradients(
    product: Any,
    dp: Any,
    rows: dict[str, Any],
    at: Tile,
    algebra: AttentionSpec,
    simplify: Any,
    values: dict[int, Any],
) -> tile.TileGradients:
    """`tile.tile_gradients` of leaves by number, with the rows in one dictionary.

    rows: "lse of softmax", "delta" and the cotangents of statistics. values: the leaves to differentiate, in the
    shape that their gradient is wanted in.
    """
    cotangents = {name: row for name, row in rows.items() if name not in ("lse of softmax", "delta")}
    _, rebuild = partition_tiles(algebra, tuple(values))

    def with_values(values: dict[int, Any]) -> AttentionSpec:
        return simplify(rebuild([values[n] for n in sorted(values)]))

    of_rows = rows["lse of softmax"], rows["delta"], cotangents
    return tile.tile_gradients(product, dp, of_rows, at, simplify(algebra), values, with_values)


def entry_gradient(ds: Any, which: int, entry: Any, at: Tile, algebra: AttentionSpec, simplify: Any) -> jax.Array:
    """The gradient (Qt, 1) of one entry of a table, leaf number `which`: one at a time, for many do not fit in
    registers.
    """
    (table,), rebuild = partition_tiles(algebra, (which,))

    def scores_of(rows: jax.Array) -> jax.Array:
        probed = Table(table.entry, table.shape[-1], table.dtype, probe=(entry, rows))
        return tile.tile_scores(jnp.zeros_like(ds), at, simplify(rebuild([probed])))

    _, pull_back = jax.vjp(scores_of, jnp.zeros((ds.shape[0], 1), ds.dtype))
    return pull_back(ds)[0]


def partition_tiles(algebra: AttentionSpec, chosen: tuple[int, ...]) -> tuple[list, Any]:
    """`partition` of the algebra on a tile, where tables are leaves too."""
    count = len(jax.tree.leaves(algebra, is_leaf=is_table))
    return partition(algebra, tuple(n in chosen for n in range(count)))


def zero_unattended(
    query: jax.Array, key: jax.Array, value: jax.Array, algebra: AttentionSpec, sizes: Sizes
) -> tuple[jax.Array, ...]:
    """The arrays with the rows that are in no allowed pair set to zero, where they hold anything that is not finite.

    0 * NaN is NaN, and a kernel multiplies whole tiles. Looking for such content costs one pass over the arrays; only
    when there is some are the rows found exactly, in O(Q K) time and O(L) memory.
    """
    if algebra.mask is None and not (algebra.bias is not None and algebra.bias.forbids):
        return query, key, value

    def exact(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, ...]:
        whole = jax.tree.map(lambda leaf: jnp.repeat(leaf, sizes.batch // leaf.shape[0], axis=0), algebra)
        dense = reference.Dense(whole, (sizes.batch, sizes.heads, sizes.length_q, sizes.length_k))
        return dense.used_queries(query), dense.used(key), dense.used(value)

    finite = jnp.isfinite(query).all() & jnp.isfinite(key).all() & jnp.isfinite(value).all()
    return jax.lax.cond(finite, lambda *arrays: arrays, exact, query, key, value)
