"""The sizes of a problem and of its tiles, which every driver shares."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mha_kernels.algebra.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a problem and of its tiles; padded lengths are whole tiles."""

    batch: int
    heads: int
    groups: int
    length_q: int
    length_k: int
    query_tile: int
    key_tile: int

    @property
    def tiles_q(self) -> int:
        return -(-self.length_q // self.query_tile)

    @property
    def tiles_k(self) -> int:
        return -(-self.length_k // self.key_tile)

    @property
    def padded(self) -> tuple[int, int]:
        """Query and key length in whole tiles."""
        return self.tiles_q * self.query_tile, self.tiles_k * self.key_tile

    @property
    def repeats(self) -> int:
        """Query heads that share a key/value head."""
        return self.heads // self.groups

    def head_first(self, array: jax.Array, length: int, fill: float = 0) -> jax.Array:
        """(B, L, n, ...) to (B, n, length, ...), padded."""
        return pad(array.swapaxes(1, 2), {2: length}, fill)

    def row(self, leaf: jax.Array, batch: Any) -> Any:
        """Which row of a leaf with R rows example `batch` reads."""
        return batch * leaf.shape[0] // self.batch if leaf.shape[0] > 1 else 0

    def pad_algebra(self, algebra: AttentionSpec) -> AttentionSpec:
        """The algebra with its per-query and per-key arrays padded to whole tiles."""
        length_q, length_k = self.padded

        def whole(leaf: jax.Array) -> jax.Array:
            grown = {axis: n for axis, n in ((2, length_q), (3, length_k)) if leaf.shape[axis] > 1}
            return pad(leaf, grown)

        return jax.tree.map(whole, algebra)


def pad(array: jax.Array, lengths: dict[int, int], fill: float = 0) -> jax.Array:
    """The array grown at the end of some axes to the given lengths."""
    widths = [(0, lengths.get(axis, size) - size) for axis, size in enumerate(array.shape)]
    return array if all(width == (0, 0) for width in widths) else jnp.pad(array, widths, constant_values=fill)
