"""Every picture that is shipped or written, and every page, opens in a real browser without a fault."""

from pathlib import Path

import pytest

from mha_research.analysis.report import ablation_plots as plots
from mha_research.analysis.report.report import write_report
from mha_research.analysis.runs import load_runs
from tests.browser import BROWSER, WHY_NOT, problems
from tests.mha_research.analysis.synthetic import METRIC, make_sweep

DOCS = Path(__file__).parents[1] / "docs"
pytestmark = pytest.mark.skipif(not BROWSER, reason=WHY_NOT)


def test_shipped(tmp_path):
    shipped = sorted(path for kind in ("*.svg", "*.png", "*.html") for path in DOCS.rglob(kind))
    assert len(shipped) >= 3
    assert problems(shipped, tmp_path) == []


def test_written(tmp_path):
    runs = load_runs(make_sweep(tmp_path / "s", seeds=range(3), tune=True))
    drawn = tmp_path / "effect.svg"
    drawn.write_text(plots.svg(plots.plot_effect(runs, METRIC, "h1"), "effect"), encoding="utf8")
    assert problems([drawn, write_report(runs, tmp_path / "report")], tmp_path) == []


def test_faults_are_seen(tmp_path):
    (tmp_path / "twice.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg" xmlns="http://www.w3.org/2000/svg"/>')
    (tmp_path / "cut.png").write_bytes(b"\x89PNG")
    (tmp_path / "page.html").write_text("<!doctype html><body><script>console.error('wrong')</script>")
    found = "\n".join(problems(sorted(tmp_path.iterdir()), tmp_path))
    for said in ("twice.svg is malformed", "images do not show: cut.png", "page.html: ", "wrong"):
        assert said in found
