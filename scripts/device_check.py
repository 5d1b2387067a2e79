"""Holds the kernel of the device at hand to the float64 reference, forward and every gradient, in the cases of the
tests.

Exits 3 where there is neither a GPU nor a TPU, 1 when a case is wrong.
"""

import sys

import jax
import jax.numpy as jnp

from mha_kernels.pallas.gpu.forward import PallasGPU
from mha_kernels.pallas.tpu.forward import PallasTPU
from tests.mha_kernels.kernel_cases import CASES, errors, outcome, problem

LARGEST = 3e-2  # relative to the largest entry: products of bfloat16 factors


def main() -> int:
    backend = jax.default_backend()
    if backend not in ("gpu", "tpu"):
        print(f"gpu_check: no GPU or TPU here, the default backend is {backend}", file=sys.stderr)
        return 3
    driver = PallasGPU() if backend == "gpu" else PallasTPU()
    bad = 0
    for name in CASES:
        for lengths in ((83, 101), (1031, 773)):
            given = problem(
                name, jnp.bfloat16, batch=2, length_q=lengths[0], length_k=lengths[1], heads=4, groups=2, width=64
            )
            found = outcome(driver, given, jnp.float32)
            with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
                expected = outcome(None, given, jnp.float64)
            worst = max(errors(found, expected))
            bad += worst > LARGEST
            print(f"{name:9} Q {lengths[0]:4} K {lengths[1]:4}  largest error {worst:.1e}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
