"""The statistics that are only shown, against closed forms and other routines."""

import itertools

import numpy as np
import pytest

from mha_research.analysis.statistics.supplementary import (
    bca_interval,
    bca_label,
    divergence_p,
    page_trend_p,
    pairing_correlation,
    wilcoxon_p,
)


@pytest.mark.parametrize("seeds", [3, 5, 8])
def test_wilcoxon_of_all_positive_is_one_in_two_to_the_n(seeds):
    assert wilcoxon_p(np.arange(1, seeds + 1) / 7) == pytest.approx(2.0**-seeds)


def test_wilcoxon_by_counting_signs():
    d = [0.5, -0.1, 0.3, 0.2]
    ranks = [4, 1, 3, 2]
    sums = [
        sum(r for r, sign in zip(ranks, signs, strict=True) if sign) for signs in itertools.product([0, 1], repeat=4)
    ]
    assert wilcoxon_p(d) == pytest.approx(np.mean(np.array(sums) >= 9))
    assert wilcoxon_p(np.add(d, 10), margin=10) == pytest.approx(wilcoxon_p(d))
    assert np.isnan(wilcoxon_p([2, 2, 2], margin=2))
    assert 0 < wilcoxon_p([1.0, 1.0, -1.0, 2.0]) < 1


def test_page_trend_by_counting_permutations():
    y = np.array([[1.0, 2, 3], [2, 1, 3], [1, 3, 5]])
    ranks = list(itertools.permutations([1, 2, 3]))
    totals = [sum(np.dot([1, 2, 3], row) for row in rows) for rows in itertools.product(ranks, repeat=3)]
    assert page_trend_p(y) == pytest.approx(np.mean(np.array(totals) >= 14 + 13 + 14))


def test_fisher_by_hand():
    assert divergence_p(3, 3, 0, 3) == pytest.approx(2 / 20)  # two extreme tables of C(6, 3)
    assert divergence_p(0, 8, 0, 8) == 1


def test_correlation():
    assert pairing_correlation([1, 2, 3], [5, 7, 9]) == pytest.approx(1)
    assert pairing_correlation([1, -1, 1, -1], [1, 1, -1, -1]) == pytest.approx(0)
    assert np.isnan(pairing_correlation([1, 1, 1], [1, 2, 3]))


def test_bca():
    low, high = bca_interval([1.0, 2, 3, 4, 10])
    assert 1 < low < 4 < high < 10
    assert (low, high) == bca_interval([1.0, 2, 3, 4, 10])
    assert np.isnan(bca_interval([1.0, 1, 1])).all()
    assert np.isnan(bca_interval([1.0, 2])).all()
    assert "84 % at 5 seeds" in bca_label(6)
    assert "covers" not in bca_label(2)
