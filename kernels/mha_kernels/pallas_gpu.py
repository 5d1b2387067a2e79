"""The GPU driver: Pallas Mosaic GPU kernels for Hopper.

A block has three warpgroups: one brings tiles of keys and values by TMA into a ring of shared-memory buffers, two
compute, each on its own rows of the block's queries, with `wgmma` for both products and everything between them in
registers. What happens in registers are the tile functions, run by `registers`; this file and `pallas_gpu_backward`
only move data. A block visits the tiles of its range and no others; a closed head gate leaves the range empty.
"""

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mha_kernels import kernel_tiles, tile
from mha_kernels.algebra import Algebra, simplest
from mha_kernels.kernel_tiles import Table, Visits, form
from mha_kernels.operands import Tile
from mha_kernels.registers import Made, Orientation, Value, columns, full, rows, scalar
from mha_kernels.sizes import Sizes, pad

plgpu: Any = None
with contextlib.suppress(ImportError):  # a jaxlib without it: `declines` says so
    plgpu = importlib.import_module("jax.experimental.pallas.mosaic_gpu")

COMPUTE = 2  # computing warpgroups of a block
WARPGROUP_ROWS = 64  # rows of one wgmma
LONGEST_TABLE = 64
WIDTHS = (64, 128, 192, 256)
OLDEST = (0, 11)


@dataclasses.dataclass(frozen=True)
class PallasGPU:
    """Tile sizes of the GPU kernels; None takes the rule for the head width.

    key_tile: keys a step, a multiple of 64; a step's queries are 64 for each of the two computing warpgroups.
    stages: steps whose keys and values may be in flight at once.
    interpret: False compiles for a GPU; `plgpu.InterpretGPUParams` runs the kernels on the host instead.

    Raises:
        ValueError: key_tile is not a positive multiple of 64, or stages is less than 2.
    """

    key_tile: int | None = None
    stages: int = 2
    interpret: Any = False

    def __post_init__(self) -> None:
        size = self.key_tile
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1 or size % 64):
            raise ValueError(f"PallasGPU key_tile is {size!r}; expected a positive multiple of 64")
        if not isinstance(self.stages, int) or self.stages < 2:
            raise ValueError(f"PallasGPU stages is {self.stages!r}; expected an integer of at least 2")

    def declines(self, query: Any, key: Any, value: Any, algebra: Algebra, statistics: tuple[str, ...]) -> str | None:
        """Why these kernels cannot do the job; None where they can."""
        reason = _environment(self.interpret)
        if reason is not None:
            return reason
        for name, array in (("query", query), ("key", key), ("value", value)):
            if array.dtype not in (jnp.bfloat16, jnp.float16) or array.dtype != query.dtype:
                return f"pallas_gpu multiplies bfloat16 or float16, all three alike; {name} is {array.dtype}"
        width = max(query.shape[-1], value.shape[-1])
        if width > WIDTHS[-1]:
            return f"pallas_gpu holds heads of width up to {WIDTHS[-1]}; came {width}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(algebra):
            if form(leaf) == "table" and leaf.shape[-1] > LONGEST_TABLE:
                name = jax.tree_util.keystr(path).lstrip(".")
                return f"{name} has {leaf.shape[-1]} entries; pallas_gpu looks up at most {LONGEST_TABLE}"
        return kernel_tiles.unsupported(algebra, self.sizes(query, key, value, algebra))

    def sizes(self, query: Any, key: Any, value: Any, algebra: Algebra | None) -> Sizes:
        (batch, length_q, heads, _), (_, length_k, groups, _) = query.shape, key.shape
        # Looking up a table holds an index and a value beside every score: half a tile more does not fit in registers.
        small = width_of(query, value) > 128 or any(form(leaf) == "table" for leaf in jax.tree.leaves(algebra))
        key_tile = self.key_tile or (64 if small else 128)
        return Sizes(batch, heads, groups, length_q, length_k, COMPUTE * WARPGROUP_ROWS, key_tile)

    def tiles(self, query: Any, key: Any, algebra: Algebra) -> dict[str, int]:
        """The tile sizes it would take for these arrays."""
        sizes = self.sizes(query, key, query, None)
        return {"query_tile": sizes.query_tile, "key_tile": sizes.key_tile}

    def forward(
        self, query: Any, key: Any, value: Any, algebra: Algebra, statistics: tuple[str, ...], precision: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """See `transforms.Driver`. Products of 16-bit numbers are exact in float32: `precision` has nothing to
        choose.
        """
        sizes, width = self.sizes(query, key, value, algebra), width_of(query, value)
        length_q, length_k = sizes.padded
        arrays = kernel_tiles.clean(query, key, value, algebra, sizes)
        q, k, v = (
            pad(x, {1: length, 3: width}) for x, length in zip(arrays, (length_q, length_k, length_k), strict=True)
        )
        algebra = sizes.pad_algebra(algebra)
        seen = kernel_tiles.visits(algebra, sizes, keys=True)
        operands = Operands(sizes, algebra)
        names = ("lse", *(name for name in statistics if name != "lse"))
        kernel = _Forward(self, sizes, operands, statistics, names, width, q.dtype)
        output, found = call(
            kernel,
            self.interpret,
            (
                shaped(q.shape, q.dtype, q),
                {name: shaped((sizes.batch, sizes.heads, length_q), jnp.float32, q) for name in names},
            ),
            {"grid": (sizes.heads, sizes.tiles_q, sizes.batch), "grid_names": ("heads", "tiles", "batch")},
            kernel.scratch(),
        )(seen, q, k, v, operands.arrays)
        found = {name: row[:, :, : sizes.length_q, None] for name, row in found.items()}
        return output[:, : sizes.length_q, :, : value.shape[-1]], found

    def backward(self, *arguments: Any) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]:
        """See `transforms.Driver`."""
        from mha_kernels import pallas_gpu_backward

        return pallas_gpu_backward.backward(self, *arguments)


