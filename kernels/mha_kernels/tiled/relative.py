"""Relative biases on a CPU: evaluated once for every distance, then laid out tile by tile.

A bias that depends on key - query alone has Q + K - 1 values, not Q K. Each row of a tile is the row above moved by
one entry, so a tile is made of slices of one line; and the gradient of the line sums rows, where that of a table looked
up at every entry would scatter Q K numbers. `to_toeplitz` puts such lines in the place of the biases, and gives the way
back for their gradients. O(Q + K) memory for each head that has a table of its own.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mha_kernels.algebra.biases import Bias, RelativeBias, SumBias, is_steady
from mha_kernels.algebra.operands import Tile, axes, lookup_by_gather
from mha_kernels.algebra.spec import AttentionSpec, Positions, partition
from mha_kernels.tiled.sizes import Sizes


class ToeplitzBias(Bias):
    """values[h, key - query - first]: a relative bias at every distance from `first` on; low, high as in `steady`."""

    values: jax.Array = axes("HN")
    first: jax.Array = axes("", "int")
    low: int | None = None
    high: int | None = None

    def tile(self, at: Tile) -> jax.Array:
        starts = at.key[..., :1] - at.query - self.first
        length = at.key.shape[-1]
        count = max(self.values.shape[0], starts.shape[0])
        lines = jnp.broadcast_to(self.values.reshape(-1, self.values.shape[-1]), (count, self.values.shape[-1]))
        rows = jnp.broadcast_to(starts[..., 0], (count, starts.shape[-2]))
        by_row = jax.vmap(lambda line, start: jax.lax.dynamic_slice_in_dim(line, start, length), in_axes=(None, 0))
        return jax.vmap(by_row)(lines, rows)

    def constant(self, at: Tile) -> Any:
        return is_steady(at, self.low, self.high)


def to_toeplitz(
    algebra: AttentionSpec, wanted: tuple[bool, ...], sizes: Sizes, dtype: Any, arithmetic: bool = False
) -> tuple[AttentionSpec, tuple[bool, ...], Callable[[list], list]]:
    """The algebra with every relative bias as a `ToeplitzBias` of `dtype`, and what that does to its gradients.

    wanted marks the leaves to differentiate. arithmetic: also biases that need no table. Returns the algebra, the
    leaves wanted of it, and the function that takes their gradients to those of the leaves wanted of the one given.
    """

    def is_line(bias: Bias) -> bool:
        return isinstance(bias, RelativeBias) and (arithmetic or not bias.arithmetic)

    if algebra.bias is None or not any(map(is_line, algebra.bias.parts())):
        return algebra, wanted, lambda gradients: gradients
    marked = jax.tree.unflatten(jax.tree.structure(algebra), wanted)
    # Of a line, the values are wanted where any leaf of its bias is.

    def mark(bias: Any) -> ToeplitzBias:
        return ToeplitzBias(any(jax.tree.leaves(bias)), False)  # type: ignore[arg-type]

    marks = tuple(jax.tree.leaves(_with_lines(marked, is_line, mark)))
    chosen, rebuild = partition(algebra, wanted)

    def lines(chosen: list) -> tuple[list, AttentionSpec]:
        new = _with_lines(rebuild(chosen), is_line, lambda bias: _line(bias, algebra.positions, sizes, dtype))
        return partition(new, marks)[0], new

    _, pull_back, new = jax.vjp(lines, chosen, has_aux=True)
    return new, marks, lambda gradients: pull_back(gradients)[0]


def _with_lines(
    algebra: AttentionSpec, is_line: Callable[[Bias], bool], line: Callable[[Any], ToeplitzBias]
) -> AttentionSpec:
    """The algebra with `line` of every part of its bias that is one in that part's place."""
    parts = algebra.bias.parts()  # type: ignore[union-attr]
    new = tuple(line(part) if is_line(part) else part for part in parts)
    return dataclasses.replace(algebra, bias=SumBias(new) if isinstance(algebra.bias, SumBias) else new[0])


def _line(bias: RelativeBias, positions: Positions, sizes: Sizes, dtype: Any) -> ToeplitzBias:
    """The bias at every distance that the padded problem has."""
    length_q, length_k = sizes.padded
    first = positions.key - positions.query - (length_q - 1)
    bias = jax.tree.map(lambda leaf: leaf.astype(dtype), bias)
    distances = first + jnp.arange(length_q + length_k - 1, dtype=jnp.int32).reshape(1, 1, 1, -1)
    values = bias.of_distance(distances, lookup_by_gather)
    return ToeplitzBias(values[:, :, :, None], first, *bias.steady())
