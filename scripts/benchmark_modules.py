"""What the module adds to its matrix products and its attention, and what decoding token by token costs.

    PYTHONPATH=.:kernels python scripts/benchmark_modules.py [--rounds 15]

The step is the gradient of a loss with respect to the parameters and the input: self attention, causal, d_model 256,
8 heads, L 256, float32. Beside it the same four products and the same call of `mha_kernels.attention`, written out
with nothing else: no biases, no checks, no options. Both run in turn in one process, so that other work on the machine
meets both; a ratio is of medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import mha_kernels as mk
from mha_research import Alibi, MultiHeadAttention

WIDTH, HEADS, LENGTH = 256, 8, 256


def module_step(module: MultiHeadAttention) -> tuple[Callable[..., Any], Any]:
    """Gradients of the module, and its parameters."""
    graph, parameters = nnx.split(module, nnx.Param)

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        return (nnx.merge(graph, parameters)(x, mask=mk.CausalMask()) ** 2).mean()

    return jax.jit(jax.grad(loss, argnums=(0, 1))), parameters


def bare_step(implementation: Any = "auto") -> tuple[Callable[..., Any], Any]:
    """The same products and the same attention, alone."""
    parameters = tuple(jax.random.normal(key, (WIDTH, WIDTH)) / 16 for key in jax.random.split(jax.random.key(0), 4))

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        heads = [(x @ w).reshape(*x.shape[:2], HEADS, -1) for w in parameters[:3]]
        output = mk.attention(*heads, mask=mk.CausalMask(), implementation=implementation)
        return ((output.reshape(x.shape) @ parameters[3]) ** 2).mean()

    return jax.jit(jax.grad(loss, argnums=(0, 1))), parameters


def medians(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Milliseconds of each, taken in turn."""
    for run in runs.values():
        jax.block_until_ready(run())
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(of) for name, of in times.items()}


def compare_steps(rounds: int) -> None:
    choices: dict[str, dict[str, Any]] = {
        "module": {},
        "module, packed": {"packed": True},
        "module, no biases": {"use_bias": False},
    }
    print("| batch | bare | " + " | ".join(f"{name} | ratio" for name in choices) + " |")
    print("|" + " ---: |" * (2 + 2 * len(choices)))
    for batch in (1, 8):
        x = jax.random.normal(jax.random.key(1), (batch, LENGTH, WIDTH))
        steps = {"bare": bare_step()}
        for name, options in choices.items():
            steps[name] = module_step(MultiHeadAttention(WIDTH, HEADS, rngs=nnx.Rngs(0), **options))
        runs = {name: lambda step=step, of=of: step(of, x) for name, (step, of) in steps.items()}  # noqa: B023
        found = medians(runs, rounds)
        bare = found.pop("bare")
        cells = " | ".join(f"{time:.2f} ms | {time / bare:.2f}" for time in found.values())
        print(f"| {batch} | {bare:.2f} ms | {cells} |", flush=True)


def decode_tokens(count: int, capacity: int) -> tuple[float, int]:
    """Seconds for `count` single tokens into an empty cache, and how often the step was compiled."""
    module = MultiHeadAttention(WIDTH, HEADS, position=Alibi(), rngs=nnx.Rngs(0))
    graph, parameters = nnx.split(module, nnx.Param)
    step = jax.jit(lambda p, token, cache: nnx.merge(graph, p).decode(token, cache), donate_argnums=2)
    token = jnp.ones((1, 1, WIDTH))
    jax.block_until_ready(step(parameters, token, module.init_cache(1, capacity)))
    cache = module.init_cache(1, capacity)
    start = time.perf_counter()
    for _ in range(count):
        output, cache = step(parameters, token, cache)
    jax.block_until_ready(output)
    return time.perf_counter() - start, step._cache_size()


def measure_decoding(rounds: int) -> None:
    print("\n| tokens | capacity | ms | microseconds a token | compilations |\n|" + " ---: |" * 5)
    for count, capacity in ((64, 256), (128, 256), (256, 256), (256, 1024)):
        results = [decode_tokens(count, capacity) for _ in range(rounds)]
        seconds = statistics.median(time for time, _ in results)
        compiled = max(times for _, times in results)
        row = f"{count} | {capacity} | {1e3 * seconds:.1f} | {1e6 * seconds / count:.0f} | {compiled}"
        print(f"| {row} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}\n")
    compare_steps(arguments.rounds)
    measure_decoding(max(1, arguments.rounds // 5))


if __name__ == "__main__":
    main()
