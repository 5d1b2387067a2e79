"""The kinds of attention that a config may name: the module of each, and settings that do not go with it.

A module refuses by itself the choices that it does not take. Here is what only the config can see, above all defaults
that a kind cannot have: they are never dropped in silence, the config has to say what stands in their place.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from mha_research.attention import (
    CollaborativeAttention,
    ConvValueAttention,
    DifferentialAttention,
    FrameDifferenceAttention,
    MultiHeadAttention,
    MultiScaleAttention,
    PerformerAttention,
    ShawAttention,
    SigmoidAttention,
    TalkingHeadsAttention,
)
from mha_research.config import ConfigError, flat


def _performer(*sizes: Any, feature_kind: str = "positive", **choices: Any) -> PerformerAttention:
    """The module's own `kind` is that of its features; in a config `kind` is that of the attention."""
    return PerformerAttention(*sizes, kind=feature_kind, **choices)  # type: ignore[arg-type]


MODULES: Mapping[str, Callable[..., Any]] = {
    "multi_head": MultiHeadAttention,
    "talking_heads": TalkingHeadsAttention,
    "sigmoid": SigmoidAttention,
    "shaw": ShawAttention,
    "differential": DifferentialAttention,
    "collaborative": CollaborativeAttention,
    "performer": _performer,
    "conv_value": functools.partial(ConvValueAttention, causal=True),
    "frame_difference": FrameDifferenceAttention,
    "multi_scale": MultiScaleAttention,
}


class Only(NamedTuple):
    """The values of a field that go with a kind, and why no others do."""

    field: str
    values: tuple[Any, ...]
    reason: str


_POSITION = "model.attention.position.name"
_ORDERED = Only("task.name", ("char_lm", "induction", "copy"), "the items of that task have no order")
_ALONE = Only("task.segments", (False,), "it would read across the documents of a window")
_MASKED = Only("task.segments", (False,), "it takes no mask that keeps the documents of a window apart")
_CONSTRAINTS: Mapping[str, tuple[Only, ...]] = {
    "shaw": (_ORDERED,),
    "collaborative": (
        Only(_POSITION, ("none", "alibi", "relative"), "mixing the turned numbers of a pair unlike is not relative"),
    ),
    "performer": (
        _MASKED,
        Only(_POSITION, ("none", "rotary"), "nothing can be added to scores that are never formed"),
        Only("model.attention.implementation", ("auto", "reference"), "it has an implementation of its own"),
    ),
    "conv_value": (
        _ORDERED,
        _ALONE,
        Only("model.attention.value_init.name", ("xavier_uniform",), "its values are a convolution"),
    ),
    "frame_difference": (_ORDERED, _ALONE),
    "multi_scale": (
        _ORDERED,
        _MASKED,
        Only(_POSITION, ("none",), "a patch has no one position; see model.position.name"),
        Only("model.attention.drop_head.importance_power", (None, 0.0), "its groups of heads are scored apart"),
    ),
}


def check_kind(config: ConfigDict) -> None:
    """ConfigError, which names the field and what it must be, for a setting that does not go with the kind."""
    kind, values = config.model.attention.kind, flat(config)
    values["task.segments"] = config.task.name == "char_lm" and config.task.segments is not False
    for only in _CONSTRAINTS.get(kind, ()):
        if values[only.field] not in only.values:
            wanted = " or ".join(map(repr, only.values))
            raise ConfigError(
                f"{only.field} must be {wanted} with model.attention.kind = {kind!r}, got {values[only.field]!r}: "
                f"{only.reason}"
            )
