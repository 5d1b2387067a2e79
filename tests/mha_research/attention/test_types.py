"""Types: with 64-bit ones enabled, float64 modules lose nothing to float32 and narrower modules hold no float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mha_kernels import Blockwise
from mha_research import (
    DropHead,
    PerformerAttention,
    RelativeBias,
    Rotary,
    attention,
    initializers,
    positions,
    update_importance,
)
from mha_research.attention.variants.multi_scale import pool_patches
from tests.mha_research.attention.helpers import close
from tests.mha_research.attention.modules import CANNOT_DECODE, MODULES, B, D, H, L

pytestmark = pytest.mark.usefixtures("x64")
KEY = jax.random.key(0)
FLOAT64, FLOAT32, BFLOAT16 = (jnp.dtype(name) for name in ("float64", "float32", "bfloat16"))


def float_types(jaxpr):
    """(primitive, float types in, float types out) of every equation, inner ones included."""

    def names(variables):
        types = (getattr(v.aval, "dtype", jnp.bool_) for v in variables)
        return frozenset(str(t) for t in types if jnp.issubdtype(t, jnp.floating))

    found = set()
    for equation in jaxpr.eqns:
        found.add((equation.primitive.name, names(equation.invars), names(equation.outvars)))
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found |= float_types(inner)
    return found


def everything(name, dtype, **choices):
    """What a module does with x: its start, a call with weights, gradients, two steps of decoding."""
    kind, own, call = MODULES[name]

    def run(key, x):
        module = kind(D, H, **{**own, **choices}, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(key))
        graph, parameters, rest = nnx.split(module, nnx.Param, ...)

        def loss(parameters, x):
            output, weights = nnx.merge(graph, parameters, rest)(x, **call, return_weights=True)
            return jnp.sum(output), (output, weights)

        (_, (output, weights)), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(parameters, x)
        made = {"start": nnx.state(module), "gradients": gradients, "output": output, "weights": weights}
        if name in CANNOT_DECODE:
            return made
        cache = module.init_cache(B, 2 * L)
        first, moved = module.decode(x, cache)
        second, again = module.decode(x, moved)
        return made | {"decoded": (first, second), "caches": (cache, moved, again)}

    return run


def audit(run, dtype):
    """What `run` makes, in types; raises where a type inside is foreign."""
    jaxpr, made = jax.make_jaxpr(run, return_shape=True)(KEY, jnp.ones((B, L, D), dtype))
    inside = float_types(jaxpr.jaxpr)
    if dtype == FLOAT64:  # DropHead decides in float32, but what it decides is boolean
        assert ("convert_element_type", frozenset({"float32"}), frozenset({"float64"})) not in inside
    else:
        assert not {equation for equation in inside if "float64" in equation[2]}
    return made


def test_every_module_is_in_the_table():
    kinds = {kind.__name__ for kind, *_ in MODULES.values()}
    exported = {name for name in attention.__all__ if name.endswith("Attention")} | {"DomainAdapter"}
    assert kinds == exported


@pytest.mark.parametrize("dtype", [FLOAT64, FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_a_module_keeps_to_its_type(name, dtype):
    made, wide = audit(everything(name, dtype), dtype), jnp.promote_types(dtype, jnp.float32)
    start = {path[-1]: variable.dtype for path, variable in nnx.to_flat_state(made["start"])}
    assert start.pop("head_importance", jnp.float32) == jnp.float32
    assert start.pop("features", wide) in (wide, jnp.uint32)  # the key of those that are redrawn
    assert set(start.values()) == {dtype}
    assert {x.dtype for x in jax.tree.leaves(made["gradients"])} == {dtype}
    assert {x.dtype for x in jax.tree.leaves(made["weights"])} == {wide}
    assert made["output"].dtype == dtype
    if name not in CANNOT_DECODE:
        assert [x.dtype for x in made["decoded"]] == [dtype, dtype]
        kinds = [[(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(c)] for c in made["caches"]]
        assert kinds[0] == kinds[1] == kinds[2]  # what a scan wants of its carry
        assert made["caches"][0].key.dtype == dtype


NUMPY = {
    "t5": {"position": RelativeBias(std=np.float64(0.1)), "num_kv_heads": np.int64(1)},
    "rotary": {"position": Rotary(np.float64(100)), "softcap": np.float64(2), "scale": np.float64(0.3)},
    "dropping": {"drop_head": DropHead(np.float64(0.5)), "dropout_rate": np.float64(0.3), "softcap": np.float64(2)},
    "grid": {"grid": np.array([1, L]).tolist(), "kernel_size": np.int64(3)},
    "scales": {"grid": [np.int64(1), L], "patch_sizes": np.array([1, 2]), "dropout_rate": np.array([0.1, 0.2])},
    "sigmoid": {"logit_bias": np.float64(-1)},
}


@pytest.mark.parametrize("name", NUMPY)
def test_numbers_of_numpy_are_numbers(name, monkeypatch):
    """They change no type, and a module holds nothing that cannot be hashed, which jit would refuse."""
    if name == "scales":
        monkeypatch.setitem(MODULES, name, (*MODULES[name][:2], {}))  # a grid has no causal mask
    made = audit(everything(name, FLOAT32, **NUMPY[name]), FLOAT32)
    assert {x.dtype for x in jax.tree.leaves((made["gradients"], made["weights"], made["output"]))} == {FLOAT32}
    kind, own, _ = MODULES[name]
    module = nnx.eval_shape(lambda: kind(D, H, **{**own, **NUMPY[name]}, rngs=nnx.Rngs(0)))
    assert isinstance(hash(nnx.graphdef(module)), int)


@pytest.mark.parametrize("name", ["alibi", "rotary", "t5"])
def test_float32_stays_on_tiles_too(name):
    assert audit(everything(name, FLOAT32, implementation=Blockwise(4, 4)), FLOAT32)["output"].dtype == FLOAT32


def test_tables_of_positions():
    place, width = np.arange(50), 8
    frequency = 100.0 ** (-np.arange(0, width, 2) / width)
    for table, at in ((positions.sinusoidal, place), (positions.log_time, 49 * np.log1p(place) / np.log(50))):
        angle = at[:, None] * frequency
        expected = np.stack([np.sin(angle), np.cos(angle)], -1).reshape(50, width)
        close(table(50, width, np.float64(100), dtype=jnp.float64), expected)
        assert table(50, width, np.float64(100)).dtype == jnp.float32
        assert table(50, width, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    assert positions.sinusoidal_at(jnp.arange(3.0), width).dtype == jnp.float64
    learned = positions.Learned(3, 4, std=np.float64(0.1), param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert learned.table.dtype == learned(2).dtype == jnp.bfloat16


MATRICES = {
    "orthogonal": initializers.orthogonal(np.float64(2)),
    "heads": initializers.orthogonal(num_heads=2),
    "svd_decay": initializers.svd_decay(np.float64(0.5)),
    "scaled": initializers.scaled(initializers.orthogonal(), np.float64(3)),
}
SPECTRA = {"orthogonal": np.full(6, 2.0), "svd_decay": 0.5 ** np.arange(6), "scaled": np.full(6, 3.0)}


@pytest.mark.parametrize("name", MATRICES)
def test_initialisers_are_exact_in_float64_and_know_16_bits(name):
    for dtype in (jnp.float64, jnp.float32, jnp.bfloat16, jnp.float16):
        assert MATRICES[name](KEY, (6, 6), dtype).dtype == dtype
    if name in SPECTRA:
        matrix = np.asarray(MATRICES[name](KEY, (6, 6), jnp.float64))
        close(np.linalg.svd(matrix, compute_uv=False), SPECTRA[name])


def test_what_float32_draws_does_not_depend_on_64_bit_types():
    def draws():
        features = PerformerAttention(D, H, num_features=8, orthogonal=False, rngs=nnx.Rngs(0)).projection()
        return features, DropHead(0.5).gates(KEY, 40, H), initializers.mimetic()(KEY, 6, 2, 3, 3)

    found = jax.jit(draws)()
    with jax.enable_x64(False):
        expected = jax.jit(draws)()
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype == jnp.float32
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def test_gates_importance_and_means_of_patches():
    gates = DropHead(0.5).gates(KEY, 40, 7, dtype=jnp.float64)
    close(gates.sum(1), np.full(40, 7.0))
    gradient = jnp.ones((2, 3), jnp.float64)
    assert update_importance(jnp.ones(3, jnp.float32), gradient, gradient).dtype == jnp.float32
    means, _ = pool_patches(jnp.full((1, 300, 1), 300.0, jnp.float16), 300, None, None)  # 90000 is no float16
    assert means.dtype == jnp.float16
    np.testing.assert_array_equal(means, [[[300]]])
