"""Compiles the kernels for real for named chips, on a machine that has none of them, and checks what compilers report.

    python scripts/aot.py                       every case, each in a process of its own; exits 1 when one fails
    python scripts/aot.py --quick               one forward and the hardest backward passes of each chip
    python scripts/aot.py --chips h200 --cases plain,t5 --widths 64,128

Needs the `aot` extra (jax with its CUDA plugin and libtpu, Python 3.12 or newer); scripts/aot makes that environment.
A wrong architecture ends in a fatal error inside LLVM, not in an exception: hence the processes.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
CHIPS = ("h200", *TOPOLOGIES)
PASSES = ("forward", "backward")
LENGTHS = {"h200": (16384, 65536), "v5e": (32768, 131072), "v5p": (32768, 131072), "v6e": (32768, 131072)}
SHARED_MEMORY = 227 * 1024  # bytes a block of an H200 may use
BATCH, HEADS, GROUPS = 1, 4, 2

# Public figures of the H200 SXM, the fields that XLA's compiler reads of a GPU it does not see.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 150122790912
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
}
platform_name: "CUDA" runtime_version { major: 13 } dnn_version_info { major: 9 minor: 13 }
device_description_str: "NVIDIA H200"
"""


class Case(NamedTuple):
    """One line of the table: what is compiled, apart from its length."""

    chip: str
    name: str
    which: str
    width: int = 64
    dtype: str = "bfloat16"

    def lengths(self) -> tuple[int, ...]:
        """Two lengths, one four times the other; one where the caller's own arrays have size Q x K."""
        return (8192,) if self.name in DENSE else LENGTHS[self.chip]


NAMES = (
    *("plain", "causal", "window", "padding", "segments", "alibi", "t5", "softcap", "drophead", "dropout"),
    *("statistics", "keybias", "densemask", "densebias", "fixedbias"),
)
DENSE = ("densemask", "densebias", "fixedbias")
WIDTHS = {"h200": (128, 256), "v5e": (32, 128, 256), "v5p": (32, 128, 256), "v6e": (32, 128, 256)}
OTHER_TYPE = {"h200": "float16", "v5e": "float32", "v5p": "float32", "v6e": "float32"}
HARDEST = {
    "h200": (("statistics", 64), ("t5", 64), ("densemask", 64), ("causal", 256)),
    **dict.fromkeys(TOPOLOGIES, (("statistics", 64),)),
}


def table(chips: list[str]) -> list[Case]:
    """Every feature at width 64, other widths and the other type for causal attention."""
    found = []
    for chip in chips:
        found += [Case(chip, name, which) for name in NAMES for which in PASSES]
        found += [Case(chip, "causal", which, width) for width in WIDTHS[chip] for which in PASSES]
        found += [Case(chip, "causal", which, dtype=OTHER_TYPE[chip]) for which in PASSES]
    return found


def quick(chips: list[str]) -> list[Case]:
    """What is compiled on every change."""
    found = []
    for chip in chips:
        found += [Case(chip, "causal", "forward")]
        found += [Case(chip, name, "backward", width) for name, width in HARDEST[chip]]
    return found


def arguments(name: str, length: int) -> tuple[Any, tuple[Any, ...]]:
    """The keyword arguments of `attention` as a function of arrays, and the shapes and types of these."""
    import jax
    import jax.numpy as jnp

    import mha_kernels as mk

    def shape(*sizes: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype)

    row = (BATCH, length)
    return {
        "plain": (lambda: {}, ()),
        "causal": (lambda: {"mask": mk.CausalMask()}, ()),
        "window": (lambda: {"mask": mk.WindowMask(1024, 0)}, ()),
        "padding": (lambda keep: {"mask": mk.CausalMask() & mk.KeyPaddingMask(keep)}, (shape(*row, dtype=jnp.bool_),)),
        "segments": (lambda q, k: {"mask": mk.SegmentMask(q, k)}, (shape(*row, dtype=jnp.int32),) * 2),
        "alibi": (lambda s: {"mask": mk.CausalMask(), "bias": mk.AlibiBias(s)}, (shape(HEADS),)),
        "t5": (lambda t: {"mask": mk.CausalMask(), "bias": mk.T5Bias(t, bidirectional=False)}, (shape(HEADS, 32),)),
        "softcap": (lambda s: {"softcap": 20.0, "sink": s, "mask": mk.CausalMask()}, (shape(HEADS),)),
        "drophead": (lambda g, s: {"head_gate": g, "sink": s}, (shape(BATCH, HEADS), shape(HEADS))),
        "dropout": (lambda k: {"dropout": mk.Dropout(0.1, k)}, (shape(2, dtype=jnp.uint32),)),
        "statistics": (lambda: {"mask": mk.CausalMask()}, ()),
        "keybias": (lambda b: {"bias": b}, (shape(1, 1, 1, length),)),
        "densemask": (lambda m: {"mask": m}, (shape(length, length, dtype=jnp.bool_),)),
        "densebias": (lambda b: {"bias": b}, (shape(1, 1, length, length),)),
        "fixedbias": (lambda b: {"bias": jax.lax.stop_gradient(b)}, (shape(1, 1, length, length),)),
    }[name]


