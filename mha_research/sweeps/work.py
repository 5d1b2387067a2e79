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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from mha_research.analysis.manifest import Manifest, PlannedRun
from mha_research.sweeps.plan import run_config
from mha_research.training import Interrupted, WorkdirError, read_result, train
from mha_research.training.files import write_atomically

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
    workdir = Path(workdir)
    if (known := state(workdir, run)) != "waiting":
        return known
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of what was meant
    with _said(log_path(workdir, run)):
        try:
            config = run_config(manifest, run, tuned(workdir, manifest, run))
            deadline = time.monotonic() + SECONDS_TO_WAIT
            while True:
                try:
                    return "diverged" if train(config, run.folder(workdir)).status == "diverged" else "finished"
                except WorkdirError as error:
                    # A worker of a sweep that was killed may still be saving its state.
                    if "another process" not in str(error) or time.monotonic() > deadline:
                        raise
                    time.sleep(1)
        except Interrupted:
            raise
        except Exception as error:
            traceback.print_exc()
            record_failure(workdir, run, f"{type(error).__name__}: {' '.join(str(error).split())}")
            return "failed"


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
