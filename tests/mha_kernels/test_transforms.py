"""Each transform of JAX against a loop, or against the reference, which has all of them."""

import functools
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
    return loss_and_results(implementation, x)[0]


def loss_and_results(implementation: Any, x: dict[str, Any]) -> Any:
    output, rows = attend(implementation, x)
    return (output.astype(rows.dtype) ** 2).sum() + (rows**2).sum(), (output, rows)


def split(x: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    real = {name: leaf for name, leaf in x.items() if jnp.issubdtype(leaf.dtype, jnp.floating)}
    return real, {name: leaf for name, leaf in x.items() if name not in real}


def gradient(implementation: Any, x: dict[str, Any]) -> dict[str, Any]:
    real, others = split(x)
    return jax.grad(lambda real: loss(implementation, real | others))(real)


def gradient_and_results(implementation: Any, x: dict[str, Any]) -> Any:
    """(gradient, (output, rows)) from one forward pass."""
    real, others = split(x)
    return jax.grad(lambda real: loss_and_results(implementation, real | others), has_aux=True)(real)


def close(found: Any, expected: Any, bound: float = 2e-5) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        scale = max(1.0, float(jnp.abs(b).max()))
        np.testing.assert_allclose(a, b, rtol=0, atol=bound * scale)


@implementations
def test_vmap_over_every_argument_at_once_and_of_the_gradient(implementation: Any) -> None:
    x = inputs()
    both = functools.partial(gradient_and_results, implementation)
    one = jax.jit(both)
    parts = [one(jax.tree.map(lambda leaf: leaf[n], x)) for n in range(N)]  # noqa: B023
    close(jax.jit(jax.vmap(both))(x), jax.tree.map(lambda *rows: jnp.stack(rows), *parts))


def test_vmap_over_each_argument_alone() -> None:
    """What is not mapped stays shared. One program for each set of arguments costs too much, so groups of like kind."""
    x = inputs()
    first = jax.tree.map(lambda leaf: leaf[0], x)
    one = jax.jit(lambda x: attend(BLOCKWISE, x))
    for names in (("gates",), ("rng", "offset"), ("slopes", "dense", "sink"), ("key", "keep"), ("start",)):
        axes = {name: 0 if name in names else None for name in x}
        mixed = {name: x[name] if name in names else first[name] for name in x}
        found = jax.jit(jax.vmap(lambda x: attend(BLOCKWISE, x), in_axes=(axes,)))(mixed)
        parts = [one(first | {name: x[name][n] for name in names}) for n in range(N)]
        close(found, jax.tree.map(lambda *rows: jnp.stack(rows), *parts))


def test_vmap_of_the_gradient_of_what_is_shared() -> None:
    """Mapped queries with shared parameters: a gradient of the parameters for each."""
    x = inputs()
    first = jax.tree.map(lambda leaf: leaf[0], x)
    names = ("slopes", "gates", "sink", "scale")

    def of_shared(query: Any) -> Any:
        shared = {name: first[name] for name in names}
        return jax.grad(lambda shared: loss(BLOCKWISE, first | shared | {"query": query}))(shared)

    one = jax.jit(of_shared)
    parts = [one(query) for query in x["query"]]
    close(jax.jit(jax.vmap(of_shared))(x["query"]), jax.tree.map(lambda *rows: jnp.stack(rows), *parts))


def test_nested_vmap() -> None:
    x = inputs(4)
    nested = jax.tree.map(lambda leaf: leaf.reshape(2, 2, *leaf.shape[1:]), x)
    one = jax.jit(lambda x: attend(BLOCKWISE, x))
    parts = [one(jax.tree.map(lambda leaf: leaf[n], x)) for n in range(4)]  # noqa: B023
    expected = jax.tree.map(lambda *rows: jnp.stack(rows), *parts)
    found = jax.jit(jax.vmap(jax.vmap(lambda x: attend(BLOCKWISE, x))))(nested)
    close(jax.tree.map(lambda leaf: leaf.reshape(4, *leaf.shape[2:]), found), expected)


def first_input() -> dict[str, Any]:
    return jax.tree.map(lambda leaf: leaf[1], inputs())


def test_hessian_vector_products() -> None:
    """jvp of grad: on tiles as on the reference, whose own is confirmed by a difference of gradients in float64."""
    real, others = split(first_input())
    along = jax.tree.map(lambda leaf: jnp.asarray(normal(leaf.size, *leaf.shape), leaf.dtype), real)

    def product(implementation: Any) -> Any:
        def of(real: dict[str, Any]) -> Any:
            return gradient(implementation, real | others)

        return jax.jit(lambda real, along: jax.jvp(of, (real,), (along,)))(real, along)

    close(product(BLOCKWISE), product("reference"), 1e-4)


def test_the_reference_has_jvp_and_gradients_of_gradients(x64: None) -> None:
    real, others = split(first_input())
    real = {name: leaf.astype(jnp.float64) for name, leaf in real.items()}
    along = jax.tree.map(lambda leaf: jnp.asarray(normal(leaf.size, *leaf.shape)), real)

    @jax.jit
    def run(real: dict[str, Any]) -> Any:
        def of(real: dict[str, Any]) -> Any:
            return gradient("reference", real | others)

        slope = jax.jvp(lambda real: loss("reference", real | others), (real,), (along,))[1]

        def inner(real: dict[str, Any]) -> Any:
            return sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(of(real)), jax.tree.leaves(along)))

        return slope, of(real), jax.grad(inner)(real)

    slope, first, second = run(real)
    assert float(slope) == pytest.approx(
        sum(float(jnp.vdot(a, b)) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(along))), rel=1e-12
    )
    step = 1e-5
    up, down = (run(jax.tree.map(lambda a, b: a + sign * step * b, real, along))[1] for sign in (1, -1))  # noqa: B023
    close(second, jax.tree.map(lambda a, b: (a - b) / (2 * step), up, down), 1e-7)


