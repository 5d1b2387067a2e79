"""One planned run, as every engine calls it: idempotent, and whatever happens is left in the sweep's directory.

runs/ARM/seedN/            what `train` leaves (see its workdir.py)
logs/ARM/seedN.log         what the run said
failures/ARM/seedN.json    why it failed, and its last lines; taken away when it is tried again
"""

import contextlib
import json
import logging
import math
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ml_collections import ConfigDict

from mha_research.analysis.manifest import Manifest, PlannedRun
from mha_research.run_dir import Result, WorkdirError, read_result
from mha_research.run_dir.files import write_atomically
from mha_research.sweeps.plan import run_config
from mha_research.sweeps.replicates import train_together
from mha_research.training import Interrupted, train

State = Literal["waiting", "finished", "diverged", "failed"]
LAST_LINES = 20
SECONDS_TO_WAIT = 120.0


class NotReady(RuntimeError):
    """A main run cannot start: the tuning of its arm is not complete. The message says what is missing."""


def state(workdir: Path, run: PlannedRun) -> State:
    """What the directory says about a run; a run in progress is still waiting for its end."""
    result = read_result(run.folder(workdir))
    if result is not None:
        return "diverged" if result.status == "diverged" else "finished"
    return "failed" if failure_path(workdir, run).exists() else "waiting"


def failure_path(workdir: Path, run: PlannedRun) -> Path:
    return workdir / "failures" / f"{run.name}.json"


def log_path(workdir: Path, run: PlannedRun) -> Path:
    return workdir / "logs" / f"{run.name}.log"


def do(workdir: Path, manifest: Manifest, run: PlannedRun) -> State:
    """Starts, resumes or leaves a run, and returns how it ended. Only Interrupted, after a checkpoint, is passed on."""
    return do_together(workdir, manifest, [run])[0]


def do_together(workdir: Path, manifest: Manifest, runs: Sequence[PlannedRun]) -> list[State]:
    """`do` for several runs that differ in their seeds alone, inside one program; what they say goes to the first's
    log."""
    workdir = Path(workdir)
    left = [run for run in runs if state(workdir, run) == "waiting"]
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of what was meant
    if left:
        with _said(log_path(workdir, left[0])):
            _train(workdir, manifest, left)
    return [state(workdir, run) for run in runs]


def _train(workdir: Path, manifest: Manifest, runs: Sequence[PlannedRun]) -> None:
    """Every run has a result or a failure afterwards."""
    ends: Sequence[Result | Exception]
    try:
        configs = [run_config(manifest, run, tuned(workdir, manifest, run)) for run in runs]
        folders = [run.folder(workdir) for run in runs]
        ends = [_patiently(configs[0], folders[0])] if len(runs) == 1 else train_together(configs, folders)
    except Interrupted:
        raise
    except Exception as error:
        ends = [error] * len(runs)
    for run, end in zip(runs, ends):
        if isinstance(end, BaseException):
            traceback.print_exception(end)
            record_failure(workdir, run, f"{type(end).__name__}: {' '.join(str(end).split())}")


def _patiently(config: ConfigDict, folder: Path) -> Result:
    """`train`, once a worker of a sweep that was killed has saved its state and let go of the directory."""
    deadline = time.monotonic() + SECONDS_TO_WAIT
    while True:
        try:
            return train(config, folder)
        except WorkdirError as error:
            if "another process" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(1)


def record_failure(workdir: Path, run: PlannedRun, reason: str) -> None:
    """Keeps why a run failed, with the last lines of its log."""
    path = failure_path(workdir, run)
    path.parent.mkdir(parents=True, exist_ok=True)
    log = log_path(workdir, run)
    lines = log.read_text(encoding="utf8", errors="replace").splitlines() if log.exists() else []
    record = {"run": run.name, "reason": reason, "log": lines[-LAST_LINES:]}
    write_atomically(path, json.dumps(record, indent=2) + "\n")


def tuned(workdir: Path, manifest: Manifest, run: PlannedRun) -> dict[str, Any]:
    """{field: value} that the tuning of the run's arm has chosen; empty without tuning. Raises NotReady."""
    if manifest.frozen.tune is None or run.phase == "tune":
        return {}
    return {manifest.frozen.tune["field"]: best_value(workdir, manifest, run.arm)[0]}


def best_value(workdir: Path, manifest: Manifest, arm: str) -> tuple[Any, Mapping[Any, float]]:
    """The tuned value of an arm, and the mean of the metric for each value of the grid; a diverged run is infinitely
    bad.

    Equal values are decided for the first. Raises NotReady naming a run that is missing.
    """
    tune = manifest.frozen.tune
    assert tune is not None
    sign = -1.0 if tune["goal"] == "max" else 1.0
    badness = {value: 0.0 for value in tune["values"]}
    for run in manifest.runs:
        if run.arm == arm and run.phase == "tune":
            result = read_result(run.folder(workdir))
            if result is None:
                raise NotReady(f"the tuning run {run.name} has no result")
            if result.status != "diverged" and tune["metric"] not in result.metrics:
                raise NotReady(f"the tuning run {run.name} has no metric {tune['metric']!r}")
            bad = math.inf if result.status == "diverged" else sign * result.metrics[tune["metric"]]
            badness[run.overrides[tune["field"]]] += bad / len(tune["seeds"])
    return min(badness, key=badness.__getitem__), {value: sign * bad for value, bad in badness.items()}


@contextlib.contextmanager
def _said(path: Path) -> Iterator[None]:
    """What is printed inside goes to the end of the file, line by line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", 1, encoding="utf8") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        yield
