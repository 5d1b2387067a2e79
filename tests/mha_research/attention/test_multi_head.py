"""MultiHeadAttention against float64 NumPy, its invariances, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from mha_kernels import CausalMask, WindowMask
from mha_research import Alibi, DropHead, MultiHeadAttention, RelativeBias, Rotary, initializers, positions
from tests.mha_research.attention import oracle
from tests.mha_research.attention.helpers import build, close, normal, run

B, Q, K, D = 2, 5, 7, 12


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"num_kv_heads": 2},
        {"num_kv_heads": 1},
        {"use_bias": False, "scale": "inverse"},
        {"scale": "none", "head_dim": 2},
        {"scale": 0.3, "softcap": 0.7},
        {"head_dim": 5, "value_head_dim": 3, "out_features": 11},
    ],
    ids=str,
)
def test_self_attention_equals_numpy(choices):
    m = build(D, 4, **choices)
    x = normal(1, B, Q, D)
    width = choices.get("head_dim", 3)
    scale = {"inverse": 1 / 3, "none": 1.0}.get(choices.get("scale"), choices.get("scale", width**-0.5))
    assert m.scale == pytest.approx(scale)
    expected, weights = oracle.module(m, x, softcap=choices.get("softcap"))
    output, returned = run(m, x, return_weights=True)
    close(output, expected)
    close(returned, weights)
    close(run(m, x, return_weights="average")[1], weights.mean(1))
    assert output.shape == (B, Q, choices.get("out_features", D))


@pytest.mark.usefixtures("each_precision")
def test_cross_attention_with_other_widths_and_every_mask():
    m = build(D, 4, 2, key_features=13, value_features=17)
    query, key, value = normal(1, B, Q, D), normal(2, B, K, 13), normal(3, B, K, 17)
    mask = normal(4, B, 4, Q, K) > -0.3
    keep = jnp.arange(K)[None] < jnp.array([[K], [3]])
    bias = normal(5, 1, 4, Q, K)
    allowed = np.asarray(mask & keep[:, None, None])
    expected, weights = oracle.module(m, query, key, value, allowed=allowed, bias=np.asarray(bias, np.float64))
    output, returned = run(m, query, key, value, mask=mask, bias=bias, key_padding_mask=keep, return_weights=True)
    close(output, expected)
    close(returned, weights)
    np.testing.assert_array_equal(output, run(m, query, key, value, mask=mask, bias=bias, key_padding_mask=keep))


@pytest.mark.usefixtures("each_precision")
def test_positions_sink_and_zero_attention_equal_numpy():
    x = normal(1, B, Q, D)
    distance = np.arange(Q)[None] - np.arange(Q)[:, None]
    causal = distance <= 0
    slopes = np.array([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])[:, None, None]
    alibi = build(D, 4, position=Alibi(), sink=True)
    sink = np.asarray(alibi.sink[...], np.float64)
    close(
        run(alibi, x, mask=CausalMask()),
        oracle.module(alibi, x, allowed=causal, bias=-slopes * abs(distance), sink=sink)[0],
    )

    both = build(D, 4, sink=True, add_zero_attention=True)
    sink = np.log(np.exp(np.asarray(both.sink[...], np.float64)) + 1)
    close(run(both, x), oracle.module(both, x, sink=sink)[0])

    relative = build(D, 4, position=RelativeBias(num_buckets=8, max_distance=5))
    table = np.asarray(relative.position_parameter[...], np.float64)
    bucket = np.asarray(positions.t5_bucket(distance, True, 8, 5))
    close(run(relative, x), oracle.module(relative, x, bias=table[:, bucket])[0])

    clipped = build(D, 4, position=RelativeBias("clipped", max_distance=2, shared=True))
    table = np.asarray(clipped.position_parameter[...], np.float64)
    assert table.shape == (1, 5)
    close(run(clipped, x), oracle.module(clipped, x, bias=table[:, np.clip(distance, -2, 2) + 2])[0])

    far = build(D, 4, position=RelativeBias("distance", max_distance=2))
    table = np.asarray(far.position_parameter[...], np.float64)
    close(run(far, x), oracle.module(far, x, bias=table[:, np.minimum(abs(distance), 2)])[0])


@pytest.mark.usefixtures("each_precision")
def test_rotary_qk_norm_and_output_gate_equal_numpy():
    x = normal(1, B, Q, 16)
    m = build(16, 4, position=Rotary(), normalize_qk=True, gate_output=True)
    q, k, v = (oracle.project(x, p) for p in (m.query, m.key, m.value))

    def norm(h, scale):
        centred = h - h.mean(-1, keepdims=True)
        return centred / np.sqrt(h.var(-1, keepdims=True) + 1e-6) * np.asarray(scale[...], np.float64)

    def rotate(h):
        angle = np.arange(Q)[:, None, None] * np.array([1.0, 0.01])
        pair = (h[..., :2] + 1j * h[..., 2:]) * np.exp(1j * angle)
        return np.concatenate([pair.real, pair.imag], -1)

    out, _ = oracle.heads(rotate(norm(q, m.query_norm.scale)), rotate(norm(k, m.key_norm.scale)), v, 0.5)
    out = out / (1 + np.exp(-oracle.project(x, m.gate)))
    close(run(m, x), oracle.merge(out, m.output))


@pytest.mark.usefixtures("each_precision")
def test_bias_key_joins_the_softmax_of_every_query():
    m = build(D, 4, 2, add_bias_kv=True, softcap=2.0, sink=True)
    x = normal(1, B, Q, D)
    q, k, v = (oracle.project(x, p) for p in (m.query, m.key, m.value))
    extra = [np.broadcast_to(np.asarray(p[...], np.float64), (B, 1, *p.shape)) for p in (m.bias_key, m.bias_value)]
    allowed = np.tril(np.ones((Q, Q), bool)) & (np.arange(Q) > 0)
    allowed = np.concatenate([allowed, np.ones((Q, 1), bool)], 1)
    sink = np.asarray(m.sink[...], np.float64)
    out, weights = oracle.heads(
        q, np.concatenate([k, extra[0]], 1), np.concatenate([v, extra[1]], 1), m.scale, allowed, sink=sink, softcap=2.0
    )
    gate = jnp.array([1.0, 0.0, 2.0, 1.0])
    keep = jnp.broadcast_to(jnp.arange(Q) > 0, (B, Q))
    output, returned = run(m, x, mask=CausalMask(), key_padding_mask=keep, head_gate=gate, return_weights=True)
    close(output, oracle.merge(out * np.asarray(gate)[:, None], m.output))
    close(returned, weights[..., :Q])
    gradient = nnx.grad(lambda m: run(m, x, mask=CausalMask(), key_padding_mask=keep).sum())(m)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))


def test_packed_projection_starts_alike_and_has_the_same_gradients():
    x, memory = normal(1, B, Q, D), normal(2, B, K, D)
    separate, packed = (
        MultiHeadAttention(D, 4, 2, value_head_dim=5, packed=p, rngs=nnx.Rngs(3)) for p in (False, True)
    )
    for name, kernel in separate.kernels().items():
        np.testing.assert_array_equal(kernel, packed.kernels()[name])

    def gradients(m):
        graph, state = nnx.split(m)

        def loss(state):
            m = nnx.merge(graph, state)
            return (m(x) ** 2).sum() + (m(x, memory) ** 2).sum()

        return nnx.to_pure_dict(jax.jit(jax.grad(loss))(state))

    expected, actual = gradients(separate), gradients(packed)["query_key_value"]
    flat = [expected[n]["kernel"].reshape(D, -1) for n in ("query", "key", "value")]
    np.testing.assert_allclose(actual["kernel"], np.concatenate(flat, 1), rtol=1e-5, atol=1e-5)
    biases = [expected[n]["bias"].reshape(-1) for n in ("query", "key", "value")]
    np.testing.assert_allclose(actual["bias"], np.concatenate(biases), rtol=1e-5, atol=1e-5)


@settings(max_examples=6)
@given(seed=st.integers(0, 2**16), heads=st.sampled_from([1, 2, 3, 6]), kv=st.sampled_from([1, 2, 3, 6]))
def test_invariances(seed, heads, kv):
    """Key order does not matter; the output is the sum of the heads' own contributions; heads may be renumbered."""
    if heads % kv:
        with pytest.raises(ValueError, match=f"num_heads={heads}.*num_kv_heads={kv}"):
            MultiHeadAttention(D, heads, kv, rngs=nnx.Rngs(0))
        return
    m = build(D, heads, kv, seed=seed)
    x, memory = normal(seed, B, Q, D), normal(seed + 1, B, K, D)
    output = run(m, x, memory)
    order = np.random.default_rng(seed).permutation(K)
    close(run(m, x, memory[:, order]), output)
    alone = jax.jit(lambda gate: m(x, memory, head_gate=gate))
    only = [alone(jnp.eye(heads)[h]) - m.output.bias[...][None, None] for h in range(heads)]
    close(sum(only) + m.output.bias[...][None, None], output, 1e-5)


