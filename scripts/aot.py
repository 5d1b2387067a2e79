"""Compiles the kernels for real for named chips, on a machine that has none of them, and checks what the compilers
report.

    python scripts/aot.py                       every case, each in a process of its own; a table; exits 1 when one
    fails python scripts/aot.py --chips h200 --cases plain,t5

Needs the `aot` extra (jax with its CUDA plugin and libtpu, Python 3.12 or newer); scripts/aot makes that environment.
A wrong architecture ends in a fatal error inside LLVM, not in an exception: hence the processes.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
CHIPS = ("h200", *TOPOLOGIES)
PASSES = ("forward", "backward")
LENGTHS = {"h200": (16384, 65536), "v5e": (32768, 131072), "v5p": (32768, 131072), "v6e": (32768, 131072)}
SHARED_MEMORY = 227 * 1024  # bytes a block of an H200 may use

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


def cases(length, batch=1, heads=4):
    """Name to (keyword arguments of the algebra as functions of arrays, the arrays' shapes)."""
    import jax
    import jax.numpy as jnp

    import mha_kernels as mk

    def shape(*sizes, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(sizes, dtype)

    flags, whole, row = jnp.bool_, jnp.int32, (batch, length)
    return {
        "plain": (lambda: {}, ()),
        "causal": (lambda: {"mask": mk.CausalMask()}, ()),
        "window": (lambda: {"mask": mk.WindowMask(1024, 0)}, ()),
        "padding": (lambda keep: {"mask": mk.CausalMask() & mk.KeyPaddingMask(keep)}, (shape(*row, dtype=flags),)),
        "segments": (lambda q, k: {"mask": mk.SegmentMask(q, k)}, (shape(*row, dtype=whole),) * 2),
        "alibi": (lambda s: {"mask": mk.CausalMask(), "bias": mk.AlibiBias(s)}, (shape(heads),)),
        "t5": (lambda t: {"mask": mk.CausalMask(), "bias": mk.T5Bias(t, bidirectional=False)}, (shape(heads, 32),)),
        "softcap": (lambda s: {"softcap": 20.0, "sink": s, "mask": mk.CausalMask()}, (shape(heads),)),
        "drophead": (lambda g: {"head_gate": g}, (shape(batch, heads),)),
        "dropout": (lambda k: {"dropout": mk.Dropout(0.1, k)}, (shape(2, dtype=jnp.uint32),)),
        "statistics": (lambda: {"mask": mk.CausalMask()}, ()),
        "keybias": (lambda b: {"bias": b}, (shape(1, 1, 1, length),)),
        "densemask": (lambda m: {"mask": m}, (shape(length, length, dtype=flags),)),
        "densebias": (lambda b: {"bias": b}, (shape(1, 1, length, length),)),
    }


DENSE = (
    "densemask",
    "densebias",
)  # arrays of the caller's own of size Q x K: compiled short, not held to linear memory


def compile_case(chip, name, which, length, width, dtype, tiles):
    """Compiles one case and returns what the compiler says; runs in a process of its own."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import mha_kernels as mk
    from mha_kernels import checks, transforms

    batch, heads, groups = 1, 4, 2
    if chip == "h200":
        from mha_kernels.pallas_gpu import PallasGPU as Driver

        topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
    else:
        from mha_kernels.pallas_tpu import PallasTPU as Driver

        topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
    driver = Driver(**tiles)
    build, extras = cases(length, batch, heads)[name]
    statistics = mk.STATISTICS if name == "statistics" else ()

    def forward(query, key, value, *extras):
        algebra = checks.bundle(query, key, **build(*extras))
        output, found = transforms.run(driver, query, key, value, algebra, statistics, None)
        return output, jax.tree.leaves(found)

    def loss(arrays):
        output, found = forward(*arrays)
        return output.astype(jnp.float32).sum() + sum(x.sum() for x in found)

    def gradient(*arrays):
        real = [jnp.issubdtype(array.dtype, jnp.floating) for array in arrays]
        chosen = [array for array, flag in zip(arrays, real, strict=True) if flag]

        def of(chosen):
            rest = iter(chosen)
            return loss([next(rest) if flag else array for array, flag in zip(arrays, real, strict=True)])

        return jax.grad(of)(chosen)

    mesh = Mesh(np.array(topology.devices[:1]), ("x",))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def placed(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    shapes = [(batch, length, n, width) for n in (heads, groups, groups)]
    arguments = [placed(shape, dtype) for shape in shapes] + [placed(extra.shape, extra.dtype) for extra in extras]
    begin = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(forward if which == "forward" else gradient).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    cost = compiled.cost_analysis() or {}
    return {
        "chip": chip,
        "case": name,
        "pass": which,
        "length": length,
        "width": width,
        "seconds": round(time.perf_counter() - begin, 1),
        "temporary": memory.temp_size_in_bytes,
        "arguments": memory.argument_size_in_bytes,
        "output": memory.output_size_in_bytes,
        "moved": cost.get("bytes accessed"),
    }


def in_process(*arguments):
    """`compile_case` in a process of its own, with what ptxas printed."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_RESOURCES": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TPU_SKIP_MDS_QUERY": "1",
        "PYTHONPATH": str(ROOT / "kernels"),
    }
    command = [sys.executable, __file__, "--one", json.dumps(arguments)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    answers = [line for line in run.stdout.splitlines() if line.startswith("{")]
    if run.returncode or not answers:
        lines = [line for line in (run.stderr + run.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line or "error" in line or "E1" in line]
        return {
            "chip": arguments[0],
            "case": arguments[1],
            "pass": arguments[2],
            "failed": (errors or lines or ["?"])[-1][:300],
        }
    report = run.stdout + run.stderr
    return json.loads(answers[-1]) | {
        "registers": max(map(int, re.findall(r"Used (\d+) registers", report)), default=None),
        "spills": sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", report))),
        "smem": max(map(int, re.findall(r"smem_scratch_bytes=(\d+)", report)), default=None),
    }


def faults(row, short):
    """What is wrong with a compiled case; `short` is the same case at a quarter of the length."""
    if "failed" in row:
        return row["failed"]
    found = []
    if row["spills"]:
        found.append(f"spills {row['spills']} B")
    if row["smem"] and row["smem"] > SHARED_MEMORY:
        found.append(f"shared memory {row['smem']} B")
    if short and row["case"] not in DENSE:
        # Short arrays may live in a TPU's vector memory, which is not counted: growth alone proves nothing there.
        if row["temporary"] > max(4.2 * short["temporary"] + 2**20, 4 * (row["arguments"] + row["output"])):
            found.append(f"temporary memory grows from {short['temporary']} to {row['temporary']} B")
        if row["temporary"] >= row["length"] ** 2:
            found.append("temporary memory of the size of Q x K")
    return "; ".join(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", default=",".join(CHIPS))
    parser.add_argument("--cases", default="")
    parser.add_argument("--passes", default=",".join(PASSES))
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tiles", default="{}", help="fields of the driver as JSON")
    parser.add_argument("--json", help="write the table here too")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(compile_case(*json.loads(options.one))))
        return 0
    sys.path.insert(0, str(ROOT / "kernels"))
    names = options.cases.split(",") if options.cases else list(cases(1024))
    rows, bad = [], 0
    titles = f"{'L':>7} {'s':>5} {'temp MB':>8} {'moved/min':>9} {'regs':>5} {'spill':>5} {'smem kB':>7}"
    print(f"{'chip':5} {'case':11} {'pass':9} {titles}")
    for chip in options.chips.split(","):
        for name in names:
            for which in options.passes.split(","):
                short = None
                for length in (8192,) if name in DENSE else LENGTHS[chip]:
                    tiles = json.loads(options.tiles)
                    row = in_process(chip, name, which, length, options.width, options.dtype, tiles)
                    row["fault"] = faults(row, short)
                    bad += bool(row["fault"])
                    rows.append(row)
                    print(line(row), flush=True)
                    if "failed" in row:
                        break
                    short = row
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{len(rows)} compiled, {bad} with faults")
    return 1 if bad else 0


def line(row):
    head = f"{row['chip']:5} {row['case']:11} {row['pass']:9}"
    if "failed" in row:
        return f"{head} FAILED {row['failed']}"
    least = row["arguments"] + row["output"]
    moved = f"{row['moved'] / least:9.1f}" if row["moved"] else f"{'-':>9}"
    smem = f"{row['smem'] / 1024:7.0f}" if row["smem"] else f"{'-':>7}"
    numbers = f"{row['length']:7} {row['seconds']:5} {row['temporary'] / 1e6:8.1f} {moved}"
    return f"{head} {numbers} {row['registers'] or '-':>5} {row['spills']:>5} {smem} {row['fault']}"


if __name__ == "__main__":
    sys.exit(main())
