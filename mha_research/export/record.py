"""A run as every tracker is given it: who it is, its settings, curves and files, read once from its directory."""

import calendar
import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mha_research.analysis.runs import SIZES, Run
from mha_research.config import records

FILES = ("config.json", "provenance.jsonl", "baselines.json", "sample.txt", "result.json")


class ExportError(ValueError):
    """What was asked for cannot be exported. The message is one line."""


@dataclasses.dataclass(frozen=True)
class Row:
    """Everything that was logged at a step, and when (seconds since 1970)."""

    step: int
    time: float
    values: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Record:
    """One run. `id` is the same at every export, wherever the sweep lies; `over` means that no row will follow."""

    id: str
    name: str
    tags: Mapping[str, str]
    config: Mapping[str, Any]
    rows: Sequence[Row]
    summary: Mapping[str, float]
    files: Sequence[Path]
    over: bool

    @property
    def unique_name(self) -> str:
        """The name with the beginning of the id, for trackers that know a run by its name alone."""
        return f"{self.name}-{self.id[:8]}"


def read_record(run: Run) -> Record | None:
    """Read what a run has logged so far.

    The newest step of a run that is under way is left for the next export: its evaluation may still be missing.

    Args:
        run: one of `load_runs`.

    Returns:
        The record, or None for a run that has not begun.
    """
    if not run.config or not run.provenance:
        return None
    over = bool(run.result)
    rows = read_rows(run.path / "metrics.jsonl", _seconds(run.provenance[0]))
    tags = {name: str(getattr(run, name)) for name in ("arm", "seed", "phase", "status", "exploratory")}
    sizes = {name: run.result[name] for name in (*SIZES, "seconds", "peak_memory_bytes") if name in run.result}
    return Record(
        id=_identify(run),
        name=run.name,
        tags=tags,
        config=dict(run.config),
        rows=rows if over else rows[:-1],
        summary={**sizes, **run.result.get("metrics", {})},
        files=[run.path / name for name in FILES if (run.path / name).is_file()],
        over=over,
    )


def read_rows(path: Path, started: float) -> list[Row]:
    """Read metrics.jsonl with one row a step: training and evaluation log a row each, often at the same step.

    Args:
        path: of the file; none is no rows, and lines torn by a kill are left out.
        started: when the run began, in seconds since 1970, from which `time/seconds` counts.

    Returns:
        The rows in the order of their steps.
    """
    values: dict[int, dict[str, float]] = {}
    for line in records(path):
        if isinstance(line.get("step"), int):
            values.setdefault(line["step"], {}).update({name: x for name, x in line.items() if name != "step"})
    rows, seconds = [], 0.0
    for step in sorted(values):
        seconds = max(seconds, values[step].get("time/seconds", seconds))
        rows.append(Row(step, started + seconds, values[step]))
    return rows


def _identify(run: Run) -> str:
    """16 hexadecimal digits of name, config and first start, which stay when the run goes on or the sweep is moved."""
    text = json.dumps([run.name, run.config, run.provenance[0]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _seconds(start: Mapping[str, Any]) -> float:
    """Seconds since 1970 of a start in provenance.jsonl."""
    return float(calendar.timegm(time.strptime(start["started"], "%Y-%m-%dT%H:%M:%SZ")))
