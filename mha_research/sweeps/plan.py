"""From a sweep file to a manifest: every run with its name and overrides, checked before anything is created."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mha_research.analysis.manifest import Manifest, PlannedRun, Question
from mha_research.config import FIELDS, ConfigError, differences, from_json, load_module, override
from mha_research.config.load import call
from mha_research.config.schema import check, unknown
from mha_research.sweeps.description import Sweep
from mha_research.training import check as check_config


class SweepError(ValueError):
    """A sweep file is wrong, or does not belong to the directory it was given. The message is one line."""


def load_sweep(file: str | Path, overrides: Mapping[str, Any] | None = None) -> tuple[str, ConfigDict, Sweep]:
    """(title, base config, sweep) of a Python file with `get_config()` and `get_sweep()`.

    The title is the first line of the file's docstring; `overrides` change the base, as on the command line of a run.
    Raises ConfigError or SweepError naming the file and what is wrong in it.
    """
    module = load_module(file)
    try:
        base, sweep = call(file, module, "get_config"), call(file, module, "get_sweep")
    except ConfigError as error:
        raise SweepError(str(error)) from error
    if not isinstance(sweep, Sweep):
        raise SweepError(f"get_sweep() of {str(file)!r} returns a Sweep; got {type(sweep).__name__}")
    title = (module.__doc__ or Path(file).stem).strip().split("\n")[0]
    return title, override(base, overrides or {}), sweep


def plan(title: str, config_file: str, base: ConfigDict, sweep: Sweep) -> Manifest:
    """The manifest of a sweep that has not started. Raises SweepError naming the arm and the field that are wrong."""
    arms = {name: _typed(f"arm {name!r}", overrides) for name, overrides in sweep.arms.items()}
    tune = None
    if sweep.tune is not None:
        if sweep.tune.field == "seed":
            raise SweepError("Tune.field is seed, but a lucky seed is no setting: see Tune.seeds")
        values = [_typed("Tune.values", {sweep.tune.field: value})[sweep.tune.field] for value in sweep.tune.values]
        tune = dataclasses.asdict(sweep.tune) | {"values": values}
    configs: dict[str, ConfigDict] = {}
    for name, overrides in arms.items():
        try:
            configs[name] = check_config(override(base, overrides))
            for value in tune["values"] if tune else ():
                check_config(override(base, {**overrides, tune["field"]: value}))  # type: ignore[index]
        except ConfigError as error:
            raise SweepError(f"arm {name!r}: {error}") from None
        for other in list(configs)[:-1]:
            if not differences(configs[other], configs[name]):
                raise SweepError(f"the arms {other!r} and {name!r} have the same config")
    question = Question(
        tuple(sweep.claims),
        sweep.seeds,  # type: ignore[arg-type]  # a Sweep has made a list of them
        tune,
        {metric: float(value) for metric, value in sweep.worst.items()},
        sorted(sweep.deterministic),
    )
    return Manifest(title, str(config_file), base.to_dict(), arms, question, list(_runs(arms, question)))


def _typed(where: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The values as the config's types. Text is no number here: a sweep file is Python, where 1e-4 is one."""
    typed = {}
    for path, value in overrides.items():
        try:
            if path not in FIELDS:
                raise unknown(path, FIELDS)
            typed[path] = check(FIELDS[path], value, path)
        except ConfigError as error:
            raise SweepError(f"{where}: {error}") from None
    return typed


def _runs(arms: Mapping[str, Mapping[str, Any]], question: Question) -> Iterator[PlannedRun]:
    """Tuning first; then seed by seed, so that what a stopped sweep has finished is paired."""
    tune = question.tune
    grid = [(seed, *numbered) for seed in tune["seeds"] for numbered in enumerate(tune["values"])] if tune else []
    for seed, number, value in grid:
        for arm, overrides in arms.items():
            changes = {**overrides, question.tune["field"]: value, "seed": seed}  # type: ignore[index]
            yield PlannedRun(f"{arm}/tune{number}-seed{seed}", arm, seed, "tune", changes)
    for seed in question.seeds:
        for arm, overrides in arms.items():
            yield PlannedRun(f"{arm}/seed{seed}", arm, seed, "main", {**overrides, "seed": seed})


def extend(started: Manifest, wanted: Manifest) -> Manifest:
    """The manifest of a sweep that has started, with what its file has gained since, labelled exploratory.

    Raises SweepError when the file no longer describes the runs that were made: another base, arm or tuning grid.
    """
    if changed := differences(base_config(started), base_config(wanted)):
        field, (old, new) = next(iter(changed.items()))
        raise SweepError(f"the directory holds a sweep with {field} {old!r}, now {new!r}; choose another directory")
    for arm, overrides in wanted.arms.items():
        if started.arms.get(arm, overrides) != overrides:
            raise SweepError(f"the directory holds another arm {arm!r}: {started.arms[arm]}, now {overrides}")
    if started.frozen.tune != wanted.frozen.tune:
        raise SweepError("the directory holds a sweep with another tuning grid; choose another directory")
    known = {run.name for run in started.runs}
    added = [dataclasses.replace(run, exploratory=True) for run in wanted.runs if run.name not in known]
    return dataclasses.replace(
        started,
        arms={**started.arms, **wanted.arms},
        runs=[*started.runs, *added],
        later=None if wanted.frozen.hash == started.frozen.hash else wanted.frozen,
    )


def base_config(manifest: Manifest) -> ConfigDict:
    """The config that the arms of a manifest change."""
    return override(_from_dict(manifest.base), {})


def run_config(manifest: Manifest, run: PlannedRun, tuned: Mapping[str, Any] | None = None) -> ConfigDict:
    """The config of one planned run; `tuned` holds the field that its arm's tuning has chosen."""
    return override(_from_dict(manifest.base), {**run.overrides, **(tuned or {})})


def _from_dict(values: Mapping[str, Any]) -> ConfigDict:
    return from_json(json.dumps(values))


def shrink(base: ConfigDict, sweep: Sweep) -> tuple[ConfigDict, Sweep]:
    """The same sweep as a rehearsal: few steps, small batches and models, little held-out, two seeds, no tuning."""
    small = {
        "train.steps": min(base.train.steps, 4),
        "train.batch_size": min(base.train.batch_size, 4),
        "train.accumulate": 1,
        "train.log_every": 2,
        "train.eval_limit": 32,
        "optimizer.warmup_steps": min(base.optimizer.warmup_steps, 1),
        "model.num_layers": 1,
    }
    return override(base, small), dataclasses.replace(sweep, seeds=sweep.seeds[:2], tune=None)  # type: ignore[index]
