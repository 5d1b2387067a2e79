"""Reading sweep directories: every number comes from the files, and what does not belong together is refused."""

import json
import math

import pytest

from mha_research.analysis.manifest import Manifest, ManifestError
from mha_research.analysis.report.report import write_report
from mha_research.analysis.runs import load_runs
from mha_research.analysis.statistics.comparison import compare, values, verdicts
from mha_research.analysis.statistics.verdict import Status
from tests.mha_research.analysis.synthetic import (
    CLAIMS,
    EFFECT,
    METRIC,
    STEPS,
    change_result,
    diverge,
    fail,
    make_sweep,
)


def test_runs_are_what_the_files_say(tmp_path):
    workdir = make_sweep(tmp_path / "s", seeds=range(3))
    diverge(workdir, "h1/seed1")
    fail(workdir, "h2/seed2")
    runs = load_runs(workdir)
    assert len(runs) == 12
    assert runs.arms == list(EFFECT)
    assert [run.status for run in runs if run.arm in ("h1", "h2")].count("finished") == 4
    first = runs[0]
    assert (first.name, first.arm, first.seed, first.config["model.attention.num_heads"]) == ("h1/seed0", "h1", 0, 1)
    stored = json.loads((workdir / "runs/h1/seed0/result.json").read_text())
    assert runs["h1/seed0"] is first
    assert repr(first) == f"Run('h1/seed0', finished, '{workdir / 'runs/h1/seed0'}')"
    assert repr(runs).startswith(f"Runs of {workdir}:\n  Run('h1/seed0', finished, ")
    with pytest.raises(KeyError, match="no run 'h9/seed0'; there are h1/seed0, "):
        runs["h9/seed0"]
    assert first.value(METRIC) == stored["metrics"][METRIC]
    assert first.value("parameters") == 12345
    assert list(first.curve("valid/nats_per_char")["step"]) == [10, 20, 30, 40, 50, 60]
    assert math.isnan(first.value("test/nothing"))
    assert len(first.curve("nothing")) == 0
    outcomes = runs.outcomes([METRIC, "parameters"])
    assert outcomes["h1"][1].status is Status.DIVERGED
    assert outcomes["h1"][1].metrics == {"parameters": 12345}
    assert outcomes["h2"][2].status is Status.LOST
    table = runs.table()
    assert list(table["status"]).count("diverged") == 1
    assert table[METRIC].notna().sum() == 10
    long = runs.curves()
    assert len(long[(long["name"] == "h4/seed0") & (long["metric"] == "train/loss")]) == 6


def test_steps_to_a_threshold_are_censored_at_the_budget(tmp_path):
    run = load_runs(make_sweep(tmp_path / "s", seeds=range(3)))[0]
    curve = run.curve("valid/nats_per_char")
    threshold = curve["value"][2] + 1e-9
    assert run.value(f"steps_to:valid/nats_per_char<={threshold}") == 30
    assert run.value("steps_to:valid/nats_per_char<=0.1") == STEPS
    assert run.value("steps_to:valid/nats_per_char>=0.1") == 10
    assert run.value("time/steps_per_second") == 10


def test_a_torn_last_row_is_left_out(tmp_path):
    workdir = make_sweep(tmp_path / "s", seeds=range(3))
    with (workdir / "runs/h1/seed0/metrics.jsonl").open("a") as file:
        file.write('{"step": 70, "train/lo')
    assert load_runs(workdir)[0].rows["step"].max() == 60


def test_single_runs_are_arms(tmp_path):
    workdir = make_sweep(tmp_path / "s", seeds=range(3))
    runs = load_runs(workdir / "runs/h1/seed0", workdir / "runs/h2/seed1")
    assert runs.manifest is None
    assert [(run.arm, run.seed) for run in runs] == [("seed0", 0), ("seed1", 1)]
    with pytest.raises(ValueError, match="belong to no sweep"):
        verdicts(runs)


