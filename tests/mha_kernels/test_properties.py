"""Any combination of shapes, groups, masks, biases, dropout, gates, offsets and types, against the oracle."""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

import mha_kernels as mk
from tests.mha_kernels import oracle
from tests.mha_kernels.problems import kept

# Of the output and of gradients; statistics have at least the types and bounds of float32.
BOUNDS = {"float64": 1e-12, "float32": 5e-6, "bfloat16": 2e-2, "float16": 3e-3}
RATE = 0.3


class Place(NamedTuple):
    """The sizes of a problem, positions i (Q, 1) of queries and j (1, K) of keys, and where its numbers come from."""

    b: int
    h: int
    queries: int
    keys: int
    i: np.ndarray
    j: np.ndarray
    rng: np.random.Generator

    def keep(self, *shape: int) -> np.ndarray:
        return self.rng.random(shape) < 0.6

    def ids(self, length: int) -> np.ndarray:
        return np.sort(self.rng.integers(0, 3, (self.b, length)))


def masks(at: Place) -> dict[str, Callable[[], tuple[mk.Mask, np.ndarray]]]:
    """Each kind of mask, and what it allows written out."""

    def causal() -> Any:
        offset = int(at.rng.integers(-3, 10))
        return mk.CausalMask(offset), at.j <= at.i + offset

    def window() -> Any:
        left, right = int(at.rng.integers(0, 6)), int(at.rng.integers(-2, 6))
        return mk.WindowMask(left, right), (at.j >= at.i - left) & (at.j <= at.i + right)

    def left() -> Any:
        left = int(at.rng.integers(-1, 6))
        return mk.WindowMask(left, None), at.j >= at.i - left

    def padding() -> Any:
        keep = at.keep(at.b, at.keys)
        return mk.KeyPaddingMask(jnp.asarray(keep)), keep[:, None, None, :]

    def segments() -> Any:
        query_ids, key_ids = at.ids(at.queries), at.ids(at.keys)
        mask = mk.SegmentMask(jnp.asarray(query_ids, jnp.int32), jnp.asarray(key_ids, jnp.int32))
        return mask, (query_ids[:, :, None] == key_ids[:, None, :])[:, None]

    def dense() -> Any:
        keep = at.keep(1, at.h, at.queries, at.keys)
        return mk.DenseMask(jnp.asarray(keep)), keep

    return {made.__name__: made for made in (causal, window, left, padding, segments, dense)}


def biases(at: Place) -> dict[str, tuple[Callable[[Any], mk.Bias], tuple[int, ...], Callable[[np.ndarray], Any]]]:
    """Each kind of bias: the class, the shape of its parameters, and the linear function of them that it adds."""
    i, j, h = at.i, at.j, at.h
    t5 = functools.partial(mk.T5Bias, max_distance=6)
    return {
        "alibi": (mk.AlibiBias, (h,), lambda slopes: -slopes[:, None, None] * abs(i - j)),
        "distance": (mk.DistanceBias, (h, 4), lambda table: table[:, np.minimum(abs(i - j), 3)]),
        "clipped": (mk.ClippedBias, (1, 5), lambda table: table[:, np.clip(j - i, -2, 2) + 2]),
        "t5": (t5, (h, 8), lambda table: table[:, oracle.t5_bucket(j - i, True, 8, 6)]),
        "dense": (mk.DenseBias, (at.b, 1, at.queries, at.keys), lambda values: values),
        "keys": (mk.DenseBias, (1, h, 1, at.keys), lambda values: values),
    }


