"""Run directories as a sweep leaves them, with numbers that are made up: reading and reporting need no training."""

import json
import math
from pathlib import Path

import numpy as np

from mha_research.analysis.manifest import FILE, Manifest, PlannedRun, Question
from mha_research.analysis.statistics.claims import AllOf, Claim
from mha_research.config import default_config, from_json, to_json
from mha_research.config.load import override

METRIC = "test/nats_per_char"
EFFECT = {"h1": 0.06, "h2": 0.02, "h4": 0.0, "h8": 0.0}
STEPS = 60
PROVENANCE = {
    "started": "2026-11-29T12:00:00Z",
    "command": ["train"],
    "overrides": {},
    "code": {"commit": "0123abc", "dirty": False},
    "python": "3.11.7",
    "packages": {"jax": "0.10.2", "flax": None},
    "device": {"platform": "cpu", "kind": "cpu", "count": 1, "processes": 1, "host": "x86_64", "cores": 2},
}
CLAIMS = (
    Claim(text="Two heads beat one", metric=METRIC, contrast={"h1": 1, "h2": -1}, source="Vaswani 2017, table 3"),
    Claim(
        text="Eight heads are as good as four", metric=METRIC, contrast={"h4": 1, "h8": -1}, kind="within", margin=0.01
    ),
    Claim(text="Eight heads <beat> four & more", metric=METRIC, contrast={"h4": 1, "h8": -1}, margin=0.02),
    AllOf(
        [
            Claim(text="Four heads beat one", metric=METRIC, contrast={"h1": 1, "h4": -1}),
            Claim(
                text="The loss falls with heads", metric=METRIC, contrast={"h1": 1.5, "h2": 0.5, "h4": -0.5, "h8": -1.5}
            ),
        ],
        text="More heads help, one step after the other",
    ),
    Claim(text="Heads are free", metric="parameters", contrast={"h8": 1, "h1": -1}, kind="within", margin=1),
)


def make_sweep(workdir: Path, seeds=range(5), claims=CLAIMS, tune=False, planned=None, arms=EFFECT) -> Path:
    """A finished sweep; `planned` are the seeds of the manifest where they differ from those that ran."""
    base = override(default_config(), {"train.steps": STEPS})
    overrides = {arm: {"model.attention.num_heads": int(arm[1:])} for arm in arms}
    planned = list(seeds if planned is None else planned)
    grid = {"field": "optimizer.learning_rate", "values": [0.001, 0.002, 0.004], "seeds": [1000], "goal": "min"}
    grid = grid | {"metric": "valid/nats_per_char"} if tune else None
    question = Question(tuple(claims), planned, grid, {METRIC: 3.0})
    runs = [
        PlannedRun(f"{arm}/tune{i}-seed1000", arm, 1000, "tune", overrides[arm] | {grid["field"]: rate, "seed": 1000})
        for arm in (arms if tune else ())
        for i, rate in enumerate(grid["values"])
    ]
    runs += [
        PlannedRun(f"{arm}/seed{seed}", arm, seed, "main", overrides[arm] | {"seed": seed})
        for seed in planned
        for arm in arms
    ]
    options = ["--config.task.files=my *"]
    manifest = Manifest(
        "How many heads?", "configs/sweeps/x.py", base.to_dict(), overrides, question, runs, options=options
    )
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / FILE).write_text(manifest.to_text())
    for run in runs:
        if run.phase == "tune" or run.seed in seeds:
            chosen = {"optimizer.learning_rate": 0.004} if tune and run.phase == "main" else {}
            make_run(workdir, run, override(base, {**run.overrides, **chosen}))
    return workdir


def make_run(workdir: Path, run: PlannedRun, config) -> None:
    """One finished run: losses fall to 1.9, plus the arm's effect, a part that the seed gives all arms, and noise."""
    folder = run.folder(workdir)
    folder.mkdir(parents=True)
    rng = np.random.default_rng([run.seed, *run.name.encode()])
    shared = np.random.default_rng(run.seed).normal(0, 0.02)
    better = 0.01 * math.log2(config.optimizer.learning_rate / 0.001)
    last = 1.9 + EFFECT[run.arm] + shared - better + rng.normal(0, 0.003)
    rows = []
    for step in range(10, STEPS + 1, 10):
        loss = last + 1.5 * math.exp(-step / 15)
        rows.append({"step": step, "train/loss": loss, "time/seconds": step * 0.1 + 1, "time/steps_per_second": 10.0})
        heads = {f"heads/entropy/0.{head}": loss + 0.1 * head for head in range(int(run.arm[1:]))}
        rows.append({"step": step, "valid/nats_per_char": loss, **heads})
    rows[-1][METRIC] = last
    result = {
        "status": "finished",
        "step": STEPS,
        "metrics": {"valid/nats_per_char": rows[-1]["valid/nats_per_char"], METRIC: last},
        "parameters": 12345,
        "flops_per_step": 10**9,
        "tokens_per_step": 4096,
        "seconds": 7.0,
        "peak_memory_bytes": 2**29,
        "skipped": 0,
        "message": "",
    }
    (folder / "config.json").write_text(to_json(config))
    (folder / "provenance.jsonl").write_text(json.dumps(PROVENANCE) + "\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "result.json").write_text(json.dumps(result))


def change_result(workdir: Path, name: str, **change) -> None:
    """Another end of a run."""
    path = workdir / "runs" / name / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def diverge(workdir: Path, name: str) -> None:
    change_result(workdir, name, status="diverged", metrics={}, message="diverged at step 40: the loss was not finite")


def fail(workdir: Path, name: str) -> None:
    """A run that failed before its result."""
    (workdir / "runs" / name / "result.json").unlink()
    path = workdir / "failures" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"run": name, "reason": "OSError: no space <left>", "log": ["step 10", "OSError"]}))


def config_of(workdir: Path, name: str):
    return from_json((workdir / "runs" / name / "config.json").read_text())
