"""A sweep of two arms and two seeds, one of its runs under way and one not begun, and what trackers should hold of it."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.documents import ROOT
from tests.mha_research.analysis.synthetic import make_sweep

RUNNING = "h2/seed0"
BEGUN = ("h1/seed0", "h1/seed1", "h2/seed0", "h2/seed1")
STEPS = (10, 20, 30, 40, 50, 60)


def make(workdir: Path) -> Path:
    """h1 and h2 with seeds 0 and 1, and a seed 2 that nobody has started; RUNNING is in the middle of step 40."""
    make_sweep(workdir, seeds=range(2), planned=range(3), claims=(), arms={"h1": 0.06, "h2": 0.02})
    folder = workdir / "runs" / RUNNING
    (folder / "result.json").rename(folder / "result.later")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.later").write_text("".join(lines))
    (folder / "metrics.jsonl").write_text("".join(lines[:7]))  # the row of training at step 40, not yet its evaluation
    return workdir


def finish(workdir: Path) -> None:
    """Let the run that is under way come to its end."""
    folder = workdir / "runs" / RUNNING
    (folder / "metrics.later").rename(folder / "metrics.jsonl")
    (folder / "result.later").rename(folder / "result.json")


def logged(workdir: Path, name: str) -> dict[tuple[str, int], float]:
    """(metric, step) to value: every number in metrics.jsonl."""
    rows = [json.loads(line) for line in (workdir / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return {(key, row["step"]): value for row in rows for key, value in row.items() if key != "step"}


def complete(workdir: Path, name: str) -> dict[tuple[str, int], float]:
    """The numbers of steps that are complete: those before 40 of the run that is under way."""
    return {key: value for key, value in logged(workdir, name).items() if name != RUNNING or key[1] < 40}


def export(workdir: Path, to: str, *options: str) -> dict[str, int]:
    """Run the command in a process of its own; returns the new steps that it tells of each run."""
    run = command(workdir, to, *options)
    assert run.returncode == 0, run.stderr
    lines = [line.removesuffix(" new steps").split(": ") for line in run.stdout.splitlines() if "new steps" in line]
    assert "not begun: h1/seed2, h2/seed2" in run.stdout
    return {name: int(steps) for name, steps in lines}


def command(
    workdir: Path, to: str, *options: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "experiments.export", f"--workdir={workdir}", f"--to={to}", *options]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, env=env)
