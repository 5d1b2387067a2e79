"""The two passes of attention.cc as a `Driver`.

It has grad, and jvp of grad (Hessian-vector products) by the forward-mode derivative of "blockwise", in O(L) memory.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_kernels.algebra import tile
from mha_kernels.algebra.spec import AttentionSpec, accumulation_dtype, partition
from mha_kernels.blockwise import Blockwise
from mha_kernels.native.library import reason_not_loaded
from mha_kernels.native.operands import PANEL, declined, operands
from mha_kernels.tiled.driver import Backward
from mha_kernels.tiled.relative import to_toeplitz
from mha_kernels.tiled.sizes import Sizes
from mha_kernels.tiled.transforms import broadcast_batch, mark_varying, varying_axes

VECTOR = 16  # values are packed to a multiple of it, which every machine's vectors divide


@dataclasses.dataclass(frozen=True)
class Native:
    """The native implementation. Its tiles are constants of attention.cc."""

    def unsupported_reason(
        self, query: jax.Array, key: jax.Array, value: jax.Array, algebra: AttentionSpec, statistics: tuple[str, ...]
    ) -> str | None:
        """It runs on CPUs, in float32, and knows no softcap, dropout, dense masks or biases, or those of a user's."""
        if jax.default_backend() != "cpu":
            return f"it runs on a CPU, and the default device here is a {jax.default_backend()}"
        if accumulation_dtype(query, key, value) != jnp.float32:
            return "it computes in float32, and an input is float64"
        return declined(algebra) or reason_not_loaded()

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

        def by_blockwise(query: jax.Array, key: jax.Array, value: jax.Array, algebra: AttentionSpec) -> Any:
            return Blockwise().forward(query, key, value, algebra, statistics, precision)

        def natively(query: jax.Array, key: jax.Array, value: jax.Array, algebra: AttentionSpec) -> Any:
            return _forward(query, key, value, algebra, statistics)

        return _with_jvp_of(by_blockwise, natively)(query, key, value, algebra)

    def backward(self, task: Backward) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]:
        """See `tiled.driver.Driver`. Trained operands on tiles beside biases, as a scale, are left to blockwise."""
        leaves, of_bias = jax.tree.leaves(task.algebra), jax.tree.leaves(task.algebra.bias)
        if any(all(leaves[n] is not leaf for leaf in of_bias) for n in task.on_tiles()):
            return Blockwise().backward(task)

        def whole(arrays: Backward) -> Backward:
            return arrays._replace(wanted=task.wanted, precision=task.precision)

        def by_blockwise(arrays: Backward) -> Any:
            return Blockwise().backward(whole(arrays))

        def natively(arrays: Backward) -> Any:
            return _backward(whole(arrays))

        return _with_jvp_of(by_blockwise, natively)(task._replace(wanted=(), precision=None))


