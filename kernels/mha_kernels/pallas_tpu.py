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
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mha_kernels import kernel_tiles, tile, tuned
from mha_kernels.algebra import Algebra, running, simplest
from mha_kernels.driver import Backward, in_32_bits
from mha_kernels.kernel_tiles import Table, Visits, form
from mha_kernels.operands import Tile
from mha_kernels.sizes import Sizes

LANES = 128
# Bytes of vector memory of a core, by what the device calls itself (public figures); other chips decline.
VMEM = {
    **dict.fromkeys(("TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v6e"), 128 * 2**20),
    **dict.fromkeys(("TPU v5", "TPU v5p", "TPU7x"), 64 * 2**20),
    "TPU v4": 16 * 2**20,
}
HOST = 64 * 2**20  # what interpreters are told to have


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

    def declines(self, query: Any, key: Any, value: Any, algebra: Algebra, statistics: tuple[str, ...]) -> str | None:
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

    def tiles(self, query: Any, key: Any, algebra: Algebra) -> dict[str, int]:
        """The tile sizes it would take for these arrays."""
        sizes = self.sizes(query, key)
        return {"query_tile": sizes.query_tile, "key_tile": sizes.key_tile}

    @in_32_bits
    def forward(
        self, query: Any, key: Any, value: Any, algebra: Algebra, statistics: tuple[str, ...], precision: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """See `driver.Driver`."""
        sizes, dtype = self.sizes(query, key), query.dtype
        length_q, length_k = sizes.padded
        query, key, value, algebra = widened((query, key, value, algebra))
        arrays = kernel_tiles.clean(query, key, value, algebra, sizes)
        q, k, v = (sizes.head_first(x, n) for x, n in zip(arrays, (length_q, length_k, length_k), strict=True))
        algebra = sizes.pad_algebra(algebra)
        seen = kernel_tiles.visits(algebra, sizes, keys=True)
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
                shaped((sizes.batch, sizes.heads, length_q, width), query.dtype, q),
                {name: shaped((sizes.batch, sizes.heads, 1, length_q), jnp.float32, q) for name in names},
            ),
            compiler_params=compiler_params(3, 4),
            interpret=self.interpret,
            name="attention_forward",
        )(seen.first, seen.steps, q, k, v, operands.arrays, seen.kinds)
        rows_of = {name: row.swapaxes(2, 3)[:, :, : sizes.length_q] for name, row in found.items()}
        return output[:, :, : sizes.length_q].swapaxes(1, 2).astype(dtype), rows_of

    @in_32_bits
    def backward(self, task: Backward) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]:
        """See `driver.Driver`."""
        from mha_kernels import pallas_tpu_backward

        return pallas_tpu_backward.backward(self, task)


def vmem() -> int:
    """Bytes of vector memory of a core of the device that is compiled for."""
    return VMEM.get(tuned.device_kind(), HOST)


def widened(arrays: Any) -> Any:
    """float16 as float32, which holds it exactly: the compiler for kernels does not know float16."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.float16 else leaf, arrays)


def shaped(shape: tuple[int, ...], dtype: Any, like: Any) -> jax.ShapeDtypeStruct:
    """The type of a result, varying over the same mesh axes as `like`."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).mat)


def compiler_params(parallel: int, axes: int) -> Any:
    """The first `parallel` axes of the grid may be shared among cores; the others run in order."""
    semantics: Any = ("parallel",) * parallel + ("arbitrary",) * (axes - parallel)
    # The default limit is a fraction of what there is; some is left to the compiler.
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=vmem() * 3 // 4)


