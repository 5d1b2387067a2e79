"""How fast XLA multiplies the matrices of one tile on a CPU, beside `torch.mm`: GFLOP/s on all cores.

    python kernels/benchmarks/products.py [--repeats 15]

The five products of tiles of 1024 queries by 512 keys at head width 64 are of three shapes. Each is run for 16 pairs of
matrices in one compiled loop, which keeps nothing of a product but one entry.
"""

import argparse
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cpu import medians

COUNT = 16
# Scores and value products; outputs and query gradients; key and value gradients, whose small operand is transposed.
SHAPES = {"mk,nk->mn": (1024, 64, 512), "mk,kn->mn": (1024, 512, 64), "mk,kn->mn ": (64, 1024, 512)}


def runs(equation: str, m: int, k: int, n: int) -> dict[str, Any]:
    """The loop in XLA and in PyTorch."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    rng = np.random.default_rng(0)
    transposed = equation.startswith("mk,nk")
    left = rng.standard_normal((COUNT, m, k), np.float32)
    right = rng.standard_normal((COUNT, n, k) if transposed else (COUNT, k, n), np.float32)

    @jax.jit
    def loop(left: Any, right: Any) -> Any:
        def add(i: Any, total: Any) -> Any:
            product = jax.lax.optimization_barrier(jnp.einsum(equation.strip(), left[i], right[i]))
            return total + product[0, 0]

        return jax.lax.fori_loop(0, COUNT, add, jnp.float32(0))

    arrays = jnp.asarray(left), jnp.asarray(right)
    tensors = torch.tensor(left), torch.tensor(right)
    output = torch.empty(m, n)

    def with_torch() -> None:
        for a, b in zip(*tensors, strict=True):
            torch.mm(a, b.T if transposed else b, out=output)

    return {"XLA": lambda: jax.block_until_ready(loop(*arrays)), "torch.mm": with_torch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    for equation, (m, k, n) in SHAPES.items():
        found = medians(runs(equation, m, k, n), options.repeats)
        rates = {name: 2e-9 * COUNT * m * k * n / seconds for name, seconds in found.items()}
        print(f"{m} x {k} x {n}:", ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items()))


if __name__ == "__main__":
    main()
