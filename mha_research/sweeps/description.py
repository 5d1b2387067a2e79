"""What a sweep file states: the arms, the seeds, and what is asked. Everything is checked before anything is
created."""

import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from mha_research.analysis.statistics.claims import AllOf, Claim, elementary

Overrides = Mapping[str, Any]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,199}")  # it names folders, of at most 255 bytes
# What a claim may be about: held-out data at the last step, the speed of exclusive runs, the steps to a threshold
# (`steps_to:valid/loss<=2.0`), and the size of a run. `valid/` itself chooses, so it cannot claim.
_CLAIMED = re.compile(r"test/.+|time/.+|steps_to:[^<>=]+(<=|>=)(.+)|parameters|flops_per_step|tokens_per_step")
FIRST_TUNING_SEED = 1000


@dataclasses.dataclass(frozen=True)
class Tune:
    """Every arm is first run at each of `values` of `field`, with `seeds` of its own, and goes on with its best one.

    Attributes:
        field: path of the config field, such as `optimizer.learning_rate`.
        values: the grid, the same for every arm.
        seeds: how many, or which; a number n means 1000, ..., 1000 + n - 1, so that no seed both chooses and claims.
        metric: a `valid/` metric, whose mean over the tuning seeds chooses.
        goal: "min" or "max".
    """

    field: str
    values: Sequence[Any]
    seeds: int | Sequence[int]
    metric: str
    goal: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if not isinstance(self.field, str):
            raise TypeError(f"Tune.field is the path of a config field; got {self.field!r}")
        if isinstance(self.values, str) or not isinstance(self.values, Iterable):
            raise TypeError(f"Tune.values is a list; got {self.values!r}")
        values = tuple(self.values)
        if len(values) < 2 or len(set(map(repr, values))) < len(values):
            raise ValueError(f"Tune.values needs two different values or more; got {list(values)}")
        if not isinstance(self.metric, str) or not self.metric.startswith("valid/"):
            raise ValueError(f"Tune.metric starts with valid/, for the test data must not choose; got {self.metric!r}")
        if self.goal not in ("min", "max"):
            raise ValueError(f"Tune.goal is min or max; got {self.goal!r}")
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "seeds", seed_list(self.seeds, "Tune.seeds", FIRST_TUNING_SEED))


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The arms of an ablation, its replicates, and its claims.

    Attributes:
        arms: name -> {path of a config field: value}, in the order of the report; or pairs, as the helpers make them.
        seeds: how many (0, 1, ...), or which. Arms are paired by seed: same order of the data, same held-out sets.
        claims: see `Claim`; the arms of their contrasts must exist.
        tune: optional, see `Tune`.
        worst: metric -> what a diverged run counts with; needed for every metric that a diverged run cannot report.
        deterministic: metrics in which seeds make no difference; the size of a run always is.

    Raises:
        TypeError, ValueError: naming the arm, seed or claim that is wrong.
    """

    arms: Mapping[str, Overrides]
    seeds: int | Sequence[int]
    claims: Sequence[Claim | AllOf] = ()
    tune: Tune | None = None
    worst: Mapping[str, float] = dataclasses.field(default_factory=dict)
    deterministic: Collection[str] = ()

    def __post_init__(self) -> None:
        if self.tune is not None and not isinstance(self.tune, Tune):
            raise TypeError(f"Sweep.tune is a Tune; got {self.tune!r}")
        object.__setattr__(self, "arms", _checked_arms(self.arms, self.tune))
        object.__setattr__(self, "seeds", seed_list(self.seeds, "Sweep.seeds", 0))
        if self.tune is not None and (both := set(self.seeds) & set(self.tune.seeds)):  # type: ignore[arg-type]
            raise ValueError(f"seeds that tune must not be seeds that claim; both lists hold {sorted(both)}")
        object.__setattr__(self, "claims", self._checked_claims())
        if not isinstance(self.worst, Mapping):
            raise TypeError(f"Sweep.worst maps metrics to numbers; got {self.worst!r}")
        for metric, value in self.worst.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not isinstance(metric, str):
                raise TypeError(f"Sweep.worst[{metric!r}] is a number; got {value!r}")
            if not math.isfinite(value):
                raise ValueError(f"Sweep.worst[{metric!r}] is finite, for verdicts count with it; got {value!r}")
        metrics = self.deterministic
        if (
            isinstance(metrics, str)
            or not isinstance(metrics, Iterable)
            or not all(isinstance(m, str) for m in metrics)
        ):
            raise TypeError(f"Sweep.deterministic is a list of metrics; got {metrics!r}")

    def _checked_claims(self) -> tuple[Claim | AllOf, ...]:
        if isinstance(self.claims, (str, Claim, AllOf)) or not isinstance(self.claims, Iterable):
            raise TypeError(f"Sweep.claims is a list of Claims; got {self.claims!r}")
        claims = tuple(self.claims)
        for claim in claims:
            if not isinstance(claim, (Claim, AllOf)):
                raise TypeError(f"Sweep.claims holds Claim and AllOf; got {claim!r}")
        for claim in elementary(claims):
            if unknown := [arm for arm in claim.contrast if arm not in self.arms]:
                raise ValueError(
                    f"the claim {claim.text!r} is about the arm {unknown[0]!r}; there are {list(self.arms)}"
                )
            if not _is_claimed(claim.metric):
                raise ValueError(
                    f"the claim {claim.text!r} is about {claim.metric!r}; claims use test/, not what chooses"
                )
        return claims


def _is_claimed(metric: str) -> bool:
    if not (match := _CLAIMED.fullmatch(metric)):
        return False
    try:
        return match[2] is None or math.isfinite(float(match[2]))
    except ValueError:
        return False


def vary(field: str, values: Iterable[Any], name: str = "") -> dict[str, Overrides]:
    """One arm per value of a field. `name` is its pattern, `h{}` for h1, h2; without one `num_heads=1`."""
    pattern = name or f"{field.rsplit('.', 1)[-1]}={{}}"
    return chain(*({pattern.format(_short(value)): {field: value}} for value in values))


def chain(*groups: Mapping[str, Overrides]) -> dict[str, Overrides]:
    """The arms of all groups, one after the other."""
    arms: dict[str, Overrides] = {}
    for group in groups:
        for name, overrides in group.items():
            if name in arms:
                raise ValueError(f"there are two arms {name!r}")
            arms[name] = overrides
    return arms


def product(*groups: Mapping[str, Overrides]) -> dict[str, Overrides]:
    """Every combination of one arm from each group, the last group fastest; names are joined by `-`."""
    arms: dict[str, Overrides] = {"": {}}
    for group in groups:
        arms = chain(*(_joined(left, right) for left in arms.items() for right in group.items()))
    return arms


def zipped(*groups: Mapping[str, Overrides]) -> dict[str, Overrides]:
    """The first arms of all groups together, the second ones together, and so on; the groups are equally long."""
    if len({len(group) for group in groups}) > 1:
        raise ValueError(f"zipped groups must be equally long; got {[len(group) for group in groups]} arms")
    return chain(*(product(*({name: group[name]} for name, group in zip(names, groups))) for names in zip(*groups)))


def seed_list(seeds: int | Sequence[int], name: str, first: int) -> tuple[int, ...]:
    """The seeds themselves: a number n counts up from `first`."""
    if isinstance(seeds, (bool, str)) or not isinstance(seeds, (int, Iterable)):
        raise TypeError(f"{name} is a number of seeds or a list of them; got {seeds!r}")
    if isinstance(seeds, int):
        seeds = range(first, first + seeds)
    seeds = tuple(seeds)
    for seed in seeds:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"{name} holds whole numbers; got {seed!r} of type {type(seed).__name__}")
        if not 0 <= seed < 2**31:
            raise ValueError(f"{name} holds numbers from 0 to 2^31 - 1; got {seed}")
    if not seeds:
        raise ValueError(f"{name} is empty")
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"{name} holds a seed twice; got {list(seeds)}")
    return seeds


def _checked_arms(arms: Any, tune: Tune | None) -> dict[str, dict[str, Any]]:
    if isinstance(arms, Mapping):
        arms = list(arms.items())
    if isinstance(arms, str) or not isinstance(arms, Iterable):
        raise TypeError(f"Sweep.arms maps names to overrides; got {arms!r}")
    checked: dict[str, dict[str, Any]] = {}
    for name, overrides in arms:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"the name of an arm is of letters, digits and . _ = + -; got {name!r}")
        if name in checked:
            raise ValueError(f"there are two arms {name!r}")
        if not isinstance(overrides, Mapping) or not all(isinstance(path, str) for path in overrides):
            raise TypeError(f"the arm {name!r} maps paths of config fields to values; got {overrides!r}")
        if "seed" in overrides:
            raise ValueError(f"the arm {name!r} sets seed, but every arm runs with the same seeds: see Sweep.seeds")
        if tune is not None and tune.field in overrides:
            raise ValueError(f"the arm {name!r} sets {tune.field}, which is tuned")
        checked[name] = dict(overrides)
    if not checked:
        raise ValueError("Sweep.arms is empty")
    return checked


def _joined(left: tuple[str, Overrides], right: tuple[str, Overrides]) -> dict[str, Overrides]:
    if both := left[1].keys() & right[1].keys():
        raise ValueError(f"the arms {left[0]!r} and {right[0]!r} both set {sorted(both)[0]!r}")
    return {f"{left[0]}-{right[0]}" if left[0] else right[0]: {**left[1], **right[1]}}


def _short(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return re.sub(r"[^A-Za-z0-9._=+-]+", "_", text).strip("_")
