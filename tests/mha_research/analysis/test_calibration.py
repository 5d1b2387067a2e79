"""How often the rule is wrong: at most 5 % plus sampling error where its assumption holds, and as documented where
not."""

import pathlib
import re

import numpy as np
import pytest

from mha_research.analysis.statistics import calibration
from mha_research.analysis.statistics.supplementary import BCA_COVERAGE

DRAWS = 20_000
FIVE_PERCENT = 0.05 + 4 * np.sqrt(0.05 * 0.95 / DRAWS)
DOCUMENT = pathlib.Path(__file__).parents[3] / "docs" / "statistics.md"


@pytest.mark.parametrize("noise", calibration.NOISES)
@pytest.mark.parametrize("seeds", calibration.SEEDS)
def test_at_most_five_percent_where_arms_are_equally_noisy(noise, seeds):
    rng = np.random.default_rng(seeds)
    for arms in calibration.EQUAL:
        for kind in ("greater", "within"):
            assert max(calibration.error_rates(arms, noise, seeds, kind, DRAWS, rng)) <= FIVE_PERCENT, (arms, kind)


def test_exact_under_normal_noise_so_the_check_can_fail():
    rng = np.random.default_rng(1)
    supported, contradicted = calibration.error_rates(calibration.EQUAL[0], "normal", 5, "greater", DRAWS, rng)
    assert min(supported, contradicted) >= 0.1 - FIVE_PERCENT


def test_a_skewed_contrast_breaks_the_bound_and_the_document_says_so():
    rng = np.random.default_rng(2)
    supported, contradicted = calibration.error_rates(
        calibration.UNEQUAL[-1], "skewed (log-normal)", 5, "greater", DRAWS, rng)  # fmt: skip
    assert supported < 0.01
    assert 0.2 < contradicted < 0.26
    row = re.search(r"\| one arm has all the noise \| skewed \(log-normal\) \| greater \|.*", DOCUMENT.read_text())
    documented = [float(number) for number in re.findall(r"([\d.]+) %", row[0])]
    assert documented[3] == pytest.approx(100 * contradicted, abs=1.5)


def test_a_family_of_claims():
    assert max(calibration.family_error(4, 400, np.random.default_rng(3))) <= 0.05 + 4 * np.sqrt(0.05 * 0.95 / 400)


def test_documented_coverage_of_bca():
    coverage = calibration.bca_coverage(5, 1000, np.random.default_rng(4))
    assert coverage == pytest.approx(BCA_COVERAGE[5], abs=4 * np.sqrt(0.83 * 0.17 / 1000))


def test_the_command_writes_between_its_markers(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{calibration.BEGIN}\nold\n{calibration.END}\nafter\n")
    monkeypatch.setattr("sys.argv", ["calibration", "--draws", "100", "--write", str(page)])
    calibration.main()
    text = page.read_text()
    assert text.startswith(f"before\n{calibration.BEGIN}\n\n100 draws")
    assert text.endswith(f"{calibration.END}\nafter\n")
    assert "old" not in text
    assert text.count("| two arms |") == 6


def test_the_document_holds_every_cell_of_its_command():
    text = DOCUMENT.read_text()
    for arms in (*calibration.EQUAL, *calibration.UNEQUAL):
        assert text.count(f"| {arms.name} |") == 2 * len(calibration.NOISES)
