"""Arms against a baseline, seed by seed; and what a sweep's claims came to."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import stats

from mha_research.analysis.manifest import Question
from mha_research.analysis.runs import SIZES, Run, Runs
from mha_research.analysis.statistics.claims import elementary
from mha_research.analysis.statistics.supplementary import divergence_p, pairing_correlation
from mha_research.analysis.statistics.verdict import Verdict, judge


def values(runs: Runs, metric: str) -> pd.DataFrame:
    """One row a seed and one column an arm; a diverged run has the declared worst value, a lost one NaN."""
    worst = runs.manifest.frozen.worst if runs.manifest else {}
    worst_value = worst.get(metric, worst.get(metric.split("@")[0], math.nan))

    def number(run: Run) -> float:
        return worst_value if run.status == "diverged" and metric not in SIZES else run.value(metric)

    rows = [(run.seed, run.arm, number(run)) for run in runs.main()]
    table = pd.DataFrame(rows, columns=["seed", "arm", metric]).pivot(index="seed", columns="arm", values=metric)
    return table[[arm for arm in runs.arms if arm in table]].sort_index()


def compare(runs: Runs, metric: str, baseline: str) -> pd.DataFrame:
    """Every arm's mean and its difference to the baseline, paired by seed.

    Columns: arm, seeds, mean, sd, difference (arm - baseline), low and high (95 % t interval of it), p (two-sided
    paired t, not adjusted: verdicts come from `verdicts`), d_z (difference over its standard deviation), correlation
    (over seeds, between the arm and the baseline), diverged, divergence_p (Fisher), lost.
    Raises ValueError for an unknown baseline, or a metric that no run has.
    """
    table = values(runs, metric)
    if baseline not in table:
        raise ValueError(f"baseline {baseline!r} is not an arm; there are {list(table)}")
    if table.isna().all(axis=None):
        raise ValueError(f"no run has the metric {metric!r}")
    count = {arm: [run.status for run in runs.main() if run.arm == arm] for arm in table}
    diverged = {arm: states.count("diverged") for arm, states in count.items()}
    rows = []
    for arm in table:
        both = table[[arm, baseline]].dropna() if arm != baseline else table[[arm]].dropna()
        d = (both[arm] - both[baseline]).to_numpy() if arm != baseline else np.array([])
        low, high, p, d_z = _paired(d)
        rows.append(
            {
                "arm": arm,
                "seeds": int(table[arm].notna().sum()),
                "mean": table[arm].mean(),
                "sd": table[arm].std(),
                "difference": float(d.mean()) if len(d) else 0.0 if arm == baseline else math.nan,
                "low": low,
                "high": high,
                "p": p,
                "d_z": d_z,
                "correlation": pairing_correlation(both[arm], both[baseline]) if arm != baseline else math.nan,
                "diverged": diverged[arm],
                "divergence_p": divergence_p(diverged[arm], len(count[arm]), diverged[baseline], len(count[baseline])),
                "lost": sum(state not in ("finished", "diverged") for state in count[arm]),
            }
        )
    return pd.DataFrame(rows)


def _paired(d: np.ndarray) -> tuple[float, float, float, float]:
    """(low, high, p, d_z) of differences; NaN where they have no spread."""
    if len(d) < 2 or np.ptp(d) == 0:
        return math.nan, math.nan, math.nan, math.nan
    result = stats.ttest_1samp(d, 0.0)
    interval = result.confidence_interval(0.95)
    return float(interval.low), float(interval.high), float(result.pvalue), float(d.mean() / d.std(ddof=1))


def verdicts(runs: Runs) -> tuple[list[Verdict], list[Verdict]]:
    """(of the frozen question, exploratory ones): the second judges what was added later, or seeds that joined.

    Raises ValueError for runs that belong to no sweep.
    """
    if runs.manifest is None:
        raise ValueError("these runs belong to no sweep, so nothing was claimed about them")
    frozen, later = runs.manifest.frozen, runs.manifest.later
    seeds = sorted({run.seed for run in runs.main()})
    planned = _judged(runs, frozen, frozen.seeds)
    if later is None and set(seeds) == set(frozen.seeds):
        return planned, []
    return planned, _judged(runs, later or frozen, seeds)


def _judged(runs: Runs, question: Question, seeds: Sequence[int]) -> list[Verdict]:
    metrics = list(dict.fromkeys(claim.metric for claim in elementary(question.claims)))
    deterministic = {*question.deterministic, *SIZES}
    return judge(question.claims, runs.outcomes(metrics), seeds, worst=question.worst, deterministic=deterministic)
