"""What a sweep saves: 4 arms x 8 seeds x 200 small steps as one sweep, and as a shell loop of `experiments.train`.

    python -m experiments.benchmark_sweep [--seeds=8] [--loop_seeds=2]

Both start with an empty compilation cache of their own and use the same cores; the loop runs one process after the
other, each of which may use them all. Of the loop, `--loop_seeds` are run: the first, which compiles, before the sweep,
and the others after it; the seeds that are left out count like these others. Prints seconds, their ratio, and the
largest memory of all processes of each together.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
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
    parser.add_argument("--loop_seeds", type=int, default=2)
    options = parser.parse_args()
    if not 2 <= options.loop_seeds <= options.seeds:
        parser.error(f"--loop_seeds is from 2 to --seeds; got {options.loop_seeds} of {options.seeds}")
    with tempfile.TemporaryDirectory() as folder:
        loop = [_loop(folder, seed) for seed in range(options.loop_seeds)]
        first = _measured(folder, "loop", options.seeds, loop[0])
        sweep = _measured(folder, "sweep", options.seeds, [_sweep(folder)])
        others = [_measured(folder, "loop", options.seeds, commands) for commands in loop[1:]]
    left = options.seeds - options.loop_seeds
    seconds = [seconds for seconds, _ in (first, *others)]
    whole = sum(seconds) + left * sum(seconds[1:]) / len(others)
    peak = max(peak for _, peak in (first, *others))
    runs = len(HEADS) * options.seeds
    print(f"sweep: {runs} runs in {sweep[0]:.0f} s, largest memory {sweep[1] / 2**20:.0f} MiB")
    measured = ", ".join(f"{x:.0f}" for x in seconds)
    print(f"loop: {len(HEADS)} runs a seed in {measured} s, largest memory {peak / 2**20:.0f} MiB")
    print(f"the loop takes {whole:.0f} s for {runs} runs" + (f", {left} seeds of which were not run" if left else ""))
    print(f"the sweep takes {sweep[0] / whole:.2f} of that")


def _measured(folder: str, cache: str, seeds: int, commands: Sequence[Sequence[str]]) -> tuple[float, int]:
    """Seconds, and the largest memory in bytes, of commands that run one after the other."""
    environment = os.environ | {"XDG_CACHE_HOME": f"{folder}/cache-{cache}", "BENCHMARK_SEEDS": str(seeds)}
    peak, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            peak[0] = max(peak[0], sum(map(_proportional_bytes, descendants(os.getpid()))))

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    try:
        for command in commands:
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    finally:
        over.set()
        watcher.join()
    return time.perf_counter() - began, peak[0]


def descendants(pid: int) -> Iterator[int]:
    """Processes below `pid`, read from /proc."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            parents.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    left = [pid]
    while left:
        children = parents.get(left.pop(), [])
        left += children
        yield from children


def _proportional_bytes(pid: int) -> int:
    """What a process takes of the memory, pages that it shares counted in parts."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has just ended
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _sweep(folder: str) -> list[str]:
    file = str(Path(__file__).absolute())
    return [sys.executable, "-m", "experiments.sweep", f"--config={file}", f"--workdir={folder}/sweep"]


def _loop(folder: str, seed: int) -> list[list[str]]:
    return [
        [
            *(sys.executable, "-m", "experiments.train", f"--config={Path(__file__).absolute()}"),
            *(f"--config.model.attention.num_heads={heads}", f"--config.seed={seed}"),
            f"--workdir={folder}/loop/h{heads}-{seed}",
        ]
        for heads in HEADS
    ]


if __name__ == "__main__":
    main()
