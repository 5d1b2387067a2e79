"""What a task is: data as a pure function of (seed, step), exact held-out sets, and what a result is held against."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import grain
import numpy as np

Example = dict[str, np.ndarray]


class TaskError(ValueError):
    """The data of a task is missing, unreadable or damaged. The message is one line that says what to do."""


@dataclasses.dataclass(frozen=True)
class TaskSpec:
    """What a model must know of a task, and what it learns by.

    Attributes:
        model: the model that `model.kind = "auto"` takes: a name in the registry of models, or a class.
        vocabulary_size: number of classes of a token, or of a target.
        length: tokens L of one example.
        loss: "cross_entropy" of logits (B, L, classes) with targets (B, L); "squared_error" of outputs (B, L, n) with
            targets (B, L, n), averaged over n; or a function (outputs, targets) -> (B, L).
    """

    model: str | Callable[..., Any]
    vocabulary_size: int
    length: int
    loss: str | Callable[..., Any] = "cross_entropy"


class Task:
    """One thing to learn. A new one sets `spec` and `chance`, and overrides the first two methods.

    Examples are dicts of arrays; every example has `targets` and `mask` (L,), true where a target counts. What else a
    model's call names, it is given. A language-model example holds `tokens`, `targets` (int32) and `mask` (bool), each
    (L,), and where documents are packed `segments` and `positions` (int32): tokens of unequal segments do not see each
    other, positions restart in each. Other kinds: see their tasks.

    The constructor's keyword parameters are the fields of `task` in a config.
    """

    spec: TaskSpec
    chance: float  # loss of a guess that has seen nothing: nats per target of a uniform guess
    notes: tuple[str, ...] = ()  # what the log should say about the data: splits, sizes, unknown characters
    fingerprint = ""  # of data that the settings do not fix, such as the text of files; "" where there is none
    ordered = True  # whether the order of an example's tokens means something
    packs_documents = False  # whether a window may hold several, told apart by `segments`

    def train_batches(self, seed: int, batch_size: int) -> grain.MapDataset:
        """Random access to training batches: element `step` depends on (seed, step) and nothing else. Endless."""
        raise NotImplementedError(f"{type(self).__name__} must override train_batches(seed, batch_size)")

    def evaluations(self) -> Mapping[str, "Evaluation"]:
        """The held-out sets by name. `valid` chooses, `test` claims; `test@512` is the same text at another length."""
        raise NotImplementedError(f"{type(self).__name__} must override evaluations()")

    def baselines(self) -> Mapping[str, Mapping[str, float]]:
        """Nats per target of simple predictors, by held-out set and by name of the predictor."""
        return {}

    def metrics(self, loss: float, accuracy: float) -> dict[str, float]:
        """The names under which a mean loss (nats per target) and accuracy are reported."""
        return {"loss": loss, "accuracy": accuracy}


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
