"""One run from a config to a result, resumed bit for bit however often it was interrupted."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from mha_research.config import ConfigError, to_json, within_bounds
from mha_research.factory.build import build_task
from mha_research.factory.kinds import check_kind
from mha_research.run_dir.checkpoint import CheckpointError, Checkpoints
from mha_research.run_dir.log import Log
from mha_research.run_dir.workdir import (
    Result,
    check_config,
    claim,
    read_result,
    record_start,
    write_document_sums,
)
from mha_research.tasks import Task, TaskSpec
from mha_research.training.clock import Clock
from mha_research.training.data import train_batches
from mha_research.training.dry_run import dry_run
from mha_research.training.evaluate import evaluation_row, head_row
from mha_research.training.interrupt import Flag, Interrupted, interrupts
from mha_research.training.profile import Profiler
from mha_research.training.step import Program, build_program
from mha_research.training.summary import finish, train_row


def train(
    config: ConfigDict,
    workdir: str | Path,
    overrides: Mapping[str, Any] | None = None,
    build: Callable[[ConfigDict, TaskSpec], Program] = build_program,
) -> Result:
    """Trains what the config says and leaves everything in `workdir`; `overrides` are only recorded.

    `build` makes the compiled functions: replicates that train inside one program share theirs.

    Idempotent: a directory whose run is over returns its result at once; one whose run was interrupted goes on from its
    last checkpoint, on CPU to the same bits. A run whose gradients stay non-finite returns with status `diverged`.
    Raises ConfigError and TaskError before anything is written, WorkdirError for a directory that holds another config,
    a run on other data or damaged files, or is in use, CheckpointError or OSError when the disk does not take what is
    written (what is there stays good), and Interrupted after a checkpoint when SIGTERM or SIGINT comes.
    """
    config, workdir = check(config), Path(workdir)
    result = read_result(workdir)
    if result is not None:
        check_config(workdir, config)
        return result
    task = build_task(config)
    dry_run(config, task)
    program = build(config, task.spec)
    with claim(workdir, config):
        record_start(workdir, config, overrides or {}, task.fingerprint)
        return _run(config, workdir, task, program)


def check(config: ConfigDict) -> ConfigDict:
    """The validated config. Raises ConfigError for a field that is wrong by itself or beside another one."""
    config = within_bounds(config)
    options = config.train
    if options.batch_size % options.accumulate:
        raise ConfigError(
            f"train.batch_size {options.batch_size} must be a multiple of train.accumulate {options.accumulate}"
        )
    check_kind(config)
    return config


def _run(config: ConfigDict, workdir: Path, task: Task, program: Program) -> Result:
    # Placed explicitly, as a restored state is: otherwise a resumed run would compile the update a second time.
    state, step = jax.device_put(program.init(config.seed), jax.devices()[0]), 0
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(Checkpoints(workdir / "checkpoints", config.train.keep_last))
        if checkpoints.steps():
            step, state = checkpoints.restore(state)
            if step != int(state["step"]):
                raise CheckpointError(f"{checkpoints.directory / str(step)} holds the state of step {state['step']}")
        log = stack.enter_context(Log(workdir, config.train.steps, step, config.run.tensorboard))
        for line in (*task.notes, f"{program.parameters:,} parameters"):
            log.say(line)
        if step:
            log.say(f"goes on after step {step}")
        flag = stack.enter_context(interrupts())
        loop = Loop(config, workdir, task, program, checkpoints, log, flag)
        diverged = loop.run(state, step)
        return finish(config, workdir, task, program, log, loop.state, diverged)


class Loop:
    """The steps of a run. `state` is the newest one."""

    def __init__(
        self,
        config: ConfigDict,
        workdir: Path,
        task: Task,
        program: Program,
        checkpoints: Checkpoints,
        log: Log,
        flag: Flag,
    ) -> None:
        self.config, self.task, self.program = config, task, program
        self.checkpoints, self.log, self.flag = checkpoints, log, flag
        self.workdir = workdir
        self.profiler = Profiler(workdir / "profile", config.run.profile_steps)

    def run(self, state: Any, start: int) -> str:
        """Updates the state from step `start` to the last, and returns "", or why the run diverged.

        The metrics of a step are read after the next step was started, so that the device never waits for this process;
        before an evaluation or a checkpoint they are read at once.
        """
        options = self.config.train
        self.state, self.clock = state, Clock(start, self.log.newest("time/seconds") or 0.0)
        batches = train_batches(self.task, self.config, start)
        unread: tuple[int, Any] | None = None
        diverged = ""
        for step in range(start + 1, options.steps + 1):
            self.profiler.step()
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                self.state, metrics = self.program.update(self.state, next(batches))
            diverged = self._read(unread)
            unread = (step, metrics)
            last = step == options.steps
            evaluate = last or step % options.eval_every == 0
            save = last or step % options.checkpoint_every == 0 or bool(self.flag.signal)
            if evaluate or save:
                # The rows of a step reach the disk before its checkpoint, so a run that resumes from it lacks none.
                diverged, unread = diverged or self._read(unread), None
            if diverged:
                break
            with self.clock.pause():
                measured = self._evaluate(step, every=last) if evaluate else None
                if save:
                    self._save(step, measured)
            if self.flag.signal and not last:
                raise Interrupted(f"stopped by signal {self.flag.signal} after step {step}", self.flag.signal)
        self.profiler.stop()
        return diverged

    def _read(self, unread: tuple[int, Any] | None) -> str:
        """Logs the metrics of a step where a row is due; returns "", or what to say when updates keep failing."""
        if unread is None:
            return ""
        step, metrics = unread
        metrics = jax.device_get(metrics)
        if step % self.config.train.log_every == 0 or step == self.config.train.steps:
            self.log.row(step, train_row(self.config, self.task, self.program, self.clock, step, metrics))
        self.log.advance(step)
        failed = int(metrics["skipped_in_a_row"])
        if failed < self.config.train.max_skipped:
            return ""
        return (
            f"diverged at step {step}: the loss or gradient of {failed} updates in a row was not finite; "
            "lower optimizer.learning_rate, lengthen optimizer.warmup_steps or set optimizer.clip_norm"
        )

    def _evaluate(self, step: int, every: bool) -> dict[str, float]:
        batch_size = self.config.train.eval_batch_size or self.config.train.batch_size
        row, sums = evaluation_row(
            self.task, self.program, self.state["params"], batch_size, every, self.config.train.eval_limit
        )
        if self.config.run.head_statistics:
            row |= head_row(self.task, self.program, self.state["params"], batch_size)
        self.log.row(step, row)
        if every:
            write_document_sums(self.workdir, sums)
        return row

    def _save(self, step: int, measured: dict[str, float] | None) -> None:
        self.log.say(self.checkpoints.save(step, self.state, to_json(self.config), measured))
