"""Bad arguments of modules, positions, initialisers and DropHead: each message names the argument and what came."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mha_kernels import CausalMask, KeyPaddingMask
from mha_research import Alibi, DropHead, MultiHeadAttention, RelativeBias, Rotary
from mha_research.attention import (
    CollaborativeAttention,
    ConvValueAttention,
    DifferentialAttention,
    DomainAdapter,
    FrameDifferenceAttention,
    MultiScaleAttention,
    PerformerAttention,
    ShawAttention,
    SigmoidAttention,
    TalkingHeadsAttention,
    initializers,
    positions,
    update_importance,
)

D, H, L = 12, 3, 5
X = np.zeros((2, L, D), np.float32)
KEY = np.zeros(2, np.uint32)
# Those that check something of their own before or after the plain module.
CONSTRUCTED = [MultiHeadAttention, PerformerAttention, DifferentialAttention, CollaborativeAttention]
CALLED = [MultiHeadAttention, TalkingHeadsAttention, PerformerAttention, ConvValueAttention, FrameDifferenceAttention]


def traced(attempt):
    """What `attempt` gives, traced and not compiled: all that is checked here is known by then."""
    return jax.eval_shape(lambda: jax.tree.map(jnp.asarray, attempt()))


def make(kind=MultiHeadAttention, features=D, heads=H, **choices):
    return kind(features, heads, **{"rngs": nnx.Rngs(0), **choices})


@pytest.mark.parametrize("kind", CONSTRUCTED, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "sizes, error, message",
    [
        ({"features": "12"}, TypeError, "in_features must be an integer, got '12'"),
        ({"features": 0}, ValueError, "in_features must be at least 1, got 0"),
        ({"heads": 3.0}, TypeError, "num_heads must be an integer, got 3.0"),
        ({"heads": 0}, ValueError, "num_heads must be at least 1, got 0"),
        ({"heads": True}, TypeError, "num_heads must be an integer, got True"),
        ({"key_features": 0}, ValueError, "key_features must be at least 1, got 0"),
        ({"value_features": -3}, ValueError, "value_features must be at least 1, got -3"),
        ({"value_head_dim": 0}, ValueError, "value_head_dim must be at least 1, got 0"),
        ({"out_features": 2.5}, TypeError, "out_features must be an integer, got 2.5"),
        ({"rngs": None}, TypeError, "rngs must be an nnx.Rngs, got None"),
        ({"position": "alibi"}, TypeError, "position must be a Position, got 'alibi'"),
        ({"drop_head": 0.1}, TypeError, "drop_head must be a DropHead, got 0.1"),
        ({"query_init": "xavier"}, TypeError, "query_init must be a Callable, got 'xavier'"),
        ({"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
        ({"scale": None}, TypeError, "scale must be a finite number, got None"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_every_module_refuses_sizes_and_choices(kind, sizes, error, message):
    if kind is CollaborativeAttention and "scale" in sizes:
        message = message.replace("CollaborativeAttention", "MultiHeadAttention")
    with pytest.raises(error, match=message):
        traced(lambda: make(kind, **sizes)(X))


CONSTRUCTION = [
    (lambda: make(head_dim=0), ValueError, "head_dim must be at least 1, got 0"),
    (lambda: make(num_kv_heads="1"), TypeError, "num_kv_heads must be an integer, got '1'"),
    (lambda: make(features=None), TypeError, "in_features must be an integer, got None"),
    (lambda: make(dropout_rate="0.1"), TypeError, r"dropout_rate must be in \[0, 1\), got 0.1"),
    (lambda: make(softcap=-1.0), ValueError, "softcap must be positive and finite, got -1.0"),
    (lambda: make(adapter_features=2.5), TypeError, "width must be an integer, got 2.5"),
    (lambda: make(rngs=nnx.Rngs(dropout=0)), ValueError, "rngs has neither a stream 'params' nor a default one"),
    (lambda: make(joint_init="mimetic"), TypeError, "joint_init must be a Callable, got 'mimetic'"),
    (lambda: make(position=Alibi), TypeError, "position must be a Position, got <class"),
    (lambda: Alibi(slopes="ab"), TypeError, "slopes must be numbers, one a head, got 'ab'"),
    (lambda: Alibi(slopes=(0.1, float("nan"))), ValueError, "slopes must be finite, got nan"),
    (lambda: Rotary(base=-1), ValueError, "base must be positive and finite, got -1"),
    (lambda: RelativeBias(num_buckets="8"), TypeError, "num_buckets must be an integer, got '8'"),
    (lambda: RelativeBias(num_buckets=2), ValueError, "num_buckets 2, max_distance 128: expected num_buckets >= 4"),
    (lambda: RelativeBias(std=float("nan")), ValueError, "std must be finite, got nan"),
    (lambda: make(PerformerAttention, num_features=2.5), TypeError, "num_features must be an integer, got 2.5"),
    (lambda: make(PerformerAttention, scale=-1.0), ValueError, "scale must be positive and finite, got -1.0"),
    (
        lambda: PerformerAttention(D, H, kind="exact", rngs=nnx.Rngs(0)),
        ValueError,
        "kind must be one of .*, got 'exact'",
    ),
    (lambda: make(ShawAttention, max_distance=0), ValueError, "max_distance must be at least 1, got 0"),
    (lambda: make(SigmoidAttention, logit_bias="a"), TypeError, "logit_bias must be a finite number, got 'a'"),
    (lambda: make(DifferentialAttention, layer=0), ValueError, "layer must be at least 1, got 0"),
    (lambda: make(DifferentialAttention, features=15), ValueError, "head_dim .* must be even, got 5"),
    (lambda: make(CollaborativeAttention, shared_dim=0), ValueError, "shared_dim must be at least 1, got 0"),
    (lambda: make(ConvValueAttention, kernel_size=2.5), TypeError, "kernel_size must be an integer, got 2.5"),
    (lambda: make(ConvValueAttention, grid=5), TypeError, r"grid must be \(rows, columns\), got 5"),
    (lambda: make(ConvValueAttention, grid=(-1, -5)), ValueError, "rows must be at least 1, got -1"),
    (lambda: make(DomainAdapter, num_domains="2"), TypeError, "num_domains must be an integer, got '2'"),
    (lambda: make(MultiScaleAttention, patch_sizes="12"), TypeError, "patch_sizes must be one or more sizes, got '12'"),
    (lambda: make(MultiScaleAttention, patch_sizes=()), ValueError, r"patch_sizes must be one or more sizes, got \(\)"),
    (lambda: make(MultiScaleAttention, patch_sizes=(1, 2.5)), TypeError, "patch_sizes must be an integer, got 2.5"),
    (lambda: make(MultiScaleAttention, grid=(0, 5)), ValueError, "rows must be at least 1, got 0"),
    (lambda: DropHead(None), TypeError, r"rate must be in \[0, 1\), got None"),
    (lambda: DropHead(0.1, "linear", steps=float("nan")), TypeError, "steps must be an integer, got nan"),
    (lambda: DropHead(0.1, importance_power="a"), TypeError, "importance_power must be a finite number, got 'a'"),
    (lambda: initializers.orthogonal(num_heads=0), ValueError, "num_heads must be at least 1, got 0"),
    (lambda: initializers.orthogonal(head_axis=2), ValueError, "head_axis must be 0 or 1, got 2"),
    (lambda: initializers.svd_decay("0.9"), TypeError, "rate must be a finite number, got '0.9'"),
    (lambda: initializers.scaled(initializers.identity(), float("inf")), ValueError, "factor must be finite, got inf"),
    (lambda: positions.sinusoidal(0, 4), ValueError, "length must be at least 1, got 0"),
    (lambda: positions.sinusoidal(3, 4, base=0), ValueError, "base must be positive and finite, got 0"),
    (lambda: positions.log_time(2.5, 4), TypeError, "length must be an integer, got 2.5"),
    (lambda: positions.Learned(0, 4, rngs=nnx.Rngs(0)), ValueError, "length must be at least 1, got 0"),
]


@pytest.mark.parametrize("attempt, error, message", CONSTRUCTION, ids=lambda x: x if isinstance(x, str) else "")
def test_construction_refuses(attempt, error, message):
    with pytest.raises(error, match=message):
        traced(lambda: attempt() and None)


@pytest.mark.parametrize("kind", CALLED, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "call, error, message",
    [
        ({"query": None}, TypeError, "query is a NoneType"),
        ({"query": X[0]}, ValueError, r"query must be \(batch, length, 12\), none of them 0, got \(5, 12\)"),
        ({"query": X[:0]}, ValueError, r"query must be .*, got \(0, 5, 12\)"),
        ({"key": X[:, :0]}, ValueError, r"key must be .*, got \(2, 0, 12\)"),
        ({"value": X}, ValueError, "value was given without key"),
        ({"head_gate": np.ones(4)}, ValueError, r"head_gate has shape \(4,\); expected \(H = 3\)"),
        ({"head_gate": np.ones((3, 3))}, ValueError, r"head_gate has shape \(3, 3\); expected \(B = 2, H = 3\)"),
        (
            {"head_gate": np.ones((2, 3, 1))},
            ValueError,
            r"head_gate has shape \(2, 3, 1\); expected \(H,\) or \(B, H\)",
        ),
        ({"head_gate": np.ones(3, bool)}, TypeError, "head_gate has dtype bool; expected float"),
        ({"key_padding_mask": np.ones(L, bool)}, ValueError, r"has shape \(5,\); expected axes \(B, K\)"),
        ({"key_padding_mask": np.ones((2, 4), bool)}, ValueError, r"has shape \(2, 4\); expected \(B = 2, K = 5\)"),
        ({"key_padding_mask": np.ones((2, L))}, TypeError, "has dtype float.*; expected bool"),
        ({"return_weights": "avg"}, ValueError, "return_weights must be a bool or 'average', got 'avg'"),
        ({"deterministic": None}, TypeError, "deterministic must be a bool, got None"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_every_module_refuses_calls(kind, call, error, message):
    with pytest.raises(error, match=message):
        traced(lambda: make(kind)(**{"query": X, **call}))


def multi_scale(**call):
    choices = {"grid": call.pop("grid", None)}
    return make(MultiScaleAttention, **choices)(**{"query": X, **call})


def training(**call):
    return make(drop_head=DropHead(0.5))(X, deterministic=False, **{"rngs": KEY, **call})


CALLS = [
    (lambda: multi_scale(query=X[0]), ValueError, r"query must be .*, got \(5, 12\)"),
    (lambda: multi_scale(value=X), ValueError, "value was given without key"),
    (lambda: multi_scale(grid=(2, 2)), ValueError, r"5 keys do not fill the grid \(2, 2\)"),
    (lambda: multi_scale(head_gate=np.ones(8)), ValueError, r"head_gate has shape \(8,\); expected \(H = 9\)"),
    (lambda: multi_scale(key_padding_mask=np.ones((2, L))), TypeError, "key_padding_mask has dtype"),
    (lambda: training(rngs=None), ValueError, "dropout or DropHead with deterministic=False needs rngs, got None"),
    (lambda: training(rngs=0), TypeError, "needs rngs, an nnx.Rngs or one jax key, got 0"),
    (lambda: training(rngs=np.zeros((2, 2), np.uint32)), TypeError, "needs rngs, an nnx.Rngs or one jax key"),
    (lambda: training(rngs=nnx.Rngs(params=0)), ValueError, "rngs has neither a stream 'dropout' nor a default one"),
    (
        lambda: training(head_gate=np.ones((3, 1))),
        ValueError,
        r"head_gate has shape \(3, 1\); expected \(B = 2, H = 3\)",
    ),
    (lambda: DropHead(0.5).gates(None, 2, 3), ValueError, "DropHead: key needs rngs, got None"),
    (lambda: DropHead(0.5).gates(KEY, 0, 3), ValueError, "batch_size must be at least 1, got 0"),
    (
        lambda: DropHead(0.5, "linear", 9).gates(KEY, 2, 3, step=[1, 2]),
        TypeError,
        r"step must be a number, got shape \(2,\)",
    ),
    (lambda: DropHead(0.5, "linear", 9).gates(KEY, 2, 3, step="a"), TypeError, "step is a str"),
    (
        lambda: DropHead(0.5, importance_power=1.0).gates(KEY, 2, 3, importance=np.ones(1)),
        ValueError,
        r"importance must be \(3,\), got \(1,\)",
    ),
    (
        lambda: update_importance(jnp.ones(3), jnp.ones((2, 3)), jnp.ones(3)),
        ValueError,
        r"gates and gradient must be \(B, H\) and importance \(H,\), got \(2, 3\), \(3,\) and \(3,\)",
    ),
    (
        lambda: positions.rotate(jnp.ones((2, 2, 1, 4)), jnp.zeros((2, 1))),
        ValueError,
        r"positions must be \(2,\) or \(2, 2\), got \(2, 1\)",
    ),
    (lambda: positions.rotate(jnp.ones((2, 3, 4)), jnp.arange(3)), ValueError, r"x must be .*, got \(2, 3, 4\)"),
    (
        lambda: positions.rotate(jnp.ones((2, 3, 1, 4), int), jnp.arange(3)),
        TypeError,
        "x must be .* of floats, .*int32",
    ),
    (lambda: make().init_cache(2, 2.5), TypeError, "capacity must be an integer, got 2.5"),
    (lambda: make().init_cache(2, 3, jnp.int32), TypeError, "dtype must be floating"),
    (lambda: make().decode(X[:, :1], None), TypeError, "cache must be a DecodeCache, got None"),
    (
        lambda: make(num_kv_heads=1).decode(X[:, :1], make().init_cache(2, 4)),
        ValueError,
        r"the cache holds key heads \(3, 4\) \(G, width\), the module makes \(1, 4\)",
    ),
    (
        lambda: make(DomainAdapter, num_domains=2)(X, domain="a"),
        TypeError,
        "domain is a str",
    ),
]


@pytest.mark.parametrize("attempt, error, message", CALLS, ids=lambda x: x if isinstance(x, str) else "")
def test_calls_refuse(attempt, error, message):
    with pytest.raises(error, match=message):
        traced(attempt)


def test_learned_positions_do_not_start_before_their_table():
    learned = positions.Learned(5, 3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="positions -1 to 0 were asked for, the table has 5 rows"):
        learned(2, -1)
    assert np.isnan(jax.jit(lambda start: learned(2, start))(-1)).all()


def test_lists_and_shared_padding_are_fine():
    """Lists are arrays, one row of padding serves all examples, and choices of None or False are not given."""
    module = make(CollaborativeAttention, head_dim=None, packed=False, position=Alibi(slopes=[0.5, 0.25, 0.125]))
    assert hash(module.position) == hash(Alibi(slopes=(0.5, 0.25, 0.125)))
    x = np.random.default_rng(0).normal(size=X.shape).astype(np.float32)
    keep = [[True, True, True, False, False]]
    alone = module(x[:, :3])
    listed = module(x[:, :3].tolist(), x.tolist(), key_padding_mask=keep, head_gate=[1.0] * H)
    np.testing.assert_allclose(alone, listed, rtol=0, atol=1e-6)
    for kind in (PerformerAttention, ConvValueAttention, FrameDifferenceAttention, MultiScaleAttention):
        module = make(kind)
        run = jax.jit(lambda keep, module=module: module(x, mask=CausalMask(), key_padding_mask=keep))
        np.testing.assert_array_equal(run(jnp.array(keep)), run(jnp.array(keep * 2)))
    module = make(PerformerAttention)
    np.testing.assert_array_equal(module(x, mask=KeyPaddingMask(keep)), module(x, key_padding_mask=np.array(keep * 2)))


def test_talking_heads_do_not_hide_nan():
    module = make(TalkingHeadsAttention)
    x = np.ones(X.shape, np.float32)
    x[0, 2] = np.nan
    assert np.isnan(module(X + 1, x)).any(axis=(1, 2)).tolist() == [True, False]
