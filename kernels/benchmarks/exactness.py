"""Distance of every implementation from float64 NumPy: makes the table of docs/exactness.md, or holds it to account.

    PYTHONPATH=.:kernels python kernels/benchmarks/exactness.py            prints the rows, measured now
    PYTHONPATH=.:kernels python kernels/benchmarks/exactness.py --check    fails where a row is far above the page

One example, one head of width 64, causal, standard normal query, key, value and output cotangent, rounded to the type
at hand before either side sees them. The truth is computed block of rows by block of rows, with the two-line formula of
the softmax and its gradient, and shares nothing with mha_kernels.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mha_kernels import CausalMask, attention
from mha_kernels.pallas.gpu.forward import PallasGPU
from mha_kernels.pallas.tpu.forward import PallasTPU

PAGE = Path(__file__).resolve().parents[2] / "docs/exactness.md"
WIDTH = 64
NAMES = ("output", "query", "key", "value")
DTYPES = ("float64", "float32", "bfloat16", "float16")
LENGTHS = (1, 7, 128, 1024, 4096, 16384)
# Longest sequence of each: the first two hold Q x K arrays, kernels are interpreted.
LONGEST = {"reference": 4096, "xla": 4096, "blockwise": 16384, "native": 16384, "pallas_tpu": 1024, "pallas_gpu": 1024}
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def implementation(name: str) -> Any:
    """What `attention` is given; the kernels run in their interpreters."""
    if name == "pallas_tpu":
        return PallasTPU(interpret=True)
    if name == "pallas_gpu":
        from jax.experimental.pallas import mosaic_gpu

        return PallasGPU(interpret=mosaic_gpu.InterpretGPUParams())
    return name


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
        ds = scale * p * (of_p - (p * of_p).sum(-1, keepdims=True))
        of_q[part] = ds @ k[:stop]
        of_k[:stop] += ds.T @ q[part]
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


def documented() -> dict[tuple[str, str, int], list[float]]:
    """(implementation, dtype, length): maximum and root mean square of each of NAMES, as the page has them."""
    rows = re.findall(r"^\| (\w+) \| (\w+) \| (\d+) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return {
        (name, dtype, int(length)): [float(cell) for cell in cells.split(" | ")] for name, dtype, length, cells in rows
    }


def measured(name: str, dtype: str, length: int) -> list[float]:
    """One row of the table. Raises ValueError where the implementation cannot do it."""
    arrays = problem(length, dtype)
    found = errors(implementation(name), dtype, arrays, truth(*arrays))
    return [number for pair in found.values() for number in pair]


def too_large(row: list[float], page: list[float], dtype: str) -> bool:
    """Whether an error is above five times that of the page: other processors and releases of JAX order sums otherwise.
    Where the page has none, four units of the last place are allowed.
    """
    return bool(np.any(np.array(row) > 5 * np.array(page) + 4 * EPSILON[dtype] * (np.array(page) == 0)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--implementations", nargs="+", default=list(LONGEST), choices=list(LONGEST))
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--check", action="store_true", help="compare with the page in place of printing")
    arguments = parser.parse_args()
    page, beyond = documented(), []
    for dtype in arguments.dtypes:
        for name in arguments.implementations:
            for length in arguments.lengths:
                if length > LONGEST[name] or (arguments.check and (name, dtype, length) not in page):
                    continue
                try:
                    row = measured(name, dtype, length)
                except ValueError as reason:
                    print(f"{name} {dtype}: {reason}", file=sys.stderr)
                    break
                print(f"| {name} | {dtype} | {length} | {' | '.join(f'{x:.1e}' for x in row)} |", flush=True)
                if arguments.check and too_large(row, page[name, dtype, length], dtype):
                    beyond.append(f"{name} {dtype} {length}")
    if beyond:
        sys.exit(f"far above the page: {', '.join(beyond)}")


if __name__ == "__main__":
    main()
