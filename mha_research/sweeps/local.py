"""Many small runs on one machine: long-lived worker processes, so that start-up and compilation are paid once.

A worker has one core of its own, or one accelerator, on which it trains the seeds of an arm together. It prefers runs
of an arm it has compiled, then an arm that no other worker has; compiled programs also go through JAX's cache on disk.
A worker whose memory has grown past its share is replaced. Workers hear SIGTERM when the sweep stops or dies, save
their state and end.
"""

import ctypes
import dataclasses
import glob
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from mha_research.analysis.manifest import Manifest, PlannedRun
from mha_research.sweeps.work import State, do_together, record_failure, state
from mha_research.training import Interrupted, use_compilation_cache
from mha_research.training.interrupt import Flag, interrupts

_PR_SET_PDEATHSIG = 1
MAX_TOGETHER = 8  # replicates inside one program
SECONDS_TO_COMPILE = 60.0  # a longer first run is training by then
Tell = Callable[[PlannedRun, "State | None"], None]  # a run began (None) or ended


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where a worker runs: cores, and the accelerator it sees, if it is given one."""

    cores: tuple[int, ...]
    accelerator: str | None = None


def slots(parallel: int | None = None) -> list[Slot]:
    """One slot per accelerator where there are any, else one per core; at most `parallel`, which then share all
    cores."""
    cores = sorted(os.sched_getaffinity(0))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    found = sorted(path.removeprefix("/dev/nvidia") for path in glob.glob("/dev/nvidia[0-9]*"))
    accelerators = visible.split(",") if visible else found
    count = len(accelerators) or len(cores)
    count = min(count, parallel or count)
    if accelerators:
        return [Slot(tuple(cores[i::count]), accelerators[i]) for i in range(count)]
    return [Slot((cores[i],)) for i in range(count)]


class _Worker:
    """The sweep's end of one worker process."""

    def __init__(self, workdir: Path, slot: Slot, memory: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.slot, self.arms = slot, set[str]()
        self.runs: Sequence[PlannedRun] = ()
        self.compiling, self.began = False, 0.0
        self.process: BaseProcess = context.Process(target=_serve, args=(str(workdir), slot, memory, other))
        self.process.start()
        other.close()

    def give(self, runs: Sequence[PlannedRun]) -> None:
        self.runs = runs
        self.compiling, self.began = runs[0].arm not in self.arms, time.monotonic()
        self.arms.add(runs[0].arm)
        self.connection.send([run.name for run in runs])

    def close(self) -> None:
        """Ends an idle worker."""
        self.connection.close()
        self.process.join()


def run_locally(
    workdir: Path, manifest: Manifest, runs: Sequence[PlannedRun], parallel: int | None, tell: Tell, mixed: bool = False
) -> None:
    """Runs everything in `runs`, and returns when each has ended somehow. Raises Interrupted when a signal came.

    `mixed` keeps the order of `runs`, in which arms alternate, so that a drift of the machine meets all of them alike.
    """
    places = slots(parallel)[: len(runs)]
    memory = 0.8 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / max(1, len(places))
    left = list(runs)
    with interrupts() as flag:
        workers = [_Worker(workdir, slot, memory) for slot in places]
        try:
            while left or any(worker.runs for worker in workers):
                if flag.signal:
                    raise Interrupted("the sweep was stopped", flag.signal)
                for index, worker in enumerate(workers):
                    if not worker.runs and left:
                        first = left[0] if mixed else choose(left, worker.arms, *_elsewhere(workers))
                        if first is None:
                            continue
                        group = replicates(left, first) if worker.slot.accelerator and not mixed else [first]
                        for run in group:
                            left.remove(run)
                            tell(run, None)
                        worker.give(group)
                    elif worker.runs and (ended := _ended(workdir, worker)):
                        for run, how in zip(worker.runs, ended):
                            tell(run, how)
                        worker.runs = ()
                        if not worker.process.is_alive() and left:
                            workers[index] = _Worker(workdir, worker.slot, memory)
                wait([worker.connection for worker in workers if worker.runs], timeout=0.2)
        finally:
            _stop(workers, flag)


def choose(
    left: Sequence[PlannedRun], warm: Collection[str], taken: Collection[str], compiling: Collection[str]
) -> PlannedRun | None:
    """The next run of a worker: of an arm it has compiled, else of an arm that nobody has, else of one somebody has.

    None, to ask again later, where all that is left is being compiled elsewhere: soon it can be read from the cache.
    """
    ready = [run for run in left if run.arm in warm or run.arm not in compiling]
    return min(ready, key=lambda run: 0 if run.arm in warm else 1 if run.arm not in taken else 2, default=None)


def _elsewhere(workers: Sequence[_Worker]) -> tuple[set[str], set[str]]:
    """(arms that any worker has compiled, arms that one is compiling now, as far as it has begun lately)."""
    lately = time.monotonic() - SECONDS_TO_COMPILE
    busy = {worker.runs[0].arm for worker in workers if worker.runs and worker.compiling and worker.began > lately}
    return {arm for worker in workers for arm in worker.arms}, busy


def replicates(left: Sequence[PlannedRun], first: PlannedRun) -> list[PlannedRun]:
    """The runs of the first one's arm that differ from it in the seed alone: an accelerator computes them together."""

    def settings(run: PlannedRun) -> tuple:
        return run.arm, run.phase, {name: value for name, value in run.overrides.items() if name != "seed"}

    return [run for run in left if settings(run) == settings(first)][:MAX_TOGETHER]


def _ended(workdir: Path, worker: _Worker) -> list[State]:
    """How the worker's runs ended, empty while they go on. A worker that died took its runs with it."""
    try:
        if worker.connection.poll():
            answer, keep = worker.connection.recv()
            if not keep:
                worker.process.join()
            return answer
    except (EOFError, OSError):
        worker.process.join()
        code = worker.process.exitcode or 0
        reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        for run in worker.runs:
            if state(workdir, run) == "waiting":
                record_failure(workdir, run, f"the process died with {reason}")
        return [state(workdir, run) for run in worker.runs]
    return []


def _stop(workers: Sequence[_Worker], flag: Flag) -> None:
    """Ends all workers: idle ones at once, busy ones after they have saved their state."""
    for worker in workers:
        if worker.runs and worker.process.is_alive():
            worker.process.terminate()
    for worker in workers:
        worker.close()


def _serve(workdir: str, slot: Slot, memory: float, connection: Connection) -> None:
    """The worker process: takes names of runs until the pipe closes, and answers how each ended and whether it goes
    on."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.setpgrp()  # Ctrl-C is for the sweep, which tells its workers
    os.sched_setaffinity(0, slot.cores)  # before JAX starts: it makes one thread per core that it may use
    if slot.accelerator is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = slot.accelerator
    use_compilation_cache()
    manifest = Manifest.read(Path(workdir))
    runs = {run.name: run for run in manifest.runs}
    while True:
        try:
            names = connection.recv()
        except (EOFError, OSError):
            return
        try:
            ended = do_together(Path(workdir), manifest, [runs[name] for name in names])
        except Interrupted:
            return
        keep = _resident_bytes() < memory
        try:
            connection.send((ended, keep))
        except OSError:  # the sweep was stopped meanwhile; how the run ended is on the disk
            return
        if not keep:
            return


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
