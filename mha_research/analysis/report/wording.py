"""The numbers of a verdict as sentences, for the report page and for the command line."""

import math
from collections.abc import Sequence
from typing import get_args

import pandas as pd

from mha_research.analysis.report.page import number
from mha_research.analysis.runs import Runs
from mha_research.analysis.statistics.by_document import document_interval
from mha_research.analysis.statistics.claims import Claim, elementary
from mha_research.analysis.statistics.comparison import values
from mha_research.analysis.statistics.power import detectable, seeds_needed
from mha_research.analysis.statistics.supplementary import (
    bca_interval,
    bca_label,
    page_trend_p,
    pairing_correlation,
    wilcoxon_p,
)
from mha_research.analysis.statistics.verdict import ALPHA, MIN_SEEDS, Verdict, Word


def contrast_of(claim: Claim) -> str:
    """`h1 − h8`, `1.5 h1 + 0.5 h2 − 2 h4`."""
    terms = (f"{'+' if c > 0 else '−'} {'' if abs(c) == 1 else f'{abs(c):.3g} '}{a}" for a, c in claim.contrast.items())
    return " ".join(terms).removeprefix("+ ")


def power_of(verdict: Verdict, claim: Claim, family: int) -> str:
    """What this many seeds could have seen, and how many the effect that was found would need; "" where nobody can say.

    `family` is the number of contrasts of the sweep, by which Holm's first step divides.
    """
    d = [x for x in verdict.values if math.isfinite(x)]
    mean, sd = pd.Series(d, dtype=float).agg(["mean", "std"])
    if len(d) < MIN_SEEDS or not sd > 0:
        return ""
    alpha = ALPHA / family
    least = number(detectable(len(d), claim.kind, alpha) * sd, 3)
    if claim.kind == "greater":
        needed = seeds_needed(abs(mean - claim.margin) / sd, "greater", alpha)
        text = f"with {len(d)} seeds, 80 % power needs an effect of {least} beyond the margin"
        found = "an effect of the size found"
    elif abs(mean) > claim.margin:  # what would contradict it, which is tested on both sides
        needed = seeds_needed((abs(mean) - claim.margin) / sd, "greater", alpha / 2)
        text = f"with {len(d)} seeds, 80 % power needs a margin of {least}"
        found = "an effect of the size found"
    else:
        needed = seeds_needed(claim.margin / sd, "within", alpha)
        text = f"with {len(d)} seeds, 80 % power needs a margin of {least}"
        found = "it, were there no effect at all"
    if verdict.word != "inconclusive":
        return text
    settle = f"about {needed} seeds would settle {found}" if needed else "no feasible number of seeds would settle it"
    return f"{text}; {settle}"


def beside(verdict: Verdict, claim: Claim, runs: Runs) -> list[str]:
    """What is shown and never decides."""
    table = values(runs, claim.metric)
    d = [x for x in verdict.values if math.isfinite(x)]
    parts = [f"p {number(verdict.p_sup, 3)} for and {number(verdict.p_con, 3)} against, before Holm's adjustment"]
    if len(d) >= MIN_SEEDS:
        low, high = bca_interval(d)
        if claim.kind == "greater":
            parts.append(f"Wilcoxon p {number(wilcoxon_p(d, claim.margin), 3)}")
        parts.append(f"{bca_label(len(d))} [{number(low)}, {number(high)}]")
    arms = [arm for arm in claim.contrast if arm in table]
    both = table[arms].dropna()
    if len(arms) == 2:
        r = pairing_correlation(both[arms[0]], both[arms[1]])
        parts.append(f"pairing: the arms correlate {'–' if math.isnan(r) else f'{r:.3f}'} over seeds")
    ordered = sorted(arms, key=lambda arm: claim.contrast[arm])
    if len(ordered) > 2 and len(both) >= 2:
        parts.append(f"Page's trend p {number(page_trend_p(both[ordered].to_numpy()), 3)}")
    if by_document := document_interval(runs, claim):
        low, high, documents = by_document
        interval = f"[{number(low)}, {number(high)}]"
        parts.append(f"other text, these seeds: 95 % BCa bootstrap over {documents} documents {interval}")
    return parts


def standing(runs: Runs) -> str:
    """Where a sweep stands: `tuning 4 of 4 runs ended; main 5 of 12 runs ended, 1 diverged, 2 failed`."""
    parts = []
    for phase, name in (("tune", "tuning"), ("main", "main")):
        states = [run.status for run in runs if run.phase == phase]
        if states:
            ended = len(states) - states.count("waiting")
            trouble = [f"{states.count(how)} {how}" for how in ("diverged", "failed", "unreadable") if how in states]
            parts.append(", ".join([f"{name} {ended} of {len(states)} runs ended", *trouble]))
    return "; ".join(parts)


def finding(runs: Runs, planned: Sequence[Verdict]) -> str:
    """What was found and which arm was best, in plain words for someone who has never seen a p value."""
    counts = {word: sum(verdict.word == word for verdict in planned) for word in get_args(Word)}
    told = {"supported": "came out as expected", "contradicted": "came out against what was expected"}
    told["inconclusive"] = "stayed open"
    parts = [f"{counts[word]} {told[word]}" for word in told if counts[word]]
    claims = f"{len(planned)} claim{'s' * (len(planned) != 1)}"
    said = [f"Of {claims}, {', '.join(parts)}." if planned else "Nothing was claimed beforehand."]
    metrics = [claim.metric for claim in elementary(verdict.claim for verdict in planned)]
    metric = next((name for name in metrics if is_lower_better(name) is not None), None)
    means = values(runs, metric).mean().dropna() if metric else pd.Series(dtype=float)
    if metric and len(means) > 1:
        best = str(means.idxmin() if is_lower_better(metric) else means.idxmax())
        side = "lowest" if is_lower_better(metric) else "highest"
        said.append(f"On average {best} was best: {side} {metric}, {number(means[best])}.")
    return " ".join(said)


def is_lower_better(metric: str) -> bool | None:
    """Whether less of the metric is better, None where its name does not tell."""
    if any(word in metric for word in ("loss", "nats", "bits", "nmse")):
        return not metric.startswith("time/")
    return False if "accuracy" in metric or "solved" in metric else None
