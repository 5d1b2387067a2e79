"""Transforms of JAX, nnx and linen on modules, in float64, against a plain loop or the plain call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.nnx import bridge

from tests.mha_research.attention.helpers import build, normal
from tests.mha_research.attention.modules import MODULES, B, D, H, L

pytestmark = pytest.mark.usefixtures("x64")
N = 2
KINDS = {kind: name for name, (kind, *_) in reversed(MODULES.items()) if name != "alibi"}  # the first of each kind
NESTED = ["performer", "scales"]  # modules in a list, a variable that is not trained


def same(found, expected):
    """Trees of arrays, each within 1e-11 of its largest entry (or of 1, where that is less)."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-11 * max(1.0, float(np.abs(other).max())))


@pytest.mark.parametrize("name", [*KINDS.values(), "dropping"])
def test_vmap_checkpoint_and_jvp(name):
    kind, choices, call = MODULES[name]
    graph, parameters, rest = nnx.split(build(D, H, kind=kind, **choices), nnx.Param, ...)
    xs, tangents = normal(1, N, B, L, D), jax.tree.map(lambda p: normal(p.size + 1, *p.shape), parameters)

    def output(parameters, x):
        return nnx.merge(graph, parameters, rest)(x, **call)

    def loss(parameters, x):
        y = output(parameters, x)
        return jnp.sum(y**2), y

    plain = jax.jit(jax.grad(loss, has_aux=True))
    parts = [plain(parameters, x) for x in xs]

    @jax.jit
    def transformed(parameters, tangents, xs):
        mapped = jax.vmap(jax.grad(jax.checkpoint(loss), has_aux=True), (None, 0))(parameters, xs)
        return mapped, jax.jvp(lambda p: loss(p, xs[0])[0], (parameters,), (tangents,))[1]

    mapped, slope = transformed(parameters, tangents, xs)
    same(mapped, jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts))
    products = [np.sum(a * b) for a, b in zip(*map(jax.tree.leaves, (parts[0][0], tangents)), strict=True)]
    assert float(slope) == pytest.approx(sum(products), abs=1e-11 * np.abs(products).sum())


@pytest.mark.parametrize("name", NESTED)
def test_nnx_and_linen(name):
    kind, choices, call = MODULES[name]
    module, x = build(D, H, kind=kind, **choices), normal(1, B, L, D)

    graph, parameters, rest = nnx.split(module, nnx.Param, ...)

    def loss(parameters, rest, call_module):
        return jnp.sum(call_module(nnx.merge(graph, parameters, rest)) ** 2)

    @jax.jit  # a module is a tree of its arrays
    def plain(module, parameters, rest):
        return module(x, **call), jax.grad(loss)(parameters, rest, lambda m: m(x, **call))

    @nnx.jit
    def lifted(parameters, rest):
        return nnx.value_and_grad(loss)(parameters, rest, nnx.remat(lambda m: m(x, **call)))

    output, gradient = plain(module, parameters, rest)
    same(lifted(parameters, rest), (jnp.sum(output**2), gradient))
    linen = bridge.ToLinen(kind, args=(D, H), kwargs={**choices, "param_dtype": float, "implementation": "reference"})
    variables = jax.eval_shape(lambda key: linen.init(key, x, **call), jax.random.key(0))
    given = {key: nnx.to_pure_dict(parameters if key == "params" else rest) for key in variables}
    assert jax.tree.map(jnp.shape, given) == jax.tree.map(jnp.shape, dict(variables))
    same(jax.jit(lambda given: linen.apply(given, x, **call))(given), output)


@pytest.mark.parametrize("name", [*NESTED, "dropping"])
def test_a_stack_of_modules_scans_like_a_loop(name):
    kind, choices, call = MODULES[name]

    @nnx.split_rngs(splits=N)
    @nnx.vmap
    def stack(rngs):
        return kind(D, H, **choices, param_dtype=float, implementation="reference", rngs=rngs)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def layers(module, x):
        return x + module(x, **call)

    @jax.jit
    def both(key, x):
        modules = stack(nnx.Rngs(key))
        graph, state = nnx.split(modules)
        looped = x
        for n in range(N):
            one = nnx.merge(graph, jax.tree.map(lambda leaf, n=n: leaf[n], state))
            looped = looped + one(looped, **call)
        return layers(modules, x), looped, nnx.state(modules, nnx.Param)

    scanned, looped, parameters = both(jax.random.key(0), normal(1, B, L, D))
    same(scanned, looped)
    drawn = [leaf for leaf in jax.tree.leaves(parameters) if leaf.ndim > 2 and np.abs(leaf).max() > 0]
    assert all(np.abs(leaf[0] - leaf[1]).max() > 0.01 for leaf in drawn)
