"""Attention over tiles in pure JAX: O(L) memory forward and backward, empty tiles skipped. The path for CPUs.

For each block of (b, h) programs and each tile of queries, over the tiles of keys: one matrix product, the tile
functions, one more product. The backward pass recomputes the scores and visits the same tiles with keys outside, so
that the gradients of a tile of keys and values are summed where they are made. Loops run one after the other; matrix
products and elementwise work use the cores. Every sum has a fixed order, so results are bitwise repeatable.

It has grad and jvp of grad (Hessian-vector products), both in O(L) memory; for jvp alone or grad of grad use
"reference".
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mha_kernels.algebra import tile
from mha_kernels.algebra.operands import Tile
from mha_kernels.algebra.spec import AttentionSpec, accumulation_dtype, partition
from mha_kernels.blockwise.grid import Grid, Programs, choose, loop
from mha_kernels.tiled.driver import Backward
from mha_kernels.tiled.relative import to_toeplitz


@dataclasses.dataclass(frozen=True)
class Blockwise:
    """Tile sizes of the blockwise implementation; None takes the rule of `grid.choose`.

    Raises:
        ValueError: a tile size is not a positive integer.
    """

    query_tile: int | None = None
    key_tile: int | None = None

    def __post_init__(self) -> None:
        for name, size in dataclasses.asdict(self).items():
            if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                raise ValueError(f"Blockwise {name} is {size!r}; expected a positive integer or None")

    def unsupported_reason(
        self, query: jax.Array, key: jax.Array, value: jax.Array, algebra: AttentionSpec, statistics: tuple[str, ...]
    ) -> str | None:
        """It can do everything."""
        return None

    def tiles(self, query: jax.Array, key: jax.Array, algebra: AttentionSpec) -> dict[str, int]:
        """The sizes that `grid.choose` settles on."""
        grid = choose(self, query, key, algebra.mask)
        return {"query_tile": grid.query_tile, "key_tile": grid.key_tile, "programs": grid.programs}

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
        grid = choose(self, query, key, algebra.mask)
        dtype = accumulation_dtype(query, key, value)
        arrays = _by_head(grid, query, key, value)
        algebra, *_ = to_toeplitz(algebra, (False,) * len(jax.tree.leaves(algebra)), grid, dtype)
        algebra = grid.pad_algebra(algebra)
        names = ("lse", *(name for name in statistics if name != "lse"))
        shape = (grid.batch * grid.heads, grid.padded[0])
        output = grid.full((*shape, value.shape[-1]), 0, query.dtype)
        rows = {name: grid.full((*shape, 1), 0, dtype) for name in names}

        def block(programs: Programs, results: Any) -> Any:
            return _forward_block(grid, programs, arrays, algebra, statistics, dtype, precision, results)

        output, rows = grid.for_each_block(algebra, block, (output, rows))
        rows = {name: grid.unfold(row, grid.length_q) for name, row in rows.items()}
        return grid.unfold(output, grid.length_q).swapaxes(1, 2), rows

    def backward(self, task: Backward) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]:
        """See `tiled.driver.Driver`."""
        query, key, value, algebra, wanted = task.query, task.key, task.value, task.algebra, task.wanted
        grid = choose(self, query, key, algebra.mask)
        dtype = accumulation_dtype(query, key, value)
        arrays = _by_head(grid, query, key, value)
        algebra, wanted, pull_back = to_toeplitz(algebra, wanted, grid, dtype)
        leaves, _ = partition(algebra, wanted)
        algebra = grid.pad_algebra(algebra)
        # Padded rows of lse are +inf: their probabilities are exactly zero.
        rows = (
            grid.fold(task.output_cotangent.swapaxes(1, 2), grid.padded[0]),
            grid.fold(task.lse, grid.padded[0], jnp.inf),
            grid.fold(task.delta, grid.padded[0]),
            {name: grid.fold(cotangent, grid.padded[0]) for name, cotangent in task.cotangents.items()},
        )
        zeros = (
            [grid.full(array.shape, 0, dtype) for array in arrays],
            [grid.full(leaf.shape, 0, dtype) for leaf in partition(algebra, wanted)[0]],
        )

        def block(programs: Programs, gradients: Any) -> Any:
            return _backward_block(grid, programs, arrays, rows, algebra, wanted, dtype, task.precision, gradients)

        found, of_leaves = grid.for_each_block(algebra, block, zeros)
        lengths = (grid.length_q, grid.length_k, grid.length_k)
        dq, dk, dv = (
            grid.unfold(gradient, length).swapaxes(1, 2).astype(array.dtype)
            for gradient, length, array in zip(found, lengths, (query, key, value), strict=True)
        )
        cut = [lax.slice(new, (0,) * new.ndim, leaf.shape) for new, leaf in zip(of_leaves, leaves, strict=True)]
        return dq, dk, dv, pull_back([new.astype(leaf.dtype) for new, leaf in zip(cut, leaves, strict=True)])


def _by_head(grid: Grid, query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays (B, L, n, ...) as (B n, padded length, ...)."""
    lengths = (grid.padded[0], grid.padded[1], grid.padded[1])
    return tuple(grid.fold(x.swapaxes(1, 2), n) for x, n in zip((query, key, value), lengths, strict=True))


