"""What a person sees while a sweep runs: one live line on a terminal, a plain line per finished run elsewhere."""

import statistics
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from mha_research.analysis.manifest import PlannedRun
from mha_research.sweeps.work import State


class Watch:
    """Counts runs as they begin and end. Time left: the median duration of a run, times runs left per worker."""

    def __init__(self, total: int, done: int, workers: int, console: Console | None = None) -> None:
        self.console = console or Console()
        self.total, self.done, self.workers = total, done, max(1, workers)
        self.failed = self.diverged = 0
        self._began: dict[str, float] = {}
        self._durations: list[float] = []
        columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[shown]}"))
        self._progress = Progress(*columns, console=self.console) if self.console.is_terminal else None

    def __enter__(self) -> "Watch":
        if self._progress:
            self._task = self._progress.add_task("runs", total=self.total, completed=self.done, shown="")
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._progress:
            self._progress.stop()

    def tell(self, run: PlannedRun, ended: State | None) -> None:
        """A run began (None) or ended."""
        now = time.monotonic()
        if ended is None:
            self._began[run.name] = now
        else:
            began = self._began.pop(run.name, None)
            took = f" in {now - began:.0f} s" if began is not None else ""  # another machine's clock is not ours
            self._durations += [now - began] if began is not None else []
            self.done += 1
            self.failed += ended == "failed"
            self.diverged += ended == "diverged"
        shown = self.line()
        if self._progress:
            self._progress.update(self._task, completed=self.done, shown=shown)
            if ended in ("failed", "diverged"):
                self.say(f"{run.name} {ended}")
        elif ended is not None:
            self.say(f"{run.name} {ended}{took}; {self.done} of {self.total} done, {shown}")

    def line(self) -> str:
        """Running, failed and diverged runs, and the time left."""
        parts = [f"{len(self._began)} running"]
        parts += [f"{count} {name}" for name, count in (("failed", self.failed), ("diverged", self.diverged)) if count]
        if self._durations and self.done < self.total:
            rounds = -(-(self.total - self.done) // self.workers)
            parts.append(f"about {duration(rounds * statistics.median(self._durations))} left")
        return ", ".join(parts)

    def say(self, line: str) -> None:
        (self._progress.console if self._progress else self.console).print(
            line, highlight=False, markup=False, soft_wrap=True
        )


def duration(seconds: float) -> str:
    """`40 s`, `12 min`, `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"
