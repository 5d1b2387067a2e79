"""The native implementation: against the oracle, under every transform, and how it is built, chosen and declined."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import mha_kernels as mk
from mha_kernels.native import library
from tests.mha_kernels.problems import normal
from tests.mha_kernels.test_properties import check, problem

KINDS = ["causal", "window", "left", "padding", "segments"]

# Its tiles are 192 queries by 512 keys forward, 96 by 256 backward, and panels of 16 to 64 keys: lengths around them.
length = st.sampled_from([1, 2, 7, 63, 65, 97, 193, 257, 530])
width = st.sampled_from([1, 3, 16, 17, 33, 80])
structures = st.fixed_dictionaries(
    {
        "sizes": st.tuples(st.integers(1, 2), length, length, st.integers(1, 2), st.integers(1, 3), width, width),
        "dtype": st.sampled_from(["float32", "bfloat16", "float16"]),
        "masks": st.lists(st.sampled_from(KINDS), max_size=3, unique=True),
        "biases": st.lists(st.sampled_from(["alibi", "distance", "clipped", "t5"]), max_size=2),
        "options": st.sets(st.sampled_from(["sink", "head_gate", "head_gates"])),
    }
)
# Of sums of up to 530 terms, where the other implementations are held to sums of 5.
BOUNDS = {"float32": 5e-5, "bfloat16": 2e-2, "float16": 3e-3}
EVERYTHING = {
    "sizes": (2, 193, 530, 2, 2, 17, 80),
    "dtype": "float32",
    "masks": ["window", "padding", "segments"],
    "biases": ["alibi", "t5"],
    "options": {"sink", "head_gates"},
}


@pytest.mark.usefixtures("native")
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(structure=EVERYTHING, seeds=[0, 1])
@given(structure=structures, seeds=st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=2))
def test_output_statistics_and_every_gradient(structure: dict[str, Any], seeds: list[int]) -> None:
    for rng in map(np.random.default_rng, seeds):
        check(structure, problem(structure, rng), rng, ("native",), BOUNDS)


def inputs(*shape: int, seed: int = 0) -> list[jax.Array]:
    """Query, key, value and an output cotangent (B, L, H, E)."""
    return [jnp.asarray(normal(seed + n, *shape), jnp.float32) for n in range(4)]


def close(found: Any, expected: Any, atol: float = 1e-5) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=atol * max(1, float(jnp.abs(other).max())))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
def test_garbage_is_never_seen(garbage: float) -> None:
    """Keys that are padding, and queries of a segment that has no key, hold anything."""
    keep = np.array([[True] * 4 + [False] * 3, [False, True, True, True, True, True, False]])
    query_ids = np.array([[0] * 5 + [9] * 2, [9] + [0] * 6])
    mask = mk.KeyPaddingMask(jnp.asarray(keep)) & mk.SegmentMask(jnp.asarray(query_ids), jnp.zeros((2, 7), jnp.int32))
    used_queries = query_ids == 0

    @jax.jit
    def run(*arrays: Any) -> Any:
        results, pull_back = jax.vjp(
            lambda *x: mk.attention_with_statistics(*x, mask=mask, implementation="native"), *arrays
        )
        return results, pull_back(jax.tree.map(jnp.ones_like, results))

    clean = inputs(2, 7, 2, 3)[:3]
    used = [jnp.asarray(rows)[:, :, None, None] for rows in (used_queries, keep, keep)]
    dirty = [jnp.where(rows, array, garbage) for rows, array in zip(used, clean)]
    expected, found = run(*clean), run(*dirty)
    assert (np.asarray(expected[0][0])[~used_queries] == 0).all()
    assert (np.asarray(expected[0][1].lse).swapaxes(1, 2)[~used_queries] == -np.inf).all()
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)
    assert all(np.isfinite(gradient).all() for gradient in found[1])


@pytest.mark.usefixtures("native")
def test_nan_where_it_is_used_is_seen() -> None:
    query, key, value, _ = inputs(1, 70, 1, 5)
    output, statistics = mk.attention_with_statistics(
        query, key.at[0, 3].set(jnp.nan), value, mask=mk.WindowMask(0, 0), implementation="native"
    )
    assert np.isnan(output[0, 3]).all()
    assert all(np.isnan(getattr(statistics, name)[0, 0, 3]) for name in ("lse", "entropy", "max_logit"))


@pytest.mark.usefixtures("native")
def test_scores_that_overflow_float32_after_the_softmax_only() -> None:
    """Weights of scores 0, -80 and -200 beside 1000: exactly one, and the softmax of what is left is right."""
    query, value = jnp.ones((1, 1, 1, 1)), jnp.asarray([1.0, 2, 3, 4]).reshape(1, 4, 1, 1)
    for scores, expected in (([1000, 0, -80, -200], 1), ([-1000, -1000, -1080, -3000], 1.5)):
        key = jnp.asarray(scores, jnp.float32).reshape(1, 4, 1, 1)
        found = mk.attention(query, key, value, scale=1.0, implementation="native")
        np.testing.assert_allclose(found.ravel(), expected, rtol=1e-6)


@pytest.mark.usefixtures("native")
def test_twice_the_same_and_no_race() -> None:
    """Every sum has a fixed order: bitwise repeatable, gradients of shared operands included."""
    arrays, table = inputs(2, 300, 6, 20)[:3], jnp.asarray(normal(9, 6, 8), jnp.float32)

    @jax.jit
    def run(arrays: Any, table: Any) -> Any:
        def loss(arrays: Any, table: Any) -> Any:
            query, key, value = arrays
            bias = mk.T5Bias(table)
            shared = key[:, :, :2], value[:, :, :2]
            return (mk.attention(query, *shared, bias=bias, mask=mk.CausalMask(), implementation="native") ** 2).sum()

        return jax.value_and_grad(loss, argnums=(0, 1))(arrays, table)

    first = jax.tree.leaves(run(arrays, table))
    for _ in range(10):
        for one, other in zip(jax.tree.leaves(run(arrays, table)), first, strict=True):
            np.testing.assert_array_equal(one, other)


def everything(x: dict[str, Any], implementation: str = "native") -> Any:
    """Output and statistics of a call with every kind of operand."""
    mask = mk.CausalMask(x["offset"]) & mk.KeyPaddingMask(x["keep"]) & mk.SegmentMask(x["query_ids"], x["key_ids"])
    bias = mk.AlibiBias(x["slopes"]) + mk.ClippedBias(x["table"])
    options = {"mask": mask, "bias": bias, "sink": x["sink"], "head_gate": x["gate"], "scale": 0.4}
    return mk.attention_with_statistics(x["query"], x["key"], x["value"], **options, implementation=implementation)


def arguments(copies: int) -> dict[str, Any]:
    """Arguments of `everything`, each with a leading axis of copies."""
    rng = np.random.default_rng(5)
    shapes = {"query": (2, 5, 4, 3), "key": (2, 7, 2, 3), "value": (2, 7, 2, 6), "slopes": (4,), "table": (4, 5)}
    x = {name: rng.standard_normal((copies, *shape)).astype(np.float32) for name, shape in shapes.items()}
    x |= {"sink": rng.standard_normal((copies, 4)).astype(np.float32), "offset": np.arange(copies, dtype=np.int32)}
    x |= {"gate": (rng.random((copies, 2, 4)) < 0.7).astype(np.float32), "keep": rng.random((copies, 2, 7)) < 0.8}
    x |= {"query_ids": rng.integers(0, 2, (copies, 2, 5)), "key_ids": rng.integers(0, 2, (copies, 2, 7))}
    return jax.tree.map(jnp.asarray, x)


FLOATS = ("query", "key", "value", "slopes", "table", "sink", "gate")


def results_and_gradients(x: dict[str, Any], implementation: str = "native") -> Any:
    def loss(floats: dict[str, Any]) -> Any:
        output, statistics = everything(x | floats, implementation)
        total = (output**2).sum() + sum(jnp.nan_to_num(row, neginf=0.0).sum() for row in jax.tree.leaves(statistics))
        return total, (output, statistics)

    return jax.value_and_grad(loss, has_aux=True)({name: x[name] for name in FLOATS})


@pytest.mark.usefixtures("native")
def test_vmap_over_every_argument_and_of_the_gradient() -> None:
    x = arguments(3)
    one = jax.jit(results_and_gradients)
    parts = [one(jax.tree.map(lambda leaf, n=n: leaf[n], x)) for n in range(3)]
    close(jax.jit(jax.vmap(results_and_gradients))(x), jax.tree.map(lambda *rows: jnp.stack(rows), *parts))
    shared = x | {name: x[name][0] for name in ("query", "table", "keep")}
    axes = {name: None if name in ("query", "table", "keep") else 0 for name in x}
    parts = [one({n: shared[n] if axes[n] is None else shared[n][i] for n in shared}) for i in range(3)]
    found = jax.vmap(results_and_gradients, in_axes=(axes,))(shared)
    close(found, jax.tree.map(lambda *rows: jnp.stack(rows), *parts))


@pytest.mark.usefixtures("native")
def test_hessian_vector_products_checkpoint_and_scan() -> None:
    x = jax.tree.map(lambda leaf: leaf[0], arguments(1))
    floats = {name: x[name] for name in FLOATS}
    along = {
        name: jnp.asarray(normal(50 + n, *leaf.shape), jnp.float32) for n, (name, leaf) in enumerate(floats.items())
    }

    def gradient(implementation: str, wrap: Any = lambda f: f) -> Any:
        return jax.grad(lambda floats: (wrap(lambda f: everything(x | f, implementation)[0])(floats) ** 2).sum())

    products = [jax.jit(lambda n=n: jax.jvp(gradient(n), (floats,), (along,)))() for n in ("native", "reference")]
    close(*products, atol=3e-5)
    close(jax.jit(gradient("native", jax.checkpoint))(floats), jax.jit(gradient("native"))(floats))

    def twice(query: Any, _: Any) -> Any:
        return everything(x | {"query": query})[0][..., :3], None

    once = everything(x)[0][..., :3]
    found = jax.jit(lambda query: jax.lax.scan(twice, query, length=2)[0])(x["query"])
    close(found, everything(x | {"query": once})[0][..., :3])


@pytest.mark.usefixtures("native")
def test_what_it_leaves_to_blockwise_in_a_backward_pass() -> None:
    """A trained scale acts on tiles and is no bias: its gradient comes from there, the others with it."""
    query, key, value, cotangent = inputs(2, 9, 2, 4)

    def run(implementation: str) -> Any:
        def loss(query: Any, scale: Any) -> Any:
            return (mk.attention(query, key, value, scale=scale, implementation=implementation) * cotangent).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(query, jnp.float32(0.3))

    close(run("native"), run("reference"))


@pytest.mark.usefixtures("native")
def test_64_bit_types_of_the_caller_change_nothing() -> None:
    x = jax.tree.map(lambda leaf: leaf[0], arguments(1))
    expected = jax.jit(results_and_gradients)(x)
    with jax.enable_x64(True):
        found = jax.jit(results_and_gradients)(x)
    for one, other in zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.usefixtures("native")
def test_memory_is_linear() -> None:
    def planned(size: int) -> int:
        array = jax.ShapeDtypeStruct((1, size, 2, 4), jnp.float32)
        bias = mk.AlibiBias(mk.alibi_slopes(2))
        run = jax.grad(lambda *x: mk.attention(*x, bias=bias, implementation="native").sum(), argnums=(0, 1, 2))
        return jax.jit(run).lower(array, array, array).compile().memory_analysis().temp_size_in_bytes

    assert planned(4096) < 4.2 * planned(1024)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
import mha_kernels as mk
from jax.sharding import PartitionSpec as P

rng = np.random.default_rng(0)
normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
p = {"query": normal(2, 5, 4, 3), "key": normal(2, 7, 2, 3), "value": normal(2, 7, 2, 3), "slopes": normal(4)}
specs = {"query": P("b", None, "h"), "key": P("b", None, "h"), "value": P("b", None, "h"), "slopes": P("h")}
mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

def attend(p):
    return mk.attention(p["query"], p["key"], p["value"], mask=mk.CausalMask(1), bias=mk.AlibiBias(p["slopes"]),
                        implementation="native")

def entered(p):
    with mk.sharded(mesh, "b", "h"):
        return (attend(p) ** 2).sum()

def mapped(p):
    f = jax.shard_map(attend, mesh=mesh, in_specs=(specs,), out_specs=P("b", None, "h"), check_vma=True)
    return (f(p) ** 2).sum()

expected = jax.jit(jax.value_and_grad(lambda p: (attend(p) ** 2).sum()))(p)
for f in (entered, mapped):
    found = jax.jit(jax.value_and_grad(f))(p)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-5)
print("same")
"""


