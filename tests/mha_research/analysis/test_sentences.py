"""The sentences beside a verdict: what they say is computed elsewhere, so here only that they say the right thing."""

import pytest

from mha_research.analysis.report.wording import contrast_of, finding, power_of, standing
from mha_research.analysis.runs import load_runs
from mha_research.analysis.statistics.claims import Claim
from mha_research.analysis.statistics.comparison import verdicts
from mha_research.analysis.statistics.verdict import Verdict
from tests.mha_research.analysis.synthetic import CLAIMS, change_result, diverge, fail, make_sweep


def claim(kind="greater", margin=0.0):
    return Claim(text="?", metric="y", contrast={"a": 1, "b": 0.5, "c": -1.5}, kind=kind, margin=margin)


def test_contrast():
    assert contrast_of(claim()) == "a + 0.5 b − 1.5 c"


def test_power_of_a_difference():
    # Cohen's tables: one-sided t at 5 %, 3 values, 80 % power needs d = 2.30; d = 0.5 needs 27 values. sd is 1.
    verdict = Verdict(claim(), "inconclusive", "", (-0.5, 0.5, 1.5))
    assert power_of(verdict, verdict.claim, 1) == (
        "with 3 seeds, 80 % power needs an effect of 2.3 beyond the margin; "
        "about 27 seeds would settle an effect of the size found"
    )
    incomplete = Verdict(claim(), "inconclusive", "", (-0.5, float("nan"), 0.5, 1.5))
    assert power_of(incomplete, incomplete.claim, 1).endswith("about 27 seeds would settle an effect of the size found")
    decided = Verdict(claim(), "supported", "", (0.5, 1.5, 2.5))
    assert power_of(decided, decided.claim, 1) == "with 3 seeds, 80 % power needs an effect of 2.3 beyond the margin"


def test_power_of_no_difference():
    # TOST at 8 values needs a margin of 1.15 sd: see evidence in the table of docs/statistics.md.
    values = (1.0, 2.0, 3.0, -1.0, -2.0, -3.0, 0.0, 0.0)
    verdict = Verdict(claim("within", 2.3), "inconclusive", "", values)
    sentence = power_of(verdict, verdict.claim, 1)
    assert "needs a margin of 2.31" in sentence  # 1.153 times the sd of 2
    assert "about 9 seeds would settle it, were there no effect at all" in sentence


def test_power_of_a_difference_beyond_the_margin_is_that_of_contradicting_it():
    """(3 - 1) / 2 standard deviations, one-sided at 0.025: 9.94 pairs (`TTestPower` of statsmodels)."""
    values = tuple(3 + 2 * x for x in (-1.0, 0.0, 1.0))
    verdict = Verdict(claim("within", 1.0), "inconclusive", "", values)
    assert power_of(verdict, verdict.claim, 1).endswith("about 10 seeds would settle an effect of the size found")


@pytest.mark.parametrize("values", [(0.1, 0.2), (1.0, 1.0, 1.0), (float("nan"),) * 3])
def test_nothing_is_said_without_a_spread(values):
    verdict = Verdict(claim(), "inconclusive", "", values)
    assert power_of(verdict, verdict.claim, 1) == ""


def test_where_a_sweep_stands_and_what_it_found(tmp_path):
    workdir = make_sweep(tmp_path / "s", seeds=range(3), planned=range(5), tune=True, claims=CLAIMS[:3])
    diverge(workdir, "h1/seed1")
    fail(workdir, "h2/seed2")
    assert standing(load_runs(workdir)) == (
        "tuning 12 of 12 runs ended; main 12 of 20 runs ended, 1 diverged, 1 failed"
    )
    whole = make_sweep(tmp_path / "w", claims=CLAIMS[:3])
    for seed in range(5):
        change_result(whole, f"h8/seed{seed}", metrics={"test/nats_per_char": 1.0 + seed / 1000})
    said = finding(load_runs(whole), verdicts(load_runs(whole))[0])
    assert said == (
        "Of 3 claims, 2 came out as expected, 1 came out against what was expected. "
        "On average h8 was best: lowest test/nats_per_char, 1.002."
    )
