"""Seconds from starting `experiments.train` to the end of its first update, with nothing compiled before and after.

    PYTHONPATH=.:kernels python scripts/benchmark_start.py [--config=configs/char_lm.py] [--rounds=3]

Also what `import mha_research` and its attention modules cost beyond jax and flax. Every process is new; the first
round of each compiles into an empty cache, the next one finds it filled. Medians, and all values.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMPORTS = {
    "jax and flax": "import jax, flax.nnx",
    "mha_research.attention beyond them": "import mha_research.attention",
    "all that a run needs beyond them": "import experiments.train, mha_research.training",
}


def environment(cache: Path) -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    return os.environ | {"PYTHONPATH": paths, "XDG_CACHE_HOME": str(cache)}


def first_update(config: str, folder: Path, cache: Path) -> float:
    """Seconds until the row of the first update is on the disk; then the run is killed."""
    command = [sys.executable, "-m", "experiments.train", f"--config={config}", f"--workdir={folder}"]
    begin = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--config.train.log_every=1"], cwd=ROOT, env=environment(cache), stdout=subprocess.DEVNULL
    )
    rows = folder / "metrics.jsonl"
    while not (rows.exists() and rows.stat().st_size):
        if process.poll() is not None:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
        time.sleep(0.005)
    seconds = time.perf_counter() - begin
    process.send_signal(signal.SIGKILL)
    process.wait()
    return seconds


def import_seconds(statement: str, cache: Path) -> float:
    """Seconds that the statement takes in a process that has imported jax and flax."""
    first = "" if statement == IMPORTS["jax and flax"] else IMPORTS["jax and flax"]
    code = f"{first}\nimport time\nbegin = time.perf_counter()\n{statement}\nprint(time.perf_counter() - begin)"
    return float(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=environment(cache)))


def say(name: str, seconds: list[float]) -> None:
    print(f"{name:>36}: {statistics.median(seconds):5.2f} s  ({', '.join(f'{value:.2f}' for value in seconds)})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="configs/char_lm.py")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    times: dict[str, list[float]] = {"first update, nothing compiled": [], "first update, compiled before": []}
    imports: dict[str, list[float]] = {name: [] for name in IMPORTS}
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(options.rounds):
            cache = Path(temporary) / f"cache{number}"
            for name, values in times.items():
                values.append(first_update(options.config, Path(temporary) / f"run{number}{name[-6:].strip()}", cache))
            for name, statement in IMPORTS.items():
                imports[name].append(import_seconds(statement, cache))
    for name, values in {**imports, **times}.items():
        say(name, values)


if __name__ == "__main__":
    main()
