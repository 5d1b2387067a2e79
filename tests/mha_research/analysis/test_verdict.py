"""The rule of a verdict against t-tests of scipy, TOST and Holm of statsmodels, values by hand, and its own table of
cases."""

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.weightstats import ttost_paired

from mha_research.analysis import AllOf, Claim, Outcome, Status, judge
from mha_research.analysis.statistics.verdict import p_values

UP = {"b": 1, "a": -1}


def runs(**arms):
    """Outcomes of metric y: arm -> one value per seed 0, 1, ...; a Status in place of a value is a run that ended
    so."""
    return {
        arm: {
            seed: Outcome(value) if isinstance(value, Status) else Outcome(metrics={"y": value})
            for seed, value in enumerate(values)
        }
        for arm, values in arms.items()
    }


def claim(contrast=UP, kind="greater", margin=0.0, **fields):
    return Claim(text="?", metric="y", contrast=contrast, kind=kind, margin=margin, **fields)


def one(a_claim, outcomes, seeds, **how):
    (verdict,) = judge([a_claim], outcomes, range(seeds), **how)
    return verdict


def test_t_by_hand():
    # d = 1, 2, 3: mean 2, standard error 1/sqrt(3), t = 2 sqrt(3) with 2 degrees of freedom, whose tail has the closed
    # form 1/2 - t / (2 sqrt(2 + t^2)).
    verdict = one(claim(), runs(a=[10, 20, 30], b=[11, 22, 33]), 3)
    tail = 0.5 - np.sqrt(12) / (2 * np.sqrt(14))
    np.testing.assert_allclose([verdict.p_sup, verdict.p_con], [tail, 1 - tail], rtol=1e-12)
    assert verdict.values == (1, 2, 3)
    assert verdict.mean == 2
    assert verdict.word == "supported"
    np.testing.assert_allclose(verdict.interval, [2 - 2.919986 / np.sqrt(3), 2 + 2.919986 / np.sqrt(3)], rtol=1e-6)


@pytest.mark.parametrize("seeds", [3, 5, 8])
def test_p_values_are_those_of_scipy_and_statsmodels(seeds):
    rng = np.random.default_rng(seeds)
    a, b = rng.standard_normal((2, seeds))
    greater, within = (
        one(claim(margin=0.3), runs(a=a, b=b), seeds),
        one(claim(kind="within", margin=0.3), runs(a=a, b=b), seeds),
    )
    assert greater.p_sup == pytest.approx(stats.ttest_rel(b - 0.3, a, alternative="greater").pvalue, rel=1e-10)
    assert greater.p_con == pytest.approx(stats.ttest_rel(b - 0.3, a, alternative="less").pvalue, rel=1e-10)
    assert within.p_sup == pytest.approx(ttost_paired(b, a, -0.3, 0.3)[0], rel=1e-10)
    outside = min(
        stats.ttest_rel(b - 0.3, a, alternative="greater").pvalue,
        stats.ttest_rel(b + 0.3, a, alternative="less").pvalue,
    )
    assert within.p_con == pytest.approx(min(1, 2 * outside), rel=1e-10)


def test_p_values_of_many_contrasts_at_once():
    d = np.random.default_rng(0).standard_normal((2, 3, 5))
    for kind in ("greater", "within"):
        together = np.array(p_values(d, kind, 0.4))
        apart = np.array([[p_values(row, kind, 0.4) for row in block] for block in d])
        np.testing.assert_allclose(together, np.moveaxis(apart, -1, 0), rtol=1e-12)


HIGH, ZERO, NOISE = [10.0, 11, 12, 10, 11], [0.1, 0, -0.1, 0.1, 0], [3.0, -4, 5, -2, -1]


@pytest.mark.parametrize(
    "kind, margin, b, word",
    [
        ("greater", 0, HIGH, "supported"),
        ("greater", 0, [-x for x in HIGH], "contradicted"),
        ("greater", 0, NOISE, "inconclusive"),
        ("greater", 20, HIGH, "contradicted"),  # there is an effect, and it is smaller than was claimed
        ("greater", 10.8, HIGH, "inconclusive"),
        ("within", 1, ZERO, "supported"),
        ("within", 1, HIGH, "contradicted"),
        ("within", 1, [-x for x in HIGH], "contradicted"),
        ("within", 1, NOISE, "inconclusive"),
        ("within", 11, HIGH, "inconclusive"),
    ],
)
def test_words(kind, margin, b, word):
    assert one(claim(kind=kind, margin=margin), runs(a=[0.0] * 5, b=b), 5).word == word


