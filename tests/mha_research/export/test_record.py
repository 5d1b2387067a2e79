"""What a tracker is given of a run, and the command around it."""

import json
import shutil
from pathlib import Path

import pytest

from experiments.export import main
from mha_research.analysis.runs import load_runs
from mha_research.export import TRACKERS, ExportError, export_runs
from mha_research.export.record import Row, read_record, read_rows
from mha_research.export.trackers import require
from tests.mha_research.export.sweeps import BEGUN, RUNNING, finish, make


def test_rows_of_a_step_are_one_and_a_torn_line_is_none(tmp_path: Path) -> None:
    lines = [
        {"step": 2, "train/loss": 3.0, "time/seconds": 5.0},
        {"step": 2, "valid/loss": 4.0},
        {"step": 4, "valid/loss": 3.5},
        {"step": 6, "train/loss": 2.0, "time/seconds": 9.5},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 8, "tr')
    assert read_rows(path, 100.0) == [
        Row(2, 105.0, {"train/loss": 3.0, "time/seconds": 5.0, "valid/loss": 4.0}),
        Row(4, 105.0, {"valid/loss": 3.5}),
        Row(6, 109.5, {"train/loss": 2.0, "time/seconds": 9.5}),
    ]
    assert read_rows(tmp_path / "none.jsonl", 0.0) == []


def test_a_record(tmp_path: Path) -> None:
    runs = load_runs(make(tmp_path / "sweep"))
    record, running = read_record(runs["h1/seed1"]), read_record(runs[RUNNING])
    assert record is not None
    assert running is not None
    assert record.tags == {
        "arm": "h1", "seed": "1", "phase": "main", "status": "finished", "exploratory": "False",
    }  # fmt: skip
    assert record.over
    assert [row.step for row in record.rows] == [10, 20, 30, 40, 50, 60]
    assert record.rows[1].time == 1795953600 + 0.1 * 20 + 1  # `started` of its provenance, and `time/seconds`
    assert record.summary["parameters"] == 12345
    assert record.config["model.attention.num_heads"] == 1
    assert [path.name for path in record.files] == ["config.json", "provenance.jsonl", "result.json"]
    assert not running.over
    assert [row.step for row in running.rows] == [10, 20, 30]
    assert read_record(runs["h1/seed2"]) is None


def test_the_id_is_of_the_run_and_not_of_its_place_or_state(tmp_path: Path) -> None:
    sweep = make(tmp_path / "sweep")
    before = {name: read_record(load_runs(sweep)[name]).id for name in BEGUN}  # type: ignore[union-attr]
    assert len(set(before.values())) == len(BEGUN)
    finish(sweep)
    with (sweep / "runs" / RUNNING / "provenance.jsonl").open("a") as file:
        file.write('{"started": "2026-11-30T12:00:00Z"}\n')
    moved = shutil.move(sweep, tmp_path / "elsewhere")
    after = {name: read_record(load_runs(moved)[name]).id for name in BEGUN}  # type: ignore[union-attr]
    assert after == before


def test_a_missing_package_is_named_with_its_extra() -> None:
    with pytest.raises(ExportError, match=r"needs the package no_such_tracker: pip install 'mha_research\[no_such"):
        require("no_such_tracker")


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "--workdir is missing"),
        (["--workdir=nowhere"], "--to is missing"),
        (["--workdir=nowhere", "--to=paper"], "there is no tracker 'paper'; choose one of"),
        (["--workdir=nowhere", "--to=tensorboard"], "nowhere is neither a sweep"),
        (["--workdir=nowhere", "--to=tensorboard", "--where=x"], "unknown option --where"),
    ],
)
def test_a_wrong_command_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not Path("nowhere").exists()


def test_help_names_every_tracker(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in TRACKERS)


def test_two_exports_at_once_are_refused(tmp_path: Path) -> None:
    from mha_research.run_dir.files import exclusive

    sweep = make(tmp_path / "sweep")
    folder = sweep / "export" / "tensorboard"
    folder.mkdir(parents=True)
    with exclusive(folder / ".lock"), pytest.raises(ExportError, match="another process is exporting"):
        export_runs(sweep, to="tensorboard")
