"""The runs of a sweep as one Slurm job array. Slurm schedules and requeues; the run directories say what is done.

A task of the array runs `python -m experiments.sweep --workdir=DIR --run=NAME`, NAME from its line of a list. Before a
task is preempted or its time is up, Slurm sends SIGTERM (`--signal`); the run saves its state and the task asks to be
requeued. Nothing here needs accounting (`sacct`).
"""

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mha_research.analysis.manifest import Manifest, PlannedRun
from mha_research.run_dir.files import write_atomically
from mha_research.sweeps.plan import SweepError
from mha_research.sweeps.progress import Watch
from mha_research.sweeps.work import record_failure, state
from mha_research.training import Interrupted
from mha_research.training.interrupt import interrupts

SECONDS_BEFORE_THE_END = 120  # of the warning that Slurm sends before the time limit
_SECONDS_BETWEEN_LOOKS = 5.0
# `exec` is not used: the shell must outlive the run to ask for the requeue. 143 is a run that saved its state on
# SIGTERM.
_SCRIPT = """#!/bin/bash
#SBATCH --job-name=mha-sweep
#SBATCH --array=0-{last}{limit}
#SBATCH --output={folder}/%a.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:TERM@{before}
cd {here}
export PYTHONPATH={path}
name=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {names})
{python} -m experiments.sweep --workdir={workdir} --run="$name" &
trap 'kill -TERM $!' TERM
wait $!
code=$?
# A trapped signal ends the first wait; the second one gets what the run says after it has saved its state.
while kill -0 $! 2>/dev/null; do wait $!; code=$?; done
[ $code -eq 143 ] && scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}"
exit $code
"""


def script(workdir: Path, folder: Path, count: int, parallel: int | None) -> str:
    """The text of the batch script for `count` runs, whose names are in `folder/names`."""
    quoted = {
        "folder": shlex.quote(str(folder)),
        "names": shlex.quote(str(folder / "names")),
        "workdir": shlex.quote(str(workdir.absolute())),
        "here": shlex.quote(str(Path.cwd())),
        "python": shlex.quote(sys.executable),
        "path": shlex.quote(":".join(path or str(Path.cwd()) for path in sys.path)),
    }
    limit = f"%{parallel}" if parallel else ""
    return _SCRIPT.format(last=count - 1, limit=limit, before=SECONDS_BEFORE_THE_END, **quoted)


def run_on_slurm(
    workdir: Path,
    manifest: Manifest,
    runs: Sequence[PlannedRun],
    watch: Watch,
    options: Sequence[str] = (),
    parallel: int | None = None,
) -> None:
    """Submits one array and watches the run directories until each run has ended or has left the queue.

    Ctrl-C stops watching; the jobs go on, and the same command later submits only what has not ended.
    Raises SweepError when sbatch is missing or refuses, and Interrupted when a signal came.
    """
    folder = _new_folder(workdir.absolute() / "slurm")
    write_atomically(folder / "names", "".join(f"{run.name}\n" for run in runs))
    write_atomically(folder / "job.sh", script(workdir, folder, len(runs), parallel))
    job = _slurm("sbatch", "--parsable", *options, str(folder / "job.sh")).split(";")[0].strip()
    watch.say(f"submitted job array {job} of {len(runs)} runs; its output is in {folder}")
    left = {run.name: run for run in runs}
    with interrupts() as flag:
        while left:
            queued = _queued(job)
            for name, run in list(left.items()):
                ended = state(workdir, run)
                if ended == "waiting" and not queued:
                    time.sleep(1)  # a file system may show the result later than the queue shows the end
                    ended = state(workdir, run)
                    if ended == "waiting":
                        record_failure(workdir, run, f"Slurm job {job} left the queue without a result")
                        ended = "failed"
                if ended != "waiting":
                    watch.tell(left.pop(name), ended)
            if flag.signal:
                raise Interrupted(f"stopped watching; job {job} goes on (scancel {job} ends it)", flag.signal)
            if left:
                time.sleep(_SECONDS_BETWEEN_LOOKS)


def _new_folder(parent: Path) -> Path:
    number = 1 + max((int(path.name) for path in parent.glob("[0-9]*")), default=0)
    folder = parent / str(number)
    folder.mkdir(parents=True)
    return folder


def _queued(job: str) -> bool:
    """Whether any task of the array still waits or runs."""
    done = subprocess.run(["squeue", "--noheader", f"--jobs={job}"], capture_output=True, text=True)
    return bool(done.stdout.strip())


def _slurm(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise SweepError(f"{command[0]} is not installed here; --executor=slurm needs Slurm's commands") from None
    except subprocess.CalledProcessError as error:
        raise SweepError(f"{command[0]} refused: {' '.join(error.stderr.split())}") from None