def dot(precision: Any) -> Callable[..., jax.Array]:
    """dot(a, b, contract): the product of two matrices summed over one axis of each, accumulated in float32."""
    if precision in (lax.Precision.HIGH, "high"):
        precision = lax.Precision.HIGHEST  # the nearest that the compiler for kernels knows

    def product(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
        axes = (((contract[0],), (contract[1],)), ((), ()))
        # Three passes over bfloat16 parts have no meaning for factors that are bfloat16 already.
        chosen = None if a.dtype == jnp.bfloat16 else precision
        return lax.dot_general(a, b, axes, precision=chosen, preferred_element_type=jnp.float32)

    return product


def visited(first: Any, count: Any, step: Any) -> Any:
    """The tile that a step brings; beyond the range the last one again, which is not fetched twice."""
    return first + jnp.minimum(step, jnp.maximum(count - 1, 0))


def to_row(column: jax.Array) -> jax.Array:
    """(n, 1) to (1, n), by way of the transpose unit."""
    return jnp.broadcast_to(column, (column.shape[0], LANES)).T[:1]


def to_column(row: jax.Array) -> jax.Array:
    """(1, n) to (n, 1)."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]


class Blocks:
    """Block specs of the arrays, from `place`: grid indices and prefetched scalars to (batch, head, query tile, key
    tile).
    """

    def __init__(self, sizes: Sizes, place: Callable[..., tuple[Any, Any, Any, Any]]) -> None:
        self.sizes, self.place = sizes, place

    def queries(self, array: jax.Array) -> pl.BlockSpec:
        """Of an array (B, H, Q, width)."""
        return self._spec((self.sizes.query_tile, array.shape[-1]), lambda b, h, i, j: (b, h, i, 0))

    def keys(self, array: jax.Array) -> pl.BlockSpec:
        """Of an array (B, G, K, width)."""
        repeats = self.sizes.repeats
        return self._spec((self.sizes.key_tile, array.shape[-1]), lambda b, h, i, j: (b, h // repeats, j, 0))

    def rows(self) -> pl.BlockSpec:
        """Of rows (B, H, 1, Q)."""
        return self._spec((1, self.sizes.query_tile), lambda b, h, i, j: (b, h, 0, i))

    def columns(self) -> pl.BlockSpec:
        """Of columns (B, H, 1, K)."""
        return self._spec((1, self.sizes.key_tile), lambda b, h, i, j: (b, h, 0, j))

    def kinds(self, seen: Visits) -> pl.BlockSpec | None:
        """Of the kinds of tiles (R, H, tiles of queries, 1, tiles of keys), one row of them a tile of queries, in
        SMEM.
        """
        if seen.kinds is None:
            return None
        _, heads, _, _, tiles_k = seen.kinds.shape

        def index(*ids: Any) -> tuple[Any, ...]:
            b, h, i, _ = self.place(*ids)
            return self.sizes.row(seen.kinds, b), h if heads > 1 else 0, i, 0, 0

        return pl.BlockSpec((1, 1, 1, 1, tiles_k), index, memory_space=pltpu.SMEM)

    def _spec(self, block: tuple[int, int], index: Callable[..., tuple]) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, *block), lambda *ids: index(*self.place(*ids)))


class Operands:
    """The leaves of an algebra as a TPU kernel takes them: arrays outside, block specs, and the values of one tile
    inside.
    """

    def __init__(self, sizes: Sizes, algebra: Algebra) -> None:
        self.sizes = sizes
        self.leaves, self.structure = jax.tree.flatten(algebra)
        self.forms = [form(leaf) for leaf in self.leaves]
        self.arrays = [self._array(leaf, kind) for leaf, kind in zip(self.leaves, self.forms, strict=True)]

    @staticmethod
    def _array(leaf: jax.Array, kind: str) -> jax.Array:
        if leaf.dtype == jnp.bool_:
            leaf = leaf.astype(jnp.int8 if kind == "full" else jnp.int32)
        if kind in ("scalar", "table"):
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                leaf = leaf.astype(jnp.float32)  # SMEM holds 32-bit words
            return leaf.reshape(leaf.shape[0], -1)
        return leaf.swapaxes(2, 3) if kind == "row" else leaf

    def specs(self, place: Callable[..., tuple[Any, Any, Any, Any]]) -> list[pl.BlockSpec]:
        return [self.spec(leaf, place) for leaf in range(len(self.leaves))]

    def spec(self, which: int, place: Callable[..., tuple[Any, Any, Any, Any]]) -> pl.BlockSpec:
        leaf, kind = self.leaves[which], self.forms[which]
        if kind in ("scalar", "table"):
            return pl.BlockSpec(memory_space=pltpu.SMEM)
        tiles = {"row": (1, self.sizes.query_tile), "column": (1, self.sizes.key_tile)}
        block = tiles.get(kind, (self.sizes.query_tile, self.sizes.key_tile))

        def index(*ids: Any) -> tuple[Any, ...]:
            b, h, i, j = place(*ids)
            where = {"row": (0, i), "column": (0, j)}.get(kind, (i, j))
            return self.sizes.row(leaf, b), h if leaf.shape[1] > 1 else 0, *where

        return pl.BlockSpec((1, 1, *block), index)

    def read(self, refs: list, b: Any, h: Any) -> Algebra:
        """The algebra on the tile whose blocks `refs` hold."""
        values = [self._value(n, ref, b, h) for n, ref in enumerate(refs)]
        return jax.tree.unflatten(self.structure, values)

    def _value(self, which: int, ref: Any, b: Any, h: Any) -> Any:
        leaf, kind = self.leaves[which], self.forms[which]
        row, head = self.sizes.row(leaf, b), h if leaf.shape[1] > 1 else 0
        if kind == "table":
            count = leaf.shape[-1]
            return Table(lambda entry: ref[row, head * count + entry], count, ref.dtype)
        value = ref[row, head] if kind == "scalar" else ref[0, 0]
        if leaf.dtype == jnp.bool_:
            value = value.astype(jnp.int32) != 0
        return to_column(value) if kind == "row" else value

    def at(self, algebra: Algebra, i: Any, j: Any) -> Tile:
        """Positions of tile (i, j)."""
        sizes, place = self.sizes, algebra.positions
        first_q, first_k = place.query + i * sizes.query_tile, place.key + j * sizes.key_tile
        query = first_q + lax.broadcasted_iota(jnp.int32, (sizes.query_tile, 1), 0)
        key = first_k + lax.broadcasted_iota(jnp.int32, (1, sizes.key_tile), 1)
        spans = (first_q, first_q + sizes.query_tile - 1), (first_k, first_k + sizes.key_tile - 1)
        end = None if sizes.padded[1] == sizes.length_k else place.key + sizes.length_k
        return Tile(place.batch, place.head, query, key, *spans, kernel_tiles.lookup, end)

    def each_kind(self, active: Any, at: Tile, algebra: Algebra, kinds: Any, j: Any, work: Callable[..., None]) -> None:
        """work(at, simplify) where the step is active and its tile not empty, in the form that its kind needs."""
        some, plain = kernel_tiles.kind_of(at, algebra, None if kinds is None else kinds[0, 0, 0, 0, j])
        active = active & some
        if plain is not False:
            pl.when(active & plain)(lambda: work(at._replace(end=None), simplest))
        if plain is not True:
            pl.when(active & jnp.logical_not(plain))(lambda: work(at, running))


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
        state, summed = scratch
        b, h, i, step = (pl.program_id(axis) for axis in range(4))
        algebra = self.operands.read(leaves, b, h)

        @pl.when(step == 0)
        def _() -> None:
            start = tile.softmax_start((self.sizes.query_tile, 1), jnp.float32, self.statistics)
            jax.tree.map(_write, state, start)
            summed[...] = jnp.zeros_like(summed)

        def work(at: Tile, simplify: Callable[[Algebra], Algebra]) -> None:
            part = simplify(algebra)
            scores = tile.tile_scores(self.dot(query[0, 0], key[0, 0], (1, 1)), at, part)
            old = jax.tree.map(lambda ref: ref[...], state)
            new, weights, decay = tile.softmax_update(old, scores, at)
            weights = tile.dropped(weights, at, part).astype(value.dtype)
            jax.tree.map(_write, state, new)
            summed[...] = summed[...] * decay + self.dot(weights, value[0, 0], (1, 0))

        j = visited(first[b, h, i], count[b, h, i], step)
        self.operands.each_kind(step < count[b, h, i], self.operands.at(algebra, i, j), algebra, kinds, j, work)

        @pl.when(step == self.sizes.tiles_k - 1)
        def _() -> None:
            final = jax.tree.map(lambda ref: ref[...], state)
            attended, results = tile.softmax_finish(final, summed[...], algebra, self.statistics)
            output[0, 0] = attended.astype(output.dtype)
            for name, row in rows.items():
                row[0, 0] = to_row(results[name])


def _write(ref: Any, value: Any) -> None:
    ref[...] = value
