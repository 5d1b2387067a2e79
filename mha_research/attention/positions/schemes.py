"""Position schemes of a module as values: what each one trains, adds to the scores and does to query and key."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp

from mha_kernels import AlibiBias, Bias, ClippedBias, DistanceBias, T5Bias, alibi_slopes
from mha_kernels.algebra.biases import check_buckets
from mha_research.attention import positions as functions
from mha_research.attention.arguments import check_integers, check_numbers


class Position:
    """What a scheme may do. A new one overrides what it needs; the rest does nothing."""

    def parameter(self, key: jax.Array, num_heads: int, dtype: Any) -> jax.Array | None:
        """The array that is trained, if there is one."""
        return None

    def bias(self, parameter: jax.Array | None, num_heads: int, dtype: Any = jnp.float32) -> Bias | None:
        """What is added to the scores, from absolute query and key indices; constants in it are of `dtype`."""
        return None

    def rotate(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Query or key (B, L, H, E) with its positions (L,) worked in."""
        return x


@dataclasses.dataclass(frozen=True)
class Alibi(Position):
    """score += -slope_h |i - j|, with the published slopes 2^(-8h/H) for any head count. Press, Smith & Lewis 2022.

    Args:
      trainable: learn the slopes, from the published ones (the paper found no gain in it)
      slopes: other (starting) slopes, one a head.
    """

    trainable: bool = False
    slopes: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.slopes is None:
            return
        if isinstance(self.slopes, str) or not isinstance(self.slopes, Iterable):
            raise TypeError(f"Alibi: slopes must be numbers, one a head, got {self.slopes!r}")
        for slope in self.slopes:
            check_numbers("Alibi", slopes=slope)
        object.__setattr__(self, "slopes", tuple(map(float, self.slopes)))

    def _slopes(self, num_heads: int, dtype: Any) -> jax.Array:
        if self.slopes is None:
            return alibi_slopes(num_heads, dtype)
        if len(self.slopes) != num_heads:
            raise ValueError(f"Alibi: {len(self.slopes)} slopes were given for {num_heads} heads")
        return jnp.asarray(self.slopes, dtype)

    def parameter(self, key: jax.Array, num_heads: int, dtype: Any) -> jax.Array | None:
        return self._slopes(num_heads, dtype) if self.trainable else None

    def bias(self, parameter: jax.Array | None, num_heads: int, dtype: Any = jnp.float32) -> Bias:
        return AlibiBias(self._slopes(num_heads, dtype) if parameter is None else parameter)


@dataclasses.dataclass(frozen=True)
class Rotary(Position):
    """q_i . k_j becomes a function of i - j: pairs of features turned by p * base^(-2i/E). Su et al. 2021; see
    `positions.rotate`.

    Args:
      base: wavelength base
      interleaved: pairs are neighbours, as in the paper
    """

    base: Annotated[float, "(0, inf)"] = 10000.0
    interleaved: bool = False

    def __post_init__(self) -> None:
        check_numbers("Rotary", positive=True, base=self.base)

    def rotate(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        return functions.rotate(x, positions, self.base, self.interleaved)


@dataclasses.dataclass(frozen=True)
class RelativeBias(Position):
    """score += table[h, bucket(j - i)], a trained scalar a head and bucket, N(0, std^2) at the start.

    Args:
      kind: "t5" (logarithmic buckets, Raffel et al. 2020), "clipped" (one entry an offset, all beyond max_distance
        share the last: table (H, 2 max_distance + 1)) or "distance" (one entry a distance |i - j|, those beyond share
        the last: (H, max_distance + 1)).
      num_buckets: of "t5".
      max_distance: where "t5" buckets end, or offsets are clipped.
      bidirectional: of "t5": later keys get buckets of their own; False shares bucket 0 among them, for causal
        attention.
      shared: one table for all heads.
    """

    kind: Literal["t5", "clipped", "distance"] = "t5"
    num_buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True
    shared: bool = False
    std: float = 0.02

    def __post_init__(self) -> None:
        if self.kind not in ("t5", "clipped", "distance"):
            raise ValueError(f"RelativeBias: kind must be 't5', 'clipped' or 'distance', got {self.kind!r}")
        check_integers("RelativeBias", num_buckets=self.num_buckets, max_distance=self.max_distance)
        check_numbers("RelativeBias", std=self.std)
        if self.kind == "t5":
            check_buckets(self.bidirectional, self.num_buckets, self.max_distance)

    def _entries(self) -> int:
        return {"t5": self.num_buckets, "clipped": 2 * self.max_distance + 1, "distance": self.max_distance + 1}[
            self.kind
        ]

    def parameter(self, key: jax.Array, num_heads: int, dtype: Any) -> jax.Array:
        return float(self.std) * jax.random.normal(key, (1 if self.shared else num_heads, self._entries()), dtype)

    def bias(self, parameter: jax.Array | None, num_heads: int, dtype: Any = jnp.float32) -> Bias:
        assert parameter is not None
        if self.kind == "t5":
            return T5Bias(parameter, bidirectional=self.bidirectional, max_distance=self.max_distance)
        return ClippedBias(parameter) if self.kind == "clipped" else DistanceBias(parameter)
