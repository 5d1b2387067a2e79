"""Statistics shown beside a verdict and never deciding it. Each is scipy's; what is written here is how it applies to
paired seeds."""

from collections.abc import Sequence

import numpy as np
from scipy import stats

# How often the 95 % BCa interval of a mean covers it under normal noise, measured by
# `python -m mha_research.analysis.statistics.calibration`.
BCA_COVERAGE = {3: 0.74, 5: 0.84, 8: 0.89, 16: 0.91}


def wilcoxon_p(d: Sequence[float], margin: float = 0.0) -> float:
    """One-sided exact Wilcoxon signed-rank p of H0: d is symmetric about `margin` or below. With n seeds never under
    2^-n; NaN if all are ties."""
    shifted = np.asarray(d, float) - margin
    if not shifted.any():
        return np.nan
    tied = len(np.unique(np.abs(shifted))) < len(shifted) or not shifted.all()
    return float(stats.wilcoxon(shifted, alternative="greater", method="asymptotic" if tied else "exact").pvalue)


def bca_interval(d: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The nominal 95 % bias-corrected accelerated bootstrap interval of the mean; with few seeds it covers less
    (`bca_label`). NaN without spread."""
    if len(d) < 3 or np.ptp(d) == 0:
        return np.nan, np.nan
    interval = stats.bootstrap(
        (np.asarray(d, float),), np.mean, n_resamples=1999, method="BCa", rng=np.random.default_rng(seed)
    ).confidence_interval
    return float(interval.low), float(interval.high)


def bca_label(seeds: int) -> str:
    """Says what a 95 % BCa interval from this many seeds really covers, from the nearest smaller number of seeds that
    was measured."""
    measured = max((n for n in BCA_COVERAGE if n <= seeds), default=None)
    return "95 % BCa bootstrap" + (
        f" (covers about {100 * BCA_COVERAGE[measured]:.0f} % at {measured} seeds)" if measured else ""
    )


def page_trend_p(y: np.ndarray) -> float:
    """Page's L: p of no trend against arms that rise from the first column to the last. y: (seeds, arms), arms in the
    predicted order."""
    return float(stats.page_trend_test(y).pvalue)


def divergence_p(diverged_a: int, runs_a: int, diverged_b: int, runs_b: int) -> float:
    """Fisher's exact two-sided p that two arms diverge equally often."""
    return float(stats.fisher_exact([[diverged_a, runs_a - diverged_a], [diverged_b, runs_b - diverged_b]])[1])


def pairing_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Correlation over seeds of two arms: pairing multiplies the variance of their difference by about 1 - r. NaN for
    an arm without spread."""
    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return np.nan
    return float(np.corrcoef(a, b)[0, 1])
