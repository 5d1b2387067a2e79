"""Power and its inverses against statsmodels, and against simulation where statsmodels has nothing."""

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.power import TTestPower

from mha_research.analysis.statistics.power import detectable, power, seeds_needed


@pytest.mark.parametrize("seeds", [3, 5, 8, 16])
def test_greater_is_the_one_sided_t_of_statsmodels(seeds):
    theirs = TTestPower()
    assert power(0.9, seeds, "greater") == pytest.approx(theirs.power(0.9, seeds, 0.05, alternative="larger"), rel=1e-6)
    size = detectable(seeds, "greater")
    assert theirs.power(size, seeds, 0.05, alternative="larger") == pytest.approx(0.8, abs=1e-4)
    assert seeds_needed(size * 1.001, "greater") == seeds


@pytest.mark.parametrize("seeds, margin", [(5, 1.6005), (8, 1.1527), (16, 0.7673)])
def test_within_detects_what_a_simulation_accepts(seeds, margin):
    assert detectable(seeds, "within") == pytest.approx(margin, abs=1e-4)
    assert seeds_needed(margin * 1.001, "within") == seeds
    rng = np.random.default_rng(seeds)
    d = rng.standard_normal((40_000, seeds))
    half = stats.t.ppf(0.95, seeds - 1) * d.std(-1, ddof=1) / np.sqrt(seeds)
    accepted = np.mean(np.abs(d.mean(-1)) + half < margin)  # the 90 % interval lies inside: TOST in another form
    assert accepted == pytest.approx(0.8, abs=4 * np.sqrt(0.16 / 40_000))


def test_power_grows_and_a_smaller_alpha_costs_seeds():
    for kind in ("greater", "within"):
        assert 0 <= power(0.2, 3, kind) < power(0.5, 30, kind) < power(0.5, 300, kind) <= 1
        assert seeds_needed(0.7, kind, alpha=0.05 / 6) > seeds_needed(0.7, kind)


def test_limits():
    assert seeds_needed(0.0, "greater") is seeds_needed(-1.0, "within") is seeds_needed(0.001, "greater") is None
    assert seeds_needed(50.0, "greater") == 3
    with pytest.raises(ValueError, match="at least 3; got 2"):
        detectable(2, "greater")
