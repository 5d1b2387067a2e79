"""Any combination of shapes, groups, masks, biases, offsets and types, against the oracle."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import mha_kernels as mk
from tests.mha_kernels import oracle

BOUNDS = {"float32": 5e-6, "bfloat16": 2e-2, "float16": 3e-3}


@st.composite
def problems(draw: Any) -> tuple[list[np.ndarray], dict[str, Any], dict[str, Any], mk.Blockwise]:
    """Arrays, arguments of `attention`, the same for the oracle, and tile sizes."""
    size = st.integers(1, 6)
    b, queries, keys, groups, e, v = (draw(size) for _ in range(6))
    h = groups * draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    arrays = [rng.standard_normal(shape) for shape in ((b, queries, h, e), (b, keys, groups, e), (b, keys, groups, v))]
    first_query, first_key = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    i, j = np.arange(queries)[:, None] + first_query, np.arange(keys)[None, :] + first_key
    masks: list[mk.Mask] = []
    biases: list[mk.Bias] = []
    allowed, bias = np.ones((b, h, queries, keys), bool), np.zeros((b, h, queries, keys))
    for kind in draw(st.lists(st.sampled_from(["causal", "window", "padding", "dense"]), max_size=2, unique=True)):
        if kind == "causal":
            offset = draw(st.integers(-3, 9))
            masks.append(mk.CausalMask(offset))
            allowed &= j <= i + offset
        elif kind == "window":
            left, right = draw(st.none() | st.integers(0, 5)), draw(st.none() | st.integers(-2, 5))
            masks.append(mk.WindowMask(left, right))
            allowed &= (left is None or j >= i - left) & (right is None or j <= i + right)
        elif kind == "padding":
            keep = rng.random((b, keys)) < 0.6
            masks.append(mk.KeyPaddingMask(jnp.asarray(keep)))
            allowed &= keep[:, None, None, :]
        else:
            keep = rng.random((1, h, queries, keys)) < 0.6
            masks.append(mk.DenseMask(jnp.asarray(keep)))
            allowed &= keep
    for kind in draw(st.lists(st.sampled_from(["alibi", "distance", "dense"]), max_size=2, unique=True)):
        if kind == "alibi":
            slopes = np.float32(rng.random(h))
            biases.append(mk.AlibiBias(jnp.asarray(slopes)))
            bias = bias - slopes[:, None, None] * abs(i - j)
        elif kind == "distance":
            table = np.float32(rng.standard_normal((h, 4)))
            biases.append(mk.DistanceBias(jnp.asarray(table)))
            bias = bias + table[:, np.minimum(abs(i - j), 3)]
        else:
            values = np.float32(rng.standard_normal((b, 1, queries, keys)))
            values = np.where(rng.random(values.shape) < 0.2, -np.inf, values)
            biases.append(mk.DenseBias(jnp.asarray(values, jnp.float32)))
            bias = bias + values
    options: dict[str, Any] = {"origin": mk.Origin(query=first_query, key=first_key)}
    options["mask"] = functools.reduce(operator.and_, masks) if masks else None
    options["bias"] = functools.reduce(operator.add, biases) if biases else None
    written_out = {"allowed": allowed, "bias": bias, "first_query": first_query, "first_key": first_key}
    return arrays, options, written_out, mk.Blockwise(draw(size), draw(size))


@settings(max_examples=10)
@given(problem=problems(), dtype=st.sampled_from(list(BOUNDS)))
def test_output_and_statistics(problem: Any, dtype: str) -> None:
    arrays, options, written_out, tiles = problem
    given_arrays = [jnp.asarray(array, dtype) for array in arrays]
    expected = oracle.attend(*(np.asarray(x, np.float64) for x in given_arrays), **written_out)
    for implementation in ("reference", tiles):
        run = jax.jit(lambda *x: mk.attention_with_statistics(*x, implementation=implementation, **options))  # noqa: B023
        output, statistics = run(*given_arrays)
        assert output.dtype == dtype
        bound = BOUNDS[dtype] * max(1, np.abs(expected.output).max())
        np.testing.assert_allclose(np.asarray(output, np.float64), expected.output, rtol=0, atol=bound)
        for name in mk.STATISTICS:
            np.testing.assert_allclose(getattr(statistics, name), expected.statistics[name], rtol=1e-5, atol=1e-5)
