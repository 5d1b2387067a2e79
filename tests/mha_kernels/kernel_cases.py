"""Problems that the kernel tests share: float64 NumPy answers for the forward pass, the float64 reference for
gradients.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import mha_kernels as mk
from mha_kernels.arguments import build_spec
from mha_kernels.reference import Reference
from mha_kernels.tiled import transforms


class Problem(NamedTuple):
    """Arrays (float32 or 16 bit) and the arguments of `attention` beside them."""

    query: Any
    key: Any
    value: Any
    arguments: dict[str, Any]


def arrays(
    seed: int, batch: int, length_q: int, length_k: int, heads: int, groups: int, width: int, value_width: int
) -> list:
    random = np.random.default_rng(seed)
    shapes = [(batch, length_q, heads, width), (batch, length_k, groups, width), (batch, length_k, groups, value_width)]
    return [random.normal(size=shape) for shape in shapes]


def arguments(name: str, batch: int, length_q: int, length_k: int, heads: int) -> dict[str, Any]:
    """The arguments of one named case, every array of its own values."""
    random = np.random.default_rng(sum(map(ord, name)))

    def normal(*shape: int) -> Any:
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    def ids(length: int) -> Any:
        return jnp.asarray(np.sort(random.integers(0, 3, (batch, length))), jnp.int32)

    keep = jnp.asarray(random.random((batch, length_k)) > 0.3)
    return {
        "gates": lambda: {"head_gate": jnp.asarray([0.0, 2.0, 1.0, 0.5][:heads]), "sink": normal(heads)},
        "causal": lambda: {
            "mask": mk.CausalMask(3),
            "origin": mk.Origin(query=2, key=1),
            "dropout": mk.Dropout(0.3, jax.random.key(1)),
        },
        "window": lambda: {"mask": mk.WindowMask(20, 5), "softcap": 3.0, "bias": normal(batch, 1, 1, length_k)},
        "padding": lambda: {"mask": mk.KeyPaddingMask(keep) & mk.CausalMask()},
        "segments": lambda: {
            "mask": mk.SegmentMask(ids(length_q), ids(length_k)),
            "bias": mk.AlibiBias(mk.alibi_slopes(heads)),
            "sink": normal(heads),
            "scale": 0.3,
        },
        "tables": lambda: {
            "bias": mk.T5Bias(normal(heads, 8), max_distance=30) + mk.ClippedBias(normal(1, 5)),
            "mask": mk.CausalMask(40),
        },
        "dense": lambda: {
            "mask": jnp.asarray(random.random((batch, 1, length_q, length_k)) > 0.5),
            "bias": normal(1, heads, length_q, length_k),
        },
    }[name]()


CASES = ("gates", "causal", "window", "padding", "segments", "tables", "dense")


def problem(
    name: str, dtype: Any, batch: int, length_q: int, length_k: int, heads: int, groups: int, width: int
) -> Problem:
    made = arrays(7, batch, length_q, length_k, heads, groups, width, width + 3)
    query, key, value = (jnp.asarray(array, dtype) for array in made)
    return Problem(query, key, value, arguments(name, batch, length_q, length_k, heads))


def outcome(driver: Any, given: Problem, dtype: Any) -> Any:
    """Output, statistics and gradients of a loss over all of them; by the reference where driver is None, in
    `dtype`.
    """

    def cast(leaf: Any) -> Any:
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) and driver is None else leaf

    inputs = jax.tree.map(cast, tuple(given[:3]))
    algebra = jax.tree.map(cast, build_spec(given.query, given.key, **given.arguments))
    leaves, structure = jax.tree.flatten(algebra)
    real = [bool(jnp.issubdtype(leaf.dtype, jnp.floating)) for leaf in leaves]
    weights = np.random.default_rng(3).normal(size=(*given.query.shape[:3], given.value.shape[-1]))

    def loss(inputs: Any, floats: Any) -> Any:
        chosen = iter(floats)
        whole = jax.tree.unflatten(
            structure, [next(chosen) if flag else leaf for leaf, flag in zip(leaves, real, strict=True)]
        )
        if driver is None:
            output, found = Reference().attend(*inputs, whole, mk.STATISTICS, None)
        else:
            output, found = transforms.run(driver, *inputs, whole, mk.STATISTICS, None)
        total = (
            output.astype(weights.dtype if dtype == jnp.float64 else jnp.float32) * jnp.asarray(weights, dtype)
        ).sum()
        for weight, name in (
            (0.1, "lse"),
            (0.3, "entropy"),
            (0.01, "distance"),
            (1.0, "previous_mass"),
            (0.5, "sink_mass"),
        ):
            values = getattr(found, name)
            total = total + weight * jnp.where(jnp.isfinite(values), values, 0).sum()
        return total, (output, found)

    floats = [leaf for leaf, flag in zip(leaves, real, strict=True) if flag]
    (_, results), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(inputs, floats)
    return jax.tree.map(np.asarray, (results, gradients))


def errors(found: Any, expected: Any) -> list[float]:
    """Largest difference of each array over the largest entry expected; NaN and infinities must be the same."""
    result = []
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        one, other = one.astype(np.float64), other.astype(np.float64)
        np.testing.assert_array_equal(np.isnan(one), np.isnan(other))
        np.testing.assert_array_equal(np.isinf(one), np.isinf(other))
        finite = np.isfinite(other)
        scale = max(np.abs(other[finite]).max(initial=0), 1e-3)
        result.append(float(np.abs(one[finite] - other[finite]).max(initial=0) / scale))
    return result
