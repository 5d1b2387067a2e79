"""Whatever lies where nobody may attend, NaN and inf included, reaches no output, statistic or gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_kernels as mk
from mha_kernels.pallas.tpu.forward import PallasTPU
from tests.mha_kernels.problems import normal

B, L, H, E = 2, 7, 2, 3
IMPLEMENTATIONS = ("reference", mk.Blockwise(3, 2))
KERNEL = PallasTPU(128, 128, interpret=True)
KEEP = np.array([[True] * 4 + [False] * 3, [False, True, True, True, True, True, False]])
USED_QUERIES = np.array([[True] * 5 + [False] * 2, [False] + [True] * 6])


def padding() -> dict[str, Any]:
    """Padded keys, and padded queries that nobody will read."""
    return {"mask": mk.KeyPaddingMask(jnp.asarray(KEEP)) & mk.DenseMask(jnp.asarray(USED_QUERIES)[:, None, :, None])}


def forbidding_bias() -> dict[str, Any]:
    allowed = KEEP[:, None, None, :] & USED_QUERIES[:, None, :, None]
    return {"bias": jnp.where(allowed, jnp.asarray(normal(9, B, 1, L, L), jnp.float32), -jnp.inf)}


def bias_under_a_mask() -> dict[str, Any]:
    return padding() | {"bias": jnp.where(KEEP[:, None, None, :], 0.5, jnp.nan)}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("options", [padding, forbidding_bias, bias_under_a_mask])
def test_garbage_is_never_seen(implementation: Any, options: Any) -> None:
    given = options()
    bias = given.pop("bias", jnp.zeros((B, 1, L, L)))

    @jax.jit
    def run(q: Any, k: Any, v: Any) -> Any:
        def attend(q: Any, k: Any, v: Any, bias: Any) -> Any:
            return mk.attention_with_statistics(q, k, v, bias=bias, implementation=implementation, **given)

        results, pull_back = jax.vjp(attend, q, k, v, bias)
        return results, pull_back(jax.tree.map(jnp.ones_like, results))

    clean = [jnp.asarray(normal(seed, B, L, H, E), jnp.float32) for seed in range(3)]
    expected, expected_gradients = run(*clean)
    gradients = jax.tree.leaves(expected_gradients)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert (np.asarray(expected[0])[~USED_QUERIES] == 0).all()
    for unused, gradient in zip((~USED_QUERIES, ~KEEP, ~KEEP), gradients):
        assert (np.asarray(gradient)[unused] == 0).all()
    for garbage in (jnp.nan, jnp.inf, -jnp.inf):
        dirty = [
            jnp.where(jnp.asarray(used)[:, :, None, None], array, garbage)
            for used, array in zip((USED_QUERIES, KEEP, KEEP), clean)
        ]
        jax.tree.map(np.testing.assert_array_equal, run(*dirty), (expected, expected_gradients))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_keys_past_the_last_query_are_never_seen(implementation: Any) -> None:
    """The padding of a tile of queries lies at positions which would attend them."""
    q, k = (jnp.asarray(normal(seed, 1, length, 1, E), jnp.float32) for seed, length in enumerate((5, 7)))

    @jax.jit
    def run(k: Any) -> Any:
        output, pull_back = jax.vjp(
            lambda q, k, v: mk.attention(q, k, v, mask=mk.CausalMask(), implementation=implementation), q, k, k
        )
        return output, pull_back(output)

    clean = run(k)
    assert np.isfinite(clean[0]).all()
    jax.tree.map(np.testing.assert_array_equal, run(k.at[:, 5:].set(jnp.nan)), clean)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_a_row_without_keys(implementation: Any) -> None:
    """0 everywhere but lse and max_logit, which are -inf; beside a sink lse is the sink."""
    q, k, v = (jnp.asarray(normal(seed, 1, 4, H, E), jnp.float32) for seed in range(3))
    mask, sink = mk.CausalMask(-2), jnp.array([0.25, -3.0])

    @jax.jit
    def run(q: Any, k: Any, v: Any, sink: Any) -> Any:
        plain = mk.attention_with_statistics(q, k, v, mask=mask, implementation=implementation)
        return plain, mk.attention_with_statistics(q, k, v, mask=mask, sink=sink, implementation=implementation)

    for (output, statistics), lse in zip(run(q, k, v, sink), (np.full(H, -np.inf), np.asarray(sink))):
        assert (output[0, :2] == 0).all()
        for name in mk.STATISTICS:
            row = getattr(statistics, name)[0, :, :2]
            empty = lse[:, None] if name == "lse" else -np.inf if name == "max_logit" else 0
            np.testing.assert_array_equal(row, np.broadcast_to(empty, (H, 2)), err_msg=name)


def test_gradients_are_bitwise_repeatable() -> None:
    """Those of shared parameters sum over many tiles: the order is fixed."""
    q, k, v = (jnp.asarray(normal(seed, B, 64, H, 8), jnp.float32) for seed in range(3))
    parameters = jnp.asarray(normal(4, H, 9), jnp.float32), jnp.asarray(normal(5, 1, H, 1, 64), jnp.float32)

    @jax.jit
    @jax.grad
    def run(parameters: Any) -> Any:
        bias = mk.ClippedBias(parameters[0]) + mk.DenseBias(parameters[1])
        return (mk.attention(q, k, v, bias=bias, implementation=mk.Blockwise(8, 16)) ** 2).sum()

    first = run(parameters)
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, run(parameters), first)


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, KERNEL], ids=str)
@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
def test_nothing_in_a_closed_head_is_ever_seen(implementation: Any, mask: str) -> None:
    """Its output and gradients are zero, that of its gate included, and nothing that lies in it reaches another head.

    Head 1 is closed in both examples, head 2 in the first: blocks of several heads hold open and closed ones.
    """
    heads = 3
    gate = jnp.array([[2.0, 0, 0], [0.5, 0, -1]])
    closed = np.asarray(gate == 0)
    arrays = [jnp.asarray(normal(seed, B, L, heads, E), jnp.float32) for seed in range(3)]
    parameters = [jnp.asarray(normal(seed, heads), jnp.float32) for seed in (3, 4)]
    of_output = jnp.asarray(normal(5, B, L, heads, E), jnp.float32)
    options: dict[str, Any] = {"none": {}, "causal": {"mask": mk.CausalMask()}, "padding": padding()}[mask]

    @jax.jit
    def run(arrays: Any, parameters: Any, of_output: Any) -> Any:
        def attend(arrays: Any, parameters: Any, gate: Any) -> Any:
            slopes, sink = parameters
            return mk.attention_with_statistics(
                *arrays,
                bias=mk.AlibiBias(slopes),
                sink=sink,
                head_gate=gate,
                implementation=implementation,
                **options,
            )

        (output, statistics), pull_back = jax.vjp(attend, arrays, parameters, gate)
        return output, statistics, pull_back((of_output, jax.tree.map(jnp.ones_like, statistics)))

    expected = run(arrays, parameters, of_output)
    output, statistics, (of_arrays, of_parameters, of_gate) = expected
    for rows in (output, *of_arrays):
        assert np.isfinite(rows).all()
        for b, h in np.argwhere(closed):
            assert (rows[b, :, h] == 0).all()
    assert np.isnan(statistics.lse[closed]).all()
    assert all(np.isfinite(x).all() and x[1] == 0 and (x[jnp.array([0, 2])] != 0).all() for x in of_parameters)
    np.testing.assert_array_equal(np.asarray(of_gate) == 0, closed)
    for garbage in (jnp.nan, jnp.inf):
        dirty = [jnp.where(closed[:, None, :, None], garbage, array) for array in arrays]
        others = [x.at[1].set(garbage) for x in parameters]
        results = run(dirty, others, jnp.where(closed[:, None, :, None], garbage, of_output))
        jax.tree.map(np.testing.assert_array_equal, results, expected)
