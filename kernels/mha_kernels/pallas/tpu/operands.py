"""What the TPU kernels share: their blocks, the operands of an algebra inside them, products, and what the compiler is
told.

Scalars and tables lie in SMEM; what belongs to rows is stored along lanes, (1, Q), and turned inside, because an array
(Q, 1) takes 128 times its size in the memory of a TPU.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mha_kernels import tuned
from mha_kernels.algebra.operands import Tile
from mha_kernels.algebra.spec import AttentionSpec, running, simplest
from mha_kernels.pallas import kernel_tiles
from mha_kernels.pallas.kernel_tiles import Table, TileSchedule, form
from mha_kernels.tiled.sizes import Sizes

LANES = 128
# Bytes of vector memory of a core, by what the device calls itself (public figures); other chips decline.
VMEM = {
    **dict.fromkeys(("TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v6e"), 128 * 2**20),
    **dict.fromkeys(("TPU v5", "TPU v5p", "TPU7x"), 64 * 2**20),
    "TPU v4": 16 * 2**20,
}
HOST = 64 * 2**20  # what interpreters are told to have


def vmem() -> int:
    """Bytes of vector memory of a core of the device that is compiled for."""
    return VMEM.get(tuned.device_kind(), HOST)


def widened(arrays: Any) -> Any:
    """float16 as float32, which holds it exactly: the compiler for kernels does not know float16."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.float16 else leaf, arrays)


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

    def kinds(self, seen: TileSchedule) -> pl.BlockSpec | None:
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

    def __init__(self, sizes: Sizes, algebra: AttentionSpec) -> None:
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

    def read(self, refs: list, b: Any, h: Any) -> AttentionSpec:
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

    def at(self, algebra: AttentionSpec, i: Any, j: Any) -> Tile:
        """Positions of tile (i, j)."""
        sizes, place = self.sizes, algebra.positions
        first_q, first_k = place.query + i * sizes.query_tile, place.key + j * sizes.key_tile
        query = first_q + lax.broadcasted_iota(jnp.int32, (sizes.query_tile, 1), 0)
        key = first_k + lax.broadcasted_iota(jnp.int32, (1, sizes.key_tile), 1)
        spans = (first_q, first_q + sizes.query_tile - 1), (first_k, first_k + sizes.key_tile - 1)
        end = None if sizes.padded[1] == sizes.length_k else place.key + sizes.length_k
        return Tile(place.batch, place.head, query, key, *spans, kernel_tiles.lookup, end)

    def each_kind(
        self, active: Any, at: Tile, algebra: AttentionSpec, kinds: Any, j: Any, work: Callable[..., None]
    ) -> None:
        """work(at, simplify) where the step is active and its tile not empty, in the form that its kind needs."""
        some, plain = kernel_tiles.kind_of(at, algebra, None if kinds is None else kinds[0, 0, 0, 0, j])
        active = active & some
        if plain is not False:
            pl.when(active & plain)(lambda: work(at._replace(end=None), simplest))
        if plain is not True:
            pl.when(active & jnp.logical_not(plain))(lambda: work(at, running))
