"""Every operand at once, output, statistics and all gradients, against the float64 oracle."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_kernels as mk
from tests.mha_kernels import problems as pr


@functools.cache
def keep_of_dropout() -> np.ndarray:
    return pr.kept(pr.DROPOUT, (pr.B, pr.H, pr.Q, pr.K), pr.ORIGIN, "reference")


def compare(implementation: Any, dtype: Any, bounds: tuple[float, float, float]) -> None:
    """bounds: of the output, of the statistics, and of gradients relative to the largest entry of each."""
    p = pr.parameters(dtype)
    run = jax.jit(jax.value_and_grad(functools.partial(pr.loss, implementation), has_aux=True))
    (_, (output, statistics)), gradients = run(p)
    forward, expected = pr.expected(p, keep_of_dropout())
    assert output.dtype == dtype
    assert statistics.lse.dtype == (jnp.float64 if dtype == jnp.float64 else jnp.float32)
    np.testing.assert_allclose(np.asarray(output, np.float64), forward.output, rtol=0, atol=bounds[0])
    for name in mk.STATISTICS:
        np.testing.assert_allclose(
            getattr(statistics, name), forward.statistics[name], rtol=0, atol=bounds[1], err_msg=name
        )
    assert set(gradients) == set(expected)
    for name, gradient in gradients.items():
        assert gradient.shape == p[name].shape
        assert gradient.dtype == p[name].dtype
        atol = bounds[2] * np.abs(expected[name]).max()
        np.testing.assert_allclose(np.asarray(gradient, np.float64), expected[name], rtol=0, atol=atol, err_msg=name)


def test_the_problem_is_a_hard_one() -> None:
    """It has closed heads, dropped entries, empty rows and rows with keys: otherwise the comparison shows little."""
    forward, _ = pr.expected(pr.parameters(np.float32), keep_of_dropout())
    assert np.isnan(forward.statistics["lse"]).sum() == pr.Q
    assert 0.2 < (keep_of_dropout() == 0).mean() < 0.4
    rows = forward.statistics["max_logit"][1, 0]
    assert list(rows == -np.inf) == [False, False, True, False, False, False, True]


@pytest.mark.parametrize("implementation", pr.IMPLEMENTATIONS, ids=str)
def test_float64_to_the_last_digits(implementation: Any, x64: None) -> None:
    compare(implementation, np.float64, (1e-12, 1e-12, 1e-12))


@pytest.mark.parametrize("dtype, bounds", [("float32", (3e-6, 3e-6, 3e-6))])
def test_float32(dtype: str, bounds: Any) -> None:
    compare(pr.BLOCKWISE, jnp.dtype(dtype), bounds)
