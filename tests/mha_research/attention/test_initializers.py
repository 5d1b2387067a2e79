"""Initialisers: fans, spectra and condition numbers of the flat matrix, as their docstrings state them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mha_research import MultiHeadAttention, initializers

KEY = jax.random.key(0)


def spectrum(init, shape, key=KEY):
    return np.linalg.svd(np.asarray(init(key, shape, jnp.float32), np.float64), compute_uv=False)


def test_xavier_takes_its_fans_from_the_flat_matrix_in_every_parameter():
    m = MultiHeadAttention(64, 8, rngs=nnx.Rngs(0))
    kernels = m.kernels()
    for kernel in kernels.values():
        largest = np.abs(kernel).max()
        assert 0.21 < largest <= 0.2165065
        assert np.var(kernel) == pytest.approx(1 / 64, rel=0.1)
    assert kernels["query"].shape == (64, 8, 8)
    assert kernels["output"].shape == (8, 8, 64)
    assert not np.array_equal(kernels["query"], kernels["key"])
    assert all(not np.any(linear.bias[...]) for linear in (m.query, m.key, m.value, m.output))


def test_orthogonal_whole_and_per_head():
    m = MultiHeadAttention(
        64, 8, query_init=initializers.orthogonal(), output_init=initializers.orthogonal(), rngs=nnx.Rngs(0)
    )
    for name in ("query", "output"):
        flat = np.asarray(m.kernels()[name]).reshape(64, 64)
        np.testing.assert_allclose(flat.T @ flat, np.eye(64), atol=1e-5)
    columns = np.asarray(initializers.orthogonal(num_heads=4)(KEY, (24, 40), jnp.float32)).reshape(24, 4, 10)
    for h in range(4):
        np.testing.assert_allclose(columns[:, h].T @ columns[:, h], np.eye(10), atol=1e-5)
    assert np.abs(columns[:, 0].T @ columns[:, 1]).max() > 0.01
    rows = np.asarray(initializers.orthogonal(2.0, num_heads=4, head_axis=0)(KEY, (40, 24), jnp.float32)).reshape(
        4, 10, 24
    )
    for h in range(4):
        np.testing.assert_allclose(rows[h] @ rows[h].T, 4 * np.eye(10), atol=1e-5)
    np.testing.assert_allclose(spectrum(initializers.orthogonal(), (24, 40)), np.ones(24), atol=1e-5)
    with pytest.raises(ValueError, match="num_heads=5"):
        initializers.orthogonal(num_heads=5)(KEY, (24, 24), jnp.float32)


def test_svd_decay_has_the_stated_spectrum():
    values = spectrum(initializers.svd_decay(), (128, 128))
    np.testing.assert_allclose(values, 0.95 ** np.arange(128), atol=1e-6)
    assert np.sum(values**2) == pytest.approx(10.256, abs=1e-3)
    assert values[0] / values[-1] == pytest.approx(675, rel=0.01)
    matched = spectrum(initializers.svd_decay(match_norm=True), (128, 128))
    assert np.sum(matched**2) == pytest.approx(128, rel=1e-4)
    np.testing.assert_allclose(matched / matched[0], values, atol=1e-5)
    wide = spectrum(initializers.svd_decay(0.5, match_norm=True), (6, 10))
    assert np.sum(wide**2) == pytest.approx(2 * 6 * 10 / 16, rel=1e-4)
    for rate in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match=f"{rate}"):
            initializers.svd_decay(rate)


def test_scaled_and_identity():
    plain, small = initializers.orthogonal(), initializers.scaled(initializers.orthogonal(), 0.25)
    np.testing.assert_allclose(small(KEY, (5, 7), jnp.float32), 0.25 * plain(KEY, (5, 7), jnp.float32), rtol=1e-6)
    np.testing.assert_array_equal(initializers.identity()(KEY, (3, 5), jnp.float32), np.eye(3, 5))
    assert initializers.svd_decay()(KEY, (5, 7), jnp.bfloat16).dtype == jnp.bfloat16


def test_mimetic_products_are_noise_beside_the_identity():
    matrices = initializers.mimetic()(KEY, 48, 4, 12, 12)
    value_output = np.asarray(matrices["value"] @ matrices["output"])
    assert np.trace(value_output) / 48 == pytest.approx(-0.7, abs=0.05)
    assert np.std(value_output - np.diag(np.diag(value_output))) == pytest.approx(0.7 / np.sqrt(48), rel=0.1)
    for h in range(4):
        query, key = (np.asarray(matrices[n]).reshape(48, 4, 12)[:, h] for n in ("query", "key"))
        # Balanced factors of one truncated SVD: the same singular values in both, the largest of the product's target.
        np.testing.assert_allclose(query.T @ query, key.T @ key, atol=1e-4)
        assert np.trace(query @ key.T) > 0
    with pytest.raises(ValueError, match="head_dim=50"):
        initializers.mimetic()(KEY, 48, 1, 50, 12)