def python(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    inherited = {name: os.environ[name] for name in ("PATH", "HOME", "XDG_CACHE_HOME") if name in os.environ}
    paths = {"PYTHONPATH": f"{root}:{root / 'kernels'}", "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, *command], env=inherited | paths | environment, capture_output=True, text=True, check=False
    )


@pytest.mark.usefixtures("native")
def test_shards_compute_what_the_whole_does() -> None:
    run = python("-W", "error", "-c", SHARDED, XLA_FLAGS="--xla_force_host_platform_device_count=4")
    assert run.stdout == "same\n", run.stderr


QUERY = np.zeros((1, 5, 2, 4), np.float32)
SEGMENTS = mk.SegmentMask(np.zeros((1, 5), np.int32), np.zeros((1, 5), np.int32))  # type: ignore[arg-type]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    "options, reason",
    [
        ({"softcap": 2.0}, "softcap is not in it"),
        ({"dropout": mk.Dropout(0.5, np.array([1, 2], np.uint32))}, "dropout is not in it"),
        ({"mask": np.ones((5, 5), bool)}, "DenseMask is not in it"),
        ({"bias": np.ones((5, 5), np.float32)}, "DenseBias is not in it"),
        ({"mask": SEGMENTS & SEGMENTS}, "one SegmentMask, not several"),
    ],
    ids=str,
)
def test_what_it_declines_goes_to_blockwise(options: dict[str, Any], reason: str) -> None:
    plan = mk.explain(QUERY, QUERY, QUERY, **options)
    assert plan.implementation == "blockwise"
    assert reason in plan.declined["native"]
    with pytest.raises(ValueError, match=f"'native' cannot do this: .*{reason}"):
        mk.attention(*inputs(1, 5, 2, 4)[:3], **options, implementation="native")