def with_p(p, seeds=5):
    """Values of an arm that give the raw p_sup against an arm of zeros."""
    shape = np.array([-2.0, -1, 0, 1, 2])
    return shape + stats.t.ppf(1 - p, seeds - 1) * stats.sem(shape)


def test_holm_by_hand():
    # Sorted 0.01, 0.02, 0.04 are multiplied by 3, 2, 1 and made monotone: 0.03, 0.04, 0.04.
    outcomes = runs(zero=[0.0] * 5, x=with_p(0.04), y=with_p(0.01), z=with_p(0.02))
    verdicts = judge([claim({arm: 1, "zero": -1}) for arm in "xyz"], outcomes, range(5))
    np.testing.assert_allclose([v.p_sup for v in verdicts], [0.04, 0.01, 0.02], rtol=1e-9)
    np.testing.assert_allclose([v.adjusted_p_sup for v in verdicts], [0.04, 0.03, 0.04], rtol=1e-9)
    assert [v.word for v in verdicts] == ["supported"] * 3


def test_holm_takes_back_a_raw_significance_and_runs_apart_for_the_two_sides():
    # 0.03 twice becomes 0.06 on the side of p_sup; the third claim's p_sup of 0.985 is a p_con of 0.015, times 3 =
    # 0.045.
    outcomes = runs(zero=[0.0] * 5, x=with_p(0.03), y=with_p(0.03), z=with_p(0.985))
    verdicts = judge([claim({arm: 1, "zero": -1}) for arm in "xyz"], outcomes, range(5))
    np.testing.assert_allclose([v.adjusted_p_sup for v in verdicts], [0.09, 0.09, 0.985], rtol=1e-9)
    np.testing.assert_allclose(verdicts[2].adjusted_p_con, 0.045, rtol=1e-9)
    assert [v.word for v in verdicts] == ["inconclusive", "inconclusive", "contradicted"]


def test_a_claim_that_lost_its_runs_keeps_its_place_in_the_family():
    outcomes = runs(zero=[0.0] * 5, x=with_p(0.03), y=[Status.LOST] * 5)
    verdicts = judge([claim({arm: 1, "zero": -1}) for arm in "xy"], outcomes, range(5))
    assert verdicts[0].adjusted_p_sup == pytest.approx(0.06)
    assert verdicts[0].word == "inconclusive"
    assert "incomplete" in verdicts[1].reason
    assert np.isnan(verdicts[1].p_sup)


def test_all_of_takes_raw_support_and_adjusted_contradiction():
    def pair(x, y):
        outcomes = runs(zero=[0.0] * 5, x=with_p(x), y=with_p(y))
        return judge([AllOf([claim({arm: 1, "zero": -1}) for arm in "xy"])], outcomes, range(5))[0]

    both = pair(0.04, 0.045)  # Holm would give 0.08: the intersection-union test does not ask for it
    assert both.word == "supported"
    assert both.p_sup == pytest.approx(0.045)
    assert both.parts[0].word == "inconclusive"
    assert pair(0.04, 0.06).word == "inconclusive"
    assert pair(0.01, 0.97).word == "inconclusive"  # p_con 0.03, adjusted 0.06
    against = pair(0.01, 0.98)  # p_con 0.02, adjusted 0.04
    assert against.word == "contradicted"
    assert against.adjusted_p_con == pytest.approx(0.04)


def test_parts_count_in_the_family():
    outcomes = runs(zero=[0.0] * 5, x=with_p(0.02), y=with_p(0.5), z=with_p(0.5))
    plain, _ = judge(
        [claim({"x": 1, "zero": -1}), AllOf([claim({arm: 1, "zero": -1}) for arm in "yz"])], outcomes, range(5)
    )
    assert plain.adjusted_p_sup == pytest.approx(0.06)


def test_all_of_with_a_lost_part_is_incomplete_unless_another_part_is_contradicted():
    parts = [claim({arm: 1, "zero": -1}) for arm in "xy"]
    (lost,) = judge([AllOf(parts)], runs(zero=[0.0] * 5, x=with_p(0.001), y=[Status.LOST] * 5), range(5))
    assert lost.word == "inconclusive"
    assert "incomplete" in lost.reason
    assert lost.lost == 5
    (against,) = judge([AllOf(parts)], runs(zero=[0.0] * 5, x=with_p(0.999), y=[Status.LOST] * 5), range(5))
    assert against.word == "contradicted"