def _environment(interpret: Any) -> str | None:
    version = tuple(int(part) for part in jax.__version__.split(".")[:2])
    if version < OLDEST or plgpu is None or not hasattr(plgpu, "emit_pipeline_warp_specialized"):
        return f"pallas_gpu needs JAX 0.11 or newer with Mosaic GPU; this is {jax.__version__}"
    if interpret:
        return None
    if jax.default_backend() != "gpu":
        return f"pallas_gpu needs a GPU; the default backend is {jax.default_backend()}"
    capability = str(getattr(jax.devices()[0], "compute_capability", "unknown"))
    if not capability.startswith("9."):
        return f"pallas_gpu is written for Hopper (compute capability 9.0); the device has {capability}"
    return None


def width_of(query: Any, value: Any) -> int:
    """The width heads are padded to: both products then have one shape, and the output fits where the query lay."""
    return -(-max(query.shape[-1], value.shape[-1]) // 64) * 64


def shaped(shape: tuple[int, ...], dtype: Any, like: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).mat)


def call(kernel: Any, interpret: Any, out: Any, grid: dict[str, Any], scratch: Any) -> Callable[..., Any]:
    """`plgpu.kernel` over pytrees, with three warpgroups a block."""
    shapes, structure = jax.tree.flatten(out)

    def flat(*arguments: Any) -> Any:
        leaves, inputs = jax.tree.flatten(arguments)

        def body(*refs: Any, scratch: Any) -> None:
            given = jax.tree.unflatten(inputs, refs[: len(leaves)])
            kernel(*given, *jax.tree.unflatten(structure, refs[len(leaves) :]), *scratch)

        results = plgpu.kernel(
            body,
            out_type=shapes,
            scratch_types={"scratch": scratch},
            num_threads=COMPUTE + 1,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=interpret,
            **grid,
        )(*leaves)
        return jax.tree.unflatten(structure, results)

    return flat


def shared(shape: tuple[int, ...], dtype: Any) -> Any:
    """A buffer in shared memory whose last two axes are laid out for wgmma."""
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


def tile_spec(size: int, width: int, index: Callable[..., Any]) -> Any:
    """A pipelined block of rows of a matrix, laid out for wgmma."""
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.BlockSpec((size, width), index, transforms=transforms)


def product(a: Any, b: Any, shape: tuple[int, ...]) -> jax.Array:
    """a b in registers, both in shared memory."""

    def multiply(accumulator: Any) -> jax.Array:
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


