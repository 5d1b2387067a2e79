"""The backward pass of the GPU driver: a kernel that visits the tiles and recomputes their probabilities in registers.

It runs in two orientations:

- by queries: a block keeps 128 queries and walks over tiles of keys: dq, and the gradients of scalars, tables and rows;
- by keys: a block keeps 128 keys and walks over tiles of queries, tiles transposed: dk, dv, and the gradients of
  columns.

Two sums of 64 x 64 a warpgroup are what its registers hold beside the tiles: wider heads take one walk for dk and one
for dv, and the widest one for each half of a gradient.

No atomics: every sum has one order, partial sums of a parameter are one a query (or key) and are added up outside. The
gradient of a whole Q x K array is left to `Blockwise`, whose memory it shares.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mha_kernels.blockwise import Blockwise
from mha_kernels.pallas import kernel_tiles
from mha_kernels.pallas.gpu import mosaic
from mha_kernels.pallas.gpu.mosaic import BLOCK, COMPUTE, WARPGROUP_ROWS, plgpu
from mha_kernels.pallas.gpu.operands import Operands, looked_up, width_of
from mha_kernels.pallas.gpu.registers import Deferred, full, rows
from mha_kernels.tiled.driver import Backward
from mha_kernels.tiled.sizes import pad

# Which cotangent of a tile is multiplied with which array to give a gradient.
FACTORS = {"query": ("product", "key"), "key": ("product", "query"), "value": ("weights", "cotangent")}
WHOLE_SUM = 192  # columns of a gradient that one walk can sum
BY_QUERIES, BY_KEYS = ("query", "cotangent"), ("key", "value")  # what a block keeps; the other two move past it


class Inputs(NamedTuple):
    """What every walk reads: arrays (B, L, n, width) and rows (B, H, Q), by name."""

    arrays: dict[str, Any]
    rows: dict[str, Any]


def backward(driver: Any, task: Backward) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]:
    """See `tiled.driver.Driver`."""
    leaves = jax.tree.leaves(task.algebra)
    chosen = {n: kernel_tiles.form(leaves[n]) for n in task.on_tiles()}
    if "full" in chosen.values():
        return Blockwise().backward(task)
    call = _Call(driver, task)
    found: dict[int, jax.Array] = {}
    of_queries, partial = call.walk(BY_QUERIES, ("query",), [n for n, kind in chosen.items() if kind != "column"])
    for n, new in partial.items():  # (B, H, entries, Q)
        rest = leaves[n].shape[4:]
        found[n] = new.swapaxes(2, 3) if chosen[n] == "row" else new.sum(axis=3).reshape(*new.shape[:2], 1, 1, *rest)
    columns = [n for n, kind in chosen.items() if kind == "column"]
    if call.both_fit():
        sums, partial = call.walk(BY_KEYS, ("key", "value"), columns)
    else:
        sums, partial = call.walk(BY_KEYS, ("key",), columns)
        sums |= call.walk(BY_KEYS, ("value",), [])[0]
    by_array = {"query": task.query, "key": task.key, "value": task.value}
    dq, dk, dv = (_cut((of_queries | sums)[name], array) for name, array in by_array.items())
    return dq, dk, dv, task.to_leaves(found | partial)


def _cut(found: jax.Array, array: jax.Array) -> jax.Array:
    """A padded gradient for each query head in the shape of its array: heads of a group are summed."""
    batch, length, groups, width = array.shape
    found = found[:, :length, :, :width].reshape(batch, length, groups, -1, width)
    return found.sum(axis=3, dtype=jnp.float32).astype(array.dtype)


class _Call:
    """Pads the arrays of a task and runs walks on them."""

    def __init__(self, driver: Any, task: Backward) -> None:
        self.driver = driver.settled(task.query, task.value, task.algebra, len(task.cotangents))
        self.task, self.width = task, width_of(task.query, task.value)
        by_queries = driver.sizes(task.query, task.key, task.value, task.algebra)
        by_queries = dataclasses.replace(by_queries, key_tile=self.driver.backward_tile)
        by_keys = dataclasses.replace(by_queries, query_tile=self.driver.backward_tile, key_tile=BLOCK)
        self.sizes = {BY_QUERIES: by_queries, BY_KEYS: by_keys}
        length_q, length_k = (-(-n // BLOCK) * BLOCK for n in (by_queries.length_q, by_queries.length_k))
        clean = kernel_tiles.zero_unattended(task.query, task.key, task.value, task.algebra, by_queries)
        arrays = dict(zip(("query", "key", "value"), clean, strict=True))
        arrays["cotangent"] = task.output_cotangent.astype(task.query.dtype)

        def row(values: jax.Array, fill: float = 0) -> jax.Array:
            return pad(values[..., 0], {2: length_q}, fill)

        # Padded rows of lse are +inf: their probabilities are exactly zero.
        of_rows = {"lse of softmax": row(task.lse, jnp.inf), "delta": row(task.delta)}
        of_rows |= {name: row(values) for name, values in task.cotangents.items()}
        lengths = {name: length_q if name in BY_QUERIES else length_k for name in arrays}
        self.inputs = Inputs(
            {name: pad(array, {1: lengths[name], 3: self.width}) for name, array in arrays.items()}, of_rows
        )

    def both_fit(self) -> bool:
        """Whether dk and dv are summed in one walk without spilling registers.

        What a table looks up, and the cotangents of several statistics, take the registers that a second sum would.
        """
        looks_up = any(kernel_tiles.form(leaf) == "table" for leaf in jax.tree.leaves(self.task.algebra.bias))
        return self.width < 128 and not looks_up and len(self.task.cotangents) <= 1

    def walk(self, kept: tuple[str, str], names: tuple[str, ...], leaves: list[int]) -> tuple[dict, dict]:
        """Gradients (B, L, H, width) of the named arrays, and partial sums (B, H, entries, L) for the leaves."""
        if self.width <= WHOLE_SUM:
            return self._walk(kept, names, leaves, 0, self.width)
        half = self.width // 2
        (one, partial), (other, _) = self._walk(kept, names, leaves, 0, half), self._walk(kept, names, [], half, half)
        whole = {name: jnp.concatenate((one[name][..., :half], other[name][..., half:]), axis=-1) for name in names}
        return whole, partial

    def _walk(
        self, kept: tuple[str, str], names: tuple[str, ...], leaves: list[int], first: int, count: int
    ) -> tuple[dict, dict]:
        """As `walk`, for `count` columns of the gradients from the `first` one on; the others hold anything."""
        sizes, arrays = self.sizes[kept], self.inputs.arrays
        by_keys = kept == BY_KEYS
        whole = sizes.pad_algebra(self.task.algebra)
        if by_keys:
            orientation = mosaic.oriented(sizes.query_tile, WARPGROUP_ROWS, key_first=True)
        else:
            orientation = mosaic.oriented(WARPGROUP_ROWS, sizes.key_tile)
        operands = Operands(sizes, whole, orientation)
        like = arrays["query"]
        length = arrays[kept[0]].shape[1]

        def shaped(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
            return kernel_tiles.shaped(shape, dtype, like)

        sums = {name: shaped(sizes.batch, length, sizes.heads, self.width, dtype=like.dtype) for name in names}
        entries = {n: operands.leaves[n].shape[-1] if operands.forms[n] == "table" else 1 for n in leaves}
        partial = {n: shaped(sizes.batch, sizes.heads, many, length) for n, many in entries.items()}
        kernel = _Kernel(self.driver, operands, kept, names, entries, self.width, pl.ds(first, count), like.dtype)
        tiles = (sizes.heads, sizes.tiles_k if by_keys else sizes.tiles_q, sizes.batch)
        run = mosaic.call(kernel, self.driver.interpret, (sums, partial), tiles, kernel.scratch())
        return run(kernel_tiles.schedule_tiles(whole, sizes, keys=not by_keys), self.inputs, operands.arrays)


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """One walk: a warpgroup keeps 64 rows of two arrays, sums along them, and visits tiles of the other two.

    names: the arrays whose gradients it sums, and which columns of them. entries: for each leaf whose gradient it sums,
    of how many entries.
    """

    driver: Any
    operands: Operands
    kept: tuple[str, str]
    names: tuple[str, ...]
    entries: dict[int, int]
    width: int
    columns: Any
    dtype: Any

    @property
    def by_keys(self) -> bool:
        return self.kept == BY_KEYS

    @property
    def other_tile(self) -> int:
        """Rows of the tiles that are visited."""
        orientation = self.operands.orientation
        return orientation.query_tile if self.by_keys else orientation.key_tile

    def scratch(self) -> Any:
        kept, rows = (COMPUTE, WARPGROUP_ROWS, self.width), self.other_tile
        buffers = {
            "kept": {name: mosaic.shared(kept, self.dtype, rows) for name in self.kept},
            "partial": {
                n: plgpu.SMEM((COMPUTE, count, WARPGROUP_ROWS), jnp.float32) for n, count in self.entries.items()
            },
            "arrived": plgpu.Barrier(num_barriers=COMPUTE, num_arrivals=2),
        }
        if self.driver.interpret:
            buffers["staging"] = mosaic.shared((COMPUTE, WARPGROUP_ROWS, rows), self.dtype, rows)
        return buffers

    def __call__(
        self, seen: kernel_tiles.TileSchedule, inputs: Inputs, leaves: list, sums: Any, found: Any, scratch: Any
    ) -> None:
        b, h, t, warpgroup = mosaic.program()
        group = h // self.operands.sizes.repeats
        begin = t * BLOCK + warpgroup * WARPGROUP_ROWS
        mine = {name: jax.tree.map(lambda ref: ref.at[warpgroup], scratch[name]) for name in scratch}
        heads = {name: group if name in BY_KEYS else h for name in inputs.arrays}
        place = pl.ds(begin, WARPGROUP_ROWS)

        def context(visit: Callable[[Any], Any]) -> None:
            for name, buffer in mine["kept"].items():
                plgpu.copy_gmem_to_smem(inputs.arrays[name].at[b, place, heads[name]], buffer, mine["arrived"])
            plgpu.barrier_wait(mine["arrived"])
            for ref in mine["partial"].values():
                for entry in range(ref.shape[0]):
                    ref[entry] = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), _along_kept())
            results = visit(tuple(mosaic.zeros(self.columns.size) for _ in self.names))
            for buffer, result in zip(mine["kept"].values(), results, strict=False):
                buffer.at[:, self.columns][...] = result.astype(self.dtype)
            plgpu.commit_smem()
            for buffer, name in zip(mine["kept"].values(), self.names, strict=False):
                plgpu.copy_smem_to_gmem(buffer, sums[name].at[b, place, h])
            for n, ref in mine["partial"].items():
                plgpu.copy_smem_to_gmem(ref, found[n].at[b, h, :, place])
            plgpu.wait_smem_to_gmem(0)

        moving = [name for name in inputs.arrays if name not in self.kept]

        def step(other: Any, blocks: Any, carry: Any) -> Any:
            i, j = (other, t) if self.by_keys else (t, other)
            corner = (other * self.other_tile, begin) if self.by_keys else (begin, other * self.other_tile)
            arrays = mine["kept"] | dict(zip(moving, blocks, strict=True))
            algebra = self.operands.read(leaves, b, h, *corner)
            at = self.operands.at(algebra, *corner)
            of_rows = {name: self._row(ref, b, h, corner[0]) for name, ref in inputs.rows.items()}

            def work(at: Any, simplify: Any, carry: Any) -> Any:
                return self._tile(arrays, algebra, at, simplify, of_rows, mine["partial"], mine.get("staging"), carry)

            return self.operands.by_kind(seen.kinds, at, algebra, (b, h, i, j), work, carry)

        arrays = [inputs.arrays[name].at[b, :, heads[name], :] for name in moving]
        first, count = seen.first[b, h, t], seen.steps[b, h, t]
        mosaic.pipelined_loop(arrays, first, count, self.other_tile, self.driver.stages, step, context)

    def _row(self, ref: Any, b: Any, h: Any, first_q: Any) -> Any:
        """The part of a row (B, H, Q) that belongs to a tile, loaded where it is used."""
        orientation = self.operands.orientation
        part, layout = ref.at[b, h, pl.ds(first_q, orientation.query_tile)], mosaic.layout_of(orientation, "q")
        return rows(Deferred(lambda: mosaic.load(part, layout), jnp.float32))

    def _tile(
        self, arrays: Any, algebra: Any, at: Any, simplify: Any, of_rows: Any, partial: Any, staging: Any, carry: Any
    ) -> Any:
        """Adds one tile to the partial sums, and to those of the carry, which it returns."""
        forms, orientation = self.operands.forms, self.operands.orientation

        def product(of_queries: str, of_keys: str) -> jax.Array:
            one, other = (of_keys, of_queries) if self.by_keys else (of_queries, of_keys)
            return mosaic.product(arrays[one], arrays[other].transpose((1, 0)), (WARPGROUP_ROWS, self.other_tile))

        tables = [n for n in partial if forms[n] == "table"]
        needed = {"leaves", *(FACTORS[name][0] for name in self.names), *(["scores"] if tables else [])}
        function = _in_registers(simplify, {n: forms[n] == "scalar" for n in partial if n not in tables}, needed)
        dp = Deferred(lambda: product("cotangent", "value"), jnp.float32)
        got = orientation.run(function, algebra, at, full(product("query", "key")), full(dp), of_rows)
        for n, new in got["leaves"].items():
            _add(partial[n], 0, new.array)
        for n in tables:
            self._entries(partial[n], n, got["scores"], at, simplify, algebra)
        factors = [FACTORS[name] for name in self.names]
        return tuple(
            mosaic.accumulate(acc, got[of].array.astype(self.dtype), arrays[other].at[:, self.columns], staging)
            for (of, other), acc in zip(factors, carry, strict=True)
        )

    def _entries(self, partial: Any, n: int, ds: Any, at: Any, simplify: Any, algebra: Any) -> None:
        """Adds the gradient of each entry of a table."""

        def function(algebra: Any, at: Any, ds: Any, e: Any) -> Any:
            at, algebra = looked_up(at, algebra)
            return kernel_tiles.entry_gradient(ds, n, e, at, algebra, simplify)

        def entry(e: Any, carry: Any) -> Any:
            _add(partial, e, self.operands.orientation.run(function, algebra, at, ds, e).array)
            return carry

        lax.fori_loop(0, partial.shape[0], entry, None)


def _in_registers(simplify: Any, per_row: dict[int, bool], needed: set[str]) -> Callable[..., Any]:
    """`tile_gradients` as `registers` runs it, which computes only what the `needed` fields of the answer ask for.

    `per_row` numbers the leaves and says which are scalars to copy to rows.
    """

    def function(algebra: Any, at: Any, scores: Any, dp: Any, of_rows: dict[str, Any]) -> Any:
        at, algebra = looked_up(at, algebra)
        leaves = jax.tree.leaves(algebra, is_leaf=kernel_tiles.is_table)
        shape = (scores.shape[0], 1)
        values = {n: jnp.broadcast_to(leaves[n], shape) if copied else leaves[n] for n, copied in per_row.items()}
        got = kernel_tiles.tile_gradients(scores, dp, of_rows, at, algebra, simplify, values)
        return {name: getattr(got, name) for name in needed}

    return function


def _along_kept() -> Any:
    """The layout of a vector along the rows that a warpgroup keeps."""
    return plgpu.Layout.WGMMA.reduce(1)


def _add(ref: Any, entry: Any, new: jax.Array) -> None:
    """Adds a vector along the kept rows to one entry of the partial sums in shared memory."""
    ref[entry] = mosaic.load(ref.at[entry], _along_kept()) + plgpu.layout_cast(new, _along_kept())
