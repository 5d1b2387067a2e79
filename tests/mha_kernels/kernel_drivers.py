"""The drivers of the kernels in their interpreters, for tests that hold them to the same cases."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mha_kernels.arguments import build_spec
from mha_kernels.pallas.gpu import forward as pallas_gpu
from mha_kernels.pallas.gpu.forward import PallasGPU
from mha_kernels.pallas.gpu.mosaic import plgpu
from mha_kernels.pallas.tpu.forward import PallasTPU
from mha_kernels.tiled import transforms

OLD = tuple(int(part) for part in jax.__version__.split(".")[:2]) < pallas_gpu.OLDEST
TPU = PallasTPU(128, 128, interpret=True)


def gpu(key_tile: int = 64, detect_races: bool = True) -> PallasGPU:
    """The GPU driver in its interpreter, which JAX has from 0.11 on."""
    return PallasGPU(key_tile, interpret=plgpu.InterpretGPUParams(detect_races=detect_races))


# With the type of input and with the largest error, relative to the largest entry: on a GPU probabilities and score
# gradients are rounded to 16 bits before they are multiplied.
DRIVERS = [pytest.param(TPU, jnp.float32, 2e-5, id="tpu-float32")]
TYPED = [pytest.param(TPU, dtype, id=f"tpu-{dtype.__name__}") for dtype in (jnp.float32, jnp.bfloat16, jnp.float16)]
if not OLD:
    DRIVERS.append(pytest.param(gpu(), jnp.bfloat16, 3e-2, id="gpu-bfloat16"))
    TYPED += [pytest.param(gpu(), dtype, id=f"gpu-{dtype.__name__}") for dtype in (jnp.bfloat16, jnp.float16)]
drivers = pytest.mark.parametrize("driver, dtype, bound", DRIVERS)
typed_drivers = pytest.mark.parametrize("driver, dtype", TYPED)


def no_races() -> bool:
    """Whether the GPU interpreter has seen none in its last run."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    races = gpu_callbacks.get_races()
    return races is None or not races.races_found


def attend(driver: Any, query: Any, key: Any, value: Any, statistics: Any = (), **arguments: Any) -> Any:
    """Output and statistics of arrays that have the type the driver wants."""
    algebra = build_spec(query, key, **arguments)
    run = jax.jit(lambda *x: transforms.run(driver, *x, statistics, None))
    return run(query, key, value, algebra)


def even(driver: Any, dtype: Any, values: Any, queries: int, heads: int = 1, **arguments: Any) -> np.ndarray:
    """Output (Q, H) of zero scores: weights are even, up to mask and bias, and results are means of `values` (K,)."""
    value = jnp.broadcast_to(jnp.asarray(values, dtype).reshape(1, -1, 1, 1), (1, len(values), heads, 4))
    query = jnp.zeros((1, queries, heads, 4), dtype)
    output, _ = attend(driver, query, jnp.zeros_like(value), value, **arguments)
    assert output.dtype == dtype
    return np.asarray(output[0, :, :, 0], np.float64)