@pytest.mark.usefixtures("native")
def test_float64_goes_to_blockwise(x64: None) -> None:
    query = np.zeros((1, 5, 2, 4))
    assert "an input is float64" in mk.explain(query, query, query).declined["native"]


@pytest.mark.usefixtures("native")
def test_it_is_chosen_where_it_is_built() -> None:
    assert mk.explain(QUERY, QUERY, QUERY).implementation == "native"


@pytest.mark.usefixtures("no_native")
def test_it_is_not_chosen_before() -> None:
    plan = mk.explain(QUERY, QUERY, QUERY)
    assert plan.implementation == "blockwise"
    assert "not built here; `python -m mha_kernels.native` compiles it" in plan.declined["native"]
    with pytest.raises(ValueError, match="it is not built here"):
        mk.attention(*inputs(1, 5, 2, 4)[:3], implementation="native")


def test_the_command_line_says_in_one_line_what_is_missing(tmp_path: Path) -> None:
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\necho 'attention.cc:1: error: no such thing' >&2\nexit 3\n")
    failing.chmod(0o755)
    (tmp_path / "file").touch()
    fresh = str(tmp_path / "cache")
    cases = [
        ({"PATH": str(tmp_path)}, "no C++ compiler is found: install g++ or clang, or name one in the variable CXX"),
        ({"CXX": "nowhere/c++"}, "nowhere/c++ does not run"),
        ({"CXX": str(failing)}, "failed with status 3:\nattention.cc:1: error: no such thing"),
        ({"CXX": str(failing), "XDG_CACHE_HOME": str(tmp_path / "file")}, str(tmp_path / "file")),
    ]
    for environment, message in cases:
        run = python("-m", "mha_kernels.native", **({"XDG_CACHE_HOME": fresh} | environment))
        assert run.returncode == 1
        assert run.stdout == ""
        assert run.stderr.startswith("mha_kernels.native: "), run.stderr
        assert message in run.stderr
    assert not list((tmp_path / "cache").rglob("*.so"))