# What decides which program is compiled. Everything else is drawn anew for the same program.
size = st.sampled_from([1, 2, 3, 5])
structures = st.fixed_dictionaries(
    {
        "sizes": st.tuples(st.integers(1, 2), size, size, st.integers(1, 2), st.integers(1, 3), size, size),
        "tiles": st.builds(mk.Blockwise, size, size),
        "dtype": st.sampled_from(list(BOUNDS)),
        "masks": st.lists(st.sampled_from(["causal", "window", "left", "padding", "segments", "dense"]), max_size=2),
        "biases": st.lists(st.sampled_from(["alibi", "distance", "clipped", "t5", "dense", "keys"]), max_size=2),
        "options": st.sets(st.sampled_from(["scale", "softcap", "sink", "dropout", "head_gate", "head_gates"])),
    }
)


class Problem(NamedTuple):
    """Arguments for `run`, and the arguments of the oracle; `written` has the function of each bias."""

    arrays: list[jax.Array]
    floats: dict[str, Any]
    others: dict[str, Any]
    parameters: list[np.ndarray]
    written: list[Callable[[np.ndarray], Any]]
    for_oracle: dict[str, Any]


def problem(structure: dict[str, Any], rng: np.random.Generator) -> Problem:
    b, queries, keys, groups, ratio, e, v = structure["sizes"]
    h, dtype = groups * ratio, structure["dtype"]
    real = "float64" if dtype == "float64" else "float32"
    origin = mk.Origin(*(int(n) for n in rng.integers(0, 10, 4)))
    i, j = np.arange(queries)[:, None] + origin.query, np.arange(keys)[None, :] + origin.key
    at = Place(b, h, queries, keys, i, j, rng)
    shapes = ((b, queries, h, e), (b, keys, groups, e), (b, keys, groups, v))
    arrays = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]

    made = [masks(at)[name]() for name in structure["masks"]]
    chosen = [biases(at)[name] for name in structure["biases"]]
    parameters = [rng.standard_normal(shape).astype(real) for _, shape, _ in chosen]
    for values in parameters:
        if values.ndim == 4:
            values[rng.random(values.shape) < 0.2] = -np.inf
    gates = rng.standard_normal((b, h)) * (rng.random((b, h)) < 0.7)
    values = {"scale": 0.7, "softcap": 2.5, "sink": rng.standard_normal(h), "head_gate": gates[0], "head_gates": gates}
    floats = {
        name.removesuffix("s"): jnp.asarray(value, real)
        for name, value in values.items()
        if name in structure["options"]
    }
    for_oracle: dict[str, Any] = {name: np.asarray(value, np.float64) for name, value in floats.items()}
    others: dict[str, Any] = {"origin": origin}
    if made:
        others["mask"] = functools.reduce(operator.and_, (mask for mask, _ in made))
    if chosen:
        floats["bias"] = functools.reduce(
            operator.add, (kind(jnp.asarray(values)) for (kind, *_), values in zip(chosen, parameters))
        )
    if "dropout" in structure["options"]:
        others["dropout"] = mk.Dropout(RATE, jax.random.key(int(rng.integers(2**31))))
        for_oracle["kept"] = kept(others["dropout"], (b, h, queries, keys), origin, "reference")
    for_oracle["allowed"] = functools.reduce(
        operator.and_, (allowed for _, allowed in made), np.ones((b, h, 1, 1), bool)
    )
    written = [write for *_, write in chosen]
    for_oracle["bias"] = sum((write(np.float64(x)) for write, x in zip(written, parameters)), np.zeros((1, 1, 1, 1)))
    for_oracle |= {"first_query": origin.query, "first_key": origin.key}
    return Problem(arrays, floats, others, parameters, written, for_oracle)


@functools.partial(jax.jit, static_argnums=0)
def run(implementation: Any, arrays: Any, floats: Any, others: Any, cotangents: Any) -> Any:
    """Output and statistics, and the gradients of `arrays` and `floats`."""

    def attend(arrays: Any, floats: Any) -> Any:
        return mk.attention_with_statistics(*arrays, **floats, **others, implementation=implementation)

    results, pull_back = jax.vjp(attend, arrays, floats)
    return results, pull_back(cotangents)


