"""Finished and unfinished runs of one or more sweep directories, as data.

runs = load_runs(DIR)          a sequence of Run
runs.table()                   one row a run: arm, seed, status, final metrics
runs["h4/seed0"]               one of them, by name or by place
runs[0].curve("valid/loss")    step and value
runs[0].restore()              the model with its trained parameters
"""

import dataclasses
import functools
import json
import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from mha_research.analysis.manifest import FILE, Manifest, ManifestError, Phase, PlannedRun
from mha_research.analysis.statistics.verdict import Outcome, Status
from mha_research.config import flat, from_json, records

SIZES = ("parameters", "flops_per_step", "tokens_per_step")
_STEPS_TO = re.compile(r"steps_to:(.+?)(<=|>=)(.+)")


def source_of(metric: str) -> str:
    """The logged metric that a claim's metric is made from: `valid/loss` of `steps_to:valid/loss<=2.0`."""
    match = _STEPS_TO.fullmatch(metric)
    return match[1] if match else metric


@dataclasses.dataclass(frozen=True, repr=False)
class Run:
    """One run. `status` is finished, diverged, failed, waiting, or unreadable where its files cannot be read here.

    `result` is what result.json holds, empty before the end; `documents` maps a held-out set to loss, hits and count at
    the last step, each a list with the sum over every document; `failure` says why a run failed or is unreadable.
    """

    name: str
    arm: str
    seed: int
    phase: Phase
    path: Path
    exploratory: bool
    status: str
    config: Mapping[str, Any]
    result: Mapping[str, Any]
    failure: Mapping[str, Any]
    documents: Mapping[str, Mapping[str, list[float]]] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Run({self.name!r}, {self.status}, {str(self.path)!r})"

    @functools.cached_property
    def rows(self) -> pd.DataFrame:
        """metrics.jsonl: one row a log point; a line torn by a kill is left out."""
        return pd.DataFrame([row for row in records(self.path / "metrics.jsonl") if isinstance(row.get("step"), int)])

    @functools.cached_property
    def provenance(self) -> list[dict[str, Any]]:
        """One record per start of the run: code, packages, device, command; one torn by a kill is left out."""
        return records(self.path / "provenance.jsonl")

    def curve(self, metric: str) -> pd.DataFrame:
        """`step` and `value` of a logged metric, in order; empty where it was never logged."""
        if metric not in self.rows:
            return pd.DataFrame({"step": [], "value": []})
        rows = self.rows[["step", metric]].dropna()
        return rows.rename(columns={metric: "value"}).reset_index(drop=True)

    def value(self, metric: str) -> float:
        """A claim's number from this run; NaN where it has none.

        `steps_to:valid/loss<=2.0` is the first logged step at which that holds, censored at the last planned step;
        `time/...` is the median of what was logged after the first row, which holds the compilation.
        """
        if not self.result:
            return math.nan
        if metric in SIZES:
            return float(self.result.get(metric, math.nan))
        if match := _STEPS_TO.fullmatch(metric):
            curve, holds = self.curve(match[1]), {"<=": operator.le, ">=": operator.ge}[match[2]]
            reached = curve["step"][holds(curve["value"], float(match[3]))]
            return float(reached.min() if len(reached) else self.config["train.steps"])
        if metric.startswith("time/"):
            return float(self.curve(metric)["value"].iloc[1:].median())
        return float(self.result.get("metrics", {}).get(metric, math.nan))

    def outcome(self, metrics: Sequence[str]) -> Outcome:
        """What the run contributes to verdicts about these metrics. A diverged run still has its size."""
        if self.status not in ("finished", "diverged"):
            return Outcome(Status.LOST)
        values = {metric: self.value(metric) for metric in metrics}
        if self.status == "diverged":
            return Outcome(Status.DIVERGED, {metric: values[metric] for metric in metrics if metric in SIZES})
        return Outcome(Status.FINISHED, {metric: value for metric, value in values.items() if not math.isnan(value)})

    def restore(self, step: int | None = None) -> Any:
        """The model with the parameters of the last checkpoint, or of the one of a step. Raises as `Checkpoints`
        does."""
        from mha_research.analysis.restore import restore  # it brings JAX, which reading results does without

        return restore(self.path, step)


class Runs(Sequence[Run]):
    """Runs in the order of the plan. `manifest` is that of the first directory, None for single runs."""

    def __init__(self, runs: Sequence[Run], manifest: Manifest | None, workdirs: Sequence[Path], same: bool) -> None:
        self._runs, self.manifest, self.workdirs = list(runs), manifest, list(workdirs)
        self.same_question = same  # every directory froze the same claims, seeds and tuning

    def __len__(self) -> int:
        return len(self._runs)

    def __repr__(self) -> str:
        return f"Runs of {', '.join(map(str, self.workdirs))}:\n" + "\n".join(f"  {run!r}" for run in self)

    def __getitem__(self, index: Any) -> Any:
        """A run by place or by name (`h4/seed0`), or those of a slice. KeyError for a name that is not there."""
        if not isinstance(index, str):
            return self._runs[index]
        found = {run.name: run for run in self}
        if index not in found:
            raise KeyError(f"there is no run {index!r}; there are {', '.join(found)}")
        return found[index]

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs)

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(run.arm for run in self))

    def main(self) -> list[Run]:
        """The runs that count: not those that only tuned."""
        return [run for run in self if run.phase == "main"]

    def outcomes(self, metrics: Sequence[str]) -> dict[str, dict[int, Outcome]]:
        """arm -> seed -> outcome, for `judge`."""
        found: dict[str, dict[int, Outcome]] = {arm: {} for arm in self.arms}
        for run in self.main():
            found[run.arm][run.seed] = run.outcome(metrics)
        return found

    def table(self) -> pd.DataFrame:
        """One row a run: name, arm, seed, phase, status, size, seconds, and every metric of its last evaluation."""
        rows = []
        for run in self:
            row = {name: getattr(run, name) for name in ("name", "arm", "seed", "phase", "status", "exploratory")}
            row |= {name: run.result.get(name) for name in (*SIZES, "step", "seconds", "peak_memory_bytes", "skipped")}
            rows.append(row | dict(run.result.get("metrics", {})))
        return pd.DataFrame(rows)

    def curves(self) -> pd.DataFrame:
        """Every logged number in long form: arm, seed, phase, step, metric, value."""
        parts = []
        for run in self:
            if len(run.rows):
                part = run.rows.melt("step", var_name="metric", value_name="value").dropna()
                parts.append(part.assign(name=run.name, arm=run.arm, seed=run.seed, phase=run.phase))
        columns = ["name", "arm", "seed", "phase", "step", "metric", "value"]
        return pd.concat(parts, ignore_index=True)[columns] if parts else pd.DataFrame(columns=columns)


