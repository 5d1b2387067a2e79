"""The TPU kernels on the host: the numbers in interpret mode, memory and races in the TPU interpreter.

Public bug reports are in test_cases_on_kernels.py, for all kernels alike.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh

import mha_kernels as mk
from mha_kernels import tuned
from mha_kernels.arguments import build_spec
from mha_kernels.pallas.tpu.forward import PallasTPU
from mha_kernels.tiled import transforms
from tests.mha_kernels.kernel_cases import CASES, errors, outcome, problem

DRIVER = PallasTPU(128, 128, interpret=True)


def attend(query, key, value, driver=DRIVER, statistics=(), **arguments):
    algebra = build_spec(query, key, **arguments)
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


@pytest.mark.parametrize(
    "name, wide",
    [("gates", False), ("causal", False), ("segments", False), ("tables", False), ("tables", True), ("dense", False)],
)
def test_lowers_for_a_tpu(name, wide):
    """What the compiler of kernels refuses before it compiles (blocks of (1, 1), layouts), seen without one; `wide`:
    with 64-bit types enabled.
    """
    given = problem(name, jnp.bfloat16, batch=2, length_q=139, length_k=151, heads=4, groups=2, width=40)
    algebra = build_spec(given.query, given.key, **given.arguments)

    def loss(query, key, value, algebra):
        output, found = transforms.run(PallasTPU(128, 128), query, key, value, algebra, mk.STATISTICS, None)
        return output.astype(jnp.float32).sum() + found.entropy.sum()

    described = {"device_kind": "TPU v5 lite", "num_cores": 1, "platform": "tpu"}
    fields = inspect.signature(AbstractDevice).parameters  # platform is there from JAX 0.11 on
    device = AbstractDevice(**{name: value for name, value in described.items() if name in fields})
    mesh = AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.enable_x64(wide), jax.sharding.use_abstract_mesh(mesh):
        assert "TPU v5 lite" in tuned.device_kind()
        traced = jax.jit(jax.grad(loss, argnums=(0, 3), allow_int=True)).trace(*given[:3], algebra)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") >= 3  # forward, dq, dk and dv


@pytest.mark.parametrize("size", [0, 100, -128, 1.0, True])
def test_tile_sizes_are_checked(size):
    with pytest.raises(ValueError, match=r"query_tile is .*multiple of 128"):
        PallasTPU(query_tile=size)


def test_reasons_to_decline():
    query = jnp.ones((1, 8, 2, 4))

    def reason(driver, array=query, **arguments):
        return driver.unsupported_reason(array, array, array, build_spec(array, array, **arguments), ())

    assert reason(DRIVER) is None
    assert "needs a TPU; the default backend is cpu" in reason(PallasTPU())
    assert "bias.table has 900 entries" in reason(DRIVER, bias=mk.DistanceBias(jnp.ones((2, 900))))
