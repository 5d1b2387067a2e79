"""The rule that decides a claim: a paired t over seeds, Holm over the sweep's claims, and three words.

One contrast gives one number per planned seed, d_s. With t-tests of their mean (`scipy.stats.ttest_1samp`), n - 1
degrees of freedom:

    greater   p_sup tests H0: d <= margin      p_con tests H0: d >= margin
    within    p_sup tests H0: |d| >= margin    p_con tests H0: |d| <= margin
              (TOST: the larger of two)        (twice the smaller of two)

Holm's step-down adjustment runs over all contrasts of the sweep (parts of an AllOf included), once for the p_sup and
once for the p_con; a contrast with no p-value keeps its place with p = 1. Supported if the adjusted p_sup <= 0.05,
contradicted if the adjusted p_con <= 0.05, otherwise inconclusive: failing to reach significance never refutes. An
AllOf is supported if every part's raw p_sup <= 0.05 (an intersection-union test needs no adjustment over its parts) and
contradicted if any part's adjusted p_con <= 0.05.

Sources: Holm 1979; Schuirmann 1987 (TOST); Berger 1982 (intersection-union tests).
"""

import dataclasses
import enum
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import numpy as np
from scipy import stats
from statsmodels.stats.multitest import multipletests

from mha_research.analysis.statistics.claims import AllOf, Claim, Kind, elementary

ALPHA = 0.05
MIN_SEEDS = 3
Word = Literal["supported", "contradicted", "inconclusive"]


class Status(enum.Enum):
    """How a run ended: with metrics, with numbers that were no longer finite, or not at all (killed, failed, not
    started)."""

    FINISHED = "finished"
    DIVERGED = "diverged"
    LOST = "lost"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one run of one arm and one seed contributes: its status and its metrics at the planned step."""

    status: Status = Status.FINISHED
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The answer to one claim and the numbers behind it.

    Attributes:
        claim: what was asked.
        word: supported, contradicted or inconclusive.
        reason: one sentence that says why.
        values: d_s per planned seed, NaN where a run is missing; empty for an AllOf.
        p_sup, p_con: raw p-values (the largest p_sup and the smallest p_con of an AllOf's parts); NaN where there is
            none.
        adjusted_p_sup, adjusted_p_con: after Holm; an AllOf, whose support is not adjusted, repeats its p_sup.
        diverged, lost: runs behind the contrast that diverged (counted with the worst value) or are missing.
        parts: the verdicts of an AllOf's parts.
    """

    claim: Claim | AllOf
    word: Word
    reason: str
    values: tuple[float, ...] = ()
    p_sup: float = np.nan
    p_con: float = np.nan
    adjusted_p_sup: float = np.nan
    adjusted_p_con: float = np.nan
    diverged: int = 0
    lost: int = 0
    parts: tuple["Verdict", ...] = ()

    @property
    def mean(self) -> float:
        return float(np.mean(self.values)) if self.values else np.nan

    @property
    def interval(self) -> tuple[float, float]:
        """The t interval that agrees with the raw one-sided tests: 90 %, whose ends are 95 % bounds each."""
        if len(self.values) < 2 or not np.isfinite(self.values).all():
            return np.nan, np.nan
        half = stats.t.ppf(1 - ALPHA, len(self.values) - 1) * stats.sem(self.values)
        return self.mean - half, self.mean + half


def p_values(d: np.ndarray, kind: Kind, margin: float) -> tuple[np.ndarray, np.ndarray]:
    """(p_sup, p_con) of contrasts d (..., seeds) with spread; the leading axes are independent repetitions."""

    def above(bound: float) -> np.ndarray:  # small when d is above the bound
        return stats.ttest_1samp(d, bound, axis=-1, alternative="greater").pvalue

    def below(bound: float) -> np.ndarray:
        return stats.ttest_1samp(d, bound, axis=-1, alternative="less").pvalue

    if kind == "greater":
        return above(margin), below(margin)
    outside = 2 * np.minimum(above(margin), below(-margin))
    return np.maximum(above(-margin), below(margin)), np.minimum(outside, 1.0)


def exact_p_values(d: float, kind: Kind, margin: float) -> tuple[float, float]:
    """(p_sup, p_con) of a contrast without error: 0 where the comparison holds, 1 where it does not; on the boundary
    neither holds."""
    distance = d - margin if kind == "greater" else margin - abs(d)
    return float(distance <= 0), float(distance >= 0)


@dataclasses.dataclass
class _Contrast:
    """One elementary claim's numbers, and the reason why it has no p-value, if it has none."""

    claim: Claim
    values: np.ndarray
    diverged: int
    lost: int
    p_sup: float = np.nan
    p_con: float = np.nan
    problem: str = ""