def _forward_block(
    grid: Grid,
    programs: Programs,
    arrays: Any,
    algebra: AttentionSpec,
    statistics: tuple[str, ...],
    dtype: Any,
    precision: Any,
    results: Any,
) -> Any:
    """Output and rows of one block of programs, written into `results`."""
    queries, keys, values = programs.load(arrays, dtype)
    queries, algebra = tile.scale_query(queries, grid.part(algebra, programs, 0, 0)), tile.unscaled(algebra)

    def query_tile(i: Any, results: Any) -> Any:
        query = grid.rows_q(queries, i)

        def key_tile(j: Any, carry: Any) -> Any:
            key, value = grid.rows_k(keys, j), grid.rows_k(values, j)

            def work(at: Tile, part: AttentionSpec, simplify: Any, carry: Any) -> Any:
                return _forward_tile(query, key, value, at, simplify(part), precision, carry)

            return grid.visit(algebra, programs, i, j, work, carry)

        rows = (*query.shape[:-1], 1)
        start = tile.softmax_start(rows, dtype, statistics), jnp.zeros((*rows[:-1], values.shape[-1]), dtype)
        state, acc = loop(*grid.key_range(algebra, programs, i), key_tile, jax.tree.map(grid.mark_varying, start))
        attended, found = tile.softmax_finish(state, acc, grid.part(algebra, programs, i, 0), statistics)
        kept = {name: found[name] for name in results[1]}
        return programs.store(results, (attended, kept), i * grid.query_tile)

    return loop(0, grid.tiles_q, query_tile, results)


def _forward_tile(
    query: jax.Array, key: jax.Array, value: jax.Array, at: Tile, algebra: AttentionSpec, precision: Any, carry: Any
) -> tuple[tile.Softmax, jax.Array]:
    """A tile of keys taken into the running softmax and the sum of values."""
    state, acc = carry
    query, key, value = zero_unattended(query, key, value, at, algebra)
    product = jnp.einsum("pqe,pke->pqk", query, key, precision=precision)
    state, weights, alpha = tile.softmax_update(state, tile.tile_scores(product, at, algebra), at)
    weights = tile.apply_dropout(weights, at, algebra)
    return state, acc * alpha + jnp.einsum("pqk,pkv->pqv", weights, value, precision=precision)


def zero_unattended(
    query: jax.Array, key: jax.Array, value: jax.Array, at: Tile, algebra: AttentionSpec
) -> tuple[jax.Array, ...]:
    """The tile's rows with those in no allowed pair set to zero, whatever they hold: 0 * NaN is NaN in a product."""
    queries, keys = tile.attended_rows(at, algebra, (*query.shape[:-1], key.shape[1]))
    if keys is None:
        return query, key, value
    return jnp.where(queries, query, 0), jnp.where(keys, key, 0), jnp.where(keys, value, 0)


