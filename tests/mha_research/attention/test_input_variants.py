"""Convolutional values, frame differences, patches of several sizes, domains: against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mha_kernels import CausalMask, WindowMask
from mha_research import (
    ConvValueAttention,
    DomainAdapter,
    FrameDifferenceAttention,
    MultiHeadAttention,
    MultiScaleAttention,
)
from tests.mha_research.attention import oracle
from tests.mha_research.attention.helpers import build, close, double, normal, run

B, L, D, H = 2, 6, 12, 4


def attend(m, q, k, v, **scores):
    return oracle.merge(oracle.heads(q, k, v, m.scale, **scores)[0], m.output)


def convolved(x, conv, causal):
    """One-dimensional convolution by its definition: y_t = sum_s x_(t+s) W_s, zeros outside."""
    kernel, x = double(conv.kernel), np.asarray(x, np.float64)
    left = 2 if causal else 1
    padded = np.pad(x, ((0, 0), (left, 2 - left), (0, 0)))
    y = sum(padded[:, s : s + x.shape[1]] @ kernel[s] for s in range(3))
    return y + double(conv.bias)


@pytest.mark.parametrize("causal, each_precision", [(False, "float32"), (True, "float64")], indirect=["each_precision"])
@pytest.mark.usefixtures("each_precision")
def test_values_of_a_sequence_are_a_convolution(causal):
    m, x = build(D, H, 2, kind=ConvValueAttention, causal=causal), normal(1, B, L, D)
    keep = np.arange(L)[None] < np.array([[L], [4]])
    v = convolved(x * keep[..., None], m.value.conv, causal).reshape(B, L, 2, 3)
    allowed = np.tril(np.ones((L, L), bool))[None, None] & keep[:, None, None]
    expected = attend(m, oracle.project(x, m.query), oracle.project(x, m.key), v, allowed=allowed)
    close(run(m, x, mask=CausalMask(), key_padding_mask=keep), expected)
    reach = np.abs(jax.jacobian(lambda x: run(m, x, mask=CausalMask())[0].sum(-1))(x)[:, 0]).max(-1) > 0
    np.testing.assert_array_equal(np.triu(reach, 1).any(), not causal)


@pytest.mark.usefixtures("each_precision")
def test_values_of_a_grid_are_a_convolution():
    m, x = build(D, H, kind=ConvValueAttention, grid=(2, 3)), normal(1, B, L, D)
    image = np.pad(np.asarray(x, np.float64).reshape(B, 2, 3, D), ((0, 0), (1, 1), (1, 1), (0, 0)))
    kernel = double(m.value.conv.kernel)
    y = sum(image[:, r : r + 2, c : c + 3] @ kernel[r, c] for r in range(3) for c in range(3)) + double(
        m.value.conv.bias
    )
    expected = attend(m, oracle.project(x, m.query), oracle.project(x, m.key), y.reshape(B, L, H, 3))
    close(run(m, x), expected)
    with pytest.raises(ValueError, match=r"5 values do not fill the grid \(2, 3\)"):
        m(x[:, :5])
    with pytest.raises(ValueError, match="cannot decode"):
        m.decode(x, m.init_cache(B, L))


@pytest.mark.parametrize(
    "mode, each_precision", [("replace", "float32"), ("concatenate", "float64")], indirect=["each_precision"]
)
@pytest.mark.usefixtures("each_precision")
def test_queries_from_frame_differences(mode):
    m, x = build(D, H, kind=FrameDifferenceAttention, difference=mode), normal(1, B, L, D)
    change = np.diff(np.asarray(x, np.float64), axis=1, prepend=np.asarray(x, np.float64)[:, :1])
    queries = change if mode == "replace" else np.concatenate([x, change], -1)
    heads = oracle.project(queries, m.query), oracle.project(x, m.key), oracle.project(x, m.value)
    close(run(m, x), attend(m, *heads))
    keep = np.arange(L)[None] >= np.array([[0], [2]])
    padded = run(m, x, key_padding_mask=keep)
    noisy = jnp.where(keep[..., None], x, 99.0)
    np.testing.assert_array_equal(run(m, noisy, key_padding_mask=keep)[1, 2:], padded[1, 2:])
    with pytest.raises(ValueError, match="'subtract'"):
        FrameDifferenceAttention(D, H, difference="subtract", rngs=nnx.Rngs(0))


@pytest.mark.usefixtures("each_precision")
def test_levels_attend_to_means_of_patches_and_are_fused_by_a_gate():
    m = build(D, (1, 2), kind=MultiScaleAttention, patch_sizes=(1, 4), head_dim=(3, 2))
    x = normal(1, B, 7, D)
    keep = np.arange(7)[None] < np.array([[7], [3]])
    real = np.asarray(x, np.float64) * keep[..., None]
    pooled = np.stack(
        [
            real[:, :4].sum(1) / keep[:, :4].sum(1)[:, None],
            real[:, 4:].sum(1) / np.maximum(keep[:, 4:].sum(1), 1)[:, None],
        ],
        1,
    )
    logits = np.asarray(x, np.float64) @ double(m.fusion.kernel) + double(m.fusion.bias)
    gate = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    seen = np.arange(4, 9, 4)[None] <= np.arange(7)[:, None] + 1
    levels = [
        oracle.module(m.levels[0], x, allowed=np.tril(np.ones((7, 7), bool))[None, None] & keep[:, None, None])[0],
        oracle.module(
            m.levels[1], x, pooled, allowed=seen[None, None] & (np.array([[1, 1], [1, 0]]) > 0)[:, None, None]
        )[0],
    ]
    expected = sum(gate[..., i : i + 1] * levels[i] for i in range(2))
    output, weights = run(m, x, mask=CausalMask(), key_padding_mask=keep, return_weights=True)
    close(output, expected, 1e-5)
    assert [w.shape for w in weights] == [(B, 1, 7, 7), (B, 2, 7, 2)]
    one = run(m, x, head_gate=jnp.array([0.0, 1.0, 1.0])) - run(m, x, head_gate=jnp.zeros(3))
    bias = double(m.levels[1].output.bias)
    assert (
        np.abs(np.asarray(one) - gate[..., 1:] * (oracle.module(m.levels[1], x, pooled_plain(x))[0] - bias)).max()
        < 1e-5
    )


def pooled_plain(x):
    x = np.asarray(x, np.float64)
    return np.stack([x[:, :4].mean(1), x[:, 4:].mean(1)], 1)


def test_levels_cannot_decode():
    m = MultiScaleAttention(D, H, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="MultiScaleAttention cannot decode"):
        m.init_cache(B, L)
    with pytest.raises(ValueError, match="MultiScaleAttention cannot decode"):
        m.decode(normal(1, B, L, D), None)


@pytest.mark.usefixtures("each_precision")
def test_patches_of_a_grid_are_squares():
    m, x = build(D, 2, kind=MultiScaleAttention, patch_sizes=(2,), grid=(2, 3)), normal(1, B, 6, D)
    image = np.asarray(x, np.float64).reshape(B, 2, 3, D)
    pooled = np.stack([image[:, :, :2].mean((1, 2)), image[:, :, 2:].mean((1, 2))], 1)
    close(run(m, x), oracle.module(m.levels[0], x, pooled)[0])
    for choices, words in (
        ({"patch_sizes": ()}, "patch_sizes"),
        ({"num_heads": (1, 2)}, "num_heads has 2 values for 3"),
    ):
        with pytest.raises(ValueError, match=words):
            MultiScaleAttention(**{"in_features": D, "num_heads": 2, "rngs": nnx.Rngs(0), **choices})
    with pytest.raises(ValueError, match="mask must be None or CausalMask"):
        m(x, mask=WindowMask(1, 0))


@pytest.mark.usefixtures("each_precision")
def test_a_domain_shifts_the_output_through_a_gate():
    m, x = build(D, H, kind=DomainAdapter, num_domains=3), normal(1, B, L, D)
    y, _ = oracle.module(m, x)
    gate = 1 / (1 + np.exp(-(y @ double(m.domain_gate.kernel) + double(m.domain_gate.bias))))
    close(run(m, x), y)
    close(run(m, x, domain=jnp.array([2, 0])), y + gate * double(m.domains)[[2, 0]][:, None])
    mixture = np.array([[0.25, 0.75, 0.0], [0.0, 0.5, 0.5]])
    output, weights = run(m, x, domain=jnp.asarray(mixture, jnp.float32), return_weights=True)
    close(output, y + gate * (mixture @ double(m.domains))[:, None])
    assert weights.shape == (B, H, L, L)
    fresh = DomainAdapter(D, H, num_domains=3, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(fresh(x, domain=jnp.array([2, 0])), MultiHeadAttention(D, H, rngs=nnx.Rngs(0))(x))
    for domain, error in ((jnp.array([3, 0]), ValueError), (jnp.zeros((B, 2)), ValueError), (jnp.zeros(B), TypeError)):
        with pytest.raises(error, match="domain"):
            m(x, domain=domain)