@pytest.mark.usefixtures("native")
def test_the_command_line_says_where_it_lies() -> None:
    run = python("-W", "error", "-m", "mha_kernels.native")
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[0] == str(library.path())


def test_a_damaged_library_is_declined_and_compiled_again(
    native_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(native_cache))
    whole = library.path()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.path().parent.mkdir()
    library.path().write_bytes(whole.read_bytes()[:20000])  # to load it would end the process
    library.path().with_suffix(".sha256").write_text(whole.with_suffix(".sha256").read_text())
    plan = mk.explain(QUERY, QUERY, QUERY)
    assert plan.implementation == "blockwise"
    assert "is damaged; `python -m mha_kernels.native` compiles it again" in plan.declined["native"]
    monkeypatch.setenv("CXX", "nowhere")
    with pytest.raises(RuntimeError, match="nowhere does not run"):  # it does not take the file for a library
        library.build()


@pytest.mark.parametrize("home", ["", "file/home"])
def test_no_home_directory_is_one_without_the_library(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if home:
        (tmp_path / "file").touch()
        monkeypatch.setenv("HOME", str(tmp_path / home))
    else:
        monkeypatch.setattr(Path, "home", no_home)
    assert mk.explain(QUERY, QUERY, QUERY).implementation == "blockwise"


class Odd(mk.KeyPaddingMask):
    """Another rule than that of its base."""

    def allowed(self, at: mk.Tile) -> jax.Array:
        return self.keep & (at.key % 2 == 1)


class Near(mk.RelativeBias):
    """Forbids what is far."""

    forbids = True

    def of_distance(self, distance: jax.Array, lookup: Any) -> jax.Array:
        return jnp.where(abs(distance) > 3, -jnp.inf, 0.0)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("options", [{"mask": Odd(np.ones((1, 5), bool))}, {"bias": Near()}], ids=["mask", "bias"])
def test_what_a_subclass_changes_is_not_taken_for_its_base(options: dict[str, Any]) -> None:
    assert (
        f"{type(next(iter(options.values()))).__name__} is not in it"
        in mk.explain(QUERY, QUERY, QUERY, **options).declined["native"]
    )


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0x7FFFFFFF, 0xFFFFFFFF], ids=hex)
def test_every_nan_is_seen(bits: int) -> None:
    key = np.ones((1, 5, 1, 3), np.float32)
    key.view(np.uint32)[0, 2] = bits
    output = mk.attention(jnp.ones((1, 4, 1, 3)), jnp.asarray(key), jnp.ones((1, 5, 1, 2)), implementation="native")
    assert np.isnan(output).all()