def accumulate(summed: jax.Array, a: jax.Array, b: Any, staging: Any) -> jax.Array:
    """summed + a b with `a` in registers.

    The interpreter knows neither accumulators that start from a value nor factors in registers; with `staging`, a
    buffer for `a`, the same sum is made of what it knows.
    """
    if staging is None:
        return pl.run_state(lambda accumulator: plgpu.wgmma(accumulator, a, b))(plgpu.ACC.init(summed))
    staging[...] = a
    plgpu.commit_smem()
    return summed + product(staging, b, summed.shape)


class Operands:
    """The leaves of an algebra as a GPU kernel takes them: arrays in global memory, and the values of one tile."""

    def __init__(self, sizes: Sizes, algebra: Algebra) -> None:
        self.sizes = sizes
        self.leaves, self.structure = jax.tree.flatten(algebra)
        self.forms = [form(leaf) for leaf in self.leaves]
        self.arrays = [self._array(leaf, kind) for leaf, kind in zip(self.leaves, self.forms, strict=True)]

    @staticmethod
    def _array(leaf: jax.Array, kind: str) -> jax.Array:
        if leaf.dtype == jnp.bool_:
            leaf = leaf.astype(jnp.int8 if kind == "full" else jnp.int32)
        rows, heads = leaf.shape[:2]
        if kind == "full":
            return leaf
        if kind in ("scalar", "table") and jnp.issubdtype(leaf.dtype, jnp.floating):
            leaf = leaf.astype(jnp.float32)
        return leaf.reshape(rows * heads, -1)

    def read(self, refs: list, b: Any, h: Any, first_q: Any, first_k: Any, orientation: Orientation) -> Algebra:
        """The algebra on the tile at (first_q, first_k) as an `Algebra` of `Value`, tables as lists of them."""
        values = [self._value(n, ref, b, h, first_q, first_k, orientation) for n, ref in enumerate(refs)]
        return jax.tree.unflatten(self.structure, values)

    def _value(self, which: int, ref: Any, b: Any, h: Any, first_q: Any, first_k: Any, orientation: Orientation) -> Any:
        leaf, kind = self.leaves[which], self.forms[which]
        row, head = self.sizes.row(leaf, b), h if leaf.shape[1] > 1 else 0
        line = row * leaf.shape[1] + head
        if kind == "scalar":
            return scalar(_truth(leaf, ref[line, 0]))
        if kind == "table":
            return [scalar(ref[line, entry]) for entry in range(leaf.shape[-1])]
        if kind == "row":
            part = ref.at[line, pl.ds(first_q, orientation.query_tile)]
            return rows(loaded(leaf, part, layout_of(orientation, "q")))
        if kind == "column":
            part = ref.at[line, pl.ds(first_k, orientation.key_tile)]
            return columns(loaded(leaf, part, layout_of(orientation, "k")))
        part = ref.at[row, head, pl.ds(first_q, orientation.query_tile), pl.ds(first_k, orientation.key_tile)]
        if orientation.key_first:
            part = part.transpose((1, 0))
        return full(loaded(leaf, part, plgpu.Layout.WGMMA))

    def at(self, algebra: Algebra, first_q: Any, first_k: Any, orientation: Orientation) -> "Place":
        """Positions of the tile at (first_q, first_k) of a padded problem."""
        place = algebra.positions
        start_q, start_k = place.query.array + first_q, place.key.array + first_k

        def along(letter: str, start: Any) -> Made:
            size, layout = orientation.size(letter), layout_of(orientation, letter)
            return Made(lambda: start + plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout), jnp.int32)

        spans = (start_q, start_q + orientation.query_tile - 1), (start_k, start_k + orientation.key_tile - 1)
        span_q, span_k = jax.tree.map(scalar, spans)
        absent: Any = None  # functions are no values: whoever runs a tile function brings the lookup
        end = None
        if self.sizes.padded[1] != self.sizes.length_k:
            end = scalar(place.key.array + self.sizes.length_k)
        return Place(
            place.batch,
            place.head,
            rows(along("q", start_q)),
            columns(along("k", start_k)),
            span_q,
            span_k,
            absent,
            end,
        )

    def kind(self, kinds: Any, at: "Place", algebra: Algebra, b: Any, h: Any, i: Any, j: Any) -> Any:
        """0 nothing to do, 1 the general case, 2 simple: which branch the tile takes; a number where it is always the
        same.
        """
        entry = None
        if kinds is not None:
            rows, heads, *_ = kinds.shape
            row = b * rows // self.sizes.batch if rows > 1 else 0
            entry = kinds[row, h if heads > 1 else 0, i, 0, j]
        at, algebra = jax.tree.map(lambda value: value.array, (at, algebra), is_leaf=_is_value)
        some, plain = kernel_tiles.kind_of(at._replace(lookup=kernel_tiles.lookup), tables(algebra), entry)
        if isinstance(some, bool) and isinstance(plain, bool):
            return 1 + plain if some else 0
        some, plain = jnp.asarray(some), jnp.asarray(plain)
        return jnp.where(some, jnp.where(plain, 2, 1), 0)


