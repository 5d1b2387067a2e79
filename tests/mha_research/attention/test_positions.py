"""Positions against closed forms, and the values of the papers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mha_research import Alibi, RelativeBias, positions


def test_sinusoids_are_those_of_the_paper_with_norm_root_half_width():
    table = np.asarray(positions.sinusoidal(520, 768))
    p, i = np.arange(520)[:, None], np.arange(384)[None]
    angle = p / 10000 ** (2 * i / 768)
    np.testing.assert_allclose(table[:, 0::2], np.sin(angle), atol=1e-4)
    np.testing.assert_allclose(table[:, 1::2], np.cos(angle), atol=1e-4)
    assert np.linalg.norm(table[512]) == pytest.approx(19.5959, abs=1e-3)
    assert positions.sinusoidal(5, 7).shape == (5, 7)


def test_log_time_keeps_the_range_and_is_finer_at_the_start():
    table = np.asarray(positions.log_time(50, 16))
    ends = np.asarray(positions.sinusoidal_at(jnp.array([0.0, 49.0]), 16))
    np.testing.assert_allclose(table[[0, -1]], ends, atol=1e-5)
    at = 49 * np.log1p(np.arange(50)) / np.log(50)
    np.testing.assert_allclose(table[:, 0], np.sin(at), atol=1e-4)
    assert np.isfinite(positions.log_time(1, 4)).all()


def test_learned_positions_refuse_to_go_past_their_table():
    learned = positions.Learned(7, 5, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(learned(3, 2), learned.table[...][2:5])
    with pytest.raises(ValueError, match="positions 5 to 7 were asked for, the table has 7 rows"):
        learned(3, 5)
    assert np.isnan(jax.jit(lambda start: learned(3, start))(5)).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_turns_pairs_and_depends_on_the_difference_alone(interleaved):
    x = np.random.default_rng(0).normal(size=(2, 5, 3, 6))
    p = np.array([0, 1, 4, 100, 7])
    turned = np.asarray(positions.rotate(jnp.asarray(x, jnp.float32), p, 100.0, interleaved))
    first, second = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, 3), slice(3, None))
    angle = p[:, None, None] * 100.0 ** (-np.arange(3) / 3)
    expected = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angle)
    np.testing.assert_allclose(turned[..., first], expected.real, atol=2e-5)
    np.testing.assert_allclose(turned[..., second], expected.imag, atol=2e-5)
    each = positions.rotate(jnp.asarray(x, jnp.float32), np.stack([p, p + 3]), 100.0, interleaved)
    np.testing.assert_array_equal(each[0], turned[0])
    q, k = (positions.rotate(jnp.asarray(x, jnp.float32), p + shift, 100.0, interleaved) for shift in (0, 11))
    scores = [np.einsum("qhe,khe->hqk", y[0], y[0]) for y in (q, k)]
    np.testing.assert_allclose(scores[0], scores[1], atol=2e-4)


def test_rotation_refuses_an_odd_width_and_keeps_the_type():
    with pytest.raises(ValueError, match="even, got 5"):
        positions.rotate(jnp.zeros((1, 2, 1, 5)), jnp.arange(2))
    assert positions.rotate(jnp.zeros((1, 2, 1, 4), jnp.bfloat16), jnp.arange(2)).dtype == jnp.bfloat16


def test_t5_buckets():
    both = {0: 0, -1: 1, 1: 17, 7: 23, 8: 24, -8: 8, -11: 8, -12: 9, 127: 31, 128: 31, -5000: 15, 5000: 31}
    np.testing.assert_array_equal(positions.t5_bucket(jnp.array(list(both)), True), list(both.values()))
    causal = {0: 0, 5: 0, -1: 1, -15: 15, -16: 16, -127: 31, -128: 31, -5000: 31}
    np.testing.assert_array_equal(positions.t5_bucket(jnp.array(list(causal)), False), list(causal.values()))


def test_schemes_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match="2 slopes were given for 3 heads"):
        Alibi(slopes=(0.5, 0.25)).bias(None, 3)
    with pytest.raises(ValueError, match="'swin'"):
        RelativeBias("swin")
    with pytest.raises(ValueError, match="max_distance must be at least 1, got 0"):
        RelativeBias(max_distance=0)
    assert Alibi(trainable=True).parameter(jax.random.key(0), 6, jnp.float32) == pytest.approx(
        [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    )
