"""Differential and collaborative attention against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mha_kernels import CausalMask
from mha_research import CollaborativeAttention, DifferentialAttention, MultiHeadAttention, Rotary
from tests.mha_research.attention import oracle
from tests.mha_research.attention.helpers import build, close, double, normal, run

B, L, D = 2, 5, 16
CAUSAL = np.tril(np.ones((L, L), bool))


@pytest.mark.usefixtures("each_precision")
def test_differential_is_the_difference_of_two_softmaxes_normalised_by_head():
    m, x = build(D, 4, 2, kind=DifferentialAttention, layer=3), normal(1, B, L, D)
    q, k, v = (oracle.project(x, p) for p in (m.query, m.key, m.value))
    assert m.scale == pytest.approx(2**-0.5)
    start = 0.8 - 0.6 * np.exp(-0.6)
    q1, k1, q2, k2 = double(m.lambdas)
    factor = np.exp(q1 @ k1) - np.exp(q2 @ k2) + start
    (first, p1), (second, p2) = (
        oracle.heads(q[..., s], k[..., s], v, m.scale, CAUSAL) for s in (slice(2), slice(2, 4))
    )
    heads = first - factor * second
    heads = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + 1e-5) * double(m.head_norm.scale) * (1 - start)
    gate = jnp.array([1.0, 0.0, 3.0, 1.0])
    output, weights = run(m, x, mask=CausalMask(), head_gate=gate, return_weights=True)
    close(output, oracle.merge(heads * np.asarray(gate)[:, None], m.output), 1e-5)
    close(weights, p1 - factor * p2, 1e-5)


def test_lambda_starts_at_the_values_of_the_paper():
    for layer, value in ((1, 0.2), (2, 0.3555), (12, 0.7779)):
        m = DifferentialAttention(D, 2, layer=layer, rngs=nnx.Rngs(0))
        assert m.lambda_start == pytest.approx(value, abs=1e-4)
    with pytest.raises(ValueError, match="even, got 5"):
        DifferentialAttention(D, 2, head_dim=5, rngs=nnx.Rngs(0))


def test_differential_decodes_with_rotary():
    m, x = build(D, 2, kind=DifferentialAttention, position=Rotary()), normal(1, B, L, D)
    decode = jax.jit(m.decode)
    first, cache = decode(x[:, :2], m.init_cache(B, L))
    close(jnp.concatenate([first, decode(x[:, 2:], cache)[0]], 1), run(m, x, mask=CausalMask()), 1e-5)


@pytest.mark.usefixtures("each_precision")
def test_collaborative_heads_mix_one_query_and_one_key():
    m, x = build(D, 4, kind=CollaborativeAttention, shared_dim=10), normal(1, B, L, D)
    q, k, v = (oracle.project(x, p) for p in (m.query, m.key, m.value))
    assert q.shape == k.shape == (B, L, 1, 10)
    expected, weights = oracle.heads(q * double(m.mixing), np.repeat(k, 4, 2), v, (10 / 4) ** -0.5, CAUSAL)
    output, returned = run(m, x, mask=CausalMask(), return_weights=True)
    close(output, oracle.merge(expected, m.output))
    close(returned, weights)
    decode = jax.jit(m.decode)
    first, cache = decode(x[:, :2], m.init_cache(B, L))
    assert cache.key.shape == (B, L, 1, 10)
    close(jnp.concatenate([first, decode(x[:, 2:], cache)[0]], 1), output, 1e-5)


def test_collaborative_starts_as_plain_attention_with_the_same_matrices():
    plain = MultiHeadAttention(D, 4, rngs=nnx.Rngs(0))
    shared = CollaborativeAttention(D, 4, rngs=nnx.Rngs(0))
    for mine, theirs in ((shared.query, plain.query), (shared.key, plain.key)):
        mine.kernel[...] = theirs.kernel[...].reshape(D, 1, D)
    shared.value, shared.output = plain.value, plain.output
    x = normal(1, B, L, D)
    close(shared(x), plain(x))
    for name in ("head_dim", "packed"):
        with pytest.raises(ValueError, match=name):
            CollaborativeAttention(D, 4, rngs=nnx.Rngs(0), **{name: 4})
