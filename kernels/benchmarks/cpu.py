"""Attention on the CPU beside its peers, interleaved in one process: medians in milliseconds, and ratios.

    python kernels/benchmarks/cpu.py                                  the whole grid
    python kernels/benchmarks/cpu.py --lengths 512 2048 --cases plain causal --repeats 9
    python kernels/benchmarks/cpu.py --memory --lengths 2048 8192       planned memory, where nothing is run

Peers that are not installed (torch, tokamax) are left out and named; "native" runs where it is built. Every round runs
each contender once, in another order, so that noise of the machine meets all of them alike; a ratio is of medians,
above 1 where the first of them is faster.
"""

import argparse
import dataclasses
import functools
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mha_kernels as mk
from mha_kernels.native.library import is_built

Runs = dict[str, Callable[[], Any]]


def operands(case: str, shape: tuple[int, int, int, int]) -> dict[str, Any]:
    """The arguments of `mha_kernels.attention` for a case, for query (B, L, H, E)."""
    batch, length, heads, _ = shape
    table = np.random.default_rng(1).standard_normal((heads, 32)).astype(np.float32)
    keep = jnp.arange(length)[None] < jnp.full((batch, 1), length - length // 5)
    document = jnp.broadcast_to(jnp.arange(length) // 128, (batch, length))
    return {
        "plain": {},
        "causal": {"mask": mk.CausalMask()},
        "alibi": {"mask": mk.CausalMask(), "bias": mk.AlibiBias(mk.alibi_slopes(heads))},
        "t5": {"bias": mk.T5Bias(jnp.asarray(table))},
        "padding": {"mask": mk.KeyPaddingMask(keep)},
        "documents": {"mask": mk.SegmentMask(document, document)},
    }[case]


@functools.lru_cache(maxsize=1)  # one is 2 GB at L 8192
def dense(case: str, shape: tuple[int, int, int, int]) -> dict[str, Any]:
    """The same case as the arrays that peers without biases and masks as functions need."""
    _, length, heads, _ = shape
    arguments = operands(case, shape)
    at = jnp.arange(length)
    distance = jnp.abs(at[:, None] - at[None])[None, None]
    if case == "alibi":
        return {"bias": -mk.alibi_slopes(heads).reshape(1, -1, 1, 1) * distance, "causal": True}
    if case == "t5":
        bucket = mk.t5_bucket(at[None] - at[:, None], True)
        return {"bias": jnp.moveaxis(arguments["bias"].table.T[bucket], -1, 0)[None]}
    if case == "documents":
        return {"keep": (at[:, None] // 128 == at // 128)[None, None]}
    if case == "padding":
        return {"keep": arguments["mask"].keep[:, None, None, :]}
    return {"causal": case == "causal"}


def ours(case: str, arrays: list[jax.Array], backward: bool, implementation: Any) -> Callable[[], Any]:
    arguments = operands(case, arrays[0].shape)

    def call(query: Any, key: Any, value: Any) -> Any:
        return mk.attention(query, key, value, implementation=implementation, **arguments)

    return jitted(call, arrays, backward)


def peer(attend: Callable[..., Any], case: str, arrays: list[jax.Array], backward: bool) -> Callable[[], Any]:
    """A function with the arguments of `jax.nn.dot_product_attention`, given bias and mask as arrays."""
    arguments = dense(case, arrays[0].shape)
    extra = {"bias": arguments.get("bias"), "mask": arguments.get("keep")}

    def call(query: Any, key: Any, value: Any, extra: Any) -> Any:
        return attend(query, key, value, is_causal=arguments.get("causal", False), **extra)

    return jitted(call, [*arrays, extra], backward)


def jax_nn(case: str, arrays: list[jax.Array], backward: bool) -> Callable[[], Any]:
    return peer(jax.nn.dot_product_attention, case, arrays, backward)


@dataclasses.dataclass(frozen=True)
class Jitted:
    """A compiled call on its arguments, and how much memory XLA plans for it beside inputs and outputs."""

    run: Any
    arrays: list[Any]

    def __call__(self) -> Any:
        return jax.block_until_ready(self.run(*self.arrays))

    def mebibytes(self) -> float:
        return self.run.lower(*self.arrays).compile().memory_analysis().temp_size_in_bytes / 2**20


def jitted(call: Callable[..., Any], arrays: list[Any], backward: bool) -> Jitted:
    cotangent = jnp.asarray(np.random.default_rng(2).standard_normal(arrays[0].shape), arrays[0].dtype)

    def loss(*arrays: Any) -> Any:
        return (call(*arrays) * cotangent).sum()

    return Jitted(jax.jit(jax.grad(loss, argnums=(0, 1, 2)) if backward else call), arrays)


def torch_sdpa(case: str, arrays: list[jax.Array], backward: bool) -> Callable[[], Any]:
    """PyTorch's fused CPU attention. It knows causal masks and float masks; a float mask beside causal holds -inf."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tensors = [torch.tensor(np.asarray(x)).transpose(1, 2).contiguous().requires_grad_(backward) for x in arrays]
    arguments = dense(case, arrays[0].shape)
    mask, causal = None, arguments.get("causal", False)
    if "bias" in arguments:
        bias = np.asarray(arguments["bias"])
        if causal:
            bias = np.where(np.tri(bias.shape[-1], dtype=bool), bias, -np.inf)
        mask, causal = torch.tensor(bias), False
    if "keep" in arguments:
        mask = torch.tensor(np.asarray(arguments["keep"])).expand(-1, -1, arrays[0].shape[1], -1)
    cotangent = torch.randn_like(tensors[0])

    def run() -> Any:
        output = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=mask, is_causal=causal)
        return torch.autograd.grad(output, tensors, cotangent) if backward else output

    return run


def tokamax_chunked(case: str, arrays: list[jax.Array], backward: bool) -> Callable[[], Any]:
    import tokamax
    from absl import flags

    flags.FLAGS([""])  # tokamax reads its settings from the command line, which is ours
    chunked = functools.partial(tokamax.dot_product_attention, implementation="xla_chunked")
    return peer(chunked, case, arrays, backward)


PEERS = {"torch": torch_sdpa, "tokamax": tokamax_chunked, "jax.nn": jax_nn}


def contenders(case: str, arrays: list[jax.Array], backward: bool, tiles: list[str], peers: list[str]) -> Runs:
    """What runs in this case, by name; `tiles` adds blockwise with explicit tile sizes, as 512x256."""
    runs: Runs = {}
    if is_built():
        runs["native"] = ours(case, arrays, backward, "native")
    runs["blockwise"] = ours(case, arrays, backward, "blockwise")
    for size in tiles:
        runs[size] = ours(case, arrays, backward, mk.Blockwise(*map(int, size.split("x"))))
    for name in peers:
        try:
            runs[name] = PEERS[name](case, arrays, backward)
        except ImportError as error:
            print(f"  {name} left out: {error}")
    return runs


def medians(runs: Runs, repeats: int) -> dict[str, float]:
    """Median seconds of each contender over rounds of all in a random order, after one round to compile."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    order = random.Random(0)
    for _ in range(repeats):
        for name in order.sample(list(runs), len(runs)):
            time.sleep(0.01)  # idle threads of the last one spin for a while, and would take time from this one
            start = time.perf_counter()
            runs[name]()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--cases", nargs="+", default=["plain", "causal", "alibi", "t5", "padding"])
    parser.add_argument("--shape", type=int, nargs=3, default=[1, 8, 64], metavar=("B", "H", "E"))
    parser.add_argument("--tiles", nargs="*", default=[], help="tile sizes to run beside the rule's, as 512x256")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--passes", nargs="+", default=["forward", "both"], choices=["forward", "both"])
    parser.add_argument("--memory", action="store_true", help="print planned memory, run nothing")
    parser.add_argument("--json", help="file to write the results to")
    options = parser.parse_args()
    batch, heads, width = options.shape
    results = []
    for case in options.cases:
        for length in options.lengths:
            rng = np.random.default_rng(0)
            arrays = [jnp.asarray(rng.standard_normal((batch, length, heads, width)), jnp.float32) for _ in range(3)]
            for which in options.passes:
                runs = contenders(case, arrays, which == "both", options.tiles, options.peers)
                if options.memory:
                    planned = {name: run.mebibytes() for name, run in runs.items() if isinstance(run, Jitted)}
                    print(
                        f"{case:8} L {length:5} {which:8} MiB", {name: round(size, 1) for name, size in planned.items()}
                    )
                    continue
                found = medians(runs, options.repeats)
                results.append({"case": case, "length": length, "pass": which, "seconds": found})
                base = found["native"] if is_built() else found["blockwise"]
                cells = ", ".join(f"{name} {1e3 * s:.1f} ms ({s / base:.2f})" for name, s in found.items())
                print(f"{case:8} L {length:5} {which:8} {cells}", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