def test_a_diverged_run_counts_with_the_worst_value():
    outcomes = runs(a=[4, Status.DIVERGED, float("nan"), 4], b=[3.0, 3, 3, 3])
    verdict = one(claim({"a": 1, "b": -1}), outcomes, 4, worst={"y": 9})
    assert verdict.values == (1, 6, 6, 1)
    assert verdict.diverged == 2
    assert "2 diverged" in verdict.reason
    undeclared = one(claim({"a": 1, "b": -1}), outcomes, 4)
    assert undeclared.word == "inconclusive"
    assert "no worst value is declared for y" in undeclared.reason


def test_a_metric_at_a_length_falls_back_to_the_worst_value_of_the_metric():
    outcomes = {arm: {s: Outcome(Status.DIVERGED) for s in range(3)} for arm in "ab"}
    at_length = Claim(text="?", metric="y@512", contrast=UP)
    assert one(at_length, outcomes, 3, worst={"y": 9.0}).values == (0, 0, 0)


@pytest.mark.parametrize("missing", [Status.LOST, None])
def test_a_lost_run_makes_the_verdict_incomplete(missing):
    outcomes = runs(a=[0.0] * 6, b=[*HIGH, Status.LOST])
    if missing is None:
        del outcomes["b"][5]
    verdict = one(claim(), outcomes, 6, worst={"y": 9})
    assert verdict.word == "inconclusive"
    assert verdict.lost == 1
    assert "no y from b seed 5" in verdict.reason
    assert one(claim(), outcomes, 5).word == "supported"  # the planned seeds decide


def test_fewer_than_three_seeds_are_never_enough():
    verdict = one(claim(), runs(a=[0, 0.0], b=[10, 10.1]), 2, deterministic={"y"})
    assert verdict.word == "inconclusive"
    assert "2 seeds" in verdict.reason


@pytest.mark.parametrize(
    "kind, margin, d, word",
    [
        ("greater", 0, 1, "supported"),
        ("greater", 0, -1, "contradicted"),
        ("greater", 1, 1, "inconclusive"),  # on the boundary: neither above nor below
        ("within", 2, 1, "supported"),
        ("within", 2, -2, "inconclusive"),
        ("within", 2, -3, "contradicted"),
    ],
)
def test_zero_spread_is_exact_for_deterministic_metrics_only(kind, margin, d, word):
    outcomes = runs(a=[0.1, 0.2, 0.3], b=[0.1 + d, 0.2 + d, 0.3 + d])  # equal but for rounding
    asked = claim(kind=kind, margin=margin)
    if margin != abs(d):
        assert one(asked, outcomes, 3, deterministic={"y"}).word == word
    outcomes = runs(a=[7, 7, 7], b=[7 + d] * 3)
    assert one(asked, outcomes, 3, deterministic={"y"}).word == word
    undeclared = one(asked, outcomes, 3)
    assert undeclared.word == "inconclusive"
    assert "not declared deterministic" in undeclared.reason


def test_a_deterministic_metric_with_spread_is_tested_like_any_other():
    assert one(claim(), runs(a=[0.0] * 5, b=NOISE), 5, deterministic={"y"}).word == "inconclusive"


def test_log_ratio():
    verdict = one(claim(scale="log_ratio", margin=np.log(1.5)), runs(a=[1, 2, 3.0], b=[2.02, 3.98, 6.0]), 3)
    np.testing.assert_allclose(verdict.values, np.log([2.02, 1.99, 2]), rtol=1e-12)
    assert verdict.word == "supported"
    undefined = one(claim(scale="log_ratio"), runs(a=[1, 2, 0.0], b=[2, 4, 6.0]), 3)
    assert undefined.word == "inconclusive"
    assert "logarithm" in undefined.reason


def test_interaction_and_trend():
    outcomes = runs(a=[1.0, 2, 4], b=[2.0, 3, 5], c=[3.0, 5, 9], d=[5.0, 8, 11])
    assert one(claim({"d": 1, "c": -1, "b": -1, "a": 1}), outcomes, 3).values == (1, 2, 1)
    assert one(claim({"a": -1.5, "b": -0.5, "c": 0.5, "d": 1.5}), outcomes, 3).values == (6.5, 10, 12.5)


def test_a_seed_twice_and_no_claims():
    with pytest.raises(ValueError, match=r"seeds must differ .* \[0, 1, 1\]"):
        judge([claim()], {}, [0, 1, 1])
    assert judge([], {}, [0, 1, 2]) == []
