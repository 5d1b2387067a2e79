"""The GPU driver: Pallas Mosaic GPU kernels for Hopper.

What happens in registers are the tile functions, run by `registers`; `mosaic` says how a block works, `gpu_operands`
how operands reach it. This file and `pallas_gpu_backward` only move data. A block visits the tiles of its range and no
others; a closed head gate leaves the range empty.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mha_kernels import tuned
from mha_kernels.algebra import tile
from mha_kernels.algebra.operands import Tile
from mha_kernels.algebra.spec import AttentionSpec
from mha_kernels.pallas import kernel_tiles
from mha_kernels.pallas.gpu import backward as pallas_gpu_backward
from mha_kernels.pallas.gpu import mosaic
from mha_kernels.pallas.gpu.mosaic import BLOCK, COMPUTE, WARPGROUP_ROWS, plgpu
from mha_kernels.pallas.gpu.operands import Operands, looked_up, width_of
from mha_kernels.pallas.gpu.registers import full, is_value, rows
from mha_kernels.pallas.kernel_tiles import TileSchedule, form, shaped
from mha_kernels.tiled.driver import Backward, in_32_bits
from mha_kernels.tiled.sizes import Sizes, pad

LONGEST_TABLE = 64
WIDEST = 256
OLDEST = (0, 11)


@dataclasses.dataclass(frozen=True)
class PallasGPU:
    """Tile sizes of the GPU kernels; None takes what `autotune` measured on this device, else the rule.

    key_tile: keys a step of the forward pass, a multiple of 64; its queries are 64 for each of the two computing
    warpgroups. backward_tile: queries or keys a step of the backward pass, 32, 64 or 128.
    stages: steps whose arrays may be in flight at once.
    interpret: False compiles for a GPU; `plgpu.InterpretGPUParams` runs the kernels on the host instead.

    Raises:
        ValueError: a size is not one of these.
    """

    key_tile: int | None = None
    backward_tile: int | None = None
    stages: int | None = None
    interpret: Any = False

    def __post_init__(self) -> None:
        for name, fits, expected in (
            ("key_tile", lambda size: size > 0 and size % 64 == 0, "a positive multiple of 64"),
            ("backward_tile", lambda size: size in (32, 64, 128), "32, 64 or 128"),
            ("stages", lambda size: size > 0, "a positive integer"),
        ):
            size = getattr(self, name)
            if size is not None and (not isinstance(size, int) or isinstance(size, bool) or not fits(size)):
                raise ValueError(f"PallasGPU {name} is {size!r}; expected {expected}")

    def settled(self, query: Any, value: Any, algebra: AttentionSpec, cotangents: int = 0) -> "PallasGPU":
        """This with every size set; cotangents: of how many statistics a backward pass takes them.

        The rule is what registers and shared memory hold: two stages, of 128 keys forward and 64 backward; half of that
        for wide heads and, backward, beside several cotangents. Looking up a table holds an index and a value beside
        every score: more than 64 do not fit, whatever was measured without one.
        """
        wide = width_of(query, value) > 128
        looks_up = any(form(leaf) == "table" for leaf in jax.tree.leaves(algebra))
        rule = {
            "key_tile": 64 if wide or looks_up else 128,
            "backward_tile": 32 if wide or cotangents > 1 else 64,
            "stages": 2,
        }
        crowded = looks_up or cotangents > 1
        given = {name: getattr(self, name) or size for name, size in rule.items()}
        return dataclasses.replace(self, **given) if crowded else tuned.settle(self, rule, query)

    def unsupported_reason(
        self, query: jax.Array, key: jax.Array, value: jax.Array, algebra: AttentionSpec, statistics: tuple[str, ...]
    ) -> str | None:
        """Why these kernels cannot do the job; None where they can."""
        reason = _environment(self.interpret)
        if reason is not None:
            return reason
        for name, array in (("query", query), ("key", key), ("value", value)):
            if array.dtype not in (jnp.bfloat16, jnp.float16) or array.dtype != query.dtype:
                return f"pallas_gpu multiplies bfloat16 or float16, all three alike; {name} is {array.dtype}"
        width = max(query.shape[-1], value.shape[-1])
        if width > WIDEST:
            return f"pallas_gpu holds heads of width up to {WIDEST}; came {width}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(algebra):
            if form(leaf) == "table" and leaf.shape[-1] > LONGEST_TABLE:
                name = jax.tree_util.keystr(path).lstrip(".")
                return f"{name} has {leaf.shape[-1]} entries; pallas_gpu looks up at most {LONGEST_TABLE}"
        settled: Any = self.settled(query, value, algebra)  # no size is None any more
        width = width_of(query, value)
        needed = 2 * width * (BLOCK + 2 * settled.stages * settled.key_tile)  # 16-bit queries, keys and values
        if needed > mosaic.SHARED_MEMORY:
            return (
                f"pallas_gpu with {settled.stages} stages of {settled.key_tile} keys of width {width} needs "
                f"{needed} bytes of shared memory; a block has {mosaic.SHARED_MEMORY}"
            )
        return kernel_tiles.unsupported(algebra)

    def sizes(self, query: jax.Array, key: jax.Array, value: jax.Array, algebra: AttentionSpec) -> Sizes:
        (batch, length_q, heads, _), (_, length_k, groups, _) = query.shape, key.shape
        settled: Any = self.settled(query, value, algebra)
        return Sizes(batch, heads, groups, length_q, length_k, BLOCK, settled.key_tile)

    def tiles(self, query: jax.Array, key: jax.Array, algebra: AttentionSpec) -> dict[str, int]:
        """The tile sizes it would take for these arrays."""
        sizes = self.sizes(query, key, query, algebra)
        return {"query_tile": sizes.query_tile, "key_tile": sizes.key_tile}

    @in_32_bits
    def forward(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        algebra: AttentionSpec,
        statistics: tuple[str, ...],
        precision: Any,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """See `tiled.driver.Driver`. Products of 16-bit numbers are exact in float32: `precision` has nothing to
        choose.
        """
        sizes, width = self.sizes(query, key, value, algebra), width_of(query, value)
        length_q, length_k = sizes.padded
        arrays = kernel_tiles.zero_unattended(query, key, value, algebra, sizes)
        q, k, v = (
            pad(x, {1: length, 3: width}) for x, length in zip(arrays, (length_q, length_k, length_k), strict=True)
        )
        algebra = sizes.pad_algebra(algebra)
        operands = Operands(sizes, algebra, mosaic.oriented(WARPGROUP_ROWS, sizes.key_tile))
        names = ("lse", *(name for name in statistics if name != "lse"))
        rows_of = {name: shaped((sizes.batch, sizes.heads, length_q), jnp.float32, q) for name in names}
        kernel = _Forward(self.settled(query, value, algebra), sizes, operands, statistics, names, width, q.dtype)
        tiles = (sizes.heads, sizes.tiles_q, sizes.batch)
        output, found = mosaic.call(
            kernel, self.interpret, (shaped(q.shape, q.dtype, q), rows_of), tiles, kernel.scratch()
        )(kernel_tiles.schedule_tiles(algebra, sizes, keys=True), q, k, v, operands.arrays)
        found = {name: row[:, :, : sizes.length_q, None] for name, row in found.items()}
        return output[:, : sizes.length_q, :, : value.shape[-1]], found

    @in_32_bits
    def backward(self, task: Backward) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]:
        """See `tiled.driver.Driver`."""
        return pallas_gpu_backward.backward(self, task)


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


def softmax_step(simplify: Any, algebra: AttentionSpec, at: Tile, state: Any, scores: Any) -> Any:
    """One tile of products taken into the running softmax, as `registers` runs it."""
    at, algebra = looked_up(at, algebra)
    algebra = simplify(algebra)
    state, weights, alpha = tile.softmax_update(state, tile.tile_scores(scores, at, algebra), at)
    return state, tile.apply_dropout(weights, at, algebra), alpha


@dataclasses.dataclass(frozen=True)
class _Forward:
    """The kernel of the forward pass."""

    driver: Any  # a PallasGPU with every size set
    sizes: Sizes
    operands: Operands
    statistics: tuple[str, ...]
    names: tuple[str, ...]
    width: int
    dtype: Any

    def scratch(self) -> Any:
        buffers = {
            "query": mosaic.shared((COMPUTE, WARPGROUP_ROWS, self.width), self.dtype, self.sizes.key_tile),
            "rows": {name: plgpu.SMEM((COMPUTE, WARPGROUP_ROWS), jnp.float32) for name in self.names},
            "arrived": plgpu.Barrier(num_barriers=COMPUTE),
        }
        if self.driver.interpret:
            buffers["staging"] = mosaic.shared(
                (COMPUTE, WARPGROUP_ROWS, self.sizes.key_tile), self.dtype, self.sizes.key_tile
            )
        return buffers

    def __call__(
        self, seen: TileSchedule, query: Any, key: Any, value: Any, leaves: Any, output: Any, found: Any, scratch: Any
    ) -> None:
        sizes = self.sizes
        b, h, i, warpgroup = mosaic.program()
        first_q = i * sizes.query_tile + warpgroup * WARPGROUP_ROWS
        mine = {name: jax.tree.map(lambda ref: ref.at[warpgroup], scratch[name]) for name in scratch}
        place = (b, pl.ds(first_q, WARPGROUP_ROWS), h)

        def context(visit: Callable[[Any], Any]) -> None:
            plgpu.copy_gmem_to_smem(query.at[place], mine["query"], mine["arrived"])
            plgpu.barrier_wait(mine["arrived"])
            start = functools.partial(tile.softmax_start, (WARPGROUP_ROWS, 1), jnp.float32, self.statistics)
            state, acc = visit((_arrays(self.operands.orientation.run(start)), mosaic.zeros(self.width)))
            self._finish(self.operands.read_rows(leaves, b, h), state, acc, mine["query"], mine["rows"])
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(mine["query"], output.at[place])
            for name, ref in mine["rows"].items():
                plgpu.copy_smem_to_gmem(ref, found[name].at[b, h, pl.ds(first_q, WARPGROUP_ROWS)])
            plgpu.wait_smem_to_gmem(0)

        def step(j: Any, blocks: Any, carry: Any) -> Any:
            first_k = j * sizes.key_tile
            algebra = self.operands.read(leaves, b, h, first_q, first_k)
            at = self.operands.at(algebra, first_q, first_k)

            def work(at: Any, simplify: Any, carry: Any) -> Any:
                key_block, value_block = blocks
                given = (mine["query"], key_block, value_block, mine.get("staging"))
                return self._tile(algebra, at, simplify, *given, carry)

            return self.operands.by_kind(seen.kinds, at, algebra, (b, h, i, j), work, carry)

        arrays = [array.at[b, :, h // sizes.repeats, :] for array in (key, value)]
        first, count = seen.first[b, h, i], seen.steps[b, h, i]
        mosaic.pipelined_loop(arrays, first, count, sizes.key_tile, self.driver.stages, step, context)

    def _tile(
        self, algebra: Any, at: Any, simplify: Any, query: Any, key: Any, value: Any, staging: Any, carry: Any
    ) -> Any:
        state, acc = carry
        scores = mosaic.product(query, key.transpose((1, 0)), (WARPGROUP_ROWS, self.sizes.key_tile))
        given = (algebra, at, jax.tree.map(rows, state), full(scores))
        state, weights, alpha = self.operands.orientation.run(functools.partial(softmax_step, simplify), *given)
        acc = acc * lax.broadcast_in_dim(alpha.array, acc.shape, (0,))
        return _arrays(state), mosaic.accumulate(acc, weights.array.astype(self.dtype), value, staging)

    def _finish(self, algebra: Any, state: Any, acc: Any, buffer: Any, rows_of: dict[str, Any]) -> None:
        def function(algebra: Any, state: Any, acc: Any) -> Any:
            return tile.softmax_finish(state, acc, algebra, self.statistics)

        whole = mosaic.oriented(WARPGROUP_ROWS, self.width)
        attended, results = whole.run(function, algebra, jax.tree.map(rows, state), full(acc))
        buffer[...] = attended.array.astype(self.dtype)
        for name, ref in rows_of.items():
            ref[...] = results[name].array


def _arrays(values: Any) -> Any:
    """The arrays of a pytree of `Value`."""
    return jax.tree.map(lambda value: value.array, values, is_leaf=is_value)