@pytest.mark.usefixtures("native")
def test_nested_vmap_over_different_operands() -> None:
    query, key, value = (jnp.asarray(normal(n, 2, 3, 1, 5, 2, 3), jnp.float32) for n in range(3))
    outer, inner = jnp.arange(2), jnp.arange(1.0, 4)

    def attend(query: Any, key: Any, value: Any, first: Any, slope: Any) -> jax.Array:
        options = {"mask": mk.CausalMask(first), "bias": mk.AlibiBias(mk.alibi_slopes(2) * slope)}
        return (mk.attention(query, key, value, **options, implementation="native") ** 2).sum()

    run = jax.value_and_grad(attend, argnums=(0, 4))
    found = jax.vmap(jax.vmap(run, (0, 0, 0, None, 0)), (0, 0, 0, 0, None))(query, key, value, outer, inner)
    for n in range(2):
        for m in range(3):
            expected = run(query[n, m], key[n, m], value[n, m], outer[n], inner[m])
            close(jax.tree.map(lambda leaf: leaf[n, m], found), expected)  # noqa: B023


@pytest.mark.usefixtures("native")
def test_packed_documents_and_padding_in_long_windows() -> None:
    """Panels that no query may attend are left out at both ends, those between them are not."""
    length, rng = 400, np.random.default_rng(0)
    ids = np.sort(rng.integers(0, 9, (2, length)))
    ids[1, 150:200] = ids[1, 0]  # a document in two pieces
    keep = np.ones((2, length), bool)
    keep[0, :70], keep[1, 330:] = False, False
    mask = mk.SegmentMask(jnp.asarray(ids, jnp.int32), jnp.asarray(ids, jnp.int32)) & mk.KeyPaddingMask(
        jnp.asarray(keep)
    )
    arrays = inputs(2, length, 2, 20)[:3]

    def run(implementation: str) -> Any:
        def loss(*arrays: Any) -> Any:
            output, statistics = mk.attention_with_statistics(*arrays, mask=mask, implementation=implementation)
            return (output**2).sum() + statistics.entropy.sum(), (output, statistics)

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*arrays)

    found, expected = run("native"), run("reference")
    np.testing.assert_array_equal(np.isfinite(found[1][1].lse), np.isfinite(expected[1][1].lse))
    close(jax.tree.map(jnp.nan_to_num, found), jax.tree.map(jnp.nan_to_num, expected), atol=3e-5)
