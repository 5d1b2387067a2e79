"""The report: tidy files that read back, and a page that is whole, safe, and the same in a real browser."""

import dataclasses
import html
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from mha_research.analysis.manifest import Manifest
from mha_research.analysis.report import ablation_plots as plots
from mha_research.analysis.report.report import write_report
from mha_research.analysis.runs import load_runs
from mha_research.analysis.statistics.claims import AllOf, Claim
from tests.mha_research.analysis.synthetic import METRIC, change_result, diverge, fail, make_sweep


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    workdir = make_sweep(tmp_path_factory.mktemp("sweep") / "s", tune=True)
    diverge(workdir, "h1/seed3")
    fail(workdir, "h2/seed4")
    return workdir


@pytest.fixture(scope="module")
def page(workdir):
    return write_report(load_runs(workdir), workdir / "report")


def test_tables_read_back(workdir, page):
    results = pd.read_csv(page.parent / "results.csv")
    pd.testing.assert_frame_equal(results, pd.read_parquet(page.parent / "results.parquet"), check_dtype=False)
    assert len(results) == 4 * 5 + 4 * 3
    assert set(results["status"]) == {"finished", "diverged", "failed"}
    curves = pd.read_parquet(page.parent / "curves.parquet")
    loss = curves[(curves["name"] == "h8/seed2") & (curves["metric"] == METRIC)]["value"].item()
    assert loss == results.set_index("name").loc["h8/seed2", METRIC]
    judged = json.loads((page.parent / "verdicts.json").read_text())
    assert [verdict["word"] for verdict in judged["planned"]][1:3] == ["supported", "contradicted"]
    assert judged["planned"][0]["adjusted_p_sup"] is None
    assert "incomplete" in judged["planned"][0]["reason"]


def test_the_page_holds_what_it_must(page):
    text = page.read_text()
    for needed in (
        "How many heads?",
        "Eight heads &lt;beat&gt; four &amp; more",  # nothing from data becomes markup
        "OSError: no space &lt;left&gt;",
        "h1/seed3 diverged",
        "h2/seed4 failed",
        "at the edge of the grid",
        "seeds would settle",
        "0123abc",
        "python -m experiments.sweep --config=configs/sweeps/x.py &#x27;--config.task.files=my *&#x27; --workdir=DIR",
        "# one run of it, h1/seed0",
        "\\\n    --config.model.attention.num_heads=1 \\\n    --config.seed=0 "
        "\\\n    --config.optimizer.learning_rate=0.004 \\\n",
        "prefers-color-scheme: dark",
        "@media print",
        "covers about 84 % at 5 seeds",
    ):
        assert needed in text, needed
    assert "<beat>" not in text
    assert not re.search(r'(src|href)="(?!#|data:)', text)  # self-contained
    assert "#123456" not in text  # every figure's ink became the colour of the text
    identifiers = re.findall(r'\bid="([^"]+)"', text)
    assert len(identifiers) == len(set(identifiers))


def test_every_figure_is_sound_svg(page):
    figures = re.findall(r"<svg .*?</svg>", page.read_text(), flags=re.S)
    assert len(figures) == 6 + 2 + 1 + 1  # contrasts, effect and cost, heads, tuning
    for figure in figures:
        root = ElementTree.fromstring(figure)
        assert root.get("aria-label")
        assert root.get("viewBox")


def test_figures_draw_the_data(workdir):
    runs = load_runs(workdir)
    effect = plots.plot_effect(runs, METRIC, "h1")
    drawn = effect.axes[0].collections
    np.testing.assert_allclose(
        [path.get_offsets()[0][1] for path in drawn if len(path.get_offsets()) == 5],
        [runs.outcomes([METRIC])[arm][0].metrics[METRIC] for arm in runs.arms],
    )
    curves = plots.plot_curves(runs, "valid/nats_per_char")
    assert [len(line.get_xdata()) for line in curves.axes[0].lines] == [6] * 4
    cost = plots.plot_cost(runs, "valid/nats_per_char")
    last = [line.get_xdata()[-1] for line in (ax.lines[3] for ax in cost.axes[:3])]
    np.testing.assert_allclose(last, [60, 5, 60e9])  # 7 seconds, of which the first log row came after 2
    assert isinstance(plots.plot_tuning(runs), Figure)
    heads = plots.plot_heads(runs).axes[0]
    last = [run.curve("valid/nats_per_char")["value"] for run in runs.main() if run.arm == "h8"]
    eight = [value.iloc[-1] for value in last if len(value)]
    assert heads.lines[3].get_ydata()[-1] == pytest.approx(np.mean(eight) + 0.1 * 3.5)


def test_a_sweep_with_nothing_in_it_yet_still_has_a_page(tmp_path):
    workdir = make_sweep(tmp_path / "s", seeds=[], planned=range(3), tune=False)
    text = write_report(load_runs(workdir), tmp_path / "report").read_text()
    assert "12 runs have not ended" in text
    assert "incomplete" in text
    assert "No run has started" in text


def test_claims_are_nested_only_in_all_of(workdir):
    planned = load_runs(workdir).manifest.frozen.claims
    assert sum(isinstance(claim, AllOf) for claim in planned) == 1