def test_checkpoint_shapes_and_donation() -> None:
    """What is donated is used for the gradient of the same shape, in a program that also recomputes."""
    x = first_input()
    real, others = split(x)
    shapes = jax.eval_shape(lambda x: attend(BLOCKWISE, x), x)
    assert jax.tree.map(lambda leaf: leaf.shape, shapes) == ((B, Q, H, E), (B, H, Q))
    plain = jax.jit(lambda real: gradient(BLOCKWISE, real | others))(real)
    recomputed = jax.grad(jax.checkpoint(lambda real: loss(BLOCKWISE, real | others)))
    donated = jax.tree.map(jnp.copy, real)
    close(jax.jit(recomputed, donate_argnums=0)(donated), plain, 1e-6)
    assert all(leaf.is_deleted() for leaf in donated.values())


def test_gradients_of_other_operands_before_do_not_matter() -> None:
    """JAX keeps what it traced: the second of two different gradients once got the operands of the first mixed up."""
    x = first_input()
    names = ("slopes", "sink", "gates", "scale", "softcap")
    whole = {name: x[name] for name in names}

    def of(some: dict[str, Any]) -> jax.Array:
        each = whole | some
        bias, gate = mk.AlibiBias(each["slopes"]), each["gates"]
        options = {"bias": bias, "head_gate": gate, "implementation": BLOCKWISE}
        options |= {name: each[name] for name in ("sink", "scale", "softcap")}
        return (mk.attention(x["query"], x["key"], x["value"], **options) ** 2).sum()

    expected = jax.jit(jax.grad(of))(whole)
    for group in (("slopes", "gates"), ("softcap", "sink"), names):
        part = {name: x[name] for name in group}
        for function in (of, jax.checkpoint(of)):
            close(jax.jit(jax.grad(function))(part), {name: expected[name] for name in group}, 1e-6)