class Place(Tile):
    """A `Tile` whose corner is known without slicing."""

    def corner(self) -> Tile:
        return self._replace(query=self.query_span[0], key=self.key_span[0])


def tables(algebra: Any) -> Any:
    """Lists of entries as tables that can be looked up."""

    def wrap(leaf: Any) -> Any:
        return Table(leaf.__getitem__, len(leaf), jnp.float32) if type(leaf) is list else leaf

    return jax.tree.map(wrap, algebra, is_leaf=lambda leaf: type(leaf) is list)


def oriented(query_tile: int, key_tile: int, key_first: bool = False) -> Orientation:
    """Tiles in the layout of a tensor-core product, rows and columns in those that its reductions have."""

    def layout(array: Any, letters: tuple[str, ...]) -> Any:
        return plgpu.layout_cast(array, plgpu.Layout.WGMMA if len(letters) == 2 else layout_of(orientation, letters[0]))

    orientation = Orientation(query_tile, key_tile, layout, key_first)
    return orientation


def layout_of(orientation: Orientation, letter: str) -> Any:
    """The register layout of a vector along queries, "q", or along keys, "k"."""
    return plgpu.Layout.WGMMA.reduce(1 - orientation.order(("q", "k")).index(letter))


def loaded(leaf: Any, ref: Any, layout: Any) -> Made:
    """What lies at `ref` in global memory, brought to registers where it is used."""
    return Made(lambda: _truth(leaf, plgpu.load(ref, layout=layout, optimized=False)), leaf.dtype)


def _truth(leaf: jax.Array, value: Any) -> Any:
    return value != 0 if leaf.dtype == jnp.bool_ else value


def _is_value(leaf: Any) -> bool:
    return isinstance(leaf, Value)


def branch(kind: Any, branches: tuple[Callable[[Any], Any], ...], carry: Any) -> Any:
    """The branch of that number; no choice is made where the number is known."""
    return branches[kind](carry) if isinstance(kind, int) else lax.switch(kind, branches, carry)


def softmax_step(algebra: Algebra, at: Tile, simplify: Any, state: Any, scores: Any) -> Any:
    """One tile of products taken into the running softmax, as `registers` runs it."""
    at, part = at._replace(lookup=kernel_tiles.lookup), simplify(tables(algebra))
    state, weights, decay = tile.softmax_update(state, tile.tile_scores(scores, at, part), at)
    return state, tile.dropped(weights, at, part), decay


