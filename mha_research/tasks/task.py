"""What a task is: data as a pure function of (seed, step), exact held-out sets, and what a result is held against."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import grain
import numpy as np

Example = dict[str, np.ndarray]


class TaskError(ValueError):
    """The data of a task is missing, unreadable or damaged. The message is one line that says what to do."""


@dataclasses.dataclass(frozen=True)
class TaskSpec:
    """What a model must know of a task: `kind` of model, number of token classes, and tokens of one example L."""

    kind: str
    vocabulary_size: int
    length: int


class Task(Protocol):
    """One thing to learn. Examples are dicts of arrays; every example has `mask`, true where a target counts.

    A language-model example holds `tokens`, `targets` (int32) and `mask` (bool), each (L,), and where documents are
    packed `segments` and `positions` (int32): tokens of unequal segments do not see each other, positions restart in
    each. Other kinds: see their tasks.
    """

    spec: TaskSpec
    chance: float  # loss of a guess that has seen nothing: nats per target of a uniform guess
    ceiling: float | None  # loss that cannot be beaten, where that is known
    notes: tuple[str, ...]  # what the log should say about the data: splits, sizes, unknown characters
    fingerprint: str  # of data that the settings do not fix, such as the text of files; "" where there is none

    def train_batches(self, seed: int, batch_size: int) -> grain.MapDataset:
        """Random access to training batches: element `step` depends on (seed, step) and nothing else. Endless."""

    def evaluations(self) -> Mapping[str, "Evaluation"]:
        """The held-out sets by name. `valid` chooses, `test` claims; `test@512` is the same text at another length."""

    def baselines(self) -> Mapping[str, Mapping[str, float]]:
        """Nats per target of simple predictors, by held-out set and by name of the predictor."""

    def metrics(self, loss: float, accuracy: float) -> dict[str, float]:
        """The names under which a mean loss (nats per target) and accuracy are reported."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A held-out set: `size` examples, of which `example(i)` is the i-th. Every target counts exactly once.

    Where the set is of `documents` (speeches, files), an example says in `document` (L,) which one each target is of.
    """

    size: int
    example: Callable[[int], Example]
    documents: int = 1

    def batches(self, batch_size: int) -> grain.MapDataset:
        """All of it in order; the last batch is filled up with examples whose mask is false everywhere."""
        rounded = -(-self.size // batch_size) * batch_size
        return grain.MapDataset.range(rounded).map(self._padded).batch(batch_size)

    def thinned(self, limit: int) -> "Evaluation":
        """`limit` of its examples, evenly spaced; itself where it has no more than that."""
        if limit >= self.size:
            return self
        return dataclasses.replace(self, size=limit, example=functools.partial(_spaced, self, limit))

    def _padded(self, index: int) -> Example:
        if index < self.size:
            return self.example(index)
        return self.example(self.size - 1) | {"mask": np.zeros_like(self.example(self.size - 1)["mask"])}


def _spaced(whole: Evaluation, limit: int, index: int) -> Example:
    return whole.example(index * whole.size // limit)


def random_batches(make: Callable[[Any, np.random.Generator], Example], seed: int, batch_size: int) -> grain.MapDataset:
    """Endless training batches of examples `make(index, rng)`, where rng depends on the seed and the index alone."""
    examples = grain.MapDataset.range(1).seed(seed % 2**32).repeat().random_map(make)
    return examples.batch(batch_size)
