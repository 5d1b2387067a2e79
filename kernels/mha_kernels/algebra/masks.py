"""Masks: which keys a query may attend (True = may attend), decided tile by tile.

A mask says three things, all from positions and the slices of its own arrays that belong to the tile:
`allowed` (the boolean tile), `kind` (is anything allowed, is everything allowed: empty tiles are skipped and full ones
need no selection), and `distances` (bounds on key - query outside which nothing is allowed: whole ranges of tiles are
never visited). Only `allowed` must be exact and only it must be written for a mask of one's own.
"""

from typing import Any

import jax
import jax.numpy as jnp

from mha_kernels.algebra.operands import Operand, Tile, axes, joined


class Mask(Operand):
    """Base of all masks; join two with ``&`` (a key is allowed when both allow it)."""

    def allowed(self, at: Tile) -> jax.Array:
        """Boolean, broadcastable to the tile: may the query at `at.query` attend the key at `at.key`?"""
        raise NotImplementedError

    def kind(self, at: Tile) -> tuple[Any, Any]:
        """(some, every): False for `some` promises an empty tile, True for `every` promises a full one."""
        return True, False

    def distances(self) -> tuple[Any, Any]:
        """(low, high): nothing is allowed unless low <= key - query <= high; None where there is no bound."""
        return None, None

    def used(self, at: Tile) -> tuple[Any, Any]:
        """(queries, keys): which rows of the tile are in an allowed pair, as (..., Qt, 1) and (..., 1, Kt).

        None has it found from `allowed`, which costs two passes over the tile.
        """
        return None, None

    def __and__(self, other: "Mask") -> "Mask":
        if not isinstance(other, Mask):
            raise TypeError(
                f"mask & {type(other).__name__}: expected a Mask on both sides (DenseMask(array) for an array)"
            )
        return AndMask(self.parts() + other.parts())


class AndMask(Mask):
    """Allowed where every part allows; made by ``&``."""

    masks: tuple[Mask, ...] = joined()

    def parts(self) -> tuple[Any, ...]:
        return self.masks

    def allowed(self, at: Tile) -> jax.Array:
        result = self.masks[0].allowed(at)
        for mask in self.masks[1:]:
            result = result & mask.allowed(at)
        return result

    def kind(self, at: Tile) -> tuple[Any, Any]:
        some, every = zip(*(mask.kind(at) for mask in self.masks), strict=True)
        return _all(some), _all(every)

    def distances(self) -> tuple[Any, Any]:
        lows, highs = zip(*(mask.distances() for mask in self.masks), strict=True)
        return _tightest(lows, jnp.maximum), _tightest(highs, jnp.minimum)

    def used(self, at: Tile) -> tuple[Any, Any]:
        by_distance = all(isinstance(mask, DistanceMask) for mask in self.masks)
        return used_by_distance(at, *self.distances()) if by_distance else (None, None)


def _all(flags: tuple[Any, ...]) -> Any:
    result = flags[0]
    for flag in flags[1:]:
        result = result & flag
    return result


def _tightest(bounds: tuple[Any, ...], choose: Any) -> Any:
    result = None
    for bound in bounds:
        if bound is not None:
            result = bound if result is None else choose(result, bound)
    return result


class DistanceMask(Mask):
    """Base of masks that allow exactly low <= key - query <= high: `distances` says all there is to say."""

    def allowed(self, at: Tile) -> jax.Array:
        low, high = self.distances()
        above = None if low is None else at.key >= at.query + low
        below = None if high is None else at.key <= at.query + high
        bounds = [bound for bound in (above, below) if bound is not None]
        return _all(tuple(bounds)) if bounds else jnp.asarray(True)

    def kind(self, at: Tile) -> tuple[Any, Any]:
        """Distances on a tile have no gaps, so its smallest and largest decide."""
        low, high = self.distances()
        smallest, largest = at.distance_span()
        some: Any = True
        every: Any = True
        if low is not None:
            some, every = some & (largest >= low), every & (smallest >= low)
        if high is not None:
            some, every = some & (smallest <= high), every & (largest <= high)
        return some, every

    def used(self, at: Tile) -> tuple[Any, Any]:
        return used_by_distance(at, *self.distances())


class CausalMask(DistanceMask):
    """Key j is allowed for query i when j <= i + offset: top-left aligned, as `jax.nn.dot_product_attention`."""

    offset: Any = axes("", "int", default=0)

    def distances(self) -> tuple[Any, Any]:
        return None, self.offset


class WindowMask(DistanceMask):
    """Key j is allowed for query i when i - left <= j <= i + right; None leaves that side unbounded."""

    left: Any = axes("", "int", optional=True)
    right: Any = axes("", "int", optional=True)

    def distances(self) -> tuple[Any, Any]:
        return None if self.left is None else -self.left, self.right


def used_by_distance(at: Tile, low: Any, high: Any) -> tuple[Any, Any]:
    """The real rows of a tile within reach of the other side, where low <= key - query <= high is allowed."""
    (first_q, last_q), (first_k, last_k) = at.query_span, at.key_span
    if at.query_end is not None:
        last_q = jnp.minimum(last_q, at.query_end - 1)
    if at.end is not None:
        last_k = jnp.minimum(last_k, at.end - 1)
    queries, keys = at.query <= last_q, at.key <= last_k
    if low is not None:
        queries, keys = queries & (at.query <= last_k - low), keys & (at.key >= first_q + low)
    if high is not None:
        queries, keys = queries & (at.query >= first_k - high), keys & (at.key <= last_q + high)
    if low is not None and high is not None:
        queries, keys = queries & (low <= high), keys & (low <= high)
    return queries, keys


class KeyPaddingMask(Mask):
    """keep (B, K): True marks a real key, False padding that nobody attends."""

    keep: jax.Array = axes("BK", "bool")

    def allowed(self, at: Tile) -> jax.Array:
        return self.keep

    def kind(self, at: Tile) -> tuple[Any, Any]:
        return _any(self.keep), _every(self.keep)


class SegmentMask(Mask):
    """query_ids (B, Q), key_ids (B, K): attention stays inside a segment (equal ids), e.g. one packed document."""

    query_ids: jax.Array = axes("BQ", "int")
    key_ids: jax.Array = axes("BK", "int")

    def allowed(self, at: Tile) -> jax.Array:
        return self.query_ids == self.key_ids

    def kind(self, at: Tile) -> tuple[Any, Any]:
        def span(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
            return ids.min(axis=(-2, -1), keepdims=True), ids.max(axis=(-2, -1), keepdims=True)

        (first, last), (key_first, key_last) = span(self.query_ids), span(self.key_ids)
        overlap = (first <= key_last) & (key_first <= last)
        return overlap, (first == last) & (key_first == key_last) & (first == key_first)


class DenseMask(Mask):
    """keep of rank 2 (Q, K) or 4 (B|1, H|1, Q|1, K|1): any boolean array."""

    keep: jax.Array = axes("BHQK", "bool")

    def allowed(self, at: Tile) -> jax.Array:
        return self.keep

    def kind(self, at: Tile) -> tuple[Any, Any]:
        return _any(self.keep), _every(self.keep)


def _any(keep: jax.Array) -> jax.Array:
    return keep.any(axis=(-2, -1), keepdims=True)


def _every(keep: jax.Array) -> jax.Array:
    return keep.all(axis=(-2, -1), keepdims=True)
