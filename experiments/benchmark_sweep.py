"""What a sweep saves: 4 arms x 8 seeds x 200 small steps as one sweep, and as a shell loop of `experiments.train`.

    python -m experiments.benchmark_sweep [--seeds=8]

Both start with an empty compilation cache of their own and use the same cores; the loop runs one process after the
other, each of which may use them all. Prints seconds, their ratio, and the largest memory of any process.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mha_research.config import default_config
from mha_research.sweeps import Sweep, vary

HEADS = (1, 2, 4, 8)


def get_config():  # type: ignore[no-untyped-def]
    config = default_config()
    config.task.name = "induction"
    config.task.length = 32
    config.model.num_layers = 1
    config.model.d_model = 32
    config.train.steps = 200
    config.train.batch_size = 8
    config.train.eval_every = 100
    config.train.checkpoint_every = 200
    config.run.tensorboard = False
    return config


def get_sweep() -> Sweep:
    return Sweep(
        arms=vary("model.attention.num_heads", HEADS, "h{}"), seeds=int(os.environ.get("BENCHMARK_SEEDS", "8"))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    seeds = parser.parse_args().seeds
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, commands in (("sweep", [_sweep(folder)]), ("loop", _loop(folder, seeds))):
            environment = os.environ | {"XDG_CACHE_HOME": f"{folder}/cache-{name}", "BENCHMARK_SEEDS": str(seeds)}
            began = time.perf_counter()
            for command in commands:
                subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
            seconds[name] = time.perf_counter() - began
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
            print(f"{name}: {seconds[name]:.0f} s for {len(HEADS) * seeds} runs, largest process so far {peak:.0f} MiB")
    print(f"the sweep takes {seconds['sweep'] / seconds['loop']:.2f} of the loop")


def _sweep(folder: str) -> list[str]:
    file = str(Path(__file__).absolute())
    return [sys.executable, "-m", "experiments.sweep", f"--config={file}", f"--workdir={folder}/sweep"]


def _loop(folder: str, seeds: int) -> list[list[str]]:
    return [
        [
            *(sys.executable, "-m", "experiments.train", f"--config={Path(__file__).absolute()}"),
            *(f"--config.model.attention.num_heads={heads}", f"--config.seed={seed}"),
            f"--workdir={folder}/loop/h{heads}-{seed}",
        ]
        for seed in range(seeds)
        for heads in HEADS
    ]


if __name__ == "__main__":
    main()
