"""What an ablation could have seen: power, the minimum detectable effect, and how many seeds would settle a claim.

Effects and margins are in standard deviations of the contrast over seeds. For "greater" the effect is the distance of d
beyond the margin, and power is the upper tail of the noncentral t (`scipy.stats.nct`). For "within" it is the margin
itself with a true effect of zero, and TOST's power is

    P = E_s [2 Phi(sqrt(n) margin - t s) - 1]_+      s^2 ~ chi^2_(n-1) / (n-1),   t the (1 - alpha) quantile

(Phillips 1990). `alpha` is 0.05 divided by the number of contrasts in the sweep: the smallest step of Holm, so the
answers are on the safe side.
"""

import numpy as np
from scipy import integrate, optimize, stats

from mha_research.analysis.statistics.claims import Kind
from mha_research.analysis.statistics.verdict import ALPHA, MIN_SEEDS

POWER = 0.8
MAX_SEEDS = 1000


def power(size: float, seeds: int, kind: Kind, alpha: float = ALPHA) -> float:
    """Probability that a claim is supported, under normal noise. `size`: the effect beyond the margin, or the margin of
    "within", in standard deviations."""
    df = seeds - 1
    t = stats.t.ppf(1 - alpha, df)
    if kind == "greater":
        return float(stats.nct.sf(t, df, size * np.sqrt(seeds)))

    def inside(chi: float) -> float:
        return (2 * stats.norm.cdf(np.sqrt(seeds) * size - t * chi / np.sqrt(df)) - 1) * stats.chi.pdf(chi, df)

    last = np.sqrt(seeds * df) * size / t  # beyond it the spread alone exceeds the margin
    low, high = np.minimum(
        stats.chi.ppf([1e-10, 1 - 1e-10], df), last
    )  # the range that matters: over all of it quad would miss the peak
    return float(integrate.quad(inside, low, high)[0])


def detectable(seeds: int, kind: Kind, alpha: float = ALPHA) -> float:
    """The size that is supported with 80 % power, in standard deviations of the contrast.

    Raises:
        ValueError: for fewer than 3 seeds, with which no claim is decided.
    """
    if seeds < MIN_SEEDS:
        raise ValueError(f"seeds must be at least {MIN_SEEDS}; got {seeds}")
    high = 1.0
    while power(high, seeds, kind, alpha) < POWER:
        high *= 2
    return float(optimize.brentq(lambda size: power(size, seeds, kind, alpha) - POWER, 0, high, xtol=1e-6))


def seeds_needed(size: float, kind: Kind, alpha: float = ALPHA) -> int | None:
    """The fewest seeds that support this size with 80 % power; None if more than 1000, or if the size is not above
    zero."""
    if not size > 0 or power(size, MAX_SEEDS, kind, alpha) < POWER:
        return None
    low, high = MIN_SEEDS - 1, MAX_SEEDS  # power grows with seeds
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(size, middle, kind, alpha) >= POWER else (middle, high)
    return high