@dataclasses.dataclass(frozen=True)
class _Forward:
    """The kernel of the forward pass."""

    driver: PallasGPU
    sizes: Sizes
    operands: Operands
    statistics: tuple[str, ...]
    names: tuple[str, ...]
    width: int
    dtype: Any

    def scratch(self) -> Any:
        buffers = {
            "query": shared((COMPUTE, WARPGROUP_ROWS, self.width), self.dtype),
            "rows": {name: plgpu.SMEM((COMPUTE, WARPGROUP_ROWS), jnp.float32) for name in self.names},
            "arrived": plgpu.Barrier(num_barriers=COMPUTE),
        }
        if self.driver.interpret:
            buffers["staging"] = shared((COMPUTE, WARPGROUP_ROWS, self.sizes.key_tile), self.dtype)
        return [buffers]

    def __call__(
        self, seen: Visits, query: Any, key: Any, value: Any, leaves: Any, output: Any, found: Any, scratch: Any
    ) -> None:
        sizes = self.sizes
        b, h, i = (lax.axis_index(name) for name in ("batch", "heads", "tiles"))
        mine = lax.axis_index("warpgroup")
        first, count = seen.first[b, h, i], seen.steps[b, h, i]
        orientation = oriented(WARPGROUP_ROWS, sizes.key_tile)
        first_q = i * sizes.query_tile + mine * WARPGROUP_ROWS
        place = (b, pl.ds(first_q, WARPGROUP_ROWS), h)

        def context(pipeline: Callable[[Any], Any]) -> None:
            buffer, rows_of = scratch["query"].at[mine], {name: ref.at[mine] for name, ref in scratch["rows"].items()}
            plgpu.copy_gmem_to_smem(query.at[place], buffer, scratch["arrived"].at[mine])
            plgpu.barrier_wait(scratch["arrived"].at[mine])
            start = orientation.run(
                functools.partial(tile.softmax_start, (WARPGROUP_ROWS, 1), jnp.float32, self.statistics)
            )
            state = jax.tree.map(lambda row: row.array, start, is_leaf=_is_value)
            summed = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, self.width), jnp.float32), plgpu.Layout.WGMMA)
            state, summed = pipeline((state, summed))
            self._finish(jax.tree.map(rows, state), summed, leaves, b, h, buffer, rows_of)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, output.at[place])
            for name, ref in rows_of.items():
                plgpu.copy_smem_to_gmem(ref, found[name].at[b, h, pl.ds(first_q, WARPGROUP_ROWS)])
            plgpu.wait_smem_to_gmem(0)

        def step(indices: Any, key_block: Any, value_block: Any, carry: Any) -> Any:
            j = first + indices[0]
            first_k = j * sizes.key_tile
            algebra = self.operands.read(leaves, b, h, first_q, first_k, orientation)
            at = self.operands.at(algebra, first_q, first_k, orientation)

            def work(at: Any, simplify: Any, carry: Any) -> Any:
                state, summed = carry
                scores = product(
                    scratch["query"].at[mine], key_block.transpose((1, 0)), (WARPGROUP_ROWS, sizes.key_tile)
                )

                def function(algebra: Any, at: Any, state: Any, scores: Any) -> Any:
                    return softmax_step(algebra, at, simplify, state, scores)

                state, weights, decay = orientation.run(function, algebra, at, jax.tree.map(rows, state), full(scores))
                summed = summed * lax.broadcast_in_dim(decay.array, summed.shape, (0,))
                staging = scratch["staging"].at[mine] if "staging" in scratch else None
                summed = accumulate(summed, weights.array.astype(self.dtype), value_block, staging)
                return jax.tree.map(lambda row: row.array, state, is_leaf=_is_value), summed

            branches = (
                lambda carry: carry,
                functools.partial(work, at, lambda algebra: algebra),
                functools.partial(work, at._replace(end=None), simplest),
            )
            return branch(self.operands.kind(seen.kinds, at, algebra, b, h, i, j), branches, carry)

        group = h // sizes.repeats
        spec = tile_spec(sizes.key_tile, self.width, lambda n: (first + n, 0))
        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(count,),
            in_specs=[spec, spec],
            max_concurrent_steps=self.driver.stages,
            num_compute_wgs=COMPUTE,
            memory_registers=40,
            wg_axis="warpgroup",
            compute_context=context,
        )(key.at[b, :, group, :], value.at[b, :, group, :])

    def _finish(
        self, state: Any, summed: Any, leaves: Any, b: Any, h: Any, buffer: Any, rows_of: dict[str, Any]
    ) -> None:
        orientation = oriented(WARPGROUP_ROWS, self.width)
        scalars = [ref if kind == "scalar" else None for ref, kind in zip(leaves, self.operands.forms, strict=True)]
        values = [
            None if ref is None else self.operands._value(n, ref, b, h, 0, 0, orientation)
            for n, ref in enumerate(scalars)
        ]
        algebra = jax.tree.unflatten(self.operands.structure, values)
        algebra = dataclasses.replace(algebra, mask=None, bias=None, dropout=None)

        def function(algebra: Any, state: Any, summed: Any) -> Any:
            return tile.softmax_finish(state, summed, algebra, self.statistics)

        attended, results = orientation.run(function, algebra, state, full(summed))
        buffer[...] = attended.array.astype(self.dtype)
        for name, ref in rows_of.items():
            ref[...] = results[name].array
