"""Look several items up at once: how many heads one layer needs for that is a theorem."""

import dataclasses
from functools import partial

import numpy as np

from mha_research.tasks.synthetic import Drawn
from mha_research.tasks.task import Example, TaskSpec


@dataclasses.dataclass(frozen=True)
class RetrievalSpec(TaskSpec):
    """Its token classes are the n ids, its length the n items; `slots` k are asked for, a value has `features` p."""

    slots: int = 0
    features: int = 0


def retrieval_example(slots: int, items: int, width: int, _: int, rng: np.random.Generator) -> Example:
    """n items with ids in random order and values (n, p) ~ N(0, 1); k different ids are asked for.

    The target (1, k p) is their values, in the order in which they are asked for.
    """
    ids, values = rng.permutation(items), rng.standard_normal((items, width), np.float32)
    asked = rng.permutation(items)[:slots]
    return {
        "ids": ids.astype(np.int32),
        "values": values,
        "queries": asked.astype(np.int32),
        "targets": values[np.argsort(ids)[asked]].reshape(1, -1),
        "mask": np.ones(1, bool),
    }


class Retrieval(Drawn):
    """k-slot retrieval. The loss is the mean square of the error; a guess of zero has 1, the variance of the values.

    One layer of h heads whose weights do not depend on the values cannot come below 1 - min(h, k) / k. For given ids
    and queries, what the heads return and so the read-out is a linear map of the values, of rank h p at most; the
    targets are an orthonormal one of rank k p, of whose square norm such a map leaves k p - h p (Eckart and Young
    1936). The bound is of one layer: further ones bring h heads each.

    Args:
        slots: items k that are asked for at once
        items: items n of one example
        width: numbers p of an item's value
        evaluation_size: number of held-out examples in each of valid and test

    Raises:
        ValueError: for sizes that make no task.
    """

    chance = 1.0
    ordered = False

    def __init__(self, slots: int = 4, items: int = 16, width: int = 8, evaluation_size: int = 256) -> None:
        if min(slots, width, evaluation_size) < 1 or slots > items:
            raise ValueError(
                "task.slots, task.width and task.evaluation_size must be 1 or more and task.items at least task.slots, "
                f"got {slots}, {width}, {evaluation_size} and {items}"
            )
        super().__init__(partial(retrieval_example, slots, items, width), evaluation_size)
        self.spec = RetrievalSpec("slot_retrieval", items, items, "squared_error", slots, width)
        self.notes = (f"{slots} of {items} items of {width} numbers, {evaluation_size} held out",)

    def metrics(self, loss: float, accuracy: float) -> dict[str, float]:
        """The normalised mean square error, and the share of examples whose own is below 0.05."""
        return {"loss": loss, "nmse": loss, "solved": accuracy}
