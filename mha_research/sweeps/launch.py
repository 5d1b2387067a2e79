"""A sweep's directory from its first start to its last run: who may use it, what is left to do, and in which order."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from mha_research.analysis.manifest import FILE, Manifest, PlannedRun
from mha_research.run_dir import make_folder
from mha_research.run_dir.files import exclusive, write_atomically
from mha_research.sweeps.plan import SweepError, extend
from mha_research.sweeps.progress import Watch
from mha_research.sweeps.work import failure_path, state

Engine = Callable[[Path, Manifest, Sequence[PlannedRun], Watch], None]  # returns when each run has ended somehow


@contextlib.contextmanager
def opened(workdir: Path, wanted: Manifest | None) -> Iterator[Manifest]:
    """The manifest of the directory, which is this process's alone while the context lasts.

    `wanted` is what the sweep file says now: it becomes the manifest of a new directory, and extends that of a started
    one. Raises SweepError for a directory that another sweep is using, or that holds something else, and WorkdirError
    for one that cannot be made.
    """
    if wanted is None:
        Manifest.read(workdir)
    elif not (workdir / FILE).exists():
        foreign = [path.name for path in sorted(workdir.glob("*"))] if workdir.exists() else []
        if foreign:
            raise SweepError(
                f"{workdir} is not empty and holds no {FILE}, but {', '.join(foreign[:3])}; choose another"
            )
        make_folder(workdir)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(exclusive(workdir / ".lock"))
        except BlockingIOError:
            raise SweepError(f"another sweep is running in {workdir}; wait for it, or stop it") from None
        manifest = wanted
        if (workdir / FILE).exists():
            manifest = extend(Manifest.read(workdir), wanted) if wanted else Manifest.read(workdir)
        assert manifest is not None
        write_atomically(workdir / FILE, manifest.to_text())
        yield manifest


def run_sweep(
    workdir: Path, manifest: Manifest, engine: Engine, workers: int, only: Collection[str] = (), retry: bool = False
) -> Watch:
    """Runs what has not ended, tuning before the runs that need it. `only`: names of arms; `retry`: failed runs too."""
    runs = [run for run in manifest.runs if not only or run.arm in only]
    if retry:
        for run in runs:
            failure_path(workdir, run).unlink(missing_ok=True)
    states = [state(workdir, run) for run in runs]
    with Watch(len(runs), len(runs) - states.count("waiting"), workers) as watch:
        watch.failed, watch.diverged = states.count("failed"), states.count("diverged")
        for phase in ("tune", "main"):
            waiting = [run for run in runs if run.phase == phase and state(workdir, run) == "waiting"]
            if waiting:
                engine(workdir, manifest, waiting, watch)
    return watch