def test_the_future_has_no_gradient():
    m = build(D, 4, 2)
    jacobian = jax.jacobian(lambda x: run(m, x, mask=CausalMask()).sum((0, 2)))(normal(1, B, Q, D))
    reach = np.abs(jacobian).max((1, 3)) > 0
    np.testing.assert_array_equal(reach, np.tril(np.ones((Q, Q), bool)))
    near = (
        np.abs(jax.jacobian(lambda x: run(m, x, mask=WindowMask(1, 0)).sum((0, 2)))(normal(1, B, Q, D))).max((1, 3)) > 0
    )
    np.testing.assert_array_equal(near, np.tril(np.ones((Q, Q), bool)) & ~np.tril(np.ones((Q, Q), bool), -2))


def test_mixed_precision_keeps_the_types_apart():
    m = MultiHeadAttention(
        D, 4, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), position=Rotary(), head_dim=4, implementation="reference"
    )
    x = normal(1, B, Q, D)
    assert m.query.kernel.dtype == jnp.float32
    assert run(m, x).dtype == jnp.bfloat16
    full = MultiHeadAttention(D, 4, rngs=nnx.Rngs(0), position=Rotary(), head_dim=4, implementation="reference")(x)
    close(run(m, x), np.asarray(full, np.float64), 0.05)