def _backward_block(
    grid: Grid,
    programs: Programs,
    arrays: Any,
    rows: Any,
    algebra: AttentionSpec,
    wanted: tuple[bool, ...],
    dtype: Any,
    precision: Any,
    gradients: Any,
) -> Any:
    """Gradients that one block of programs contributes, added into `gradients`."""
    queries, keys, values = programs.load(arrays, dtype)
    rows = jax.tree.map(programs.rows, rows)
    (dq_all, dk_all, dv_all), of_leaves = gradients

    def key_tile(j: Any, carry: Any) -> Any:
        key, value = grid.rows_k(keys, j), grid.rows_k(values, j)

        def query_tile(i: Any, carry: Any) -> Any:
            row = jax.tree.map(lambda array: grid.rows_q(array, i), rows)

            def work(at: Tile, part: AttentionSpec, simplify: Any, carry: Any) -> Any:
                dq, dk, dv, of_leaves = carry
                new_q, new_k, new_v, new = _backward_tile(
                    grid, grid.rows_q(queries, i), key, value, row, at, part, simplify, wanted, precision
                )
                of_leaves = [grid.add_part(leaf, add, programs, i, j) for leaf, add in zip(of_leaves, new, strict=True)]
                return grid.add_rows_q(dq, new_q, i), dk + new_k, dv + new_v, of_leaves

            return grid.visit(algebra, programs, i, j, work, carry)

        dq, dk_all, dv_all, of_leaves = carry
        start = (dq, jnp.zeros_like(key).swapaxes(1, 2), jnp.zeros_like(value).swapaxes(1, 2), of_leaves)
        dq, dk, dv, of_leaves = loop(*grid.query_range(algebra, programs, j), query_tile, start)
        first = j * grid.key_tile
        dk_all, dv_all = (
            programs.add_shared(whole, transposed(new, grid), first) for whole, new in ((dk_all, dk), (dv_all, dv))
        )
        return dq, dk_all, dv_all, of_leaves

    start = (jnp.zeros_like(queries), dk_all, dv_all, of_leaves)
    dq, dk_all, dv_all, of_leaves = loop(0, grid.tiles_k, key_tile, start)
    return [programs.store(dq_all, dq, 0), dk_all, dv_all], of_leaves


def _backward_tile(
    grid: Grid,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    row: Any,
    at: Tile,
    part: AttentionSpec,
    simplify: Any,
    wanted: Any,
    precision: Any,
) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]:
    """What one tile adds to the gradients of its queries, keys and values and of the wanted leaves of the algebra."""
    output_cotangent, *of_rows = row
    query, key, value = zero_unattended(query, key, value, at, simplify(part))
    chosen, rebuild = partition(part, wanted)
    product = jnp.einsum("pqe,pke->pqk", query, key, precision=precision)
    dp = jnp.einsum("pqv,pkv->pqk", output_cotangent, value, precision=precision)
    found = tile.tile_gradients(
        product, dp, tuple(of_rows), at, simplify(part), chosen, lambda leaves: simplify(rebuild(leaves))
    )
    dq = jnp.einsum("pqk,pke->pqe", found.product, key, precision=precision)
    dk = jnp.einsum("peq,pqk->pek", transposed(query, grid), found.product, precision=precision)
    dv = jnp.einsum("pvq,pqk->pvk", transposed(output_cotangent, grid), found.weights, precision=precision)
    return dq, dk, dv, found.leaves


def transposed(rows: jax.Array, grid: Grid) -> jax.Array:
    """(P, n, m) as (P, m, n) in memory, before and after.

    The backward pass sums over queries in two products. XLA's CPU products with a transposed left operand run at half
    speed, so the small operand is transposed instead; the barriers keep XLA from moving that back. Not in a problem of
    one tile: there no loop is left, and after the barriers XLA lays the products out as its own emitter refuses
    ("Check failed: IsMonotonicWithDim0Major", JAX 0.10.2), which ends the process.
    """
    if grid.is_one_tile():
        return rows.swapaxes(1, 2)
    return lax.optimization_barrier(lax.optimization_barrier(rows).swapaxes(1, 2))
