"""The backward pass of the GPU driver: two kernels that visit the tiles and recompute their probabilities in registers.

- `_Queries`: a block keeps 128 queries and walks over tiles of keys: dq, and the gradients of scalars, tables and rows;
- `_Keys`: a block keeps 128 keys and walks over tiles of queries, tiles transposed: dk, dv, and the gradients of
  columns. Two sums of 64 x width a warpgroup fill its registers, so that wide heads take one walk for dk and one for
  dv.

No atomics: every sum has one order, partial sums of a parameter are one a query (or key) and are added up outside. The
gradient of a whole Q x K array is left to `Blockwise`, whose memory it shares.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mha_kernels import kernel_tiles
from mha_kernels.algebra import Algebra, simplest, sum_to_leaf
from mha_kernels.blockwise import Blockwise
from mha_kernels.kernel_tiles import Visits, entry_gradient, tile_gradients
from mha_kernels.pallas_gpu import (
    COMPUTE,
    WARPGROUP_ROWS,
    Made,
    Operands,
    accumulate,
    branch,
    call,
    layout_of,
    oriented,
    plgpu,
    product,
    shaped,
    shared,
    tables,
    tile_spec,
    width_of,
)
from mha_kernels.registers import Orientation, full, rows
from mha_kernels.sizes import Sizes, pad

BLOCK = COMPUTE * WARPGROUP_ROWS


class Inputs(NamedTuple):
    """What both kernels read: arrays (B, L, n, width), rows (B, H, Q) by name, and the leaves of the algebra."""

    query: Any
    key: Any
    value: Any
    cotangent: Any
    rows: dict[str, Any]
    leaves: list[Any]


def backward(
    driver: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    algebra: Algebra,
    lse: jax.Array,
    correction: jax.Array,
    output_cotangent: jax.Array,
    cotangents: dict[str, jax.Array],
    wanted: tuple[bool, ...],
    precision: Any,
) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]:
    """See `transforms.Driver`."""
    leaves = jax.tree.leaves(algebra)
    # Sink and head gate act on rows, not on tiles: the caller finds theirs.
    acts = [leaf is not algebra.sink and leaf is not algebra.head_gate for leaf in leaves]
    chosen = {n: kernel_tiles.form(leaves[n]) for n, flag in enumerate(wanted) if flag and acts[n]}
    if "full" in chosen.values():
        arguments = (query, key, value, algebra, lse, correction, output_cotangent, cotangents, wanted, precision)
        return Blockwise().backward(*arguments)
    width = width_of(query, value)
    by_queries = dataclasses.replace(driver.sizes(query, key, value, algebra), key_tile=driver.key_tile or 64)
    by_keys = dataclasses.replace(by_queries, query_tile=64, key_tile=BLOCK)
    lengths = [-(-n // BLOCK) * BLOCK for n in (by_queries.length_q, by_queries.length_k)]
    arrays = kernel_tiles.clean(query, key, value, algebra, by_queries)
    arrays = (*arrays, output_cotangent.astype(query.dtype))
    q, k, v, cotangent = (pad(x, {1: lengths[which], 3: width}) for x, which in zip(arrays, (0, 1, 1, 0), strict=True))

    def row(values: jax.Array, fill: float = 0) -> jax.Array:
        return pad(values[..., 0], {2: lengths[0]}, fill)

    # Padded rows of lse are +inf: their probabilities are exactly zero.
    of_rows = {"lse of softmax": row(lse, jnp.inf), "correction": row(correction)}
    of_rows |= {name: row(values) for name, values in cotangents.items()}

    def run(kernel: Any, sizes: Sizes, keys: bool, out: Any, tiles: int) -> Any:
        whole = sizes.pad_algebra(algebra)
        operands = Operands(sizes, whole)
        inputs = Inputs(q, k, v, cotangent, of_rows, operands.arrays)
        seen = kernel_tiles.visits(whole, sizes, keys)
        kernel = kernel(driver, sizes, operands, width, q.dtype, out)
        types = jax.tree.map(lambda shape: shaped(shape.shape, shape.dtype, q), out)
        grid = {"grid": (sizes.heads, tiles, sizes.batch), "grid_names": ("heads", "tiles", "batch")}
        return call(kernel, driver.interpret, types, grid, kernel.scratch())(seen, inputs)

    batch, heads = by_queries.batch, by_queries.heads
    entries = {n: leaves[n].shape[-1] if kind == "table" else 1 for n, kind in chosen.items() if kind != "column"}
    partial_q = {
        n: jax.ShapeDtypeStruct((batch, heads, count, lengths[0]), jnp.float32) for n, count in entries.items()
    }
    dq, found = run(_Queries, by_queries, True, (jax.ShapeDtypeStruct(q.shape, q.dtype), partial_q), by_queries.tiles_q)
    found = {n: _by_leaf(new, leaves[n], chosen[n]) for n, new in found.items()}
    one = jax.ShapeDtypeStruct((batch, lengths[1], heads, width), q.dtype)
    partial_k = {
        n: jax.ShapeDtypeStruct((batch, heads, 1, lengths[1]), jnp.float32)
        for n, kind in chosen.items()
        if kind == "column"
    }
    # What a table looks up, and the cotangents of several statistics, take the registers that the second sum would.
    looks_up = any(kernel_tiles.form(leaf) == "table" for leaf in jax.tree.leaves(algebra.bias))
    if width < 128 and not looks_up and len(cotangents) <= 1:
        sums, columns = run(_Keys, by_keys, False, ({"key": one, "value": one}, partial_k), by_keys.tiles_k)
    else:
        sums, columns = run(_Keys, by_keys, False, ({"key": one}, partial_k), by_keys.tiles_k)
        sums |= run(_Keys, by_keys, False, ({"value": one}, {}), by_keys.tiles_k)[0]
    found |= columns
    dk, dv = (
        sums[name][:, : array.shape[1], :, : array.shape[-1]]
        .reshape(*array.shape[:3], by_queries.repeats, array.shape[-1])
        .sum(axis=3, dtype=jnp.float32)
        .astype(array.dtype)
        for name, array in (("key", key), ("value", value))
    )
    dq = dq[:, : query.shape[1], :, : query.shape[-1]]
    gradients = [
        sum_to_leaf(found[n], leaves[n]) if n in found else jnp.zeros_like(leaves[n])
        for n, flag in enumerate(wanted)
        if flag
    ]
    return dq, dk, dv, gradients


def _by_leaf(found: jax.Array, leaf: jax.Array, kind: str) -> jax.Array:
    """Partial sums (B, H, entries, Q) as (B, H, Q, 1) of a row, or summed over queries as (B, H, 1, 1, ...)."""
    if kind == "row":
        return found.swapaxes(2, 3)
    return found.sum(axis=3).reshape(*found.shape[:2], 1, 1, *leaf.shape[4:])


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """What both kernels have: a warpgroup keeps 64 rows of two arrays, sums along them, and walks over tiles."""

    driver: Any
    sizes: Sizes
    operands: Operands
    width: int
    dtype: Any
    out: Any

    def scratch(self) -> Any:
        entries = {n: shape.shape[2] for n, shape in self.out[1].items()}
        buffers = {
            "kept": [shared((COMPUTE, WARPGROUP_ROWS, self.width), self.dtype) for _ in range(2)],
            "partial": {n: plgpu.SMEM((COMPUTE, count, WARPGROUP_ROWS), jnp.float32) for n, count in entries.items()},
            "arrived": plgpu.Barrier(num_barriers=COMPUTE, num_arrivals=2),
        }
        if self.driver.interpret:
            buffers["staging"] = shared((COMPUTE, WARPGROUP_ROWS, self.other_tile), self.dtype)
        return [buffers]

    @property
    def other_tile(self) -> int:
        """Rows of the tiles that are walked over."""
        raise NotImplementedError

    def walk(
        self,
        seen: Visits,
        inputs: Inputs,
        found: Any,
        scratch: Any,
        kept: Any,
        moving: Any,
        sums: int,
        work: Any,
        store: Any,
    ) -> None:
        """Brings `kept`, walks with `work` over the tiles of the two arrays `moving`, and hands the sums to `store`."""
        b, h, t = (lax.axis_index(name) for name in ("batch", "heads", "tiles"))
        mine = lax.axis_index("warpgroup")
        first, count = seen.first[b, h, t], seen.steps[b, h, t]
        begin = t * BLOCK + mine * WARPGROUP_ROWS
        buffers = [buffer.at[mine] for buffer in scratch["kept"]]
        partial = {n: ref.at[mine] for n, ref in scratch["partial"].items()}
        row_layout = plgpu.Layout.WGMMA.reduce(1)

        def context(pipeline: Callable[[Any], Any]) -> None:
            for (array, head), buffer in zip(kept, buffers, strict=True):
                part = array.at[b, pl.ds(begin, WARPGROUP_ROWS), head]
                plgpu.copy_gmem_to_smem(part, buffer, scratch["arrived"].at[mine])
            plgpu.barrier_wait(scratch["arrived"].at[mine])
            for ref in partial.values():
                for entry in range(ref.shape[0]):
                    ref[entry] = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), row_layout)
            zeros = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, self.width), jnp.float32), plgpu.Layout.WGMMA)
            results = pipeline((zeros,) * sums)
            for buffer, result in zip(buffers, results, strict=False):
                buffer[...] = result.astype(self.dtype)
            plgpu.commit_smem()
            for buffer, output in zip(buffers, store, strict=False):
                plgpu.copy_smem_to_gmem(buffer, output.at[b, pl.ds(begin, WARPGROUP_ROWS), h])
            for n, ref in partial.items():
                plgpu.copy_smem_to_gmem(ref, found[n].at[b, h, :, pl.ds(begin, WARPGROUP_ROWS)])
            plgpu.wait_smem_to_gmem(0)

        def step(indices: Any, one: Any, other: Any, carry: Any) -> Any:
            staging = scratch["staging"].at[mine] if "staging" in scratch else None
            return work(
                seen, inputs, (b, h, t, begin, first + indices[0]), buffers, (one, other), partial, staging, carry
            )

        spec = tile_spec(self.other_tile, self.width, lambda n: (first + n, 0))
        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(count,),
            in_specs=[spec, spec],
            max_concurrent_steps=self.driver.stages,
            num_compute_wgs=COMPUTE,
            memory_registers=40,
            wg_axis="warpgroup",
            compute_context=context,
        )(*(array.at[b, :, head, :] for array, head in moving))

    def gradients(
        self,
        inputs: Inputs,
        place: Any,
        orientation: Orientation,
        kinds: Any,
        tile_of: tuple[Any, Any],
        then: Any,
        carry: Any,
    ) -> Any:
        """then(at, simplify, algebra, gradients of) in the form that the kind of the tile needs; skips an empty one."""
        b, h, first_q, first_k = place
        algebra = self.operands.read(inputs.leaves, b, h, first_q, first_k, orientation)
        at = self.operands.at(algebra, first_q, first_k, orientation)
        layout = layout_of(orientation, "q")

        def row(ref: Any) -> Any:
            part = ref.at[b, h, pl.ds(first_q, orientation.query_tile)]
            return rows(Made(lambda: plgpu.load(part, layout=layout, optimized=False), jnp.float32))

        of_rows = {name: row(ref) for name, ref in inputs.rows.items()}

        def work(at: Any, simplify: Any, carry: Any) -> Any:
            return then(at, simplify, algebra, of_rows, carry)

        branches = (
            lambda carry: carry,
            functools.partial(work, at, lambda algebra: algebra),
            functools.partial(work, at._replace(end=None), simplest),
        )
        return branch(self.operands.kind(kinds, at, algebra, b, h, *tile_of), branches, carry)


def _in_registers(simplify: Any, per_row: dict[int, bool], needed: tuple[str, ...]) -> Callable[..., Any]:
    """`tile_gradients` as `registers` runs it, which computes only what the `needed` fields of the answer ask for.

    `per_row` numbers the leaves and says which are scalars to copy to rows.
    """

    def function(algebra: Any, at: Any, scores: Any, of_weights: Any, of_rows: dict[str, Any]) -> Any:
        algebra, at = tables(algebra), at._replace(lookup=kernel_tiles.lookup)
        leaves = jax.tree.leaves(algebra, is_leaf=kernel_tiles.is_table)
        shape = (scores.shape[0], 1)
        values = {n: jnp.broadcast_to(leaves[n], shape) if copied else leaves[n] for n, copied in per_row.items()}
        got = tile_gradients(scores, of_weights, of_rows, at, algebra, simplify, values)
        return {name: getattr(got, name) for name in needed}

    return function


class _Queries(_Kernel):
    """dq, and partial sums a query of the gradients of scalars, tables and rows."""

    @property
    def other_tile(self) -> int:
        return self.sizes.key_tile

    def __call__(self, seen: Visits, inputs: Inputs, dq: Any, found: Any, scratch: Any) -> None:
        h = lax.axis_index("heads")
        group = h // self.sizes.repeats
        kept, moving = [(inputs.query, h), (inputs.cotangent, h)], [(inputs.key, group), (inputs.value, group)]
        self.walk(seen, inputs, found, scratch, kept, moving, 1, self.work, [dq])

    def work(
        self, seen: Any, inputs: Any, place: Any, kept: Any, moving: Any, partial: Any, staging: Any, carry: Any
    ) -> Any:
        b, h, i, begin, j = place
        (query, cotangent), (key, value), sizes = kept, moving, self.sizes
        orientation = oriented(WARPGROUP_ROWS, sizes.key_tile)
        shape = (WARPGROUP_ROWS, sizes.key_tile)
        forms = self.operands.forms

        def then(at: Any, simplify: Any, algebra: Any, of_rows: Any, carry: Any) -> Any:
            scores = product(query, key.transpose((1, 0)), shape)
            of_weights = Made(lambda: product(cotangent, value.transpose((1, 0)), shape), jnp.float32)
            per_row = {n: forms[n] == "scalar" for n in partial if forms[n] != "table"}
            needed = ("product", "leaves", "scores") if len(per_row) < len(partial) else ("product", "leaves")
            function = _in_registers(simplify, per_row, needed)
            got = orientation.run(function, algebra, at, full(scores), full(of_weights), of_rows)
            for n, new in got["leaves"].items():
                _add(partial[n], 0, new.array)
            for n in partial:
                if forms[n] == "table":
                    self._entries(partial[n], n, got["scores"], at, simplify, algebra, orientation)
            return (accumulate(carry[0], got["product"].array.astype(self.dtype), key, staging),)

        tile_at = (b, h, begin, j * sizes.key_tile)
        return self.gradients(inputs, tile_at, orientation, seen.kinds, (i, j), then, carry)

    def _entries(
        self, partial: Any, n: int, of_scores: Any, at: Any, simplify: Any, algebra: Any, orientation: Any
    ) -> None:
        def entry(e: Any, carry: Any) -> Any:
            def function(algebra: Any, at: Any, of_scores: Any, e: Any) -> Any:
                at = at._replace(lookup=kernel_tiles.lookup)
                return entry_gradient(of_scores, n, e, at, tables(algebra), simplify)

            _add(partial, e, orientation.run(function, algebra, at, of_scores, e).array)
            return carry

        lax.fori_loop(0, partial.shape[0], entry, None)


class _Keys(_Kernel):
    """dk and dv (or one of them) for each query head, and partial sums a key of the gradients of columns."""

    @property
    def other_tile(self) -> int:
        return self.sizes.query_tile

    def __call__(self, seen: Visits, inputs: Inputs, sums: Any, found: Any, scratch: Any) -> None:
        h = lax.axis_index("heads")
        group = h // self.sizes.repeats
        kept, moving = [(inputs.key, group), (inputs.value, group)], [(inputs.query, h), (inputs.cotangent, h)]
        store = [sums[name] for name in ("key", "value") if name in sums]
        self.walk(seen, inputs, found, scratch, kept, moving, len(store), self.work, store)

    def work(
        self, seen: Any, inputs: Any, place: Any, kept: Any, moving: Any, partial: Any, staging: Any, carry: Any
    ) -> Any:
        b, h, j, begin, i = place
        (key, value), (query, cotangent), sizes = kept, moving, self.sizes
        orientation = oriented(sizes.query_tile, WARPGROUP_ROWS, key_first=True)
        shape = (WARPGROUP_ROWS, sizes.query_tile)

        def then(at: Any, simplify: Any, algebra: Any, of_rows: Any, carry: Any) -> Any:
            scores = product(key, query.transpose((1, 0)), shape)
            of_weights = Made(lambda: product(value, cotangent.transpose((1, 0)), shape), jnp.float32)
            factors = [("product", query)] if "key" in self.out[0] else []
            factors += [("weights", cotangent)] if "value" in self.out[0] else []
            function = _in_registers(simplify, {n: False for n in partial}, ("leaves", *(name for name, _ in factors)))
            got = orientation.run(function, algebra, at, full(scores), full(of_weights), of_rows)
            for n, new in got["leaves"].items():
                _add(partial[n], 0, new.array)
            return tuple(
                accumulate(summed, got[name].array.astype(self.dtype), other, staging)
                for (name, other), summed in zip(factors, carry, strict=True)
            )

        tile_at = (b, h, i * sizes.query_tile, begin)
        return self.gradients(inputs, tile_at, orientation, seen.kinds, (i, j), then, carry)


def _add(ref: Any, entry: Any, new: jax.Array) -> None:
    """Adds a vector along the kept rows to one entry of the partial sums in shared memory."""
    layout = plgpu.Layout.WGMMA.reduce(1)
    ref[entry] = plgpu.load(ref.at[entry], layout=layout, optimized=False) + plgpu.layout_cast(new, layout)
