"""What an implementation that visits tiles provides, so that `transforms` can make it differentiable."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import jax
import jax.numpy as jnp

from mha_kernels.algebra.spec import AttentionSpec, sum_to_leaf


class Backward(NamedTuple):
    """The task of a backward pass: the operands of the forward pass, what it kept, and the cotangents.

    output_cotangent (B, Q, H, V) is already gated. lse, delta and cotangents (those of statistics) are rows
    (B, H, Q, 1). wanted: one flag a leaf of `algebra`, True where its gradient is asked for.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    algebra: AttentionSpec
    lse: jax.Array
    delta: jax.Array
    output_cotangent: jax.Array
    cotangents: dict[str, jax.Array]
    wanted: tuple[bool, ...]
    precision: Any

    def on_tiles(self) -> list[int]:
        """Numbers of the wanted leaves that act on tiles; sink and head gate act on rows, `transforms` does them."""
        leaves = jax.tree.leaves(self.algebra)
        on_rows = self.algebra.sink, self.algebra.head_gate
        return [n for n, flag in enumerate(self.wanted) if flag and not any(leaves[n] is leaf for leaf in on_rows)]

    def to_leaves(self, found: dict[int, jax.Array]) -> list[jax.Array]:
        """Gradients of all wanted leaves, from those found for each (batch, head): zero where none was."""
        leaves = jax.tree.leaves(self.algebra)
        return [
            sum_to_leaf(found[n], leaves[n]) if n in found else jnp.zeros_like(leaves[n])
            for n, flag in enumerate(self.wanted)
            if flag
        ]


class Driver(Protocol):
    """An implementation that visits tiles: a frozen dataclass of tile sizes with these two passes.

    Leaves of `algebra` are aligned (b, h, q, k, ...) with b in {1, R}, R dividing B: example t uses row t * R // B.
    """

    def forward(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        algebra: AttentionSpec,
        statistics: tuple[str, ...],
        precision: Any,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Output (B, Q, H, V) in the query's type; rows (B, H, Q, 1) of "lse" and of the requested statistics."""
        ...

    def backward(self, task: Backward) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]:
        """Gradients of query, key, value and of the wanted leaves of the algebra, in the shapes they have.

        Those of sink and head gate may be left at zero: the caller finds them.
        """
        ...


P = ParamSpec("P")
R = TypeVar("R")


def in_32_bits(method: Callable[P, R]) -> Callable[P, R]:
    """A pass of a driver that is traced without 64-bit types, whatever the caller has enabled.

    With them, the loops and index maps of a kernel count in int64, which JAX's own lowering to TPU and GPU refuses.
    """

    @functools.wraps(method)
    def run(*args: P.args, **keywords: P.kwargs) -> R:
        with jax.enable_x64(False):
            return method(*args, **keywords)

    return run