PROBE = """<script>
const all = (what) => [...document.querySelectorAll(what)];
const boxes = all('figure svg').map(e => e.getBoundingClientRect());
parent.postMessage(JSON.stringify({figures: boxes.length, smallest: Math.min(...boxes.map(b => b.width * b.height)),
  wide: document.documentElement.scrollWidth, window: innerWidth,
  words: all('.word').map(e => e.textContent), arms: all('th').map(e => e.textContent).filter(t => /^h[0-9]$/.test(t)),
  ink: getComputedStyle(document.querySelector('figure svg text')).fill,
  paper: getComputedStyle(document.body).backgroundColor}), '*');
</script>"""
# Headless Chromium has no window as narrow as a phone, so the page is looked at in a frame.
FRAME = """<script>addEventListener('message', event => document.body.dataset.seen = event.data)</script>
<iframe src="page.html" style="border:0;width:{width}px;height:900px"></iframe>"""
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(not BROWSER, reason="no Chromium here; CI installs it")
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_in_a_real_browser(page, tmp_path, width, dark):
    (tmp_path / "page.html").write_text(page.read_text().replace("</body>", PROBE + "</body>"))
    frame = tmp_path / "frame.html"
    frame.write_text("<!doctype html><body>" + FRAME.format(width=width))
    command = [
        *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr"),
        f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1400,1000",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--virtual-time-budget=5000",
        "--dump-dom",
        frame.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ":CONSOLE" not in done.stderr
    seen = json.loads(html.unescape(re.search(r"data-seen=\"([^\"]*)\"", done.stdout)[1]))
    assert seen["figures"] == 10
    assert seen["smallest"] > 20_000
    assert seen["wide"] <= seen["window"] == width  # tables scroll by themselves, the page never sideways
    judged = json.loads((page.parent / "verdicts.json").read_text())["planned"]
    assert seen["words"] == [part["word"] for verdict in judged for part in (verdict, *verdict["parts"])]
    assert set(seen["arms"]) == {"h1", "h2", "h4", "h8"}

    def bright(colour):
        return sum(map(int, re.findall(r"\d+", colour)[:3])) > 3 * 128

    assert (bright(seen["ink"]), bright(seen["paper"])) == (dark, not dark)


def test_a_folder_of_other_things_is_left_alone(workdir, tmp_path):
    (tmp_path / "index.html").write_text("mine")
    with pytest.raises(ValueError, match=r"holds index\.html but no report; choose another folder with --output"):
        write_report(load_runs(workdir), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["index.html"]
    assert (tmp_path / "index.html").read_text() == "mine"


def test_seeds_of_another_machine_alone_have_ended(tmp_path):
    """The first directory planned seeds 0 to 2 and ran none of them; the second ran others, and tuned."""
    waiting = make_sweep(tmp_path / "a", seeds=[], planned=range(3))
    joined = load_runs(waiting, make_sweep(tmp_path / "b", seeds=range(3, 6)))
    text = write_report(joined, tmp_path / "report").read_text()
    assert "\\\n    --config.model.attention.num_heads=1 \\\n    --config.seed=3 " in text
    tuned = make_sweep(tmp_path / "c", seeds=range(3), tune=True)
    shutil.rmtree(tuned / "runs/h2")
    assert "at the edge of the grid" in write_report(load_runs(tuned), tmp_path / "tuned").read_text()


HOSTILE = "\"'><script>alert(1)</script> $\\bad{ & ünï😀 " + "long" * 500


def test_hostile_names_stay_text(tmp_path):
    """In claims, titles, metrics, reasons and logs; a dollar begins no formula."""
    metric = f"test/{HOSTILE}"
    claim = Claim(text=HOSTILE, source=HOSTILE, metric=metric, contrast={"h1": 1, "h2": -1})
    workdir = make_sweep(tmp_path / "s", seeds=range(3), claims=[claim])
    manifest = Manifest.read(workdir)
    manifest = dataclasses.replace(manifest, title=HOSTILE, config_file=HOSTILE)
    (workdir / "manifest.json").write_text(manifest.to_text())
    for run in manifest.runs:
        change_result(workdir, run.name, metrics={metric: 1.0 + run.seed + len(run.arm) * run.seed})
    diverge(workdir, "h4/seed1")
    change_result(workdir, "h4/seed1", message=HOSTILE)
    fail(workdir, "h8/seed1")
    (workdir / "failures/h8/seed1.json").write_text(json.dumps({"reason": HOSTILE, "log": [HOSTILE]}))
    text = write_report(load_runs(workdir), tmp_path / "report").read_text()
    assert "<script" not in text
    assert text.count("&lt;script&gt;alert(1)") > 8
    for figure in re.findall(r"<svg .*?</svg>", text, flags=re.S):
        ElementTree.fromstring(figure)


def test_single_runs_with_dollars_in_their_names_are_drawn(tmp_path):
    workdir = make_sweep(tmp_path / "s", seeds=range(2), arms={"h1": 0, "h2": 0})
    for seed, name in ((0, "a$\\bad$"), (1, "b$_$")):
        shutil.copytree(workdir / f"runs/h1/seed{seed}", tmp_path / name)
    runs = load_runs(tmp_path / "a$\\bad$", tmp_path / "b$_$")
    assert "a$\\bad$" in plots.svg(plots.plot_effect(runs, METRIC, "b$_$"), "effect")
    assert "b$_$" in plots.svg(plots.plot_curves(runs, "train/loss"), "curves")


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_sweep_of_few_seeds_that_all_diverged_still_has_a_page(seeds, tmp_path):
    workdir = make_sweep(tmp_path / "s", seeds=range(seeds))
    for run in load_runs(workdir):
        diverge(workdir, run.name)
    text = write_report(load_runs(workdir), tmp_path / "report").read_text()
    assert f"{seeds} seeds: fewer than 3" in text
    assert f"{4 * seeds} diverged" in text
