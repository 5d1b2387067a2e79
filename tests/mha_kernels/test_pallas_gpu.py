"""The GPU kernels in the Mosaic GPU interpreter, with race detection on, and why they decline elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mha_kernels as mk
from mha_kernels import checks, pallas_gpu, transforms
from mha_kernels.pallas_gpu import PallasGPU
from tests.mha_kernels.kernel_cases import CASES, errors, outcome, problem

OLD = tuple(int(part) for part in jax.__version__.split(".")[:2]) < pallas_gpu.OLDEST


def interpreted(key_tile=64):
    """The driver in the interpreter; on a JAX that has none, the test shows that the driver says so."""
    if OLD:
        array = jnp.ones((1, 8, 2, 4), jnp.bfloat16)
        reason = PallasGPU(interpret=True).declines(array, array, array, checks.bundle(array, array), ())
        assert reason == f"pallas_gpu needs JAX 0.11 or newer with Mosaic GPU; this is {jax.__version__}"
        return None
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return PallasGPU(key_tile, interpret=plgpu.InterpretGPUParams(detect_races=True))


def attend(driver, query, key, value, statistics=(), **arguments):
    arrays = [array.astype(jnp.bfloat16) for array in (query, key, value)]
    return transforms.run(driver, *arrays, checks.bundle(*arrays[:2], **arguments), statistics, None)


@pytest.mark.parametrize("name", CASES)
def test_float64_reference_forward_and_every_gradient(name):
    """Products of 16-bit factors: probabilities and score gradients are rounded to 8 bits before they are
    multiplied.
    """
    driver = interpreted()
    if driver is None:
        return
    given = problem(name, jnp.bfloat16, batch=1, length_q=83, length_k=101, heads=2, groups=1, width=17)
    (output, found), gradients = outcome(driver, given, jnp.float32)
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    assert not gpu_callbacks.get_races().races_found
    with jax.enable_x64(True):
        (expected_output, expected), expected_gradients = outcome(None, given, jnp.float64)
    assert max(errors(output, expected_output)) < 1e-2
    assert max(errors(found, expected)) < 3e-6
    assert max(errors(gradients, expected_gradients)) < 3e-2


@pytest.mark.parametrize("length", [1, 65, 129])
def test_any_length(length):
    """S19: zero scores, every second key 1: the mean of the values, whatever the length."""
    driver = interpreted()
    if driver is None:
        return
    zeros = jnp.zeros((1, length, 1, 20))
    value = jnp.broadcast_to((jnp.arange(length) % 2)[None, :, None, None], zeros.shape)
    output, _ = attend(driver, zeros, zeros, value.astype(jnp.float32))
    np.testing.assert_allclose(output.astype(np.float32), (length // 2) / length, rtol=5e-3)


def test_causal_range_rows_without_keys_and_dropout():
    """S18, S02 and S13 in one walk each."""
    driver = interpreted()
    if driver is None:
        return
    zeros = jnp.zeros((1, 130, 1, 8))
    steps = jnp.broadcast_to(jnp.arange(130.0)[None, :, None, None], zeros.shape)
    output, _ = attend(driver, zeros, zeros, steps, mask=mk.CausalMask())
    np.testing.assert_allclose(output[0, :, 0, 0].astype(np.float32), np.arange(130) / 2, rtol=1e-2)
    keep = (jnp.arange(8)[:, None] < 4) & (jnp.arange(8)[None, :] < 4)
    output, _ = attend(driver, zeros[:, :8], zeros[:, :8], steps[:, :8], mask=keep)
    np.testing.assert_allclose(output[0, :, 0, 0].astype(np.float32), [1.5] * 4 + [0] * 4)
    dropout = mk.Dropout(0.5, jax.random.key(0))
    output, _ = attend(driver, zeros, zeros[:, :4], jnp.ones((1, 4, 1, 8)), dropout=dropout)
    assert set(np.asarray(output[0, :, 0, 0], np.float32)) <= {0, 0.5, 1, 1.5, 2}


@pytest.mark.parametrize("size", [0, 32, 100, 64.0, True])
def test_tile_sizes_are_checked(size):
    with pytest.raises(ValueError, match=r"key_tile is .*multiple of 64"):
        PallasGPU(key_tile=size)


def test_stages_are_checked():
    with pytest.raises(ValueError, match="stages is 1"):
        PallasGPU(stages=1)


def test_reasons_to_decline():
    half = jnp.ones((1, 8, 2, 4), jnp.bfloat16)

    def reason(driver, array=half, **arguments):
        return driver.declines(array, array, array, checks.bundle(array, array, **arguments), ())

    assert reason(PallasGPU()) is not None
    if OLD:
        return
    assert "needs a GPU; the default backend is cpu" in reason(PallasGPU())
    driver = interpreted()
    assert reason(driver) is None
    assert "query is float32" in reason(driver, half.astype(jnp.float32))
    assert "width up to 256; came 257" in reason(driver, jnp.ones((1, 8, 2, 257), jnp.bfloat16))
    assert "bias.table has 65 entries" in reason(driver, bias=mk.DistanceBias(jnp.ones((2, 65))))
