"""The GPU kernels in the Mosaic GPU interpreter, with race detection on, and why they decline elsewhere."""

import jax
import jax.numpy as jnp
import pytest

import mha_kernels as mk
from mha_kernels.arguments import build_spec
from mha_kernels.pallas.gpu.forward import PallasGPU
from mha_kernels.tiled import transforms
from tests.mha_kernels.kernel_cases import CASES, errors, outcome, problem
from tests.mha_kernels.kernel_drivers import OLD, gpu, no_races

if not OLD:  # older releases of JAX have no interpreter

    @pytest.mark.parametrize("name", CASES)
    def test_float64_reference_forward_and_every_gradient(name):
        """Products of 16-bit factors: probabilities and score gradients are rounded to 8 bits before they are
        multiplied.
        """
        given = problem(name, jnp.bfloat16, batch=1, length_q=83, length_k=101, heads=2, groups=1, width=17)
        (output, found), gradients = outcome(gpu(), given, jnp.float32)
        assert no_races()
        with jax.enable_x64(True):
            (expected_output, expected), expected_gradients = outcome(None, given, jnp.float64)
        assert max(errors(output, expected_output)) < 1e-2
        assert max(errors(found, expected)) < 3e-6
        assert max(errors(gradients, expected_gradients)) < 3e-2

    def test_lowers_for_a_gpu_with_64_bit_types_enabled():
        given = problem("tables", jnp.bfloat16, batch=1, length_q=83, length_k=101, heads=2, groups=1, width=17)
        with jax.enable_x64(True):
            algebra = build_spec(given.query, given.key, **given.arguments)

            def loss(query, key, value, algebra):
                output, _ = transforms.run(PallasGPU(), query, key, value, algebra, (), None)
                return output.astype(jnp.float32).sum()

            traced = jax.jit(jax.grad(loss, argnums=(0, 3), allow_int=True)).trace(*given[:3], algebra)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("mosaic_gpu") >= 3  # forward, dq, dk and dv


@pytest.mark.parametrize("size", [0, 96, 100, 64.0, True])
def test_tile_sizes_are_checked(size):
    with pytest.raises(ValueError, match=r"key_tile is .*multiple of 64"):
        PallasGPU(key_tile=size)
    with pytest.raises(ValueError, match=r"backward_tile is .*32, 64 or 128"):
        PallasGPU(backward_tile=size)


@pytest.mark.parametrize("stages", [0, -1, 2.0, True])
def test_stages_are_checked(stages):
    with pytest.raises(ValueError, match=r"stages is .*positive integer"):
        PallasGPU(stages=stages)


def test_reasons_to_decline():
    half = jnp.ones((1, 8, 2, 4), jnp.bfloat16)

    def reason(driver, array=half, **arguments):
        return driver.unsupported_reason(array, array, array, build_spec(array, array, **arguments), ())

    if OLD:
        expected = f"pallas_gpu needs JAX 0.11 or newer with Mosaic GPU; this is {jax.__version__}"
        assert reason(PallasGPU()) == reason(PallasGPU(interpret=True)) == expected
        return
    assert "needs a GPU; the default backend is cpu" in reason(PallasGPU())
    driver = gpu()
    assert reason(driver) is None
    assert "query is float32" in reason(driver, half.astype(jnp.float32))
    assert "width up to 256; came 257" in reason(driver, jnp.ones((1, 8, 2, 257), jnp.bfloat16))
    assert "bias.table has 65 entries" in reason(driver, bias=mk.DistanceBias(jnp.ones((2, 65))))