def test_directories_join_by_arm_and_seed(tmp_path):
    parts = [
        make_sweep(tmp_path / name, seeds=seeds, planned=range(5))
        for name, seeds in (("a", range(3)), ("b", range(2, 5)))
    ]
    runs = load_runs(*parts)
    assert len(runs) == 20
    assert all(run.status == "finished" for run in runs)
    assert runs.same_question
    planned, exploratory = verdicts(runs)
    assert [v.word for v in planned] == [v.word for v in verdicts(load_runs(make_sweep(tmp_path / "all")))[0]]
    assert exploratory == []


def test_what_does_not_belong_together_is_refused(tmp_path):
    a, b = (make_sweep(tmp_path / name, seeds=range(3)) for name in "ab")
    change_result(b, "h4/seed1", metrics={METRIC: 1.0})
    with pytest.raises(ManifestError, match="same arm and seed with different results"):
        load_runs(a, b)
    text = (b / "manifest.json").read_text()
    (b / "manifest.json").write_text(text.replace('"d_model": 128', '"d_model": 64'))
    change_result(b, "h4/seed1", metrics=load_runs(a)[6].result["metrics"])
    with pytest.raises(ManifestError, match=r"the arm 'h1' differs in model\.d_model"):
        load_runs(a, b)
    with pytest.raises(ManifestError, match=r"neither a sweep .* nor a run"):
        load_runs(tmp_path)


@pytest.mark.parametrize(
    "old, new, message",
    [
        ('"seeds": [0, 1, 2]', '"seeds": [0, 1, 2, 3]', "do not have the hash"),
        ('"name": "h1/seed0"', '"name": "../../outside"', "outside its directory"),
        ('"runs": [', '"runs": [[', "cannot be read"),
        ('"hash": ', '"hish": ', "cannot be read"),
        ('"arms": {', '"arms": [], "arm": {', "cannot be read"),
        ('"name": "h1/seed0"', '"name": 3', "cannot be read"),
        ('"name": "h1/seed0"', '"name": "h2/seed0"', "names the run 'h2/seed0' twice"),
        ('"arm": "h1"', '"arm": "h9"', "cannot be read"),
        ('"seed": 0, "phase"', '"seed": 1, "phase"', "'h1/seed0' is not that of its arm and seed"),
        ('num_heads": 1, "seed": 0', 'num_heads": 2, "seed": 0', "'h1/seed0' is not that of its arm and seed"),
    ],
)
def test_a_manifest_that_was_changed_is_refused(tmp_path, old, new, message):
    workdir = make_sweep(tmp_path / "s", seeds=range(3))
    path = workdir / "manifest.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ManifestError, match=message):
        Manifest.read(workdir)


def test_the_manifest_survives_its_file(tmp_path):
    workdir = make_sweep(tmp_path / "s", tune=True)
    manifest = Manifest.read(workdir)
    assert manifest.to_text() == (workdir / "manifest.json").read_text()
    assert tuple(manifest.frozen.claims) == CLAIMS
    lines = (workdir / "manifest.json").read_text().splitlines()
    assert sum(line.startswith('{"name": ') for line in lines) == len(manifest.runs) == 32  # one line a run


def test_compare_by_hand(tmp_path):
    workdir = make_sweep(tmp_path / "s", seeds=range(3))
    for seed, (a, b) in enumerate([(1.0, 2.0), (2.0, 4.0), (3.0, 6.0)]):
        change_result(workdir, f"h1/seed{seed}", metrics={METRIC: a})
        change_result(workdir, f"h2/seed{seed}", metrics={METRIC: b})
    diverge(workdir, "h4/seed0")
    fail(workdir, "h8/seed0")
    table = compare(load_runs(workdir), METRIC, "h1").set_index("arm")
    row = table.loc["h2"]
    assert (row["mean"], row["difference"], row["sd"], row["seeds"]) == (4, 2, 2, 3)
    half = 4.302652729749464 / math.sqrt(3)  # t quantile with 2 degrees of freedom; the differences are 1, 2, 3
    assert (row["low"], row["high"]) == pytest.approx((2 - half, 2 + half))
    assert row["p"] == pytest.approx(0.07417990022744858)
    assert row["d_z"] == 2
    assert row["correlation"] == pytest.approx(1)
    assert table.loc["h1", "difference"] == 0
    assert (table.loc["h4", "diverged"], table.loc["h8", "lost"], table.loc["h8", "seeds"]) == (1, 1, 2)
    assert values(load_runs(workdir), METRIC).loc[0, "h4"] == 3.0
    with pytest.raises(ValueError, match="'h3' is not an arm"):
        compare(load_runs(workdir), METRIC, "h3")
    with pytest.raises(ValueError, match="no run has the metric 'test/f1'"):
        compare(load_runs(workdir), "test/f1", "h1")


