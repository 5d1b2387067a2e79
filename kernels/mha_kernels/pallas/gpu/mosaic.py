"""How a block of a Hopper GPU works: shared memory, tensor-core products, and the walk over tiles. No mathematics.

A block has three warpgroups: one brings tiles by TMA into a ring of shared-memory buffers, two compute, each on its own
64 rows, with `wgmma` for products and everything between them in registers.
"""

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mha_kernels.pallas.gpu.registers import Orientation

plgpu: Any = None
with contextlib.suppress(ImportError):  # a jaxlib without it: `PallasGPU.unsupported_reason` says so
    plgpu = importlib.import_module("jax.experimental.pallas.mosaic_gpu")

COMPUTE = 2  # computing warpgroups of a block
WARPGROUP_ROWS = 64  # rows of one wgmma
BLOCK = COMPUTE * WARPGROUP_ROWS  # rows a block keeps
SHARED_MEMORY = 227 * 1024  # bytes a block may use
LOADING_REGISTERS = 24  # the fewest a warpgroup can have: 240 are left for a thread that computes


def call(kernel: Any, interpret: Any, out: Any, tiles: tuple[int, int, int], scratch: Any) -> Callable[..., Any]:
    """`plgpu.kernel` over pytrees, on a grid of (heads, tiles, batch)."""
    shapes, structure = jax.tree.flatten(out)

    def flat(*arguments: Any) -> Any:
        leaves, inputs = jax.tree.flatten(arguments)

        def body(*refs: Any, scratch: Any) -> None:
            given = jax.tree.unflatten(inputs, refs[: len(leaves)])
            kernel(*given, *jax.tree.unflatten(structure, refs[len(leaves) :]), scratch)

        results = plgpu.kernel(
            body,
            out_type=shapes,
            scratch_types={"scratch": scratch},
            grid=tiles,
            grid_names=("heads", "tiles", "batch"),
            num_threads=COMPUTE + 1,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=interpret,
        )(*leaves)
        return jax.tree.unflatten(structure, results)

    return flat


def program() -> tuple[Any, Any, Any, Any]:
    """Example, head and tile of the block, and which warpgroup this is."""
    b, h, t, mine = (lax.axis_index(name) for name in ("batch", "heads", "tiles", "warpgroup"))
    return b, h, t, mine


def _for_products(rows: int) -> tuple[Any, Any]:
    """How 16-bit matrices lie in shared memory for products that sum over as few as `rows` of their rows."""
    chunk = min(rows, 64)
    return plgpu.TilingTransform((8, chunk)), plgpu.SwizzleTransform(2 * chunk)


def shared(shape: tuple[int, ...], dtype: Any, rows: int) -> Any:
    """A buffer in shared memory whose last two axes are a factor of products with tiles of `rows` rows."""
    return plgpu.SMEM(shape, dtype, transforms=_for_products(rows))


def pipelined_loop(
    arrays: list, first: Any, count: Any, rows: int, stages: int, step: Callable[..., Any], context: Callable[..., None]
) -> None:
    """Brings blocks first, ..., first + count - 1, of `rows` rows each, of all `arrays` (L, width).

    Computing warpgroups run context(visit), and visit(carry) folds step(block number, blocks, carry) over the blocks.
    """
    spec = plgpu.BlockSpec((rows, arrays[0].shape[-1]), lambda n: (first + n, 0), transforms=_for_products(rows))

    def body(indices: Any, *given: Any) -> Any:
        *blocks, carry = given
        return step(first + indices[0], blocks, carry)

    plgpu.emit_pipeline_warp_specialized(
        body,
        grid=(count,),
        in_specs=[spec] * len(arrays),
        max_concurrent_steps=stages,
        num_compute_wgs=COMPUTE,
        memory_registers=LOADING_REGISTERS,
        wg_axis="warpgroup",
        compute_context=context,
    )(*arrays)


def product(a: Any, b: Any, shape: tuple[int, ...]) -> jax.Array:
    """a b in registers, both in shared memory."""

    def multiply(accumulator: Any) -> jax.Array:
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


def accumulate(acc: jax.Array, a: jax.Array, b: Any, staging: Any) -> jax.Array:
    """summed + a b with `a` in registers.

    The interpreter knows neither accumulators that start from a value nor factors in registers; with `staging`, a
    buffer for `a`, the same sum is made of what it knows.
    """
    if staging is None:
        return pl.run_state(lambda accumulator: plgpu.wgmma(accumulator, a, b))(plgpu.ACC.init(acc))
    staging[...] = a
    plgpu.commit_smem()
    return acc + product(staging, b, acc.shape)


def zeros(width: int) -> jax.Array:
    """An accumulator of a warpgroup's rows."""
    return plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, width), jnp.float32), plgpu.Layout.WGMMA)


def oriented(query_tile: int, key_tile: int, key_first: bool = False) -> Orientation:
    """Tiles in the layout of a tensor-core product, rows and columns in those that its reductions have."""

    def layout(array: Any, letters: tuple[str, ...]) -> Any:
        return plgpu.layout_cast(array, plgpu.Layout.WGMMA if len(letters) == 2 else layout_of(orientation, letters[0]))

    orientation = Orientation(query_tile, key_tile, layout, key_first)
    return orientation


def layout_of(orientation: Orientation, letter: str) -> Any:
    """The register layout of a vector along queries, "q", or along keys, "k"."""
    return plgpu.Layout.WGMMA.reduce(1 - orientation.order(("q", "k")).index(letter))


def load(ref: Any, layout: Any) -> jax.Array:
    """What lies at `ref`, in registers."""
    return plgpu.load(ref, layout=layout, optimized=False)
