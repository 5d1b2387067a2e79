"""A sweep that is killed at random points ends with the results of one that never was.

`python -m tests.experiments.interrupting --kills=20` is the long check; the tests kill three times.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from experiments.benchmark_sweep import descendants

ROOT = Path(__file__).parents[2]
SWEEP = ROOT / "tests/mha_research/sweeps/tiny.py"
# Compiling is most of the time here, so XLA is told to make less of an effort.
XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def start(workdir: Path, *options: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "experiments.sweep", f"--config={SWEEP}", f"--workdir={workdir}", *options]
    paths = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": XLA_FLAGS}
    # A session of its own: job control of a terminal must not stop a process in the background.
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, start_new_session=True, **streams)


def kill_at_random(workdir: Path, kills: int, rng: random.Random, longest: float, *options: str) -> list[str]:
    """Starts the sweep `kills` times and kills it after a random time: alone, with its workers, or by SIGTERM. Says
    how."""
    said = []
    for _ in range(kills):
        sweep = start(workdir, *options)
        try:
            sweep.wait(rng.uniform(1, longest))
        except subprocess.TimeoutExpired:
            how = rng.choice(["sweep", "all", "terminate"])
            workers = list(descendants(sweep.pid)) if how == "all" else []
            sweep.send_signal(signal.SIGTERM if how == "terminate" else signal.SIGKILL)
            for worker in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
            said.append(how)
        sweep.communicate(timeout=120)
    return said


def results(workdir: Path) -> dict[str, dict]:
    """Every run's result and logged numbers, without what a clock says."""
    found = {}
    for path in sorted(workdir.glob("runs/*/*/result.json")):
        result = json.loads(path.read_text())
        rows = [json.loads(line) for line in (path.parent / "metrics.jsonl").read_text().splitlines()]
        found[str(path.parent.relative_to(workdir))] = {
            "metrics": result["metrics"],
            "step": result["step"],
            "rows": [{name: v for name, v in row.items() if not name.startswith("time/")} for row in rows],
        }
    return found


# Enough steps that a run can be stopped in the middle.
LONGER = ("--config.train.steps=3000", "--config.train.checkpoint_every=200", "--config.train.eval_every=1000")


def same_as_the_local_engine(there: Path, here: Path) -> int:
    """Runs the sweep of `there`, with `LONGER`, by the local engine in `here`, and says how many runs were compared.

    Machines and numbers of threads may differ between the two, so the last bits may. AssertionError beyond 1e-3.
    """
    local = start(here, *LONGER)
    out, err = local.communicate(timeout=900)
    assert local.returncode == 0, out + err
    others = results(there)
    for name, result in results(here).items():
        for metric, value in result["metrics"].items():
            other = others[name]["metrics"][metric]
            assert abs(other - value) <= 1e-3 * max(1, abs(value)), f"{name}: {metric} is {value} here, {other} there"
    return len(others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    kills, rng = parser.parse_args().kills, random.Random(parser.parse_args().seed)
    # Long enough that the last kill still finds work to interrupt.
    longer = ("--config.train.steps=2000", "--config.train.checkpoint_every=20", "--config.train.eval_every=200")
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        whole, killed = Path(folder, "whole"), Path(folder, "killed")
        out, err = start(whole, *longer).communicate(timeout=600)
        assert len(results(whole)) == 6, out + err
        said = kill_at_random(killed, kills, rng, 20.0, *longer)
        out, err = start(killed, *longer).communicate(timeout=600)
        same = results(whole) == results(killed)
        print(f"killed {len(said)} times ({', '.join(said)}) in {time.monotonic() - began:.0f} s: equal {same}")
        sys.exit(0 if same and len(results(killed)) == 6 else f"different results\n{out}{err}")


if __name__ == "__main__":
    main()
