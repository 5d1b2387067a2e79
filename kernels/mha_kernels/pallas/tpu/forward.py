"""The TPU driver: Pallas kernels with the tiles of keys in the grid, so that any length fits in VMEM.

The grid is (batch, head, tile of queries, step); a step brings one tile of keys and values, and the running softmax
stays in scratch memory from step to step. Tiles outside a program's range are neither fetched (the index map repeats
the last one) nor computed. Scalars and tables lie in SMEM; what belongs to rows is stored along lanes, (1, Q), and
turned inside, because an array (Q, 1) takes 128 times its size in the memory of a TPU. The backward pass is in
`pallas_tpu_backward`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mha_kernels import tuned
from mha_kernels.algebra import tile
from mha_kernels.algebra.operands import Tile
from mha_kernels.algebra.spec import AttentionSpec
from mha_kernels.pallas import kernel_tiles
from mha_kernels.pallas.tpu import backward as pallas_tpu_backward
from mha_kernels.pallas.tpu.operands import (
    LANES,
    VMEM,
    Blocks,
    Operands,
    compiler_params,
    dot,
    to_row,
    visited,
    vmem,
    widened,
)
from mha_kernels.tiled.driver import Backward, in_32_bits
from mha_kernels.tiled.sizes import Sizes


@dataclasses.dataclass(frozen=True)
class PallasTPU:
    """Tile sizes of the TPU kernels, multiples of 128; None takes what `autotune` measured on this device, else the
    rule. Shorter lengths take shorter tiles.

    interpret: False compiles for a TPU; True, or `pltpu.InterpretParams`, runs the kernels on the host instead.

    Raises:
        ValueError: a tile size is not a positive multiple of 128.
    """

    query_tile: int | None = None
    key_tile: int | None = None
    interpret: Any = False

    def __post_init__(self) -> None:
        for name in ("query_tile", "key_tile"):
            size = getattr(self, name)
            if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1 or size % LANES):
                raise ValueError(f"PallasTPU {name} is {size!r}; expected a positive multiple of {LANES}")

    def settled(self, query: Any) -> "PallasTPU":
        """This with every size set. The rule: 512, and 256 on chips where a dozen tiles of scores would not fit."""
        size = 512 if vmem() > 16 * 2**20 else 256
        return tuned.settle(self, {"query_tile": size, "key_tile": size}, query)

    def unsupported_reason(
        self, query: jax.Array, key: jax.Array, value: jax.Array, algebra: AttentionSpec, statistics: tuple[str, ...]
    ) -> str | None:
        """Why these kernels cannot do the job; None where they can."""
        if not self.interpret and jax.default_backend() != "tpu":
            return f"pallas_tpu needs a TPU; the default backend is {jax.default_backend()}"
        if not self.interpret and tuned.device_kind() not in VMEM:
            return f"pallas_tpu knows {', '.join(VMEM)}; the device is {tuned.device_kind()}"
        for name, array in (("query", query), ("key", key), ("value", value)):
            if array.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
                return f"pallas_tpu multiplies bfloat16, float16 and float32; {name} is {array.dtype}"
        return kernel_tiles.unsupported(algebra)

    def sizes(self, query: Any, key: Any) -> Sizes:
        (batch, length_q, heads, _), (_, length_k, groups, _) = query.shape, key.shape
        settled: Any = self.settled(query)  # no size is None any more
        query_tile = min(settled.query_tile, -(-length_q // LANES) * LANES)
        key_tile = min(settled.key_tile, -(-length_k // LANES) * LANES)
        return Sizes(batch, heads, groups, length_q, length_k, query_tile, key_tile)

    def tiles(self, query: jax.Array, key: jax.Array, algebra: AttentionSpec) -> dict[str, int]:
        """The tile sizes it would take for these arrays."""
        sizes = self.sizes(query, key)
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
        """See `tiled.driver.Driver`."""
        sizes, dtype = self.sizes(query, key), query.dtype
        length_q, length_k = sizes.padded
        query, key, value, algebra = widened((query, key, value, algebra))
        arrays = kernel_tiles.zero_unattended(query, key, value, algebra, sizes)
        q, k, v = (sizes.head_first(x, n) for x, n in zip(arrays, (length_q, length_k, length_k), strict=True))
        algebra = sizes.pad_algebra(algebra)
        seen = kernel_tiles.schedule_tiles(algebra, sizes, keys=True)
        operands = Operands(sizes, algebra)
        names = ("lse", *(name for name in statistics if name != "lse"))

        def place(b: Any, h: Any, i: Any, step: Any, first: Any, count: Any) -> tuple[Any, Any, Any, Any]:
            return b, h, i, visited(first[b, h, i], count[b, h, i], step)

        spec = Blocks(sizes, place)
        rows = spec.rows()
        start = jax.eval_shape(lambda: tile.softmax_start((sizes.query_tile, 1), jnp.float32, statistics))
        width = v.shape[-1]
        kernel = _Forward(sizes, operands, statistics, dot(precision))
        output, found = pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(sizes.batch, sizes.heads, sizes.tiles_q, sizes.tiles_k),
                in_specs=[spec.queries(q), spec.keys(k), spec.keys(v), operands.specs(place), spec.kinds(seen)],
                out_specs=(spec.queries(v), {name: rows for name in names}),
                scratch_shapes=[
                    jax.tree.map(lambda row: pltpu.VMEM(row.shape, row.dtype), start),
                    pltpu.VMEM((sizes.query_tile, width), jnp.float32),
                ],
            ),
            out_shape=(
                kernel_tiles.shaped((sizes.batch, sizes.heads, length_q, width), query.dtype, q),
                {name: kernel_tiles.shaped((sizes.batch, sizes.heads, 1, length_q), jnp.float32, q) for name in names},
            ),
            compiler_params=compiler_params(3, 4),
            interpret=self.interpret,
            name="attention_forward",
        )(seen.first, seen.steps, q, k, v, operands.arrays, seen.kinds)
        rows_of = {name: row.swapaxes(2, 3)[:, :, : sizes.length_q] for name, row in found.items()}
        return output[:, :, : sizes.length_q].swapaxes(1, 2).astype(dtype), rows_of

    @in_32_bits
    def backward(self, task: Backward) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]:
        """See `tiled.driver.Driver`."""
        return pallas_tpu_backward.backward(self, task)


@dataclasses.dataclass(frozen=True)
class _Forward:
    """The kernel of the forward pass; one call is one step of the grid."""

    sizes: Sizes
    operands: Operands
    statistics: tuple[str, ...]
    dot: Callable[..., jax.Array]

    def __call__(
        self,
        first: Any,
        count: Any,
        query: Any,
        key: Any,
        value: Any,
        leaves: Any,
        kinds: Any,
        output: Any,
        rows: Any,
        *scratch: Any,
    ) -> None:
        state, acc = scratch
        b, h, i, step = (pl.program_id(axis) for axis in range(4))
        algebra = self.operands.read(leaves, b, h)

        @pl.when(step == 0)
        def _() -> None:
            start = tile.softmax_start((self.sizes.query_tile, 1), jnp.float32, self.statistics)
            jax.tree.map(_write, state, start)
            acc[...] = jnp.zeros_like(acc)

        def work(at: Tile, simplify: Callable[[AttentionSpec], AttentionSpec]) -> None:
            part = simplify(algebra)
            scores = tile.tile_scores(self.dot(query[0, 0], key[0, 0], (1, 1)), at, part)
            old = jax.tree.map(lambda ref: ref[...], state)
            new, weights, alpha = tile.softmax_update(old, scores, at)
            weights = tile.apply_dropout(weights, at, part).astype(value.dtype)
            jax.tree.map(_write, state, new)
            acc[...] = acc[...] * alpha + self.dot(weights, value[0, 0], (1, 0))

        j = visited(first[b, h, i], count[b, h, i], step)
        self.operands.each_kind(step < count[b, h, i], self.operands.at(algebra, i, j), algebra, kinds, j, work)

        @pl.when(step == self.sizes.tiles_k - 1)
        def _() -> None:
            final = jax.tree.map(lambda ref: ref[...], state)
            attended, results = tile.softmax_finish(final, acc[...], algebra, self.statistics)
            output[0, 0] = attended.astype(output.dtype)
            for name, row in rows.items():
                row[0, 0] = to_row(results[name])


def _write(ref: Any, value: Any) -> None:
    ref[...] = value
