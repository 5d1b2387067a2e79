"""What a run says: rows in metrics.jsonl, TensorBoard events, and a progress line or plain lines for a person."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from mha_research.run_dir.events import Events
from mha_research.run_dir.files import read_rows, write_atomically

_SECONDS_BETWEEN_PLAIN_LINES = 5.0


class Log:
    """Writes rows `{"step": n, name: number, ...}`, each on the disk before the call returns.

    On resuming at step s, rows after s are taken away, for they will be written again; so is a torn last line. Rows up
    to s are kept, because each is flushed before the checkpoint of its step.
    """

    def __init__(self, workdir: Path, total_steps: int, step: int, tensorboard: bool) -> None:
        self.path = workdir / "metrics.jsonl"
        self.rows = [row for row in read_rows(self.path) if row["step"] <= step]
        write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in self.rows))
        self._file = self.path.open("a", encoding="utf8")
        self._console = Console()
        self._progress = self._start_progress(total_steps, step) if self._console.is_terminal else None
        self._last_line = -float("inf")
        self._total_steps = total_steps
        self._events = Events(workdir / "tensorboard", step) if tensorboard else None

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()
        if self._progress:
            self._progress.stop()
        if self._events:
            self._events.close()

    def row(self, step: int, values: dict[str, float]) -> None:
        """One row, and what of it a person should see. Raises OSError when the disk does not take it."""
        values = {name: value for name, value in values.items() if math.isfinite(value)}  # JSON has no NaN
        row = {"step": step, **values}
        self.rows.append(row)
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._events:
            self._events.write(step, values)
        self._show(step, values)

    def newest(self, name: str) -> float | None:
        """The latest value under a name, None where there is none."""
        return next((row[name] for row in reversed(self.rows) if name in row), None)

    def rows_of(self, step: int) -> dict[str, float]:
        """Everything that was logged at a step."""
        return {
            name: value for row in self.rows if row["step"] == step for name, value in row.items() if name != "step"
        }

    def advance(self, step: int) -> None:
        """Moves the progress line to the step."""
        if self._progress:
            self._progress.update(self._task, completed=step)

    def say(self, line: str) -> None:
        """A line for the person who watches."""
        console = self._progress.console if self._progress else self._console
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _show(self, step: int, values: dict[str, float]) -> None:
        shown = "  ".join(f"{name} {_number(value)}" for name, value in values.items() if name in _SHOWN)
        if "time/seconds_left" in values:
            shown += f"  {_duration(values['time/seconds_left'])} left"
        evaluated = any(name.startswith(("valid/", "test/")) for name in values)
        if self._progress and not evaluated:
            self._progress.update(self._task, completed=step, shown=shown)
        elif evaluated or time.monotonic() - self._last_line > _SECONDS_BETWEEN_PLAIN_LINES:
            self._last_line = time.monotonic()
            self.say(f"step {step}/{self._total_steps}  {shown}")

    def _start_progress(self, total_steps: int, step: int) -> Progress:
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[shown]}"))
        progress = Progress(*columns, console=self._console, transient=True)
        self._task = progress.add_task("train", total=total_steps, completed=step, shown="")
        progress.start()
        return progress


_SHOWN = (
    "train/loss",
    "train/grad_norm",
    "train/skipped",
    "time/tokens_per_second",
    "valid/loss",
    "valid/accuracy",
    "valid/nats_per_char",
    "valid/bits_per_char",
    "test/loss",
    "test/nats_per_char",
    "test/bits_per_char",
)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
