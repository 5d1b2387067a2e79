"""Talking heads, sigmoid and Shaw attention against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mha_kernels import CausalMask
from mha_research import MultiHeadAttention, ShawAttention, SigmoidAttention, TalkingHeadsAttention
from tests.mha_research.attention import oracle
from tests.mha_research.attention.helpers import build, close, double, normal, run

B, L, D, H = 2, 5, 12, 4
CAUSAL = np.tril(np.ones((L, L), bool))
KEEP = np.arange(L)[None] >= np.array([[0], [2]])


def heads_of(m, x):
    return [oracle.project(x, p) for p in (m.query, m.key, m.value)]


@pytest.mark.usefixtures("each_precision")
def test_talking_heads_mix_logits_and_weights():
    m, x = build(D, H, kind=TalkingHeadsAttention), normal(1, B, L, D)
    q, k, v = heads_of(m, x)
    allowed = CAUSAL[None] & KEEP[:, None]
    logits = np.einsum("bhqk,hm->bmqk", m.scale * np.einsum("bqhe,bkhe->bhqk", q, k), double(m.mix_logits))
    weights = np.stack([[oracle.softmax(logits[b, h], allowed[b]) for h in range(H)] for b in range(B)])
    weights = np.einsum("bmqk,mh->bhqk", weights, double(m.mix_weights))
    output, returned = run(m, x, mask=CausalMask(), key_padding_mask=KEEP, return_weights=True)
    close(returned, weights)
    close(output, oracle.merge(np.einsum("bhqk,bkhv->bqhv", weights, v), m.output))


@pytest.mark.usefixtures("each_precision")
def test_sigmoid_weighs_every_key_by_itself():
    m, x = build(D, H, 2, kind=SigmoidAttention), normal(1, B, L, D)
    q, k, v = heads_of(m, x)
    k, v = (np.repeat(y, 2, axis=2) for y in (k, v))
    scores = m.scale * np.einsum("bqhe,bkhe->bhqk", q, k) - np.log(L)
    weights = (CAUSAL[None, None] & KEEP[:, None, None]) / (1 + np.exp(-scores))
    output, returned = run(m, x, mask=CausalMask(), key_padding_mask=KEEP, return_weights=True)
    close(returned, weights)
    close(output, oracle.merge(np.einsum("bhqk,bkhv->bqhv", weights, v), m.output))
    with pytest.raises(ValueError, match="sink"):
        SigmoidAttention(D, H, sink=True, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "tables, each_precision",
    [((True, True), "float64"), ((True, False), "float32"), ((False, True), "float32")],
    ids=str,
    indirect=["each_precision"],
)
@pytest.mark.usefixtures("each_precision")
def test_shaw_adds_a_vector_to_each_key_and_value(tables):
    m = build(D, H, kind=ShawAttention, max_distance=2, key_table=tables[0], value_table=tables[1])
    x = normal(1, B, L, D)
    q, k, v = heads_of(m, x)
    row = np.clip(np.arange(L)[None] - np.arange(L)[:, None], -2, 2) + 2
    key_vector, value_vector = (0.0 if t is None else double(t)[row] for t in (m.key_table, m.value_table))
    expected = np.zeros((B, L, H, 3))
    for b in range(B):
        for h in range(H):
            keys, values = k[b, None, :, h] + key_vector, v[b, None, :, h] + value_vector
            scores = m.scale * np.einsum("qe,qke->qk", q[b, :, h], np.broadcast_to(keys, (L, L, 3)))
            weights = oracle.softmax(scores, CAUSAL)
            expected[b, :, h] = np.einsum("qk,qkv->qv", weights, np.broadcast_to(values, (L, L, 3)))
    close(run(m, x, mask=CausalMask()), oracle.merge(expected, m.output))


@pytest.mark.parametrize("kind, choices", [(TalkingHeadsAttention, {}), (ShawAttention, {"max_distance": 3})], ids=str)
def test_dense_variants_decode_gate_and_refuse_kernels(kind, choices):
    m, x = build(D, H, 2, kind=kind, **choices), normal(1, B, L, D)
    gate = jnp.array([1.0, 0.0, 2.0, 1.0])
    full = run(m, x, mask=CausalMask(), head_gate=gate)
    decode = jax.jit(m.decode)
    first, cache = decode(x[:, :3], m.init_cache(B, L), head_gate=gate)
    second, _ = decode(x[:, 3:], cache, head_gate=gate)
    close(jnp.concatenate([first, second], 1), full, 1e-5)
    with pytest.raises(ValueError, match=r"dense, O\(Q K\).*'blockwise'"):
        kind(D, H, implementation="blockwise", rngs=nnx.Rngs(0), **choices)(x)


def test_variants_start_as_plain_attention():
    x = normal(1, B, L, D)
    plain = MultiHeadAttention(D, H, rngs=nnx.Rngs(0))
    close(TalkingHeadsAttention(D, H, rngs=nnx.Rngs(0))(x), plain(x))
    without = ShawAttention(D, H, key_table=False, value_table=False, rngs=nnx.Rngs(0))
    close(without(x), plain(x))