def _with_jvp_of(differentiable: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with the forward-mode derivative of another one that computes the same."""
    result = jax.custom_jvp(function)
    result.defjvp(lambda primals, tangents: jax.jvp(differentiable, primals, tangents))
    return result


def _sizes(query: jax.Array, key: jax.Array) -> Sizes:
    (batch, length_q, heads, _), (_, length_k, groups, _) = query.shape, key.shape
    return Sizes(batch, heads, groups, length_q, length_k, length_q, PANEL)


def _for_each_example(algebra: AttentionSpec, batch: int) -> AttentionSpec:
    """With every leaf (B | 1, ...): one that is mapped by an outer `vmap` alone has a row for several examples."""
    return jax.tree.map(lambda leaf: broadcast_batch(leaf, batch), algebra)


def _moments(names: Any) -> tuple[list[str], int]:
    """Which of the names are moments, in the order of C++, and the same as a set of bits."""
    chosen = [name for name in tile.MOMENTS if name in names]
    return chosen, sum(1 << tile.MOMENTS.index(name) for name in chosen)


def _call(name: str, results: dict[str, jax.ShapeDtypeStruct], arrays: Any, moments: int) -> dict[str, jax.Array]:
    """The function of attention.cc, inside `shard_map` too: all it reads and gives varies over the same mesh axes."""
    axes = frozenset[str]().union(*map(varying_axes, arrays))
    arrays = [mark_varying(array, axes) for array in arrays]
    found = jax.ffi.ffi_call(name, tuple(results.values()))(*arrays, moments=np.int64(moments))
    return {name: mark_varying(array, axes) for name, array in zip(results, found, strict=True)}


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _forward(
    query: jax.Array, key: jax.Array, value: jax.Array, algebra: AttentionSpec, statistics: tuple[str, ...]
) -> Any:
    sizes, width, value_width = _sizes(query, key), query.shape[-1], value.shape[-1]
    batch, heads, groups, length_q = sizes.batch, sizes.heads, sizes.groups, sizes.length_q
    algebra = _for_each_example(algebra, batch)
    lined, *_ = to_toeplitz(algebra, (False,) * len(jax.tree.leaves(algebra)), sizes, jnp.float32, arithmetic=True)
    names, moments = _moments(statistics)

    found = _call(
        "mha_forward",
        {
            "output": _floats(batch, length_q, heads, value_width),
            "maximum": _floats(batch, heads, length_q),
            "total": _floats(batch, heads, length_q),
            "moments": _floats(len(names), batch, heads, length_q),
            "packed_keys": _floats(batch, groups, sizes.padded[1], width),
            "packed_values": _floats(batch, groups, sizes.padded[1], -(-value_width // VECTOR) * VECTOR),
            "used": jax.ShapeDtypeStruct((batch, length_q + sizes.length_k), jnp.uint8),
        },
        (*(x.astype(jnp.float32) for x in (query, key, value)), *operands(lined, sizes)),
        moments,
    )
    rows = {name: found["moments"][n][..., None] for n, name in enumerate(names)}
    state = tile.Softmax(found["maximum"][..., None], found["total"][..., None], rows)
    share, results = tile.softmax_rows(state, algebra, statistics)
    output = found["output"].swapaxes(1, 2)  # normalised over the keys
    if algebra.sink is not None:
        output = output * (share * state.denominator)
    kept = {name: results[name] for name in ("lse", *(name for name in statistics if name != "lse"))}
    return tile.apply_gate(output, algebra).swapaxes(1, 2).astype(query.dtype), kept


def _backward(task: Backward) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]:
    query, key, value = task.query, task.key, task.value
    sizes = _sizes(query, key)
    algebra = _for_each_example(task.algebra, sizes.batch)
    lined, wanted, pull_back = to_toeplitz(algebra, task.wanted, sizes, jnp.float32, arithmetic=True)
    inner = task._replace(algebra=lined, wanted=wanted)
    on_line = inner.on_tiles()
    inputs = operands(lined, sizes)
    names, moments = _moments(task.cotangents)
    cotangents = [task.cotangents[name][..., 0] for name in names]
    per_row = (sizes.batch, sizes.heads, sizes.length_q)

    found = _call(
        "mha_backward",
        {
            "query": _floats(*query.shape),
            "key": _floats(*key.shape),
            "value": _floats(*value.shape),
            "line": _floats(*per_row[:2], inputs.line.shape[-1]) if on_line else _floats(0),
            "used": jax.ShapeDtypeStruct((sizes.batch, sizes.length_q + sizes.length_k), jnp.uint8),
        },
        (
            *(x.astype(jnp.float32) for x in (query, key, value)),
            *inputs,
            jnp.where(task.lse == -jnp.inf, jnp.inf, task.lse)[..., 0],
            task.delta[..., 0],
            task.output_cotangent.astype(jnp.float32),
            jnp.stack(cotangents) if cotangents else jnp.zeros((0, *per_row), jnp.float32),
        ),
        moments,
    )
    dq, dk, dv = (found[name].astype(x.dtype) for name, x in (("query", query), ("key", key), ("value", value)))
    of_leaves = pull_back(inner.to_leaves({n: found["line"][:, :, None, None] for n in on_line}))
    leaves = partition(task.algebra, task.wanted)[0]
    return dq, dk, dv, [new.reshape(len(leaf), -1, *leaf.shape[1:]).sum(axis=1) for new, leaf in zip(of_leaves, leaves)]
