"""Biases: what is added to a score, decided tile by tile from head and positions.

A bias is one method, `tile`, written with arithmetic, comparisons, selects and `at.lookup`, so that the same lines run
in the dense reference, on a CPU tile and inside a Pallas kernel; its gradient is taken through that method on the tile.
`constant` may promise that the bias has one value on a whole tile, which then takes a scalar path.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_kernels.algebra.operands import Lookup, Operand, Tile, axes, joined, known


class Bias(Operand):
    """Base of all biases; join two with ``+``."""

    forbids = False  # True when the bias may hold -inf, which forbids the key

    def tile(self, at: Tile) -> jax.Array:
        """The bias on the tile, broadcastable to it; scores are scale * q.k, softcapped, plus this."""
        raise NotImplementedError

    def constant(self, at: Tile) -> Any:
        """True promises that every entry of the tile has the same bias."""
        return False

    def __add__(self, other: "Bias") -> "Bias":
        if not isinstance(other, Bias):
            raise TypeError(
                f"bias + {type(other).__name__}: expected a Bias on both sides (DenseBias(array) for an array)"
            )
        return SumBias(self.parts() + other.parts())


class SumBias(Bias):
    """The sum of its parts; made by ``+``."""

    biases: tuple[Bias, ...] = joined()

    @property
    def forbids(self) -> bool:  # type: ignore[override]
        return any(bias.forbids for bias in self.biases)

    def parts(self) -> tuple[Any, ...]:
        return self.biases

    def tile(self, at: Tile) -> jax.Array:
        result = self.biases[0].tile(at)
        for bias in self.biases[1:]:
            result = result + bias.tile(at)
        return result

    def constant(self, at: Tile) -> Any:
        result = self.biases[0].constant(at)
        for bias in self.biases[1:]:
            result = result & bias.constant(at)
        return result


class CornerBias(Bias):
    """`inner` where it is constant on every tile it is asked for: evaluated at one entry and broadcast."""

    inner: Bias = joined()

    def tile(self, at: Tile) -> jax.Array:
        return self.inner.tile(at.corner())


class RelativeBias(Bias):
    """Base of biases that depend on key - query alone: write `of_distance`, and `steady` where it stops changing."""

    arithmetic = False  # True where working out an entry costs less than looking it up among those of all distances

    def of_distance(self, distance: jax.Array, lookup: Lookup) -> jax.Array:
        """The bias at integer distances key - query, entry by entry; `lookup` is that of `Tile`."""
        raise NotImplementedError

    def steady(self) -> tuple[int | None, int | None]:
        """(low, high): the bias has one value for all distances <= low, and one for all >= high; None: never."""
        return None, None

    def tile(self, at: Tile) -> jax.Array:
        return self.of_distance(at.key - at.query, at.lookup)

    def constant(self, at: Tile) -> Any:
        return is_steady(at, *self.steady())


def is_steady(at: Tile, low: int | None, high: int | None) -> Any:
    """Whether all distances on the tile are <= low, or all >= high."""
    smallest, largest = at.distance_span()
    result: Any = False
    if low is not None:
        result = result | (largest <= low)
    if high is not None:
        result = result | (smallest >= high)
    return result


class AlibiBias(RelativeBias):
    """-slopes[h] * |i - j| with slopes (H,); Press, Smith and Lewis 2022, "Train short, test long", section 3.

    The paper writes the causal form; |i - j| is the symmetric one that bidirectional attention needs, and equal to it
    under a causal mask. It is added after scaling (the paper's footnote 10).
    """

    slopes: jax.Array = axes("H")
    arithmetic = True

    def of_distance(self, distance: jax.Array, lookup: Lookup) -> jax.Array:
        return -self.slopes * jnp.abs(distance).astype(self.slopes.dtype)


class T5Bias(RelativeBias):
    """table[h, bucket(j - i)] with table (H, buckets); Raffel et al. 2020, section 2.1.

    Half of the buckets (a quarter a side when bidirectional) hold exact distances, the rest grow logarithmically up to
    max_distance, and the last holds everything beyond; see `t5_bucket`.
    """

    table: jax.Array = axes("HN")
    bidirectional: bool = True
    max_distance: int = 128

    def check(self) -> None:
        check_buckets(self.bidirectional, self.table.shape[-1], self.max_distance)

    def of_distance(self, distance: jax.Array, lookup: Lookup) -> jax.Array:
        return lookup(self.table, t5_bucket(distance, self.bidirectional, self.table.shape[-1], self.max_distance))

    def steady(self) -> tuple[int | None, int | None]:
        return -self.max_distance, self.max_distance if self.bidirectional else 0


def t5_bucket(relative_position: Any, bidirectional: bool, num_buckets: int = 32, max_distance: int = 128) -> Any:
    """The T5 bucket of relative_position = key - query, any integer shape, as int32 in [0, num_buckets).

    Distances below half of a side's buckets have a bucket each, then log-spaced up to max_distance. Bidirectional: keys
    ahead use the upper half of the buckets; otherwise keys ahead share bucket 0. The bucket edges are computed on the
    host in float64, so that no device rounds a distance across an edge, and the bucket is a count of edges passed: only
    comparisons, which every accelerator compiles. Raffel et al. 2020 (T5), as in the t5x code.

    Raises:
        ValueError: num_buckets or max_distance is no integer or too small. TypeError: a position is no integer.
    """
    side, exact = check_buckets(bidirectional, num_buckets, max_distance)
    relative_position = known(relative_position, "relative_position")
    if not jnp.issubdtype(relative_position.dtype, jnp.integer):
        raise TypeError(f"relative_position has dtype {relative_position.dtype}; expected integers")
    relative_position = jnp.asarray(relative_position, jnp.int32)
    distance = jnp.abs(relative_position) if bidirectional else jnp.maximum(-relative_position, 0)
    bucket = jnp.minimum(distance, exact)
    for edge in _bucket_edges(side, exact, max_distance):
        bucket = bucket + (distance >= edge).astype(jnp.int32)
    if bidirectional:
        bucket = bucket + side * (relative_position > 0).astype(jnp.int32)
    return bucket


def check_buckets(bidirectional: bool, num_buckets: int, max_distance: int) -> tuple[int, int]:
    """Buckets of a side, and how many of them hold one distance. Raises ValueError: see `t5_bucket`."""
    integers = all(isinstance(n, (int, np.integer)) for n in (num_buckets, max_distance))
    side = 0 if not integers else num_buckets // 2 if bidirectional else num_buckets
    exact = max(side // 2, 0)
    if exact < 1 or max_distance <= exact:
        raise ValueError(
            f"num_buckets {num_buckets!r}, max_distance {max_distance!r}: expected num_buckets >= "
            f"{4 if bidirectional else 2} and max_distance > {exact}, the number of exact buckets, both integers"
        )
    return side, exact


def _bucket_edges(side: int, exact: int, max_distance: int) -> list[int]:
    """The smallest distance of each logarithmic bucket after the first, which starts at `exact`."""
    distances = np.arange(exact, max_distance + 1)
    fraction = np.log(distances / exact + np.finfo(np.float32).eps) / np.log(max_distance / exact)
    buckets = np.minimum(exact + (fraction * (side - exact)).astype(np.int64), side - 1)
    return [int(distances[np.argmax(buckets >= bucket)]) for bucket in range(exact + 1, side)]


class ClippedBias(RelativeBias):
    """table[h, clip(j - i, -k, k) + k] with table (H, 2 k + 1): clipped relative positions, Shaw et al. 2018, eq. 3."""

    table: jax.Array = axes("HN")

    def check(self) -> None:
        if self.table.shape[-1] % 2 == 0:
            raise ValueError(
                f"ClippedBias.table has {self.table.shape[-1]} entries a head; expected an odd number, 2 k + 1"
            )

    def of_distance(self, distance: jax.Array, lookup: Lookup) -> jax.Array:
        clip = self.table.shape[-1] // 2
        return lookup(self.table, jnp.clip(distance, -clip, clip) + clip)

    def steady(self) -> tuple[int | None, int | None]:
        clip = self.table.shape[-1] // 2
        return -clip, clip


class DistanceBias(RelativeBias):
    """table[h, min(|i - j|, N - 1)] with table (H, N): one learned value for every distance, none for the direction."""

    table: jax.Array = axes("HN")

    def of_distance(self, distance: jax.Array, lookup: Lookup) -> jax.Array:
        return lookup(self.table, jnp.minimum(jnp.abs(distance), self.table.shape[-1] - 1))

    def steady(self) -> tuple[int | None, int | None]:
        farthest = self.table.shape[-1] - 1
        return -farthest, farthest


class DenseBias(Bias):
    """values of rank 2 (Q, K) or 4 (B|1, H|1, Q|1, K|1); -inf forbids a key."""

    values: jax.Array = axes("BHQK")
    forbids = True

    def tile(self, at: Tile) -> jax.Array:
        return self.values


def alibi_slopes(num_heads: int, dtype: Any = jnp.float32) -> jax.Array:
    """ALiBi's slopes, (H,) of `dtype`: 2^(-8 k / H) for k = 1..H when H is a power of two.

    Otherwise the slopes of the power of two below, then every second slope of twice that count, as the authors' code
    does. E.g. 8 heads: 1/2, 1/4, ..., 1/256. Press, Smith and Lewis 2022, section 3 and its published code.

    Raises:
        ValueError: num_heads is not a positive integer.
    """
    if not isinstance(num_heads, (int, np.integer)) or isinstance(num_heads, bool) or num_heads < 1:
        raise ValueError(f"num_heads is {num_heads!r}; expected a positive integer")
    below = 1 << (int(num_heads).bit_length() - 1)
    slopes = _power_of_two_slopes(below)
    if below < num_heads:
        slopes = np.concatenate([slopes, _power_of_two_slopes(2 * below)[::2][: num_heads - below]])
    return jnp.asarray(slopes, dtype)


def _power_of_two_slopes(num_heads: int) -> np.ndarray:
    return 2.0 ** (-8.0 * np.arange(1, num_heads + 1) / num_heads)
