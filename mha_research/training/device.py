"""What the device can do and how much memory a run took, for the figures in the log."""

import resource
import sys
import time

import jax
import jax.numpy as jnp

# Dense peak FLOP/s of one chip in bfloat16, from the vendors' data sheets.
_PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
}


def peak_flops() -> float:
    """FLOP/s that all devices together could reach: from the data sheet where known, else of a timed matrix product."""
    device = jax.devices()[0]
    known = next((peak for name, peak in _PEAK_FLOPS.items() if device.device_kind.startswith(name)), None)
    return (known or _measured_flops()) * jax.device_count()


def _measured_flops(size: int = 1024, repeats: int = 5) -> float:
    x = jnp.ones((size, size), jnp.float32)
    multiply = jax.jit(jnp.matmul)
    multiply(x, x).block_until_ready()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        multiply(x, x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def peak_memory_bytes() -> int:
    """Most memory in use so far: of the first device where it counts that, else of this process."""
    statistics = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in statistics:
        return int(statistics["peak_bytes_in_use"])
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
