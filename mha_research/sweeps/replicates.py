"""Seeds of one arm inside one program: `jax.vmap` over them, for accelerators that a small run leaves idle.

Every run is an unchanged `train` in a thread of its own, with its own directory, rows, checkpoints and result. Only the
compiled functions are shared: a call waits until every run has made its next call, then all of them are computed at
once. So a run may resume from another step, diverge or end before the others, and may later go on alone. The numbers
differ from those of separate runs only by the order of sums inside a batched matrix product.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from mha_research.config import differences
from mha_research.run_dir import Result
from mha_research.tasks import TaskSpec
from mha_research.training import Interrupted, train
from mha_research.training.interrupt import interrupts
from mha_research.training.step import Program, build_program


def train_together(configs: Sequence[ConfigDict], workdirs: Sequence[Path]) -> list[Result | Exception]:
    """What `train` gives for each config and directory, or what it raises; the configs differ in `seed` alone.

    Raises ValueError when they differ in more, and Interrupted on SIGTERM or SIGINT: then each run goes on from the
    checkpoint it saved last.
    """
    for config in configs[1:]:
        if more := set(differences(configs[0], config)) - {"seed"}:
            raise ValueError(f"runs that train together differ in seed alone; got {sorted(more)[0]} too")
    meeting = Meeting(len(configs))
    ends: list[Any] = [None] * len(configs)

    def one(index: int) -> None:
        try:
            ends[index] = train(configs[index], workdirs[index], build=meeting.build)
        except BaseException as error:
            ends[index] = error
        finally:
            meeting.leave()

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(configs))]
    with interrupts() as flag:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
                if flag.signal:
                    meeting.stop(Interrupted("the runs were stopped", flag.signal))
    if flag.signal and any(isinstance(end, Interrupted) for end in ends):
        raise Interrupted("the runs were stopped", flag.signal)
    return ends


@dataclasses.dataclass
class _Call:
    """One run's call of one function, and what came of it."""

    name: str
    arguments: tuple[Any, ...]
    result: Any = None
    done: bool = False


class Meeting:
    """Where the runs of a group wait for each other. `count` of them take part until they leave."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._calls: list[_Call] = []
        self._changed = threading.Condition()
        self._functions: dict[str, Callable[..., Any]] = {}
        self._stopped: BaseException | None = None

    def build(self, config: ConfigDict, spec: TaskSpec) -> Program:
        """`build_program` with an update and an evaluation that wait for the others."""
        program = build_program(config, spec)
        self._functions = {name: getattr(program, name) for name in ("update", "evaluate")}  # everybody's are the same
        update, evaluate = (functools.partial(self._call, name) for name in self._functions)
        return dataclasses.replace(program, update=update, evaluate=evaluate)

    def leave(self) -> None:
        """One run is over."""
        with self._changed:
            self.count -= 1
            self._serve_if_all_wait()

    def stop(self, reason: BaseException) -> None:
        """Every run's next call raises."""
        with self._changed:
            self._stopped = reason
            for call in self._calls:
                call.result, call.done = reason, True
            self._calls.clear()
            self._changed.notify_all()

    def _call(self, name: str, *arguments: Any) -> Any:
        call = _Call(name, arguments)
        with self._changed:
            if self._stopped:
                raise self._stopped
            self._calls.append(call)
            self._serve_if_all_wait()
            while not call.done:
                self._changed.wait()
        if isinstance(call.result, BaseException):
            raise call.result
        return call.result

    def _serve_if_all_wait(self) -> None:
        """Computes what everybody waits for: one batched call per function that was asked for."""
        if not self._calls or len(self._calls) < self.count:
            return
        for name in dict.fromkeys(call.name for call in self._calls):
            calls = [call for call in self._calls if call.name == name]
            try:
                results = _at_once(self._functions[name], tuple(call.arguments for call in calls))
            except BaseException as error:
                results = [error] * len(calls)
            for call, result in zip(calls, results):
                call.result, call.done = result, True
        self._calls.clear()
        self._changed.notify_all()


def _at_once(function: Callable[..., Any], calls: tuple[tuple[Any, ...], ...]) -> Sequence[Any]:
    """The results of several calls of a function; one alone is simply made."""
    return [function(*calls[0])] if len(calls) == 1 else _mapped(function)(calls)


@functools.lru_cache(maxsize=16)
def _mapped(function: Callable[..., Any]) -> Callable[[tuple[tuple[Any, ...], ...]], tuple[Any, ...]]:
    """`function` of many tuples of arguments: stacked, mapped and taken apart inside one program."""

    def together(calls: tuple[tuple[Any, ...], ...]) -> tuple[Any, ...]:
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *calls)
        results = jax.vmap(function)(*stacked)
        return tuple(jax.tree.map(lambda leaf, i=i: leaf[i], results) for i in range(len(calls)))

    return jax.jit(together)
