"""FAVOR+: the features' mean and mean squared error as in the paper, and the module against its own definition in
NumPy.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mha_kernels import CausalMask, WindowMask
from mha_research import Alibi, PerformerAttention, performer
from tests.mha_research.attention import oracle
from tests.mha_research.attention.helpers import build, close, normal, run

B, L, D, H = 2, 7, 8, 2


def estimates(kind, x, y, draws, m, orthogonal=False):
    """phi(x) . phi(y) for `draws` independent projections of m features."""

    def one(key):
        make = performer.orthogonal_projection if orthogonal else lambda k, m, d: jax.random.normal(k, (m, d))
        w = make(key, m, len(x))
        return performer.favor_features(x, w, kind) @ performer.favor_features(y, w, kind)

    return np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), draws)), np.float64)


@pytest.mark.parametrize("kind", performer.KINDS)
def test_mean_and_error_of_the_features_are_those_of_lemma_2(kind):
    x, y = 0.35 * normal(0, 6), 0.35 * normal(1, 6)
    kernel, both = np.exp(float(x @ y)), np.exp(float((x + y) @ (x + y)))
    apart, m = np.exp(-float((x - y) @ (x - y))), 8
    positive = both * kernel**2 * (1 - 1 / both) / m
    error = {
        "positive": positive,
        "hyperbolic": (1 - 1 / both) * positive / 2,
        "trigonometric": both * kernel**-2 * (1 - apart) ** 2 / (2 * m),
    }[kind]
    values = estimates(kind, x, y, 40000, m)
    assert values.mean() == pytest.approx(kernel, abs=5 * np.sqrt(error / 40000))
    assert ((values - kernel) ** 2).mean() == pytest.approx(error, rel=0.06)


def test_orthogonal_rows_have_chi_norms_and_less_error():
    w = np.asarray(performer.orthogonal_projection(jax.random.key(0), 2000, 5), np.float64)
    blocks = w.reshape(-1, 5, 5)
    gram = blocks @ blocks.swapaxes(1, 2)
    assert np.abs(gram - gram * np.eye(5)).max() < 1e-4
    assert (w**2).sum(1).mean() == pytest.approx(5, rel=0.05)
    assert performer.orthogonal_projection(jax.random.key(0), 7, 5).shape == (7, 5)
    x, y = 0.3 * normal(0, 8), 0.3 * normal(1, 8)
    independent = (np.exp(float((x + y) @ (x + y))) - 1) * np.exp(2 * float(x @ y)) / 8  # lemma 2
    assert estimates("positive", x, y, 4000, 8, orthogonal=True).var() < 0.95 * independent


def favor(m, q, k, v, allowed, step=None):
    """The estimate by its definition, each probability formed, in float64."""
    w = np.asarray(m.projection(step), np.float64)
    q, k = (np.sqrt(m.scale) * y for y in (q, np.repeat(k, H // k.shape[2], 2)))

    def phi(x):
        p, half = x @ w.T, (x**2).sum(-1, keepdims=True) / 2
        if m.kind == "trigonometric":
            return np.exp(half) * np.concatenate([np.cos(p), np.sin(p)], -1)
        return np.exp(np.concatenate([p, -p], -1) - half) if m.kind == "hyperbolic" else np.exp(p - half)

    kernel = np.einsum("bqhm,bkhm->bhqk", phi(q), phi(k)) * allowed
    total = kernel.sum(-1, keepdims=True)
    weights = np.divide(kernel, total, out=np.zeros_like(kernel), where=total != 0)
    return np.einsum("bhqk,bkhv->bqhv", weights, np.repeat(v, H // v.shape[2], 2)), weights


@pytest.mark.parametrize("kind", performer.KINDS)
@pytest.mark.parametrize("causal, each_precision", [(False, "float32"), (True, "float64")], indirect=["each_precision"])
@pytest.mark.usefixtures("each_precision")
def test_the_module_is_the_estimate_with_padding_and_prefix_sums(kind, causal, monkeypatch):
    monkeypatch.setattr(performer, "CHUNK", 3)  # several chunks, the last one ragged
    m = build(D, H, 1, kind=partial(PerformerAttention, kind=kind), num_features=16, redraw_every=10)
    x, keep = normal(1, B, L, D), np.arange(L)[None] >= np.array([[0], [4]])
    allowed = keep[:, None, None] & (np.tril(np.ones((L, L), bool)) if causal else True)
    q, k, v = (oracle.project(x, p) for p in (m.query, m.key, m.value))
    expected, weights = favor(m, q, k, v, allowed, step=25)
    mask = CausalMask() if causal else None
    output, returned = run(m, x, mask=mask, key_padding_mask=keep, step=25, return_weights=True)
    bound = 2e-3 if kind == "trigonometric" else 2e-5
    close(output, oracle.merge(expected, m.output), bound)
    close(returned, weights, bound)


def test_large_scores_stay_finite_and_no_later_key_is_seen(monkeypatch):
    monkeypatch.setattr(performer, "CHUNK", 3)
    m = build(D, H, kind=PerformerAttention, num_features=16)
    x = 30 * normal(1, B, L, D)
    output, gradient = jax.jit(jax.value_and_grad(lambda x: m(x, mask=CausalMask())[:, :4].sum()))(x)
    assert np.isfinite(output)
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[:, 4:], 0)
    later = x.at[:, 4:].multiply(100.0)
    np.testing.assert_array_equal(run(m, x, mask=CausalMask())[:, :4], run(m, later, mask=CausalMask())[:, :4])


def test_the_estimate_nears_softmax_attention_with_more_features():
    errors = []
    for m in (16, 1024):
        module = PerformerAttention(D, H, num_features=m, rngs=nnx.Rngs(0))
        x = 0.5 * normal(1, B, L, D)
        errors.append(np.abs(run(module, x) - oracle.module(module, x)[0]).max())
    assert errors[1] < errors[0] / 3
    assert errors[1] < 0.02


def test_redrawing_is_a_function_of_the_step_and_decoding_equals_the_full_pass():
    m = build(D, H, 1, kind=PerformerAttention, num_features=16, redraw_every=10)
    np.testing.assert_array_equal(m.projection(10), m.projection(19))
    assert np.abs(m.projection(9) - m.projection(10)).max() > 0.1
    x = normal(1, B, L, D)
    decode = jax.jit(m.decode)
    first, cache = decode(x[:, :3], m.init_cache(B, L))
    close(jnp.concatenate([first, decode(x[:, 3:], cache)[0]], 1), run(m, x, mask=CausalMask()), 1e-5)


def test_what_an_estimate_cannot_do_is_refused():
    with pytest.raises(ValueError, match="'softmax'"):
        performer.favor_features(jnp.zeros(3), jnp.zeros((2, 3)), "softmax")
    for choices in ({"dropout_rate": 0.1}, {"sink": True}, {"kind": "cosine"}, {"num_features": 0}):
        with pytest.raises(ValueError, match="PerformerAttention"):
            PerformerAttention(D, H, rngs=nnx.Rngs(0), **choices)
    m, x = PerformerAttention(D, H, rngs=nnx.Rngs(0)), normal(1, B, L, D)
    for call in ({"mask": WindowMask(1, 0)}, {"bias": jnp.zeros((L, L))}, {"mask": jnp.ones((L, L), bool)}):
        with pytest.raises(ValueError, match="PerformerAttention"):
            m(x, **call)
    with pytest.raises(ValueError, match="bias"):
        PerformerAttention(D, H, position=Alibi(), rngs=nnx.Rngs(0))(x)
