"""What every tiled implementation shares: its gradient, `vmap`, and life inside `shard_map`.

A driver knows how to visit tiles forward and backward. Here its two passes become one differentiable function:

- `custom_vjp`: the backward pass recomputes probabilities from the stored log-sum-exp, so memory stays O(L). What needs
  only rows, not tiles (the gradients of the sink and of the gates), is done here once.
- `custom_vmap`: a mapped axis is folded into B, so closed gates still skip and dropout stays what a loop gives.
- Variance: operands that are the same on every shard are marked as varying before the call; the transpose of that
  mark is the sum over shards which their gradients need.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from mha_kernels.algebra import tile
from mha_kernels.algebra.spec import AttentionSpec, HeadStatistics, accumulation_dtype, sum_to_leaf
from mha_kernels.tiled.driver import Backward, Driver


class Static(NamedTuple):
    """What does not change under any transform: the driver, the structure of the algebra, and the choices of the call.

    floating: one flag a leaf of the algebra, True where the leaf is differentiated.
    """

    driver: Driver
    structure: Any
    floating: tuple[bool, ...]
    statistics: tuple[str, ...]
    precision: Any

    def split(self, leaves: list) -> tuple[tuple, tuple]:
        """The leaves of an algebra as the differentiated ones and the others."""
        pairs = list(zip(leaves, self.floating, strict=True))
        return tuple(leaf for leaf, real in pairs if real), tuple(leaf for leaf, real in pairs if not real)

    def algebra(self, floats: tuple, others: tuple) -> AttentionSpec:
        """The algebra from its differentiated leaves and the others."""
        real, other = iter(floats), iter(others)
        return jax.tree.unflatten(self.structure, [next(real if flag else other) for flag in self.floating])


def run(
    driver: Driver,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    algebra: AttentionSpec,
    statistics: tuple[str, ...],
    precision: Any,
) -> tuple[jax.Array, HeadStatistics]:
    """Output (B, Q, H, V) and statistics (B, H, Q) by a driver, differentiable in every floating operand."""
    query, key, value, algebra = equally_varying((query, key, value, algebra))
    leaves, structure = jax.tree.flatten(algebra)
    floating = tuple(bool(jnp.issubdtype(leaf.dtype, jnp.floating)) for leaf in leaves)
    static = Static(driver, structure, floating, statistics, precision)
    output, rows = _attend(static, query, key, value, *static.split(leaves))
    return output, tile.statistics_of(rows, statistics, algebra)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: Static, query: jax.Array, key: jax.Array, value: jax.Array, floats: tuple, others: tuple) -> Any:
    output, rows = _forward(static, query, key, value, floats, others)
    return output, {name: rows[name] for name in static.statistics}


def _attend_forward(static: Static, *primals: Any) -> Any:
    """As `_attend`, keeping what the backward pass needs.

    Which operands are differentiated travels as the size of an array each, 1 or 0, and not in the structure of what is
    kept: JAX remembers one structure for a traced function, and it may be that of another set of operands.
    """
    query, key, value, floats, others = jax.tree.map(lambda primal: primal.value, primals)
    wanted = [jnp.zeros(int(primal.perturbed), jnp.int8) for primal in primals[3]]
    output, rows = _forward(static, query, key, value, floats, others)
    kept = (query, key, value, floats, others), wanted, (output, rows)
    return (output, {name: rows[name] for name in static.statistics}), kept


def _attend_backward(static: Static, residuals: Any, cotangents: Any) -> Any:
    (query, key, value, floats, others), wanted, (output, rows) = residuals
    output_cotangent, row_cotangents = cotangents
    if isinstance(output_cotangent, SymbolicZero):
        output_cotangent = jnp.zeros_like(output)
    row_cotangents = {
        name: row_cotangents[name]
        for name in static.statistics
        if name not in ("max_logit", "max_probability") and not isinstance(row_cotangents[name], SymbolicZero)
    }
    flags = [mark.shape[-1] == 1 for mark in wanted]
    each = iter(flags)
    differentiated = static._replace(floating=tuple(real and next(each) for real in static.floating))
    leaves = jax.tree.leaves(static.algebra(floats, others))
    inputs = (query, key, value, *differentiated.split(leaves))
    query, key, value, found = _backward(differentiated, inputs, (output, rows), (output_cotangent, row_cotangents))
    gradients = iter(found)
    return query, key, value, tuple(next(gradients) if flag else None for flag in flags), None


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


def _forward(static: Static, *arrays: Any) -> Any:
    """The forward pass, with a mapped axis folded into B."""

    @jax.custom_batching.custom_vmap
    def mapped(query: jax.Array, key: jax.Array, value: jax.Array, floats: tuple, others: tuple) -> Any:
        return static.driver.forward(
            query, key, value, static.algebra(floats, others), static.statistics, static.precision
        )

    @mapped.def_vmap
    def fold(size: int, batched: Any, *arrays: Any) -> Any:
        arrays = (*_fold_batch(size, arrays[:3], batched[:3]), *_fold_aligned(size, arrays[3:], batched[3:]))
        results = _unfold(size, _forward(static, *arrays))
        return results, jax.tree.map(lambda _: True, results)

    return mapped(*arrays)


def _backward(static: Static, *arrays: Any) -> Any:
    """The backward pass, with a mapped axis folded into B."""

    @jax.custom_batching.custom_vmap
    def mapped(inputs: Any, results: Any, cotangents: Any) -> Any:
        return _gradients(static, inputs, results, cotangents)

    @mapped.def_vmap
    def fold(size: int, batched: Any, inputs: Any, results: Any, cotangents: Any) -> Any:
        whole = _fold_batch(size, inputs[:3], batched[0][:3])
        # A gradient is wanted for each mapped copy, so floating operands get a row each even where they are shared.
        floats = _fold_aligned(size, inputs[3], batched[0][3], copies=True)
        others = _fold_aligned(size, inputs[4], batched[0][4])
        rest = _fold_batch(size, (results, cotangents), batched[1:])
        gradients = _unfold(size, _backward(static, (*whole, floats, others), *rest))
        return gradients, jax.tree.map(lambda _: True, gradients)

    return mapped(*arrays)


def _fold_batch(size: int, arrays: Any, batched: Any) -> Any:
    """(size, B, ...) to (size * B, ...); what is not mapped is repeated."""

    def fold(array: Any, mapped: bool) -> Any:
        whole = array if mapped else jnp.broadcast_to(array[None], (size, *array.shape))
        return whole.reshape(-1, *array.shape[2 if mapped else 1 :])

    return _map(fold, arrays, batched)


def _fold_aligned(size: int, arrays: Any, batched: Any, copies: bool = False) -> Any:
    """As `_fold_batch` for aligned leaves, whose first axis may be shorter than B: shared ones stay shared."""

    def fold(array: Any, mapped: bool) -> Any:
        if not mapped and array.shape[0] == 1 and not copies:
            return array
        return _fold_batch(size, array, mapped)

    return _map(fold, arrays, batched)


def _map(fold: Callable[[Any, bool], Any], arrays: Any, batched: Any) -> Any:
    """`tree.map` where the flags come with lists in place of tuples."""
    leaves, structure = jax.tree.flatten(arrays)
    return jax.tree.unflatten(structure, map(fold, leaves, jax.tree.leaves(batched)))


def _unfold(size: int, arrays: Any) -> Any:
    return jax.tree.map(lambda array: array.reshape(size, -1, *array.shape[1:]), arrays)


def _gradients(static: Static, inputs: Any, results: Any, cotangents: Any) -> Any:
    """Gradients of query, key, value and the floating leaves, from what the forward pass kept."""
    query, key, value, floats, others = inputs
    (output, rows), (output_cotangent, row_cotangents) = results, cotangents
    algebra = static.algebra(floats, others)
    whole = dataclasses.replace(
        algebra,
        sink=broadcast_batch(algebra.sink, query.shape[0]),
        head_gate=broadcast_batch(algebra.head_gate, query.shape[0]),
    )
    dtype = accumulation_dtype(query, key, value)
    by_head = tile.closed_as_zero(output_cotangent.swapaxes(1, 2).astype(dtype), whole)
    output_product = (by_head * output.swapaxes(1, 2).astype(dtype)).sum(axis=-1, keepdims=True)
    lse = rows["lse"]
    attended = jnp.where(lse == -jnp.inf, 0, 1).astype(dtype)
    sink_share = tile.sink_share(lse, whole)
    delta = tile.compute_delta(output_product, rows, row_cotangents, attended - sink_share)
    gated = tile.apply_gate(by_head, whole).swapaxes(1, 2)
    wanted, precision = static.floating, static.precision
    task = Backward(query, key, value, algebra, lse, delta, gated, row_cotangents, wanted, precision)
    *gradients, floats = static.driver.backward(task)
    found = static.algebra(tuple(floats), others)
    if algebra.sink is not None:
        found = dataclasses.replace(found, sink=sum_to_leaf(-sink_share * delta, algebra.sink))
    if algebra.head_gate is not None:
        gate = whole.head_gate.astype(dtype)
        per_row = jnp.where(gate == 0, 0, output_product / jnp.where(gate == 0, 1, gate))
        found = dataclasses.replace(found, head_gate=sum_to_leaf(per_row, algebra.head_gate))
    return *gradients, static.split(jax.tree.leaves(found))[0]


def broadcast_batch(leaf: Any, batch: int) -> Any:
    """An aligned leaf (R, ...) with R dividing `batch` as (1 | batch, ...)."""
    if leaf is None or leaf.shape[0] in (1, batch):
        return leaf
    return jnp.repeat(leaf, batch // leaf.shape[0], axis=0)


def equally_varying(arrays: Any) -> Any:
    """Marks every array as varying over all the mesh axes that any of them varies over (inside `shard_map`)."""
    axes = frozenset[str]().union(*(varying_axes(leaf) for leaf in jax.tree.leaves(arrays)))
    return jax.tree.map(lambda leaf: mark_varying(leaf, axes), arrays) if axes else arrays


def varying_axes(array: Any) -> frozenset[str]:
    """The mesh axes over which an array differs from shard to shard."""
    return jax.typeof(array).mat.varying


def mark_varying(array: Any, axes: frozenset[str]) -> Any:
    """The array marked as varying over `axes`; the transpose of the mark sums over those that are new."""
    missing = tuple(sorted(axes - varying_axes(array)))
    return jax.lax.pcast(array, missing, to="varying") if missing else array
