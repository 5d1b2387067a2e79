"""What a kind of attention tells whoever builds an experiment with it."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class AllowedValues:
    """The values of a config's field that go with a kind, and why no others do.

    A module refuses by itself the choices that it does not take. Here is what only the config can see, above all
    defaults that a kind cannot have: they are never dropped in silence, the config has to say what stands in their
    place.

    Attributes:
        field: path in the config, `model.attention.position.name`; or `task.ordered`, whether the task's items have an
            order, and `task.segments`, whether documents are packed into one window.
        values: those that may stand there.
        reason: of the refusal.
    """

    field: str
    values: tuple[Any, ...]
    reason: str


POSITION = "model.attention.position.name"
ORDERED = AllowedValues("task.ordered", (True,), "the items of that task have no order")
NO_SEGMENTS = AllowedValues("task.segments", (False,), "it would read across the documents of a window")
NO_SEGMENT_MASK = AllowedValues(
    "task.segments", (False,), "it takes no mask that keeps the documents of a window apart"
)