def test_verdicts_of_planned_and_of_added_seeds(tmp_path):
    workdir = make_sweep(tmp_path / "s")
    planned, exploratory = verdicts(load_runs(workdir))
    words = ["supported", "supported", "contradicted", "supported", "supported"]
    assert [verdict.word for verdict in planned] == words
    assert exploratory == []
    more = make_sweep(tmp_path / "more", seeds=range(7))
    joined = load_runs(workdir, more)
    again, exploratory = verdicts(joined)
    assert again == planned
    assert not joined.same_question
    assert len(exploratory) == 5
    assert len(exploratory[0].values) == 7


@pytest.mark.parametrize("name", ["result.json", "config.json", "documents.json"])
@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff\x00", b'{"metrics": [], "test": 3}'])
def test_a_damaged_file_of_a_run_costs_that_run_and_is_named(tmp_path, name, content):
    workdir = make_sweep(tmp_path / "s", seeds=range(3))
    (workdir / "runs/h1/seed0" / name).write_bytes(content)
    runs = load_runs(workdir)
    assert [run.name for run in runs if run.status != "finished"] == ["h1/seed0"]
    bad = runs["h1/seed0"]
    assert bad.status == "unreadable"
    assert f"h1/seed0/{name} cannot be read: " in bad.failure["reason"]
    assert "\n" not in bad.failure["reason"]
    assert compare(runs, METRIC, "h1").set_index("arm")["lost"].to_dict() == {"h1": 1, "h2": 0, "h4": 0, "h8": 0}


def test_a_run_of_a_kind_that_is_unknown_here_costs_that_run(tmp_path):
    workdir = make_sweep(tmp_path / "s", seeds=range(3))
    for name in ("h2/seed1", "h4/seed0"):
        config = workdir / "runs" / name / "config.json"
        config.write_text(config.read_text().replace('"kind": "multi_head"', '"kind": "from_tomorrow"', 1))
    (workdir / "runs/h8/seed2/config.json").unlink()
    runs = load_runs(workdir)
    bad = {run.name: run.failure["reason"] for run in runs if run.status == "unreadable"}
    assert set(bad) == {"h2/seed1", "h4/seed0", "h8/seed2"}
    assert "from_tomorrow" in bad["h2/seed1"]
    assert "a result but no config.json" in bad["h8/seed2"]
    text = write_report(runs, tmp_path / "report").read_text()
    assert "h2/seed1 cannot be read here." in text
    assert "from_tomorrow" in text
    single = load_runs(workdir / "runs/h2/seed1", workdir / "runs/h1/seed0")
    assert [run.status for run in single] == ["unreadable", "finished"]


def test_damaged_lines_are_left_out(tmp_path):
    workdir = make_sweep(tmp_path / "s", seeds=range(3))
    folder = workdir / "runs/h1/seed0"
    for name in ("metrics.jsonl", "provenance.jsonl"):
        with (folder / name).open("ab") as file:
            file.write(b'{"step": 7\n[]\n\xff\n{"ste{"step": 8}')
    run = load_runs(workdir)[0]
    assert list(run.rows["step"]) == sorted([*range(10, 70, 10)] * 2)
    assert len(run.provenance) == 1
