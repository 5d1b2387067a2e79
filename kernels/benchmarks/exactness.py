"""Distance of every implementation from float64 NumPy: the tables of docs/exactness.md, and their bounds.

    PYTHONPATH=.:kernels python kernels/benchmarks/exactness.py --lengths 1 7 128 1024 4096 16384

One example, one head of width 64, causal, standard normal query, key, value and output cotangent, rounded to the type
at hand before either side sees them. The truth is computed block of rows by block of rows, with the two-line formula of
the softmax and its gradient, and shares nothing with mha_kernels.
"""

import argparse
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_kernels import CausalMask, attention

WIDTH = 64
NAMES = ("output", "query", "key", "value")
# Largest error allowed of output and gradients. Values are averages of standard normals, so errors are near absolute
# ones in units of the type: 2^-24, 2^-11 and 2^-9 times a few.
BOUNDS = {"float64": 2e-14, "float32": 1e-5, "float16": 8e-3, "bfloat16": 6e-2}


def problem(length: int, dtype: str) -> list[np.ndarray]:
    """Query, key, value and the cotangent of the output, (L, E) float64, each exactly representable in `dtype`."""
    rng = np.random.default_rng(length)
    arrays = rng.standard_normal((4, length, WIDTH))
    with jax.enable_x64(True):
        return [np.asarray(jnp.asarray(array, dtype), np.float64) for array in arrays]


def truth(q: np.ndarray, k: np.ndarray, v: np.ndarray, of_output: np.ndarray, rows: int = 512) -> list[np.ndarray]:
    """Causal attention and its gradients, NAMES, in float64."""
    length, scale = len(q), WIDTH**-0.5
    output, of_q, of_k, of_v = (np.zeros_like(q) for _ in range(4))
    for start in range(0, length, rows):
        part = slice(start, start + rows)
        stop = min(start + rows, length)
        scores = scale * q[part] @ k[:stop].T
        scores[np.arange(stop)[None, :] > np.arange(start, stop)[:, None]] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        output[part] = p @ v[:stop]
        of_p = of_output[part] @ v[:stop].T
        of_scores = scale * p * (of_p - (p * of_p).sum(-1, keepdims=True))
        of_q[part] = of_scores @ k[:stop]
        of_k[:stop] += of_scores.T @ q[part]
        of_v[:stop] += p.T @ of_output[part]
    return [output, of_q, of_k, of_v]


def errors(implementation: Any, dtype: str, arrays: list[np.ndarray], expected: list[np.ndarray]) -> dict[str, Any]:
    """(maximum, root mean square) of the error of the output and of each gradient."""
    with jax.enable_x64(dtype == "float64"):
        q, k, v, of_output = (jnp.asarray(array[None, :, None], dtype) for array in arrays)

        @jax.jit
        def run(q: Any, k: Any, v: Any, of_output: Any) -> Any:
            options: dict[str, Any] = {"mask": CausalMask(), "implementation": implementation}
            output, pull_back = jax.vjp(lambda *x: attention(*x, **options), q, k, v)
            return output, *pull_back(of_output)

        found = [np.asarray(array, np.float64)[0, :, 0] for array in run(q, k, v, of_output)]
    differences = {name: a - b for name, a, b in zip(NAMES, found, expected, strict=True)}
    return {name: (abs(d).max(), np.sqrt((d**2).mean())) for name, d in differences.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 7, 128, 1024, 4096])
    parser.add_argument("--implementations", nargs="+", default=["reference", "blockwise", "xla"])
    parser.add_argument("--dtypes", nargs="+", default=list(BOUNDS), choices=list(BOUNDS))
    parser.add_argument("--dense-limit", type=int, default=4096, help="no Q x K implementation beyond this length")
    arguments = parser.parse_args()
    print("| implementation | dtype | L | " + " | ".join(f"{name} max | rms" for name in NAMES) + " |")
    print("| --- | --- | ---: |" + " ---: | ---: |" * len(NAMES), flush=True)
    beyond = []
    for dtype in arguments.dtypes:
        for length in arguments.lengths:
            arrays = problem(length, dtype)
            expected = truth(*arrays)
            for name in arguments.implementations:
                if name == "xla" and dtype == "float64":  # declined: its softmax is float32
                    continue
                if name != "blockwise" and length > arguments.dense_limit:
                    continue
                found = errors(name, dtype, arrays, expected)
                cells = " | ".join(f"{largest:.1e} | {rms:.1e}" for largest, rms in found.values())
                print(f"| {name} | {dtype} | {length} | {cells} |", flush=True)
                if name != "xla" and max(largest for largest, _ in found.values()) > BOUNDS[dtype]:
                    beyond.append(f"{name} {dtype} {length}")
    if beyond:
        sys.exit(f"beyond the bound: {', '.join(beyond)}")


if __name__ == "__main__":
    main()
