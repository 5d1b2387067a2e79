"""Transforms of JAX against a loop."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_kernels as mk
from tests.mha_kernels.problems import normal

# Small, because a folded axis multiplies the programs that are compiled side by side.
N, B, Q, K, H, E = 2, 1, 5, 7, 2, 3
BLOCKWISE = mk.Blockwise(query_tile=2, key_tile=3)
implementations = pytest.mark.parametrize("implementation", ["reference", BLOCKWISE], ids=str)


def inputs(count: int = N) -> dict[str, Any]:
    """`count` copies of every operand along a new first axis, all different."""

    def floats(seed: int, *shape: int) -> Any:
        return jnp.asarray(normal(seed, count, *shape), jnp.float32)

    rng = np.random.default_rng(0)
    gates = np.ones((count, B, H))
    gates[np.arange(count) % 2 == 0, 0, 1] = 0
    return {
        "query": floats(0, B, Q, H, E),
        "key": floats(1, B, K, H, E),
        "value": floats(2, B, K, H, E),
        "slopes": floats(3, H),
        "dense": floats(5, 1, H, 1, K),
        "sink": floats(6, H),
        "scale": jnp.linspace(0.5, 1, count),
        "softcap": jnp.linspace(2.0, 3, count),
        "gates": jnp.asarray(gates * normal(7, count, B, H), jnp.float32),
        "keep": jnp.asarray(rng.random((count, B, K)) < 0.7),
        "offset": jnp.arange(count, dtype=jnp.int32) % 3,
        "start": jnp.arange(count, dtype=jnp.int32),
        "rng": jax.random.split(jax.random.key(1), count),
    }


def attend(implementation: Any, x: dict[str, Any]) -> Any:
    output, statistics = mk.attention_with_statistics(
        x["query"],
        x["key"],
        x["value"],
        mask=mk.CausalMask(x["offset"] + 2) & mk.KeyPaddingMask(x["keep"]),
        bias=mk.AlibiBias(x["slopes"]) + mk.DenseBias(x["dense"]),
        sink=x["sink"],
        scale=x["scale"],
        softcap=x["softcap"],
        head_gate=x["gates"],
        dropout=mk.Dropout(0.4, x["rng"]),
        origin=mk.Origin(query=x["start"]),
        statistics=("entropy", "distance"),
        implementation=implementation,
    )
    return output, jnp.nan_to_num(statistics.entropy + statistics.distance)


def loss(implementation: Any, x: dict[str, Any]) -> jax.Array:
    output, rows = attend(implementation, x)
    return (output**2).sum() + (rows**2).sum()


def split(x: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    real = {name: leaf for name, leaf in x.items() if jnp.issubdtype(leaf.dtype, jnp.floating)}
    return real, {name: leaf for name, leaf in x.items() if name not in real}


def gradient(implementation: Any, x: dict[str, Any]) -> dict[str, Any]:
    real, others = split(x)
    return jax.grad(lambda real: loss(implementation, real | others))(real)


def close(found: Any, expected: Any, bound: float = 2e-5) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        scale = max(1.0, float(jnp.abs(b).max()))
        np.testing.assert_allclose(a, b, rtol=0, atol=bound * scale)


@implementations
def test_vmap_over_every_argument_at_once_and_of_the_gradient(implementation: Any) -> None:
    x = inputs()

    def both(x: dict[str, Any]) -> Any:
        return attend(implementation, x), gradient(implementation, x)

    one = jax.jit(both)
    parts = [one(jax.tree.map(lambda leaf: leaf[n], x)) for n in range(N)]  # noqa: B023
    close(jax.jit(jax.vmap(both))(x), jax.tree.map(lambda *rows: jnp.stack(rows), *parts))
