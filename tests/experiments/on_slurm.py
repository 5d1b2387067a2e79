"""What `scripts/check_slurm` runs against a real Slurm: see there."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.experiments.interrupting import results, start


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        here, there = Path(folder, "here"), Path(folder, "there")
        # Enough steps that a task can be told to stop in the middle; the same settings on both sides.
        longer = ("--config.train.steps=3000", "--config.train.checkpoint_every=200", "--config.train.eval_every=1000")
        on_slurm = start(there, "--executor=slurm", *longer)
        told = tell_one_to_stop(there)
        out, err = on_slurm.communicate(timeout=900)
        print(out, err)
        assert on_slurm.returncode == 0, f"the sweep on Slurm ended with {on_slurm.returncode}"
        restarted = (there / "runs" / told / "provenance.jsonl").read_text().count("\n")
        assert restarted == 2, f"{told} was told to stop and started {restarted} times"
        again = start(there, *longer)
        assert "0 runs to do" in again.communicate(timeout=300)[0], "the local engine found something left to do"
        local = start(here, *longer)
        out, err = local.communicate(timeout=900)
        assert local.returncode == 0, out + err
        # Machines and numbers of threads may differ between the two, so the last bits may.
        for name, result in results(here).items():
            for metric, value in result["metrics"].items():
                other = results(there)[name]["metrics"][metric]
                assert abs(other - value) <= 1e-3 * max(1, abs(value)), (
                    f"{name}: {metric} is {value} here and {other} there"
                )
        print(f"one array, {told} stopped and went on, {len(results(there))} runs equal to the local engine's")


def tell_one_to_stop(workdir: Path) -> str:
    """Sends SIGTERM to a task that has a checkpoint, as a preemption does, and returns the run's name."""
    for _ in range(600):
        for names in workdir.glob("slurm/1/names"):
            for index, name in enumerate(names.read_text().split()):
                run = workdir / "runs" / name
                if any(run.glob("checkpoints/[0-9]*")) and not (run / "result.json").exists():
                    job = subprocess.run(["squeue", "--noheader", "--format=%A %K"], capture_output=True, text=True)
                    found = {line.split()[1]: line.split()[0] for line in job.stdout.splitlines()}
                    if str(index) in found:
                        # It complains when the task has heard and is already being requeued; what counts is its second
                        # start.
                        subprocess.run(["scancel", "--batch", "--signal=TERM", found[str(index)]], capture_output=True)
                        return name
        time.sleep(0.3)
    sys.exit("no task of the array could be stopped in the middle")


if __name__ == "__main__":
    main()
