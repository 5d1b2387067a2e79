"""What an ablation asks, as data: a claim is one contrast of arms, one number per seed, with a direction fixed
beforehand.

A claim holds no code, so it can be frozen, hashed and compared before the first run starts; `verdict.py` has the rule
that decides it.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

Kind = Literal["greater", "within"]
Scale = Literal["difference", "log_ratio"]


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a number; got {value!r} of type {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"{name} is finite; got {value!r}")
    return float(value)


def _text(value: object, name: str, empty: bool = False) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} is a string; got {value!r} of type {type(value).__name__}")
    if not (value or empty):
        raise ValueError(f"{name} is empty")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """d_s = sum_a c_a y_(a, s): one number per seed s, positive in the predicted direction.

    Attributes:
        text: the claim in words, as the report shows it.
        metric: the name of y in a run's metrics, such as `test/nats_per_char` or `test/nats_per_char@512`.
        contrast: arm name -> c_a, summing to zero. A difference is +1, -1; a 2x2 interaction +1, -1, -1, +1; a trend
            the centred log of the factor.
        kind: "greater" claims d > margin, "within" claims |d| < margin.
        margin: in units of d. Zero or more; above zero for "within".
        scale: "difference" takes y as it is, "log_ratio" takes its natural logarithm, so that a margin of 0.01 is about
            1 %.
        source: where the claim comes from.

    Raises:
        TypeError, ValueError: naming the field, what came and what was expected.
    """

    text: str
    metric: str
    contrast: Mapping[str, float]
    kind: Kind = "greater"
    margin: float = 0.0
    scale: Scale = "difference"
    source: str = ""

    def __post_init__(self) -> None:
        _text(self.text, "Claim.text")
        _text(self.metric, f"metric of the claim {self.text!r}")
        _text(self.source, f"source of the claim {self.text!r}", empty=True)
        for name, choices in (("kind", get_args(Kind)), ("scale", get_args(Scale))):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} of the claim {self.text!r} is one of {', '.join(choices)}; got {getattr(self, name)!r}"
                )
        if not isinstance(self.contrast, Mapping):
            raise TypeError(f"contrast of the claim {self.text!r} maps arm names to numbers; got {self.contrast!r}")
        contrast = {
            arm: _number(c, f"contrast[{arm!r}] of the claim {self.text!r}") for arm, c in self.contrast.items()
        }
        size = sum(map(abs, contrast.values()))
        if size == 0 or abs(sum(contrast.values())) > 1e-9 * size:
            raise ValueError(f"contrast of the claim {self.text!r} must sum to zero without being zero; got {contrast}")
        margin = _number(self.margin, f"margin of the claim {self.text!r}")
        if margin < 0 or (margin == 0 and self.kind == "within"):
            allowed = "above" if self.kind == "within" else "at least"
            raise ValueError(f"margin of the claim {self.text!r} is {allowed} zero; got {self.margin!r}")
        object.__setattr__(self, "contrast", contrast)
        object.__setattr__(self, "margin", margin)


@dataclasses.dataclass(frozen=True)
class AllOf:
    """A claim that holds only if every part holds, such as an inverted U: up from the left, and down to the right.

    Raises:
        TypeError, ValueError: if there are fewer than two parts, or one that is not a Claim.
    """

    parts: Sequence[Claim]
    text: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.parts, (str, Claim)) or not isinstance(self.parts, Iterable):
            raise TypeError(f"AllOf.parts is a list of Claims; got {self.parts!r}")
        parts = tuple(self.parts)
        for part in parts:
            if not isinstance(part, Claim):
                raise TypeError(f"AllOf.parts holds Claims only; got {part!r}")
        if len(parts) < 2:
            raise ValueError(f"AllOf needs two parts or more; got {len(parts)}")
        _text(self.text, "AllOf.text", empty=True)
        _text(self.source, f"source of the claim {self.text!r}", empty=True)
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "text", self.text or "; and ".join(part.text for part in parts))


def elementary(claims: Iterable[Claim | AllOf]) -> Iterator[Claim]:
    """The contrasts behind `claims`, in order, the parts of every AllOf in its place."""
    for claim in claims:
        yield from claim.parts if isinstance(claim, AllOf) else (claim,)


def claim_to_json(claim: Claim | AllOf) -> dict[str, Any]:
    """Plain data that `claim_from_json` reads back as an equal claim."""
    if isinstance(claim, AllOf):
        return {"text": claim.text, "source": claim.source, "parts": [claim_to_json(part) for part in claim.parts]}
    return dataclasses.asdict(claim)


def claim_from_json(data: Mapping[str, Any]) -> Claim | AllOf:
    """The inverse of `claim_to_json`; raises as the claims themselves do."""
    if "parts" in data:
        return AllOf([Claim(**part) for part in data["parts"]], text=data["text"], source=data["source"])
    return Claim(**data)