def close(name: str, found: Any, expected: Any, bound: float, size: float = 1.0) -> None:
    """Within `bound` of the largest entry, or of `size`, that of what was added up to it."""
    atol = bound * max(size, np.abs(expected).max(initial=0, where=np.isfinite(expected)))
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=0, atol=atol, err_msg=name)


def check(
    structure: dict[str, Any],
    given_problem: Problem,
    rng: np.random.Generator,
    implementations: tuple[Any, ...],
    bounds: dict[str, float] = BOUNDS,
) -> None:
    """Holds implementations to the oracle: output, statistics and every gradient, within the bound of the type."""
    dtype, arrays = structure["dtype"], given_problem.arrays
    # Scores are rounded as well, and those under a large bias are large.
    bias = given_problem.for_oracle["bias"]
    largest = np.abs(bias).max(where=np.isfinite(bias), initial=0)
    rounding = 0 if dtype == "float64" else 2.0**-22 * largest
    bound, exact = bounds[dtype] + rounding, min(bounds[dtype], 1e-5) + rounding
    forward = oracle.attend(*(np.asarray(x, np.float64) for x in arrays), **given_problem.for_oracle)
    of_output = jnp.asarray(rng.standard_normal(forward.output.shape), dtype)
    rows = {name: rng.standard_normal(row.shape) for name, row in forward.statistics.items()}
    of_rows = mk.HeadStatistics(
        **{name: jnp.asarray(row, "float64" if dtype == "float64" else "float32") for name, row in rows.items()}
    )
    expected = oracle.gradients(forward, of_output, {name: rows[name] for name in oracle.DIFFERENTIABLE})
    of_bias = expected.pop("bias")
    for implementation in implementations:
        (output, statistics), (of_arrays, of_floats) = run(
            implementation, arrays, given_problem.floats, given_problem.others, (of_output, of_rows)
        )
        assert output.dtype == dtype
        close("output", output, forward.output, bound)
        for name in mk.STATISTICS:
            close(name, getattr(statistics, name), forward.statistics[name], exact)
        of_biases = jax.tree.leaves(of_floats.pop("bias", None))
        for name, gradient in (dict(zip(("query", "key", "value"), of_arrays)) | of_floats).items():
            close(name, gradient, expected[name], bound)
        for name, gradient, write in zip(structure["biases"], of_biases, given_problem.written, strict=True):
            # What each entry adds to the bias, alone: the bias is linear in its parameters.
            entries = [write(unit) for unit in np.eye(gradient.size).reshape(-1, *gradient.shape)]
            size = max((abs(of_bias) * abs(entry)).sum() for entry in entries)
            close(name, gradient.ravel(), [(of_bias * entry).sum() for entry in entries], bound, size)


MANY_PROGRAMS = {
    "sizes": (5, 2, 3, 2, 2, 2, 3),
    "tiles": mk.Blockwise(2, 2),
    "dtype": "float32",
    "masks": ["causal"],
    "biases": ["alibi", "dense"],
    "options": {"head_gates", "sink"},
}

# XLA's CPU compiler once ended the process on this one: see `blockwise.transposed`.
ONE_TILE = {
    "sizes": (1, 2, 2, 2, 1, 3, 5),
    "tiles": mk.Blockwise(5, 5),
    "dtype": "float32",
    "masks": [],
    "biases": [],
    "options": {"head_gate", "head_gates"},
}


# An example compiles two programs, which is all that costs; each then meets ten problems.
@settings(max_examples=3)
@example(structure=MANY_PROGRAMS, seeds=[0, 1])
@example(structure=ONE_TILE, seeds=[0])
@given(structure=structures, seeds=st.lists(st.integers(0, 2**32 - 1), min_size=10, max_size=10))
def test_output_statistics_and_every_gradient(structure: dict[str, Any], seeds: list[int]) -> None:
    with jax.enable_x64(structure["dtype"] == "float64"):
        for rng in map(np.random.default_rng, seeds):
            check(structure, problem(structure, rng), rng, ("reference", structure["tiles"]))