def test_without_output_projection_the_heads_lie_side_by_side():
    m = build(D, 4, value_head_dim=5, output_projection=False)
    x = normal(1, B, Q, D)
    out, _ = oracle.heads(*(oracle.project(x, p) for p in (m.query, m.key, m.value)), m.scale)
    close(run(m, x), out.reshape(B, Q, 20))
    assert m.out_features == 20


def test_mimetic_start_sets_all_four_matrices():
    m = MultiHeadAttention(8, 2, joint_init=initializers.mimetic(0.0, 1.0, 0.0, 1.0), rngs=nnx.Rngs(0))
    kernels = {name: np.asarray(kernel) for name, kernel in m.kernels().items()}
    for h in range(2):
        product = kernels["query"][:, h] @ kernels["key"][:, h].T
        np.testing.assert_allclose(
            product @ product, product, atol=1e-5
        )  # the identity, truncated to rank 4: a projector
        assert np.trace(product) == pytest.approx(4, abs=1e-5)
    value_output = np.einsum("dhv,hvo->do", kernels["value"], kernels["output"])
    np.testing.assert_allclose(value_output, -np.eye(8), atol=1e-5)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"num_heads": 5}, "in_features=12 is no multiple of num_heads=5"),
        ({"dropout_rate": -0.1}, "-0.1"),
        ({"dropout_rate": float("nan")}, "nan"),
        ({"dropout_rate": 1.5}, "1.5"),
        ({"scale": "sqrt"}, "'sqrt'"),
        ({"packed": True, "key_features": 5}, "packed"),
        ({"output_projection": False, "out_features": 7}, "got 7"),
        pytest.param({"joint_init": initializers.mimetic(), "num_kv_heads": 2}, "joint_init", id="joint_init"),
        ({"adapter_features": 0}, "width"),
    ],
    ids=str,
)
def test_construction_refuses(arguments, words):
    with pytest.raises(ValueError, match=words):
        MultiHeadAttention(**{"in_features": D, "num_heads": 4, "rngs": nnx.Rngs(0), **arguments})


@pytest.mark.parametrize(
    "inputs, options, error, words",
    [
        ([(B, Q, 5)], {}, ValueError, "query must be"),
        ([(B, Q, D), (B, K, 5)], {}, ValueError, "key must be"),
        ([(B, Q, D), (3, K, D)], {}, ValueError, "batch sizes"),
        ([(B, Q, D), (B, K, D), (B, Q, D)], {}, ValueError, "lengths differ"),
        ([(B, Q, D), None, (B, Q, D)], {}, ValueError, "value was given without key"),
        ([(B, Q, D)], {"key_padding_mask": np.ones((B, K), bool)}, ValueError, "keep"),
        ([(B, Q, D)], {"mask": np.ones((Q, Q), np.int32)}, TypeError, "mask"),
        ([(B, Q, D)], {"head_gate": np.ones(3, np.float32)}, ValueError, "head_gate"),
    ],
    ids=str,
)
def test_a_call_refuses(inputs, options, error, words):
    m = MultiHeadAttention(D, 4, rngs=nnx.Rngs(0))
    arrays = [None if shape is None else jnp.zeros(shape) for shape in inputs]
    with pytest.raises(error, match=words):
        m(*arrays, **options)


def test_dropout_needs_a_key_and_is_off_unless_asked_for():
    x = normal(1, B, Q, D)
    noisy, plain = (build(D, 4, dropout_rate=rate, drop_head=DropHead(0.5) if rate else None) for rate in (0.8, 0.0))
    with pytest.raises(ValueError, match=r"[Dd]ropout"):
        run(noisy, x, deterministic=False)
    for output in (run(noisy, x, rngs=jax.random.key(1)), run(noisy, x, rngs=jax.random.key(2)), run(noisy, x)):
        np.testing.assert_array_equal(output, run(plain, x))
    first, again, other = (run(noisy, x, deterministic=False, rngs=jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0
    jitted = jax.jit(lambda x, key: noisy(x, deterministic=False, rngs=nnx.Rngs(dropout=key), return_weights=True))
    weights = jitted(x, jax.random.key(1))[1]
    close(weights.sum(-1), np.ones((B, 4, Q)))
