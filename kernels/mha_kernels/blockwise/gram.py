"""How alike heads attend: inner products of attention maps, without the maps."""

from typing import Any

import jax
import jax.numpy as jnp

from mha_kernels.algebra import tile
from mha_kernels.algebra.operands import Tile
from mha_kernels.algebra.spec import AttentionSpec, accumulation_dtype
from mha_kernels.blockwise.driver import Blockwise, zero_unattended
from mha_kernels.blockwise.grid import Programs, choose, loop
from mha_kernels.tiled.transforms import run

TILE = 256


@jax.jit
def gram(query: jax.Array, key: jax.Array, algebra: AttentionSpec) -> jax.Array:
    """sum_ij p_a(i, j) p_b(i, j), (B, H, H), by two passes over tiles: log-sum-exp first, then the products."""
    dtype = accumulation_dtype(query, key)
    _, statistics = run(Blockwise(), query, key, jnp.zeros_like(key[..., :1]), algebra, ("lse",), None)
    grid = choose(Blockwise(TILE, TILE), query, key, programs=query.shape[2])
    assert statistics.lse is not None
    lse = grid.fold(statistics.lse[..., None], grid.padded[0], jnp.inf)
    queries, keys = grid.fold(query.swapaxes(1, 2), grid.padded[0]), grid.fold(key.swapaxes(1, 2), grid.padded[1])
    algebra = grid.pad_algebra(algebra)

    def example(programs: Programs, result: jax.Array) -> jax.Array:
        query, key, rows = (
            programs.rows(queries).astype(dtype),
            programs.shared_rows(keys).astype(dtype),
            programs.rows(lse),
        )

        def query_tile(i: Any, total: jax.Array) -> jax.Array:
            def key_tile(j: Any, total: jax.Array) -> jax.Array:
                def work(at: Tile, part: AttentionSpec, simplify: Any, total: jax.Array) -> jax.Array:
                    queries, keys, _ = zero_unattended(
                        grid.rows_q(query, i), grid.rows_k(key, j), grid.rows_k(key, j), at, simplify(part)
                    )
                    product = jnp.einsum("pqe,pke->pqk", queries, keys)
                    weights = tile.normalize(tile.tile_scores(product, at, simplify(part)), grid.rows_q(rows, i))
                    return total + jnp.einsum("aqk,bqk->ab", weights, weights)

                return grid.visit(algebra, programs, i, j, work, total)

            return loop(*grid.key_range(algebra, programs, i), key_tile, total)

        total = loop(0, grid.tiles_q, query_tile, grid.full((grid.heads, grid.heads), 0, dtype))
        return jax.lax.dynamic_update_slice_in_dim(result, total[None], programs.batch()[0], axis=0)

    return grid.for_each_block(algebra, example, grid.full((grid.batch, grid.heads, grid.heads), 0, dtype))
