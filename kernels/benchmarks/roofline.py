"""TFLOP/s of the kernels beside cuDNN, tokamax and dense XLA, and beside the matrix product that this device reaches.

    python kernels/benchmarks/roofline.py --output=roofline          writes roofline.json and roofline.md

Every figure is a median of runs of one process, implementations taken in turn; a peer that is not installed, or that
declines, has its reason in the table. Counted are 4 B H Q K E floating-point operations forward and 2.5 times as many
backward, half of that for a causal mask, and the same for a head that a gate leaves out: so DropHead shows as more.
Exits 3 where there is neither a GPU nor a TPU.
"""

import argparse
import functools
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import mha_kernels as mk
from mha_kernels.autotune import median_seconds

IMPLEMENTATIONS = ("pallas_gpu", "pallas_tpu", "cudnn", "xla", "blockwise", "tokamax")
LENGTHS = (1024, 4096, 16384, 65536)
WIDTHS = (64, 128)
HEADS = 16
DENSE_LIMIT = 16384  # beyond it an implementation or an operand of size Q x K does not fit


def operands(name: str, length: int) -> dict[str, Any]:
    """The arguments of `attention` of one row of the table."""
    kinds: dict[str, Callable[[], dict[str, Any]]] = {
        "full": dict,
        "causal": lambda: {"mask": mk.CausalMask()},
        "alibi": lambda: {"mask": mk.CausalMask(), "bias": mk.AlibiBias(mk.alibi_slopes(HEADS))},
        "t5": lambda: {"mask": mk.CausalMask(), "bias": mk.T5Bias(jnp.zeros((HEADS, 32)), bidirectional=False)},
        "dense bias": lambda: {"bias": jnp.zeros((1, HEADS, length, length), jnp.bfloat16)},
        "statistics": lambda: {"mask": mk.CausalMask()},
        "drophead 0.5": lambda: {"head_gate": jnp.arange(HEADS) % 2 * 2.0},
    }
    return kinds[name]()


CASES = ("full", "causal", "alibi", "t5", "dense bias", "statistics", "drophead 0.5")


def runner(implementation: str, case: str, length: int) -> Callable[..., Any]:
    """attention(query, key, value) of one cell of the table."""
    given = operands(case, length)
    if implementation == "tokamax":
        if given and case != "causal":
            raise ValueError("not compared on this case")
        import tokamax

        return functools.partial(tokamax.dot_product_attention, is_causal=case == "causal")
    if case == "statistics":
        return lambda *arrays: mk.attention_with_statistics(*arrays, implementation=implementation, **given)[0]
    return functools.partial(mk.attention, implementation=implementation, **given)


def timed(function: Callable[..., Any], arrays: tuple[jax.Array, ...], repeats: int) -> tuple[float, int]:
    """Median seconds of a call, and bytes of temporary memory."""
    compiled = jax.jit(function).lower(*arrays).compile()
    memory = compiled.memory_analysis()
    return median_seconds(compiled, arrays, repeats), memory.temp_size_in_bytes if memory else 0


def matrix_peak(repeats: int) -> float:
    """TFLOP/s of a bfloat16 matrix product of size 8192: the peak that is compared with."""
    square = jnp.ones((8192, 8192), jnp.bfloat16)
    seconds, _ = timed(jnp.matmul, (square, square), repeats)
    return 2 * 8192**3 / seconds / 1e12


def measure(implementation: str, case: str, length: int, width: int, repeats: int) -> dict[str, Any]:
    """One cell of the table, forward and backward."""
    row = {"implementation": implementation, "case": case, "length": length, "width": width}
    if length > DENSE_LIMIT and (implementation == "xla" or case == "dense bias"):
        return row | {"reason": "Q x K does not fit"}
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = tuple(jax.random.normal(key, (1, length, HEADS, width), jnp.bfloat16) for key in keys)
    work = 4 * HEADS * length**2 * width / (2 if "mask" in operands(case, 8) else 1)
    try:
        attend = runner(implementation, case, length)

        def loss(*arrays: jax.Array) -> jax.Array:
            return attend(*arrays).astype(jnp.float32).sum()

        forward, memory = timed(attend, arrays, repeats)
        both, memory_both = timed(jax.grad(loss, argnums=(0, 1, 2)), arrays, repeats)
    except Exception as error:  # one cell that declines, or does not fit, must not lose the others
        return row | {"reason": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    return row | {
        "forward_tflops": work / forward / 1e12,
        "backward_tflops": 2.5 * work / max(both - forward, 1e-9) / 1e12,
        "forward_seconds": forward,
        "gradient_seconds": both,
        "forward_temporary": memory,
        "gradient_temporary": memory_both,
    }


def markdown(report: dict[str, Any]) -> str:
    """The report as a table."""
    lines = [
        f"{report['device']}, JAX {report['jax']}, matrix product {report['peak_tflops']:.0f} TFLOP/s",
        "",
        "| case | L | E | implementation | forward TFLOP/s | of peak | backward TFLOP/s | temporary MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        head = f"| {row['case']} | {row['length']} | {row['width']} | {row['implementation']} |"
        if "reason" in row:
            lines.append(f"{head} {row['reason'].replace('|', '/')} | | | |")
        else:
            share = row["forward_tflops"] / report["peak_tflops"]
            numbers = f"{row['forward_tflops']:.0f} | {share:.0%} | {row['backward_tflops']:.0f}"
            lines.append(f"{head} {numbers} | {row['gradient_temporary'] / 1e6:.0f} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", default="roofline")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    options = parser.parse_args()
    if jax.default_backend() not in ("gpu", "tpu"):
        print(f"roofline: no GPU or TPU here, the default backend is {jax.default_backend()}", file=sys.stderr)
        return 3
    report: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "peak_tflops": matrix_peak(options.repeats),
        "rows": [],
    }
    output = pathlib.Path(options.output)
    for length in map(int, options.lengths.split(",")):
        for width in WIDTHS:
            for case in CASES:
                for implementation in IMPLEMENTATIONS:
                    report["rows"].append(measure(implementation, case, length, width, options.repeats))
            # Written as it grows: an hour of measuring is not lost to one crash.
            output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
            output.with_suffix(".md").write_text(markdown(report))
    print(markdown(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