def compile_case(case: Case, length: int, sizes: dict[str, int]) -> dict[str, Any]:
    """Compiles one case and returns what the compiler says; runs in a process of its own."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import mha_kernels as mk
    from mha_kernels.arguments import build_spec
    from mha_kernels.pallas.gpu.forward import PallasGPU
    from mha_kernels.pallas.tpu.forward import PallasTPU
    from mha_kernels.tiled import transforms

    if case.chip == "h200":
        topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
    else:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[case.chip])
    driver = PallasGPU(**sizes) if case.chip == "h200" else PallasTPU(**sizes)
    build, extras = arguments(case.name, length)
    statistics = mk.STATISTICS if case.name == "statistics" else ()

    def forward(*arrays: Any) -> Any:
        algebra = build_spec(*arrays[:2], **build(*arrays[3:]))
        output, found = transforms.run(driver, *arrays[:3], algebra, statistics, None)
        return output, jax.tree.leaves(found)

    def gradient(*arrays: Any) -> Any:
        def loss(*arrays: Any) -> Any:
            output, found = forward(*arrays)
            return output.astype(jnp.float32).sum() + sum(x.sum() for x in found)

        real = [n for n, array in enumerate(arrays) if jnp.issubdtype(array.dtype, jnp.floating)]
        return jax.grad(loss, argnums=real)(*arrays)

    mesh = Mesh(np.array(topology.devices[:1]), ("x",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    shapes = [jax.ShapeDtypeStruct((BATCH, length, n, case.width), case.dtype) for n in (HEADS, GROUPS, GROUPS)]
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere) for x in (*shapes, *extras)]
    begin = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(forward if case.which == "forward" else gradient).lower(*placed).compile()
        seconds = time.perf_counter() - begin
        algebra = build_spec(*shapes[:2], **build(*(jnp.ones(x.shape, x.dtype) for x in extras)))
        moved = bytes_moved(driver, case.which, shapes, algebra)
    memory = compiled.memory_analysis()
    return {
        "length": length,
        "seconds": round(seconds, 1),
        "temporary": memory.temp_size_in_bytes,
        "arguments": memory.argument_size_in_bytes,
        "output": memory.output_size_in_bytes,
        "moved": moved,
    }


def bytes_moved(driver: Any, which: str, shapes: list[Any], algebra: Any) -> int:
    """What the walks bring and store, if no tile stays in a cache: kept rows once, other rows at every visit."""
    from mha_kernels.pallas import kernel_tiles
    from mha_kernels.pallas.gpu.forward import PallasGPU
    from mha_kernels.pallas.gpu.mosaic import BLOCK

    query, key, value = shapes
    on_gpu = isinstance(driver, PallasGPU)
    sizes = driver.sizes(query, key, value, algebra) if on_gpu else driver.sizes(query, key)
    width = (query.shape[-1] + value.shape[-1]) * query.dtype.itemsize

    def walk(sizes: Any, keys: bool) -> int:
        visits = int(kernel_tiles.schedule_tiles(sizes.pad_algebra(algebra), sizes, keys).steps.sum())
        kept = sizes.padded[0 if keys else 1] * sizes.batch * sizes.heads
        return (2 * kept + visits * (sizes.key_tile if keys else sizes.query_tile)) * width

    forward = walk(sizes, keys=True)
    if which == "forward":
        return forward
    by_keys = dataclasses.replace(sizes, query_tile=64, key_tile=BLOCK) if on_gpu else sizes
    return 2 * forward + walk(by_keys, keys=False)


def in_process(case: Case, length: int, sizes: dict[str, int]) -> dict[str, Any]:
    """`compile_case` in a process of its own, with what ptxas printed."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_RESOURCES": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no device is taken, so another compilation is no rival
        "PYTHONPATH": str(ROOT / "kernels"),
    }
    command = [sys.executable, __file__, "--one", json.dumps([case, length, sizes])]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    answers = [line for line in run.stdout.splitlines() if line.startswith("{")]
    if run.returncode or not answers:
        lines = [line for line in (run.stderr + run.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line or "error" in line or "E1" in line]
        return case._asdict() | {"length": length, "failed": (errors or lines or ["?"])[-1][:300]}
    report = run.stdout + run.stderr
    return (
        case._asdict()
        | json.loads(answers[-1])
        | {
            "registers": max(map(int, re.findall(r"Used (\d+) registers", report)), default=None),
            "spills": sum(map(int, re.findall(r"stack frame, (\d+) bytes spill stores", report))),
            "smem": max(map(int, re.findall(r"smem_scratch_bytes=(\d+)", report)), default=None),
        }
    )


def faults(row: dict[str, Any], short: dict[str, Any] | None) -> str:
    """What is wrong with a compiled case; `short` is the same case at a quarter of the length."""
    if "failed" in row:
        return row["failed"]
    found = []
    if row["spills"]:
        found.append(f"spills {row['spills']} B")
    if row["smem"] and row["smem"] > SHARED_MEMORY:
        found.append(f"shared memory {row['smem']} B")
    if short:
        # Short arrays may live in a TPU's vector memory, which is not counted: growth alone proves nothing there.
        # In its other memory a row of a head takes 128 lanes, however narrow it is.
        stored = (row["arguments"] + row["output"]) * max(1, 128 // row["width"])
        if row["temporary"] > max(4.2 * short["temporary"] + 2**20, 2 * stored):
            found.append(f"temporary memory grows from {short['temporary']} to {row['temporary']} B")
        if row["temporary"] >= row["length"] ** 2:
            found.append("temporary memory of the size of Q x K")
    return "; ".join(found)


HEADER = f"{'chip':5} {'case':10} {'pass':8} {'E':>3} {'type':8} {'L':>6} {'s':>5} {'temp MB':>8} {'moved/min':>9}"
HEADER += f" {'regs':>4} {'spill':>5} {'smem kB':>7}"


def line(row: dict[str, Any]) -> str:
    head = f"{row['chip']:5} {row['name']:10} {row['which']:8} {row['width']:3} {row['dtype']:8} {row['length']:6}"
    if "failed" in row:
        return f"{head} FAILED {row['failed']}"
    moved = row["moved"] / (row["arguments"] + row["output"])
    smem = f"{row['smem'] / 1024:.0f}" if row["smem"] else "-"
    numbers = f"{row['seconds']:5} {row['temporary'] / 1e6:8.1f} {moved:9.1f}"
    return f"{head} {numbers} {row['registers'] or '-':>4} {row['spills']:>5} {smem:>7} {row['fault']}".rstrip()


def chosen(options: argparse.Namespace) -> list[Case]:
    """The cases that the command line asks for."""
    chips = options.chips.split(",")
    found = quick(chips) if options.quick else table(chips)
    if options.cases:
        found = [case for case in found if case.name in options.cases.split(",")]
    if options.passes:
        found = [case for case in found if case.which in options.passes.split(",")]
    if options.widths:
        found = [case for case in found if str(case.width) in options.widths.split(",")]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", default=",".join(CHIPS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--cases", default="")
    parser.add_argument("--passes", default="")
    parser.add_argument("--widths", default="")
    parser.add_argument("--sizes", default="{}", help="fields of the driver as JSON, in place of its rule")
    parser.add_argument("--json", type=pathlib.Path, help="write the table here too")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        case, length, sizes = json.loads(options.one)
        print(json.dumps(compile_case(Case(*case), length, sizes)))
        return 0
    rows: list[dict[str, Any]] = []
    print(HEADER)
    for case in chosen(options):
        short = None
        for length in case.lengths():
            row = in_process(case, length, json.loads(options.sizes))
            row["fault"] = faults(row, short)
            rows.append(row)
            print(line(row), flush=True)
            short = row
            if "failed" in row:
                break
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    bad = sum(bool(row["fault"]) for row in rows)
    print(f"{len(rows)} compiled, {bad} with faults")
    return 1 if bad or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
