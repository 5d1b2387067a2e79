"""Finds tile sizes by timing them on the device at hand, and writes the JSON that the drivers read (see `tuned`).

    python -m mha_kernels.autotune                                    widths 64 and 128, lengths 1024 to 16384
    python -m mha_kernels.autotune --widths 128 --lengths 8192 --output folder

Exits 3 where there is neither a GPU nor a TPU. Interrupted, it keeps the lengths that were finished.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from mha_kernels import tuned
from mha_kernels.algebra.masks import CausalMask
from mha_kernels.arguments import build_spec
from mha_kernels.pallas.gpu.forward import PallasGPU
from mha_kernels.pallas.tpu.forward import PallasTPU
from mha_kernels.tiled import transforms

CANDIDATES: dict[type, dict[str, tuple[int, ...]]] = {
    PallasGPU: {"key_tile": (64, 128, 192), "backward_tile": (32, 64, 128), "stages": (2, 3, 4)},
    PallasTPU: {"query_tile": (256, 512, 1024), "key_tile": (256, 512, 1024)},
}
ROUNDS = 5
Timer = Callable[[Any, tuple[jax.Array, ...]], float]


def measured(driver: Any, arrays: tuple[jax.Array, ...]) -> float:
    """Median seconds of a causal forward and backward pass by this driver.

    Raises whatever the compiler does when the sizes do not fit.
    """

    def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        algebra = build_spec(query, key, mask=CausalMask())
        return transforms.run(driver, query, key, value, algebra, (), None)[0].astype(jnp.float32).sum()

    return median_seconds(jax.jit(jax.grad(loss, argnums=(0, 1, 2))), arrays, ROUNDS)


def median_seconds(function: Callable[..., Any], arrays: tuple[jax.Array, ...], rounds: int) -> float:
    """Median seconds of a call that has been made once before."""
    jax.block_until_ready(function(*arrays))
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        jax.block_until_ready(function(*arrays))
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def candidates(driver: Any) -> Iterator[Any]:
    """The driver with each combination of sizes."""
    sizes = CANDIDATES[type(driver)]
    for values in itertools.product(*sizes.values()):
        yield dataclasses.replace(driver, **dict(zip(sizes, values, strict=True)))


def best(driver: Any, arrays: tuple[jax.Array, ...], timer: Timer = measured) -> dict[str, int] | None:
    """The sizes that are fastest on query, key and value; None where none of them runs."""
    found: list[tuple[float, dict[str, int]]] = []
    for candidate in candidates(driver):
        sizes = {name: getattr(candidate, name) for name in CANDIDATES[type(driver)]}
        if candidate.unsupported_reason(*arrays, build_spec(*arrays[:2]), ()) is not None:
            continue
        try:
            found.append((timer(candidate, arrays), sizes))
        except Exception as error:  # a compiler says in many ways that sizes do not fit; the others still may
            print(f"{sizes}: {str(error).splitlines()[0][:120] if str(error) else type(error).__name__}", flush=True)
    return min(found, key=lambda pair: pair[0])[1] if found else None


def tune(
    driver: Any, problems: list[tuple[int, int]], output: Path, heads: int = 16, timer: Timer = measured
) -> dict[str, Any]:
    """Tries the candidates on problems (length, width), and after each writes what is known to `output`.

    What the file held for other problems stays in it.
    """
    report: dict[str, Any] = {"sizes": {}}
    if output.exists():
        report = json.loads(output.read_text())
    report |= {"device": tuned.device_kind(), "jax": jax.__version__}
    for length, width in problems:
        arrays = [jax.random.normal(key, (1, length, heads, width)) for key in jax.random.split(jax.random.key(0), 3)]
        half = tuple(array.astype(jnp.bfloat16) for array in arrays)
        sizes = best(driver, half, timer)
        print(f"length {length}, width {width}: {sizes or 'nothing runs'}", flush=True)
        if sizes is not None:
            report["sizes"].setdefault(tuned.entry(driver, half[0]), {})[str(length)] = sizes
            output.parent.mkdir(parents=True, exist_ok=True)
            unfinished = output.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(report, indent=1) + "\n")
            os.replace(unfinished, output)
    return report


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--output", type=Path, help="folder of the JSON; else where the package reads it")
    options = parser.parse_args(arguments)
    backend = jax.default_backend()
    if backend not in ("gpu", "tpu"):
        print(f"autotune: no GPU or TPU here, the default backend is {backend}", file=sys.stderr)
        return 3
    file = tuned.path(tuned.device_kind())
    file = options.output / file.name if options.output else file
    tune(
        PallasGPU() if backend == "gpu" else PallasTPU(), list(itertools.product(options.lengths, options.widths)), file
    )
    print(f"wrote {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
