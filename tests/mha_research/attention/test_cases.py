"""Public bug reports of other libraries as tests of the module, on the dense reference and on tiles.

With zero query weights every allowed key gets the same weight, so outputs are means that one can check by hand.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mha_kernels import Blockwise, CausalMask, DenseBias, WindowMask
from mha_kernels.pallas.tpu.forward import PallasTPU
from mha_research import Alibi, DropHead, MultiHeadAttention, initializers
from tests.mha_research.attention import oracle
from tests.mha_research.attention.helpers import build, normal, run

EACH = {"reference": "reference", "blockwise": Blockwise(4, 4), "kernel": PallasTPU(128, 128, interpret=True)}
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", list(EACH.values()), ids=list(EACH))
TYPES = [("reference", "float16"), ("blockwise", "float16"), ("blockwise", "bfloat16"), ("kernel", "bfloat16")]
ZERO, IDENTITY = jax.nn.initializers.zeros, initializers.identity()


def averaging(features, implementation, num_heads=1, **choices):
    """A module that averages its inputs over the allowed keys: zero scores, values and outputs as they come."""
    choices = {"query_init": ZERO, "value_init": IDENTITY, "output_init": IDENTITY, "use_bias": False, **choices}
    return MultiHeadAttention(features, num_heads, implementation=implementation, rngs=nnx.Rngs(0), **choices)


def column(*values):
    return jnp.array(values, jnp.float32)[None, :, None]


@IMPLEMENTATIONS
def test_s01_masks_that_leave_a_query_no_key_give_zeros_and_finite_gradients(implementation):
    m = averaging(2, implementation)
    v = jnp.array([[[1.0, 0], [0, 1], [2, 3], [4, 5]]])
    keep = jnp.array([[False, False, True, True]])
    call = {"mask": WindowMask(1, 0), "key_padding_mask": keep}
    with jax.debug_nans(True):
        np.testing.assert_array_equal(run(m, v, **call)[0], [[0, 0], [0, 0], [2, 3], [3, 4]])
        gradient = jax.grad(lambda value: run(m, v, v, value, **call).sum())(v)
        np.testing.assert_allclose(gradient[0].sum(-1) / 2, [0, 0, 1.5, 0.5], atol=1e-6)
        random = build(2, 1, implementation=implementation)
        gradients = jax.grad(lambda q: run(random, q, v, v, **call).sum())(normal(1, 1, 4, 2))
    assert np.isfinite(gradients).all()
    np.testing.assert_array_equal(gradients[0, :2], 0)


@IMPLEMENTATIONS
def test_s02_a_boolean_mask_with_empty_rows(implementation):
    m = averaging(1, implementation)
    x = column(*range(8))
    mask = jnp.zeros((8, 8), bool).at[:4, :4].set(True)
    output, weights = run(m, x, mask=mask, return_weights=True)
    np.testing.assert_allclose(output[0, :, 0], [1.5] * 4 + [0] * 4, atol=1e-6)
    np.testing.assert_array_equal(weights[0, 0, 4:], 0)
    np.testing.assert_array_equal(run(m, x, bias=jnp.where(mask, 0.0, -jnp.inf)), output)


@IMPLEMENTATIONS
def test_s03_the_rank_of_a_mask_does_not_matter(implementation):
    m = averaging(2, implementation, num_heads=2)
    x = jnp.broadcast_to(column(1, 2, 4, 1000), (2, 4, 2))
    keep = jnp.broadcast_to(jnp.array([True, True, True, False]), (2, 4))
    causal = jnp.tri(4, dtype=bool)
    for shape in ((4, 4), (1, 1, 4, 4), (2, 1, 4, 4), (2, 2, 4, 4)):
        mask = jnp.broadcast_to(causal, shape)
        output, weights = run(m, x, mask=mask, key_padding_mask=keep, return_weights=True)
        np.testing.assert_allclose(output[1, :, 1], [1, 1.5, 7 / 3, 7 / 3], rtol=1e-6)
        np.testing.assert_allclose(weights[0, 1, 3], [1 / 3, 1 / 3, 1 / 3, 0], rtol=1e-6)


@IMPLEMENTATIONS
def test_s04_boolean_selects_float_is_added_integers_are_refused(implementation):
    m = averaging(1, implementation)
    query, key = column(5), column(0, 1)
    output, weights = run(m, query, key, bias=jnp.array([[1.0, 0.0]]), return_weights=True)
    np.testing.assert_allclose(weights[0, 0, 0], [0.7310586, 0.2689414], atol=1e-6)
    assert float(output[0, 0, 0]) == pytest.approx(0.2689414, abs=1e-6)
    assert float(run(m, query, key, mask=jnp.array([[True, False]]))[0, 0, 0]) == 0
    for wrong in (jnp.array([[1, 0]]), jnp.array([[1.0, 0.0]])):
        with pytest.raises(TypeError, match=r"mask|keep"):
            m(query, key, mask=wrong)
    with pytest.raises(TypeError, match=r"mask|keep"):
        m(query, key, key_padding_mask=jnp.array([[1.0, 0.0]]))


@pytest.mark.parametrize("implementation, dtype", TYPES)
def test_s05_s14_masks_as_large_numbers_and_half_precision(implementation, dtype):
    bound, dtype = {"bfloat16": 1e-2, "float16": 2e-3}[dtype], jnp.dtype(dtype)
    m = averaging(1, EACH[implementation], dtype=dtype)
    x = column(9, 9, 9, 1, 3).astype(dtype)
    keep = jnp.array([[False, False, False, True, True]])
    low = jnp.finfo(dtype).min
    causal, padding = (jnp.where(ok, 0, low).astype(dtype) for ok in (jnp.tri(5, dtype=bool), keep))
    summed = causal[None, None] + padding[:, None, None]  # overflows to -inf, which forbids as well
    output, gradient = jax.value_and_grad(lambda x: run(m, x, bias=summed)[0, 3:, 0].sum())(x)
    assert float(output) == pytest.approx(3, abs=2 * bound)
    assert np.isfinite(np.asarray(gradient, np.float32)).all()
    boolean = run(m, x, mask=CausalMask(), key_padding_mask=keep)
    assert boolean.dtype == dtype
    np.testing.assert_allclose(np.asarray(boolean[0, :, 0], np.float32), [0, 0, 0, 1, 2], atol=bound)


@IMPLEMENTATIONS
@pytest.mark.parametrize("score", [0, -20])
def test_s05_two_planes_of_finite_minimums(implementation, score):
    """Causal and padding as two biases of finfo.min, which meet at -inf; every score 0, or -20 by a third."""
    low, keep = jnp.finfo(jnp.float32).min, jnp.array([False, False, False, True, True])
    planes = [DenseBias(jnp.where(ok, 0, low)) for ok in (jnp.tri(5, dtype=bool), keep[None])]
    bias = planes[0] + planes[1] + DenseBias(jnp.full((1, 1), float(score)))
    m = averaging(1, implementation)
    output, pull_back = jax.vjp(lambda x: run(m, x, bias=bias), column(9, 9, 9, 1, 3))
    np.testing.assert_array_equal(output[0, 3:, 0], [1, 2])
    assert np.isfinite(output).all()
    assert np.isfinite(pull_back(jnp.ones_like(output))[0]).all()


@IMPLEMENTATIONS
def test_s09_slopes_of_six_heads_reach_the_scores(implementation):
    """Two keys and zero scores: the far one weighs 1 / (1 + exp(slope))."""
    m = averaging(6, implementation, num_heads=6, position=Alibi())
    x = jnp.zeros((1, 2, 6))
    output, weights = run(m, x, x.at[:, 1].set(1), return_weights=True)
    expected = 1 / (1 + np.exp(2.0 ** -np.array([2, 4, 6, 8, 1, 3])))
    np.testing.assert_allclose(weights[0, :, 0, 1], expected, rtol=1e-6)
    np.testing.assert_allclose(output[0, 0], expected, rtol=1e-6)


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    "call",
    [
        {},
        {"return_weights": True},
        {"deterministic": False, "rngs": jax.random.key(0)},
        {"key_padding_mask": jnp.ones((1, 4), bool)},
        {"bias": jnp.ones((4, 4))},
    ],
    ids=["plain", "weights", "dropout", "padding", "bias"],
)
def test_s06_nothing_turns_the_causal_mask_off(implementation, call):
    m = build(8, 2, dropout_rate=0.5, implementation=implementation)
    x = normal(0, 1, 4, 8)
    first, second = (run(m, y, mask=CausalMask(), **call) for y in (x, x.at[:, 3].add(100)))
    first, second = (y[0] if isinstance(y, tuple) else y for y in (first, second))
    np.testing.assert_array_equal(first[:, :3], second[:, :3])
    if "return_weights" in call:
        weights = run(averaging(1, implementation), column(1, 2, 3, 4), mask=CausalMask(), return_weights=True)[1]
        np.testing.assert_allclose(weights[0, 0], np.tri(4) / np.arange(1, 5)[:, None], rtol=1e-6)


@IMPLEMENTATIONS
def test_s07_s10_decoding_sees_every_cached_key_at_its_distance(implementation):
    plain = averaging(1, implementation)
    alibi = averaging(2, implementation, num_heads=2, position=Alibi())
    for m, expected in ((plain, [0, 0.5, 1, 1.5, 2, 2.5]), (alibi, None)):
        width, steps = m.in_features, 6 if expected else 4
        cache, outputs = m.init_cache(1, steps), []
        step = jax.jit(m.decode)
        for t in range(steps):
            output, cache = step(jnp.full((1, 1, width), float(t)), cache)
            outputs.append(output[0, 0])
        if expected:
            np.testing.assert_allclose(np.array(outputs)[:, 0], expected, atol=1e-6)
        else:
            np.testing.assert_allclose(outputs[3], [1.5780387, 1.5048828], atol=1e-5)


@IMPLEMENTATIONS
def test_s08_the_triangle_is_aligned_at_the_top_left(implementation):
    m = averaging(1, implementation)
    for queries, keys, expected in ((2, 5, [1, 1.5]), (5, 2, [1, 1.5, 1.5, 1.5, 1.5])):
        output = run(m, jnp.ones((1, queries, 1)), column(*range(1, keys + 1)), mask=CausalMask())
        np.testing.assert_allclose(output[0, :, 0], expected, atol=1e-6)


@IMPLEMENTATIONS
def test_s11_s13_dropout_is_off_in_evaluation_and_follows_normalisation(implementation):
    m = build(8, 2, dropout_rate=0.8, drop_head=DropHead(0.5), implementation=implementation)
    x = normal(0, 1, 4, 8)
    same = [run(m, x, rngs=jax.random.key(s)) for s in (1, 2)] + [run(m, x)]
    np.testing.assert_array_equal(same[0], same[2])
    np.testing.assert_array_equal(same[1], same[2])
    noisy = averaging(1, implementation, dropout_rate=0.5)
    call = {"deterministic": False, "rngs": jax.random.key(0)}
    output = np.asarray(run(noisy, jnp.ones((1, 200, 1)), jnp.ones((1, 4, 1)), **call))
    assert set(np.unique(output)) <= {0.0, 0.5, 1.0, 1.5, 2.0}
    assert len(np.unique(output)) >= 3
    assert 0.9 < output.mean() < 1.1
    first = run(noisy, jnp.ones((1, 4, 1)), mask=CausalMask(), **call)[0, 0, 0]
    assert float(first) in (0.0, 2.0)


@IMPLEMENTATIONS
def test_s16_a_query_head_uses_its_own_group(implementation):
    for heads, groups, expected in ((4, 2, [10, 10, 20, 20]), (6, 2, [10] * 3 + [20] * 3), (3, 1, [10] * 3)):
        m = averaging(groups, implementation, num_heads=heads, num_kv_heads=groups, head_dim=1, output_projection=False)
        x = jnp.broadcast_to(10.0 * jnp.arange(1, groups + 1), (1, 5, groups))
        np.testing.assert_allclose(run(m, x)[0, 0], expected, rtol=1e-6)
        np.testing.assert_allclose(jax.jit(m.decode)(x, m.init_cache(1, 5))[0][0, 4], expected, rtol=1e-6)
    with pytest.raises(ValueError, match="num_heads=6 must be a multiple of num_kv_heads=4"):
        MultiHeadAttention(12, 6, 4, rngs=nnx.Rngs(0))


@IMPLEMENTATIONS
def test_s17_the_documented_layout_is_right_and_the_other_is_refused(implementation):
    m = build(16, 4, implementation=implementation)
    x = normal(42, 1, 32, 16)
    output = np.asarray(run(m, x), np.float64).ravel()
    expected = oracle.module(m, x)[0].ravel()
    assert output @ expected / np.linalg.norm(output) / np.linalg.norm(expected) > 0.99999
    square = MultiHeadAttention(32, 4, rngs=nnx.Rngs(0))
    swapped = normal(42, 1, 16, 32)
    for call in ({"mask": jnp.ones((1, 1, 32, 32), bool)}, {"key_padding_mask": jnp.ones((1, 32), bool)}):
        with pytest.raises(ValueError, match="32"):
            square(swapped, **call)


@IMPLEMENTATIONS
def test_a_call_outside_of_jit_gives_the_same(implementation):
    m = build(8, 2, 1, implementation=implementation)
    x, keep = normal(0, 2, 5, 8), jnp.arange(5)[None] < jnp.array([[5], [3]])
    call = {"mask": CausalMask(), "key_padding_mask": keep, "head_gate": jnp.array([0.5, 0.0])}
    np.testing.assert_allclose(m(x, **call), run(m, x, **call), rtol=0, atol=1e-6)
