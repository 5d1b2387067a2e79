"""From directories of runs to a tracker: which trackers there are, and one pass over the runs."""

import dataclasses
import importlib
from pathlib import Path
from types import ModuleType
from typing import Protocol

from mha_research.analysis.runs import load_runs
from mha_research.export.record import ExportError, Record, read_record
from mha_research.run_dir.files import exclusive

# Each in a file of its own, which is imported when it is asked for: nobody needs the packages of the others.
TRACKERS = {
    "mlflow": "to_mlflow:MlflowTracker",
    "tensorboard": "to_tensorboard:TensorBoardTracker",
    "trackio": "to_trackio:TrackioTracker",
    "wandb": "to_wandb:WandbTracker",
}


class Tracker(Protocol):
    """Made with (output, project). What it already holds of a run, it does not take twice."""

    def write(self, record: Record) -> int:
        """Add what the tracker lacks of a run; returns how many steps that were."""


@dataclasses.dataclass(frozen=True)
class Exported:
    """New steps by run, the runs that have not begun, and where it all lies."""

    steps: dict[str, int]
    waiting: list[str]
    output: str


def export_runs(*workdirs: str | Path, to: str, output: str | None = None, project: str | None = None) -> Exported:
    """Make the runs of sweep directories, or of single runs, those of a tracker on this machine; nothing is uploaded.

    May be repeated, while the sweep is running too: each run has the same id every time, and only new steps are added.

    Args:
        workdirs: directories of sweeps or of single runs.
        to: one of TRACKERS.
        output: folder of the tracker's files (for mlflow also the URI of a store or server); DIR/export/TO if None.
        project: the name under which the tracker groups them; that of the first directory if None.

    Returns:
        What was added.

    Raises:
        ExportError: for an unknown tracker, a package that is missing, or another export into the same folder.
        ManifestError: for a directory that holds no runs.
    """
    if to not in TRACKERS:
        raise ExportError(f"there is no tracker {to!r}; choose one of {', '.join(TRACKERS)}")
    runs = load_runs(*workdirs)
    first = Path(workdirs[0])
    folder = first / "export" / to
    folder.mkdir(parents=True, exist_ok=True)
    output = output or str(folder)
    steps, waiting = {}, []
    try:
        with exclusive(folder / ".lock"):
            tracker = open_tracker(to, output, project or first.resolve().name)
            for run in runs:
                if record := read_record(run):
                    steps[run.name] = tracker.write(record)
                else:
                    waiting.append(run.name)
    except BlockingIOError:
        raise ExportError(f"another process is exporting {first} to {to}") from None
    return Exported(steps, waiting, output)


def open_tracker(name: str, output: str, project: str) -> Tracker:
    """The tracker of that name, its module imported now."""
    module, _, kind = TRACKERS[name].partition(":")
    return getattr(importlib.import_module(f"mha_research.export.{module}"), kind)(output, project)


def require(package: str) -> ModuleType:
    """The package of a tracker. Raises ExportError naming the extra that brings it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ExportError(f"--to={package} needs the package {package}: pip install 'mha_research[{package}]'") from None
