"""Rows of training metrics, and what is written when a run is over."""

import json
import math
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mha_research.run_dir.files import write_atomically
from mha_research.run_dir.log import Log
from mha_research.run_dir.workdir import Result
from mha_research.tasks import CharLM, Task
from mha_research.training.clock import Clock
from mha_research.training.device import peak_flops, peak_memory_bytes
from mha_research.training.sample import generate
from mha_research.training.step import Program


def train_row(
    config: ConfigDict, task: Task, program: Program, clock: Clock, step: int, metrics: dict[str, Any]
) -> dict[str, float]:
    """`train/...`: means over real tokens, or over updates made, since the last row; `time/...`: how fast it goes."""
    sums = {name: float(value) for name, value in metrics["sums"].items()}
    row = {"train/skipped": float(metrics["skipped"]), "train/learning_rate": float(metrics["learning_rate"])}
    if sums["count"]:
        row |= {
            "train/loss": sums["loss"] / sums["count"],
            "train/accuracy": sums["hits"] / sums["count"],
            "train/grad_norm": sums["grad_norm"] / sums["updates"],
        }
    rate = clock.rate(step)
    return row | {
        "time/steps_per_second": rate,
        "time/tokens_per_second": rate * config.train.batch_size * task.spec.length,
        "time/flops_per_second": rate * flops_per_step(config, program),
        "time/seconds": clock.seconds(),
        "time/seconds_left": (config.train.steps - step) / rate,
    }


def flops_per_step(config: ConfigDict, program: Program) -> int:
    """One forward pass and a backward pass of twice its cost, for every example of an update (see `forward_flops`)."""
    return 3 * program.forward_flops * config.train.batch_size


def finish(
    config: ConfigDict, workdir: Path, task: Task, program: Program, log: Log, state: Any, diverged: str
) -> Result:
    """Baselines, a sample, the summary for a person, and result.json, which is written last of all."""
    step = int(state["step"])
    last = log.rows_of(config.train.steps)
    result = Result(
        status="diverged" if diverged else "finished",
        step=step,
        metrics={name: value for name, value in last.items() if not name.startswith(("time/", "heads/"))},
        parameters=program.parameters,
        flops_per_step=flops_per_step(config, program),
        tokens_per_step=config.train.batch_size * task.spec.length,
        seconds=log.newest("time/seconds") or 0.0,
        peak_memory_bytes=peak_memory_bytes(),
        skipped=int(state["skipped"]),
        message=diverged,
    )
    log.say(diverged or f"finished {step} steps in {result.seconds:.0f} s of training")
    if not diverged:
        if config.run.baselines:
            _say_baselines(workdir, task, last, log)
        if config.run.sample_length and isinstance(task, CharLM):
            text = generate(config, task, program.model(state["params"]))
            write_atomically(workdir / "sample.txt", text + "\n")
            log.say(f"sample: {text}")
        _say_speed(config, program, log, result)
    write_atomically(workdir / "result.json", result.to_json())
    log.say(f"everything lies in {workdir}")
    return result


def _say_baselines(workdir: Path, task: Task, measured: dict[str, float], log: Log) -> None:
    """Held-out losses of the run beside those of simple predictors, which are computed once and kept."""
    path = workdir / "baselines.json"
    if not path.exists():
        write_atomically(path, json.dumps(task.baselines(), indent=2) + "\n")
    for split, losses in json.loads(path.read_text(encoding="utf8")).items():
        mine = {"this run": measured[f"{split}/loss"]} if f"{split}/loss" in measured else {}
        for name, nats in (mine | losses).items():
            log.say(f"{split:>5} {name:>12}: {nats:.4f} nats, {nats / math.log(2):.4f} bits")


def _say_speed(config: ConfigDict, program: Program, log: Log, result: Result) -> None:
    flops, tokens = log.newest("time/flops_per_second"), log.newest("time/tokens_per_second")
    if flops and tokens:
        share = flops / peak_flops()
        log.say(
            f"{result.parameters:,} parameters, {result.flops_per_step:.3g} FLOPs a step, {tokens:,.0f} tokens/s, "
            f"{flops / 1e9:.{'1f' if flops >= 1e9 else '2g'}} GFLOP/s ({share:.0%} of the device), "
            f"peak memory {result.peak_memory_bytes / 2**20:,.0f} MiB"
        )
