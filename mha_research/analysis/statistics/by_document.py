"""What other text would say: a claim's contrast when held-out documents are drawn anew, with the seeds as they are.

Seeds are the only replicates of a verdict, so its interval does not cover new text. This one covers new text and not
new seeds; it is shown beside the verdict and never decides.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np
from scipy import stats

from mha_research.analysis.runs import Run, Runs
from mha_research.analysis.statistics.claims import Claim

MIN_DOCUMENTS = 5
# A metric that is a ratio of sums over targets: which sum, and what its mean is divided by.
_RATIOS = {"loss": ("loss", 1.0), "nats_per_char": ("loss", 1.0), "bits_per_char": ("loss", math.log(2))}
_RATIOS["accuracy"] = ("hits", 1.0)


def document_interval(runs: Runs, claim: Claim, seed: int = 0) -> tuple[float, float, int] | None:
    """(low, high, documents): the 95 % BCa bootstrap interval over documents of the seeds' mean contrast.

    The contrast is the mean over seeds of sum_a c_a y_(a, s), and y a ratio of sums over the drawn documents, or its
    logarithm for `log_ratio`. None for a metric that is no such ratio, with fewer than 5 documents scored, or where no
    seed has finished runs of every arm.
    """
    split, _, metric = claim.metric.partition("/")
    name, at, length = metric.partition("@")
    if name not in _RATIOS:
        return None
    part, unit = _RATIOS[name]
    runs_of = {arm: {run.seed: run for run in runs.main() if run.arm == arm} for arm in claim.contrast}
    seeds = sorted(set.intersection(*(set(found) for found in runs_of.values())))
    sums = {arm: [_sums(found[s], f"{split}{at}{length}") for s in seeds] for arm, found in runs_of.items()}
    paired = [i for i in range(len(seeds)) if all(found[i] for found in sums.values())]
    if not paired:
        return None
    over, under = (
        np.array([[found[i][which] for i in paired] for found in sums.values()]) for which in (part, "count")
    )
    scored = under.min((0, 1)) > 0
    over, under = over[..., scored], under[..., scored]
    if scored.sum() < MIN_DOCUMENTS:
        return None
    statistic = _contrast(over / unit, under, np.array(list(claim.contrast.values())), claim.scale == "log_ratio")
    documents = over.shape[-1]
    alone = statistic(np.arange(documents)[:, None])
    if np.ptp(alone) <= 1e-12 * np.abs(alone).max():
        return float(alone[0]), float(alone[0]), documents
    interval = stats.bootstrap(
        (np.arange(documents),), statistic, n_resamples=1999, batch=100, rng=np.random.default_rng(seed)
    ).confidence_interval
    return float(interval.low), float(interval.high), documents


def _sums(run: Run, split: str) -> Mapping[str, list[float]]:
    return run.documents.get(split, {}) if run.status == "finished" else {}


def _contrast(over: np.ndarray, under: np.ndarray, c: np.ndarray, logarithm: bool) -> Callable[..., np.ndarray]:
    """The mean contrast as a function of which documents are drawn; `over` and `under` are (arms, seeds, documents)."""

    def statistic(drawn: np.ndarray, axis: int = -1) -> np.ndarray:
        drawn = np.moveaxis(drawn, axis, -1).astype(int)
        y = over[..., drawn].sum(-1) / under[..., drawn].sum(-1)
        return np.tensordot(c, (np.log(y) if logarithm else y).mean(1), 1)

    return statistic
