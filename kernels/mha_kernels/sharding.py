"""Attention over a device mesh: one `shard_map` over examples and heads, entered here and nowhere else."""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, PartitionSpec

from mha_kernels.algebra.spec import AttentionSpec

Axes = str | tuple[str, ...] | None


class Sharding(NamedTuple):
    """A mesh and the names of its axes that examples and heads are spread over."""

    mesh: Mesh
    batch: Axes
    heads: Axes

    def size(self, axes: Axes) -> int:
        """How many shards the named axes make together."""
        names = (axes,) if isinstance(axes, str) else axes or ()
        return math.prod(self.mesh.shape[name] for name in names)


_ACTIVE: contextvars.ContextVar[Sharding | None] = contextvars.ContextVar("mha_kernels_sharding", default=None)


@contextlib.contextmanager
def sharded(mesh: Mesh, batch: Axes = "data", heads: Axes = "heads") -> Iterator[None]:
    """Within this context, attention runs shard by shard: examples over the `batch` axes, heads over the `heads` axes.

    Left to itself the compiler would gather all examples and heads for the loops over them. Every shard computes what
    the whole would (dropout and positions included), and gradients of operands that shards share are summed over them.

    Args:
        mesh: the device mesh. batch, heads: a name of one of its axes, several names, or None to leave whole.

    Raises:
        ValueError: the mesh has no such axis, or one is named twice; later, when batch or key/value heads do not
            divide evenly. TypeError: mesh is no mesh.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"sharded: mesh is {mesh!r}; expected a jax.sharding.Mesh")
    names = jax.tree.leaves((batch, heads))
    for name in names:
        if name not in mesh.axis_names:
            raise ValueError(f"sharded: no axis {name!r}; expected one of {mesh.axis_names}")
    if len(set(names)) < len(names):
        raise ValueError(f"sharded: batch is {batch!r} and heads {heads!r}; expected each axis once")
    token = _ACTIVE.set(Sharding(mesh, batch, heads))
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def active() -> Sharding | None:
    """The sharding in force, None outside `sharded` and inside a `shard_map` that has been entered already."""
    sharding = _ACTIVE.get()
    inside = sharding is not None and set(jax.sharding.get_abstract_mesh().manual_axes) & set(sharding.mesh.axis_names)
    return None if inside else sharding


def run(
    sharding: Sharding,
    work: Callable[..., Any],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    algebra: AttentionSpec,
) -> Any:
    """work(query, key, value, algebra) shard by shard; it returns output (B, Q, H, V) and rows (B, H, Q)."""
    shards_b, shards_h = sharding.size(sharding.batch), sharding.size(sharding.heads)
    if query.shape[0] % shards_b or key.shape[2] % shards_h:
        raise ValueError(
            f"query has batch size {query.shape[0]} and key has {key.shape[2]} heads; expected multiples of "
            f"{shards_b} and {shards_h}, the shards of {sharding.batch!r} and {sharding.heads!r}"
        )

    def aligned(leaf: Any) -> PartitionSpec:
        return PartitionSpec(
            sharding.batch if leaf.shape[0] > 1 else None, sharding.heads if leaf.shape[1] > 1 else None
        )

    array = PartitionSpec(sharding.batch, None, sharding.heads)
    mapped = jax.shard_map(
        work,
        mesh=sharding.mesh,
        in_specs=(array, array, array, jax.tree.map(aligned, algebra)),
        out_specs=(array, PartitionSpec(sharding.batch, sharding.heads)),
    )
    return mapped(query, key, value, algebra)
