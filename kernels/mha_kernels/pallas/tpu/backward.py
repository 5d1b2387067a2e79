"""The backward pass of the TPU driver: three kernels that visit the tiles and recompute their probabilities.

- `_Queries`, grid (batch, head, tile of queries, step over keys): dq, and the gradients of scalars, tables and rows;
- `_Keys`, grid (batch, group, tile of keys, step over the group's heads and their queries): dk, dv, gradients of
  columns;
- `_Full`, grid (row, head, tile of queries, tile of keys, program): gradients of whole Q x K arrays, summed in place
  over the programs that share one; only when such a gradient is asked for.

No atomics anywhere: every sum has one order, so results repeat bit for bit.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mha_kernels.algebra import tile
from mha_kernels.algebra.operands import Tile
from mha_kernels.algebra.spec import AttentionSpec
from mha_kernels.pallas import kernel_tiles
from mha_kernels.pallas.kernel_tiles import entry_gradient, is_table, tile_gradients
from mha_kernels.pallas.tpu.operands import (
    LANES,
    Blocks,
    Operands,
    compiler_params,
    dot,
    to_column,
    to_row,
    visited,
    widened,
)
from mha_kernels.tiled.driver import Backward
from mha_kernels.tiled.sizes import Sizes, pad


class Inputs(NamedTuple):
    """What every backward kernel reads: arrays (B, n, L, width), rows (B, H, 1, Q), the leaves, the kinds of tiles."""

    query: Any
    key: Any
    value: Any
    cotangent: Any
    lse: Any
    delta: Any
    of_statistics: dict[str, Any]
    leaves: list[Any]
    kinds: Any


def backward(driver: Any, task: Backward) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]:
    """See `tiled.driver.Driver`."""
    sizes = driver.sizes(task.query, task.key)
    wide = task._replace(**widened({name: getattr(task, name) for name in ("query", "key", "value", "algebra")}))
    algebra = sizes.pad_algebra(wide.algebra)
    operands = Operands(sizes, algebra)
    seen = kernel_tiles.schedule_tiles(algebra, sizes, keys=True)
    call = _Call(driver.interpret, sizes, operands, _inputs(wide, sizes, operands, seen), dot(task.precision))
    chosen = task.on_tiles()
    dq, found = call.queries(seen, [n for n in chosen if operands.forms[n] in ("scalar", "table", "row")])
    columns = [n for n in chosen if operands.forms[n] == "column"]
    dk, dv, of_columns = call.keys(kernel_tiles.schedule_tiles(algebra, sizes, keys=False), columns)
    found |= of_columns
    for n in chosen:
        if operands.forms[n] == "full":
            found[n] = call.full(seen, n)
    lengths = sizes.length_q, sizes.length_k, sizes.length_k
    dq, dk, dv = (
        gradient[:, :, :length].swapaxes(1, 2).astype(array.dtype)
        for gradient, length, array in zip((dq, dk, dv), lengths, (task.query, task.key, task.value), strict=True)
    )
    return dq, dk, dv, task.to_leaves(found)


def _inputs(task: Backward, sizes: Sizes, operands: Operands, seen: kernel_tiles.TileSchedule) -> Inputs:
    """The arrays of the task as the kernels read them."""
    length_q, length_k = sizes.padded
    arrays = kernel_tiles.zero_unattended(task.query, task.key, task.value, task.algebra, sizes)
    arrays = (*arrays, task.output_cotangent.astype(task.query.dtype))
    lengths = (length_q, length_k, length_k, length_q)

    def row(rows: jax.Array, fill: float = 0) -> jax.Array:
        return pad(rows.swapaxes(2, 3), {3: length_q}, fill)

    query, key, value, cotangent = (sizes.head_first(x, length) for x, length in zip(arrays, lengths, strict=True))
    return Inputs(
        *(query, key, value, cotangent),
        row(task.lse, jnp.inf),  # probabilities of padded rows are exactly zero
        row(task.delta),
        {name: row(cotangent) for name, cotangent in task.cotangents.items()},
        operands.arrays,
        seen.kinds,
    )


@dataclasses.dataclass(frozen=True)
class _Call:
    """Builds the calls of the three kernels."""

    interpret: Any
    sizes: Sizes
    operands: Operands
    inputs: Inputs
    dot: Callable[..., jax.Array]

    def specs(self, spec: Blocks, seen: kernel_tiles.TileSchedule) -> Inputs:
        inputs, rows = self.inputs, spec.rows()
        return Inputs(
            *(
                spec.queries(inputs.query),
                spec.keys(inputs.key),
                spec.keys(inputs.value),
                spec.queries(inputs.cotangent),
            ),
            *(rows, rows, {name: rows for name in inputs.of_statistics}),
            self.operands.specs(spec.place),
            spec.kinds(seen),
        )

    def run(
        self, kernel: Any, seen: Any, spec: Blocks, grid: tuple, parallel: int, out: Any, scratch: list, name: str
    ) -> Any:
        out_specs, out_shape = out
        grid_spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=grid,
            in_specs=[self.specs(spec, seen)],
            out_specs=out_specs,
            scratch_shapes=scratch,
        )
        return pl.pallas_call(
            kernel,
            grid_spec=grid_spec,
            out_shape=out_shape,
            compiler_params=compiler_params(parallel, len(grid)),
            interpret=self.interpret,
            name=name,
        )(seen.first, seen.steps, self.inputs)

    def shaped(self, *shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return kernel_tiles.shaped(shape, dtype, self.inputs.query)

    def queries(self, seen: kernel_tiles.TileSchedule, chosen: list[int]) -> tuple[jax.Array, dict[int, jax.Array]]:
        sizes, operands = self.sizes, self.operands

        def place(b: Any, h: Any, i: Any, step: Any, first: Any, count: Any) -> tuple[Any, ...]:
            return b, h, i, visited(first[b, h, i], count[b, h, i], step)

        spec = Blocks(sizes, place)
        specs: dict[int, Any] = {}
        shapes: dict[int, Any] = {}
        for n in chosen:
            entries = operands.leaves[n].size // (operands.leaves[n].shape[0] * operands.leaves[n].shape[1])
            if operands.forms[n] == "row":
                specs[n], shapes[n] = spec.rows(), self.shaped(sizes.batch, sizes.heads, 1, sizes.padded[0])
            else:
                block = (1, 1, entries, LANES)
                specs[n] = pl.BlockSpec(block, lambda b, h, *_: (b, h, 0, 0))
                shapes[n] = self.shaped(sizes.batch, sizes.heads, entries, LANES)
        width = self.inputs.query.shape[-1]
        rows = {n: pltpu.VMEM((sizes.query_tile, 1), jnp.float32) for n in chosen if operands.forms[n] == "row"}
        dq, found = self.run(
            _Queries(sizes, operands, self.dot),
            *(seen, spec, (sizes.batch, sizes.heads, sizes.tiles_q, sizes.tiles_k)),
            2 if specs.keys() - rows.keys() else 3,
            (
                (spec.queries(self.inputs.query), specs),
                (self.shaped(sizes.batch, sizes.heads, sizes.padded[0], width, dtype=self.inputs.query.dtype), shapes),
            ),
            [pltpu.VMEM((sizes.query_tile, width), jnp.float32), rows],
            "attention_backward_queries",
        )
        for n in chosen:
            if operands.forms[n] == "row":
                found[n] = found[n].swapaxes(2, 3)
            else:
                rest = operands.leaves[n].shape[4:]
                found[n] = found[n][..., 0].reshape(sizes.batch, sizes.heads, 1, 1, *rest)
        return dq, found

    def keys(
        self, seen: kernel_tiles.TileSchedule, chosen: list[int]
    ) -> tuple[jax.Array, jax.Array, dict[int, jax.Array]]:
        sizes = self.sizes

        def place(b: Any, g: Any, j: Any, step: Any, first: Any, count: Any) -> tuple[Any, ...]:
            h, n = g * sizes.repeats + step // sizes.tiles_q, step % sizes.tiles_q
            return b, h, visited(first[b, h, j], count[b, h, j], n), j

        spec = Blocks(sizes, place)
        shared, columns = spec.keys(self.inputs.key), spec.columns()
        widths = self.inputs.key.shape[-1], self.inputs.value.shape[-1]
        shapes = [self.shaped(*array.shape, dtype=array.dtype) for array in (self.inputs.key, self.inputs.value)]
        column = self.shaped(sizes.batch, sizes.heads, 1, sizes.padded[1])
        return self.run(
            _Keys(sizes, self.operands, self.dot),
            *(seen, spec, (sizes.batch, sizes.groups, sizes.tiles_k, sizes.repeats * sizes.tiles_q)),
            3,
            (
                (shared, spec.keys(self.inputs.value), {n: columns for n in chosen}),
                (*shapes, {n: column for n in chosen}),
            ),
            [
                *(pltpu.VMEM((sizes.key_tile, width), jnp.float32) for width in widths),
                {n: pltpu.VMEM((1, sizes.key_tile), jnp.float32) for n in chosen},
            ],
            "attention_backward_keys",
        )

    def full(self, seen: kernel_tiles.TileSchedule, which: int) -> jax.Array:
        sizes = self.sizes
        rows, heads, *lengths = self.operands.leaves[which].shape
        shared_b, shared_h = sizes.batch // rows, sizes.heads // heads

        def place(r: Any, h: Any, i: Any, j: Any, step: Any, first: Any, count: Any) -> tuple[Any, ...]:
            return r * shared_b + step // shared_h, h * shared_h + step % shared_h, i, j

        block = pl.BlockSpec((1, 1, sizes.query_tile, sizes.key_tile), lambda r, h, i, j, *_: (r, h, i, j))
        return self.run(
            _Full(sizes, self.operands, self.dot, which, shared_b, shared_h),
            *(seen, Blocks(sizes, place), (rows, heads, sizes.tiles_q, sizes.tiles_k, shared_b * shared_h)),
            4,
            (block, self.shaped(rows, heads, *lengths)),
            [],
            "attention_backward_full",
        )


def _tile(
    dot: Any, inputs: Inputs, algebra: AttentionSpec, at: Tile, simplify: Any, values: dict[int, Any]
) -> tile.TileGradients:
    """One tile; `values` are the leaves to differentiate, in the shape their gradient is wanted in."""
    rows = {name: to_column(ref[0, 0]) for name, ref in inputs.of_statistics.items()}
    rows |= {"lse of softmax": to_column(inputs.lse[0, 0]), "delta": to_column(inputs.delta[0, 0])}
    product = dot(inputs.query[0, 0], inputs.key[0, 0], (1, 1))
    dp = dot(inputs.cotangent[0, 0], inputs.value[0, 0], (1, 1))
    return tile_gradients(product, dp, rows, at, algebra, simplify, values)


@dataclasses.dataclass(frozen=True)
class _Queries:
    sizes: Sizes
    operands: Operands
    dot: Callable[..., jax.Array]

    def __call__(self, first: Any, count: Any, inputs: Inputs, dq: Any, found: Any, acc: Any, rows: Any) -> None:
        b, h, i, step = (pl.program_id(axis) for axis in range(4))
        algebra = self.operands.read(inputs.leaves, b, h)

        @pl.when(step == 0)
        def _() -> None:
            for ref in (acc, *rows.values()):
                ref[...] = jnp.zeros_like(ref)

        @pl.when((step == 0) & (i == 0))
        def _() -> None:
            for n in found.keys() - rows.keys():
                found[n][...] = jnp.zeros_like(found[n])

        def work(at: Tile, simplify: Callable[[AttentionSpec], AttentionSpec]) -> None:
            leaves = jax.tree.leaves(algebra, is_leaf=is_table)
            column = (self.sizes.query_tile, 1)
            values = {n: jnp.broadcast_to(leaves[n], column) for n in found if not is_table(leaves[n])}
            got = _tile(self.dot, inputs, algebra, at, simplify, values)
            acc[...] += self.dot(got.product.astype(inputs.key.dtype), inputs.key[0, 0], (1, 0))
            for n, new in got.leaves.items():
                if n in rows:
                    rows[n][...] += new
                else:
                    found[n][0, 0] += jnp.broadcast_to(new.sum(axis=0, keepdims=True), (1, LANES))
            for n in found:
                if is_table(leaves[n]):

                    def entry(e: Any, carry: Any, n: int = n) -> Any:
                        new = entry_gradient(got.scores, n, e, at, algebra, simplify)
                        found[n][0, 0, pl.ds(e, 1), :] += jnp.broadcast_to(new.sum(axis=0, keepdims=True), (1, LANES))
                        return carry

                    lax.fori_loop(0, leaves[n].shape[-1], entry, 0)

        j = visited(first[b, h, i], count[b, h, i], step)
        self.operands.each_kind(step < count[b, h, i], self.operands.at(algebra, i, j), algebra, inputs.kinds, j, work)

        @pl.when(step == self.sizes.tiles_k - 1)
        def _() -> None:
            dq[0, 0] = acc[...].astype(dq.dtype)
            for n, ref in rows.items():
                found[n][0, 0] = to_row(ref[...])


@dataclasses.dataclass(frozen=True)
class _Keys:
    sizes: Sizes
    operands: Operands
    dot: Callable[..., jax.Array]

    def __call__(self, first: Any, count: Any, inputs: Inputs, dk: Any, dv: Any, found: Any, *scratch: Any) -> None:
        sum_k, sum_v, columns = scratch
        b, g, j, step = (pl.program_id(axis) for axis in range(4))
        h, n = g * self.sizes.repeats + step // self.sizes.tiles_q, step % self.sizes.tiles_q
        algebra = self.operands.read(inputs.leaves, b, h)

        @pl.when(step == 0)
        def _() -> None:
            sum_k[...], sum_v[...] = jnp.zeros_like(sum_k), jnp.zeros_like(sum_v)

        @pl.when(n == 0)
        def _() -> None:
            for ref in columns.values():
                ref[...] = jnp.zeros_like(ref)

        def work(at: Tile, simplify: Callable[[AttentionSpec], AttentionSpec]) -> None:
            leaves = jax.tree.leaves(algebra, is_leaf=is_table)
            got = _tile(self.dot, inputs, algebra, at, simplify, {leaf: leaves[leaf] for leaf in found})
            sum_v[...] += self.dot(got.weights.astype(inputs.cotangent.dtype), inputs.cotangent[0, 0], (0, 0))
            sum_k[...] += self.dot(got.product.astype(inputs.query.dtype), inputs.query[0, 0], (0, 0))
            for leaf, new in got.leaves.items():
                columns[leaf][...] += new.astype(jnp.float32)

        i = visited(first[b, h, j], count[b, h, j], n)
        self.operands.each_kind(n < count[b, h, j], self.operands.at(algebra, i, j), algebra, inputs.kinds, j, work)

        @pl.when(n == self.sizes.tiles_q - 1)
        def _() -> None:
            for leaf, ref in columns.items():
                found[leaf][0, 0] = ref[...]

        @pl.when(step == self.sizes.repeats * self.sizes.tiles_q - 1)
        def _() -> None:
            dk[0, 0], dv[0, 0] = sum_k[...].astype(dk.dtype), sum_v[...].astype(dv.dtype)


@dataclasses.dataclass(frozen=True)
class _Full:
    sizes: Sizes
    operands: Operands
    dot: Callable[..., jax.Array]
    which: int
    shared_b: int
    shared_h: int

    def __call__(self, first: Any, count: Any, inputs: Inputs, found: Any) -> None:
        r, head, i, j, step = (pl.program_id(axis) for axis in range(5))
        b, h = r * self.shared_b + step // self.shared_h, head * self.shared_h + step % self.shared_h
        algebra = self.operands.read(inputs.leaves, b, h)

        @pl.when(step == 0)
        def _() -> None:
            found[...] = jnp.zeros_like(found)

        def work(at: Tile, simplify: Callable[[AttentionSpec], AttentionSpec]) -> None:
            leaf = jax.tree.leaves(algebra, is_leaf=is_table)[self.which]
            got = _tile(self.dot, inputs, algebra, at, simplify, {self.which: leaf})
            found[0, 0] += got.leaves[self.which].astype(jnp.float32)

        begin = first[b, h, i]
        active = (begin <= j) & (j < begin + count[b, h, i])
        self.operands.each_kind(active, self.operands.at(algebra, i, j), algebra, inputs.kinds, j, work)