def load_runs(*workdirs: str | Path) -> Runs:
    """The runs of sweep directories, or of directories of single runs, whose arm is then the directory's name.

    Several sweeps are joined by arm and seed. Raises ManifestError for a directory that is neither, for an arm whose
    settings differ between directories, and for a run that two of them hold with different results. A run whose own
    files cannot be read has the status "unreadable", and costs nothing but itself.
    """
    if not workdirs:
        raise TypeError("load_runs needs one directory or more")
    paths = [Path(workdir) for workdir in workdirs]
    manifests = [Manifest.read(path) if (path / FILE).exists() else None for path in paths]
    runs: dict[tuple[str, int, str], Run] = {}
    for path, manifest in zip(paths, manifests):
        for run in _of_sweep(path, manifest) if manifest else [_single(path)]:
            key = (run.arm, run.seed, run.name if run.phase == "tune" else "")
            runs[key] = _joined(runs[key], run) if key in runs else run
    first = next((manifest for manifest in manifests if manifest), None)
    _check_arms(paths, manifests)
    same = all(
        manifest is not None and first is not None and manifest.frozen.hash == first.frozen.hash
        for manifest in manifests
    )
    return Runs(list(runs.values()), first, paths, same)


def _of_sweep(workdir: Path, manifest: Manifest) -> list[Run]:
    return [_read(run, run.folder(workdir), workdir / "failures" / f"{run.name}.json") for run in manifest.runs]


def _read(planned: PlannedRun, path: Path, failure_path: Path) -> Run:
    """The run as its files tell it. One that cannot be read costs that run alone, which says why."""
    found: list[dict[str, Any]] = [{}, {}, {}, {}]
    try:
        files = (path / "config.json", path / "result.json", failure_path, path / "documents.json")
        found = [_json(file) for file in files]
        if found[1] and not found[0]:
            raise ManifestError(f"{path} holds a result but no config.json that says of what")
        status = str(found[1].get("status", "failed" if found[2] else "waiting"))
    except ManifestError as error:
        found, status = [{}, {}, {"reason": str(error)}, {}], "unreadable"
    config, result, failure, documents = found
    name, arm, seed, phase = planned.name, planned.arm, planned.seed, planned.phase
    return Run(name, arm, seed, phase, path, planned.exploratory, status, flat(config), result, failure, documents)


def _single(path: Path) -> Run:
    if not (path / "config.json").exists():
        raise ManifestError(f"{path} is neither a sweep (no {FILE}) nor a run (no config.json)")
    try:
        seed = _json(path / "config.json")["seed"]
    except ManifestError:  # a config of another version: what it says of itself is all there is
        seed = 0
    return _read(PlannedRun(path.name, path.name, seed, "main", {}), path, path / "failure.json")


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        text = path.read_text(encoding="utf8")
        data = from_json(text).to_dict() if path.name == "config.json" else json.loads(text)
        if not isinstance(data, dict):
            raise ValueError("it holds no JSON object")
        if not all(isinstance(data.get(part, {}), dict) for part in ("metrics", "valid", "test")):
            raise ValueError("a part of it is no JSON object")
        if wrong := [name for name, value in data.get("metrics", {}).items() if not isinstance(value, (int, float))]:
            raise ValueError(f"its metric {wrong[0]!r} is no number")
    except ValueError as error:
        raise ManifestError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    return data


def _joined(old: Run, new: Run) -> Run:
    if old.result and new.result and old.result.get("metrics") != new.result.get("metrics"):
        raise ManifestError(f"{old.path} and {new.path} are the same arm and seed with different results")
    return old if old.result else new


def _check_arms(paths: Sequence[Path], manifests: Sequence[Manifest | None]) -> None:
    """Equal names are equal settings, or the directories do not belong together."""
    seen: dict[str, tuple[Path, Any]] = {}
    for path, manifest in zip(paths, manifests):
        for arm, overrides in manifest.arms.items() if manifest else ():
            here = {**flat(manifest.base), **overrides}  # type: ignore[union-attr]
            where, there = seen.setdefault(arm, (path, here))
            if changed := [field for field in here if not field.startswith("run.") and here[field] != there.get(field)]:
                raise ManifestError(f"the arm {arm!r} differs in {changed[0]} between {where} and {path}")
