"""The TPU kernels on the host: the numbers in interpret mode, memory and races in the TPU interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import mha_kernels as mk
from mha_kernels import checks, transforms
from mha_kernels.pallas_tpu import PallasTPU
from tests.mha_kernels.kernel_cases import CASES, errors, outcome, problem

DRIVER = PallasTPU(128, 128, interpret=True)


def attend(query, key, value, driver=DRIVER, statistics=(), **arguments):
    algebra = checks.bundle(query, key, **arguments)
    return jax.jit(transforms.run, static_argnums=(0, 5, 6))(driver, query, key, value, algebra, statistics, None)


@pytest.mark.parametrize("name", CASES)
def test_float64_reference_forward_and_every_gradient(name):
    given = problem(name, jnp.float32, batch=2, length_q=139, length_k=151, heads=4, groups=2, width=17)
    found = outcome(DRIVER, given, jnp.float32)
    with jax.enable_x64(True):
        expected = outcome(None, given, jnp.float64)
    assert max(errors(found, expected)) < 3e-6


def test_bfloat16_keeps_float32_statistics():
    given = problem("causal", jnp.bfloat16, batch=1, length_q=67, length_k=71, heads=2, groups=1, width=32)
    (output, found), _ = outcome(DRIVER, given, jnp.float32)
    with jax.enable_x64(True):
        expected = outcome(None, given, jnp.float64)
    assert output.dtype == jnp.bfloat16
    assert found.lse.dtype == np.float32
    assert max(errors((output,), (expected[0][0],))) < 1e-2
    assert max(errors(found, expected[0][1])) < 2e-6


@pytest.mark.parametrize("name", ["padding"])
def test_tpu_interpreter_finds_no_race(name):
    """Uninitialised memory is NaN there, an access out of bounds raises, and reads and writes are checked for races."""
    driver = PallasTPU(128, 128, interpret=pltpu.InterpretParams(detect_races=True))
    given = problem(name, jnp.float32, batch=1, length_q=131, length_k=137, heads=2, groups=1, width=16)
    found = outcome(driver, given, jnp.float32)
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    assert not interpret_pallas_call.races.races_found
    with jax.enable_x64(True):
        expected = outcome(None, given, jnp.float64)
    assert max(errors(found, expected)) < 3e-6


@pytest.mark.parametrize("length", [1, 5, 127, 129, 192])
def test_any_length(length):
    """S19: zero scores, v_j = j gives (L - 1) / 2, a width that fits no lane, and two calls agree bit for bit."""
    query = key = jnp.zeros((1, length, 1, 20))
    value = jnp.broadcast_to(jnp.arange(length, dtype=jnp.float32)[None, :, None, None], (1, length, 1, 20))
    output, _ = attend(query, key, value)
    np.testing.assert_allclose(output, (length - 1) / 2, rtol=1e-6)
    np.testing.assert_array_equal(output, attend(query, key, value)[0])


@pytest.mark.parametrize("tiles", [(256, 128), (128, 256)])
def test_causal_range_of_unequal_tiles(tiles):
    """S18: out_i = i / 2 on every row, whichever tile is the larger."""
    length = 384
    query = key = jnp.zeros((1, length, 1, 8))
    value = jnp.broadcast_to(jnp.arange(length, dtype=jnp.float32)[None, :, None, None], (1, length, 1, 8))
    output, _ = attend(query, key, value, PallasTPU(*tiles, interpret=True), mask=mk.CausalMask())
    np.testing.assert_allclose(output[0, :, 0], np.broadcast_to(np.arange(length)[:, None] / 2, (length, 8)), rtol=1e-6)


def test_rows_without_a_key_are_zero():
    """S02: a boolean mask and the additive one that say the same."""
    query = key = jnp.zeros((1, 8, 1, 4))
    value = jnp.broadcast_to(jnp.arange(8.0)[None, :, None, None], (1, 8, 1, 4))
    keep = (jnp.arange(8)[:, None] < 4) & (jnp.arange(8)[None, :] < 4)
    for arguments in ({"mask": keep}, {"bias": jnp.where(keep, 0.0, -jnp.inf)}):
        output, found = attend(query, key, value, statistics=("lse",), **arguments)
        np.testing.assert_allclose(output[0, :, 0, 0], [1.5] * 4 + [0] * 4)
        assert (found.lse[0, 0, 4:] == -jnp.inf).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_finite_minimum_added_twice(dtype):
    """S05: causal and padding as two additive masks whose minimum overflows to -inf when they are joined."""
    least = jnp.finfo(dtype).min
    causal = jnp.where(jnp.tril(jnp.ones((5, 5), bool)), 0, least).astype(dtype)
    padding = jnp.where(jnp.asarray([False, False, False, True, True]), 0, least).astype(dtype).reshape(1, 1, 1, 5)
    query = key = jnp.zeros((1, 5, 1, 4), dtype)
    value = jnp.asarray([9, 9, 9, 1, 3], dtype).reshape(1, 5, 1, 1)
    bias = mk.DenseBias(causal.reshape(1, 1, 5, 5)) + mk.DenseBias(padding)
    output, _ = attend(query, key, value, bias=bias)
    np.testing.assert_allclose(output[0, 3:, 0, 0].astype(np.float32), [1, 2])
    assert jnp.isfinite(output).all()


def test_slopes_of_six_heads():
    """S09: zero scores, two keys, heads that are no power of two: the weight of the far key is 1 / (1 + exp(slope))."""
    query, key = jnp.zeros((1, 1, 6, 4)), jnp.zeros((1, 2, 6, 4))
    value = jnp.broadcast_to(jnp.asarray([0.0, 1.0]).reshape(1, 2, 1, 1), (1, 2, 6, 4))
    output, _ = attend(query, key, value, bias=mk.AlibiBias(mk.alibi_slopes(6)))
    slopes = np.asarray([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])
    np.testing.assert_allclose(output[0, 0, :, 0], 1 / (1 + np.exp(slopes)), rtol=1e-6)


def test_dropout_follows_normalisation():
    """S13: four equal weights, half dropped: every output is a multiple of 1/2, with mean near 1."""
    query, key, value = jnp.zeros((1, 200, 1, 4)), jnp.zeros((1, 4, 1, 4)), jnp.ones((1, 4, 1, 4))
    output, _ = attend(query, key, value, dropout=mk.Dropout(0.5, jax.random.key(0)))
    rows = np.asarray(output[0, :, 0, 0])
    assert set(rows) <= {0, 0.5, 1, 1.5, 2}
    assert len(set(rows)) >= 3
    assert 0.9 <= rows.mean() <= 1.1


def test_what_nobody_attends_never_shows():
    """NaN and infinity at padded keys and in a query without keys, forward and backward."""
    keep = jnp.arange(40) < 29
    query, key, value = (jnp.ones((1, 40, 1, 8)) for _ in range(3))
    dirty = [query, key.at[:, 29:].set(jnp.nan), value.at[:, 29:].set(jnp.inf)]

    def total(query, key, value):
        return attend(query, key, value, mask=mk.KeyPaddingMask(keep[None]))[0].sum()

    for clean, other in zip(
        jax.grad(total, argnums=(0, 1, 2))(query, key, value), jax.grad(total, argnums=(0, 1, 2))(*dirty), strict=True
    ):
        np.testing.assert_array_equal(clean, other)
        assert (other[:, 29:] == 0).all() or clean.shape == query.shape
    np.testing.assert_array_equal(total(query, key, value), total(*dirty))


def test_a_closed_head_does_not_run():
    """Its visits are none: keys of NaN, attended by closed heads only, change nothing."""
    query, key, value = jnp.ones((2, 3, 2, 4)), jnp.ones((2, 5, 2, 4)), jnp.ones((2, 5, 2, 4))
    gate = jnp.asarray([[1.0, 0.0], [0.0, 1.0]])
    dirty = jnp.where(gate[:, None, :, None] == 0, jnp.nan, key)
    output, found = attend(query, dirty, value, head_gate=gate, statistics=("entropy",))
    np.testing.assert_allclose(output, jnp.broadcast_to(gate[:, None, :, None], output.shape))
    np.testing.assert_array_equal(
        jnp.isnan(found.entropy), jnp.broadcast_to(gate[:, :, None] == 0, found.entropy.shape)
    )


@pytest.mark.parametrize("size", [0, 100, -128, 1.0, True])
def test_tile_sizes_are_checked(size):
    with pytest.raises(ValueError, match=r"query_tile is .*multiple of 128"):
        PallasTPU(query_tile=size)


def test_reasons_to_decline():
    query = jnp.ones((1, 8, 2, 4))

    def reason(driver, array=query, **arguments):
        return driver.declines(array, array, array, checks.bundle(array, array, **arguments), ())

    assert reason(DRIVER) is None
    assert "needs a TPU; the default backend is cpu" in reason(PallasTPU())
    assert "query is float16" in reason(DRIVER, query.astype(jnp.float16))
    assert "bias.table has 900 entries" in reason(DRIVER, bias=mk.DistanceBias(jnp.ones((2, 900))))
