"""What `scripts/check_slurm` runs against a real Slurm: see there."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.experiments.interrupting import LONGER, same_as_the_local_engine, start


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        here, there = Path(folder, "here"), Path(folder, "there")
        on_slurm = start(there, "--executor=slurm", *LONGER)
        told = tell_one_to_stop(there)
        out, err = on_slurm.communicate(timeout=900)
        print(out, err)
        assert on_slurm.returncode == 0, f"the sweep on Slurm ended with {on_slurm.returncode}"
        restarted = (there / "runs" / told / "provenance.jsonl").read_text().count("\n")
        assert restarted == 2, f"{told} was told to stop and started {restarted} times"
        again = start(there, *LONGER)
        assert "0 runs to do" in again.communicate(timeout=300)[0], "the local engine found something left to do"
        compared = same_as_the_local_engine(there, here)
        print(f"one array, {told} stopped and went on, {compared} runs equal to the local engine's")


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