def _measure(
    claim: Claim,
    outcomes: Mapping[str, Mapping[int, Outcome]],
    seeds: Sequence[int],
    worst: Mapping[str, float],
    deterministic: Collection[str],
) -> _Contrast:
    worst_value = worst.get(claim.metric, worst.get(claim.metric.split("@")[0], np.nan))
    diverged = {}  # per run, counted even where the contrast has no value
    lost: list[str] = []
    y = np.full((len(claim.contrast), len(seeds)), np.nan)
    for a, arm in enumerate(claim.contrast):
        for s, seed in enumerate(seeds):
            outcome = outcomes.get(arm, {}).get(seed, Outcome(Status.LOST))
            value = outcome.metrics.get(claim.metric)
            known = value is not None and np.isfinite(value)
            if known and (outcome.status is Status.FINISHED or claim.metric in deterministic):
                y[a, s] = value  # what seeds do not change, such as its size, a diverged run has all the same
            elif outcome.status is Status.DIVERGED or (outcome.status is Status.FINISHED and value is not None):
                diverged[arm, seed] = y[a, s] = worst_value
            else:
                lost.append(f"{arm} seed {seed}")
    undefined = claim.scale == "log_ratio" and bool((y <= 0).any())
    coefficients = np.array(list(claim.contrast.values()))[:, None]
    terms = np.full_like(y, np.nan) if undefined else coefficients * (np.log(y) if claim.scale == "log_ratio" else y)
    result = _Contrast(claim, terms.sum(0), len(diverged), len(lost))
    size = np.abs(terms).sum(0).max() if terms.size else 0.0
    if lost:
        result.problem = (
            f"incomplete: no {claim.metric} from {', '.join(lost[:3])}{' and others' if len(lost) > 3 else ''}"
        )
    elif len(seeds) < MIN_SEEDS:
        result.problem = f"{len(seeds)} seeds: fewer than {MIN_SEEDS}"
    elif diverged and not np.isfinite(worst_value):
        result.problem = f"{len(diverged)} diverged and no worst value is declared for {claim.metric}"
    elif undefined:
        result.problem = f"the logarithm of {claim.metric} is not defined for a value of zero or less"
    elif np.ptp(result.values) > 1e-13 * size:  # below that the spread is rounding
        result.p_sup, result.p_con = map(float, p_values(result.values, claim.kind, claim.margin))
    elif claim.metric in deterministic:
        result.p_sup, result.p_con = exact_p_values(float(result.values[0]), claim.kind, claim.margin)
    else:
        result.problem = f"every seed gives the same number, and {claim.metric} is not declared deterministic"
    return result


def _holm(p: Sequence[float]) -> np.ndarray:
    return multipletests(np.nan_to_num(p, nan=1.0), alpha=ALPHA, method="holm")[1]


def _word(supported: bool, contradicted: bool) -> Word:
    return "supported" if supported else "contradicted" if contradicted else "inconclusive"


def _decide(contrast: _Contrast, adjusted_p_sup: float, adjusted_p_con: float) -> Verdict:
    word = _word(adjusted_p_sup <= ALPHA, adjusted_p_con <= ALPHA)
    reason = contrast.problem or f"adjusted p {adjusted_p_sup:.3g} for, {adjusted_p_con:.3g} against"
    if contrast.diverged and not contrast.problem:
        reason += f"; {contrast.diverged} diverged, counted with the worst value"
    if contrast.problem:
        adjusted_p_sup = adjusted_p_con = np.nan
    return Verdict(
        contrast.claim,
        word,
        reason,
        tuple(map(float, contrast.values)),
        contrast.p_sup,
        contrast.p_con,
        float(adjusted_p_sup),
        float(adjusted_p_con),
        contrast.diverged,
        contrast.lost,
    )


def _decide_all(claim: AllOf, parts: tuple[Verdict, ...]) -> Verdict:
    p_sup = np.max([part.p_sup for part in parts])  # NaN if a part has none, so that it cannot be supported
    p_con, adjusted_p_con = (
        functools.reduce(np.fmin, [getattr(part, name) for part in parts]) for name in ("p_con", "adjusted_p_con")
    )
    word = _word(p_sup <= ALPHA, adjusted_p_con <= ALPHA)
    holding = sum(part.p_sup <= ALPHA for part in parts)
    reason = f"{holding} of {len(parts)} parts hold, {sum(part.word == 'contradicted' for part in parts)} contradicted"
    reason += "".join(f"; {part.reason}" for part in parts if np.isnan(part.p_sup))
    return Verdict(
        claim,
        word,
        reason,
        (),
        float(p_sup),
        float(p_con),
        float(p_sup),
        float(adjusted_p_con),
        sum(part.diverged for part in parts),
        sum(part.lost for part in parts),
        parts,
    )


def judge(
    claims: Sequence[Claim | AllOf],
    outcomes: Mapping[str, Mapping[int, Outcome]],
    seeds: Sequence[int],
    *,
    worst: Mapping[str, float] | None = None,
    deterministic: Collection[str] = (),
) -> list[Verdict]:
    """One verdict per claim, by the rule at the top of this file.

    Args:
        claims: all claims of the sweep: they are one family for Holm's adjustment.
        outcomes: arm -> seed -> outcome. A run that is not there is lost. A finished run whose metric is not finite
            diverged.
        seeds: the planned seeds, which are the replicates; others in `outcomes` are left out.
        worst: metric -> the value that a diverged run counts with; `metric@512` falls back to `metric`.
        deterministic: metrics in which seeds make no difference (a parameter count), compared exactly when they have no
            spread; a diverged run that has one counts with it.

    Raises:
        ValueError: if a seed is planned twice.
    """
    if len(set(seeds)) != len(seeds):
        raise ValueError(f"seeds must differ from each other; got {list(seeds)}")
    contrasts = [_measure(claim, outcomes, seeds, worst or {}, deterministic) for claim in elementary(claims)]
    if not contrasts:
        return []
    adjusted = zip(_holm([c.p_sup for c in contrasts]), _holm([c.p_con for c in contrasts]), strict=True)
    decided = iter([_decide(c, *p) for c, p in zip(contrasts, adjusted, strict=True)])
    return [
        _decide_all(claim, tuple(next(decided) for _ in claim.parts)) if isinstance(claim, AllOf) else next(decided)
        for claim in claims
    ]
