"""However a run was interrupted, it ends with the bits of one that was not (S24); nothing is lost or written twice."""

import json
import pathlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ml_collections import ConfigDict

from mha_research.config import override
from mha_research.run_dir import CheckpointError, Checkpoints, WorkdirError, read_result
from mha_research.run_dir.log import Log
from mha_research.training import Interrupted, train
from mha_research.training import loop as loop_module

Fingerprint = Callable[..., dict[str, Any]]


class Killed(BaseException):
    """Stands for SIGKILL where the process must live on: nothing catches it, nothing is saved."""


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], None]) -> None:
    """Makes the next run act just before the update of the given step."""
    original = loop_module.train_batches

    def batches(task: Any, config: ConfigDict, start: int) -> Iterator[Any]:
        for number, batch in enumerate(original(task, config, start), start + 1):
            if number == step:
                act()
            yield batch

    monkeypatch.setattr(loop_module, "train_batches", batches)


def kill(*_: Any, **__: Any) -> None:
    raise Killed


def test_rows_are_where_the_config_says(uninterrupted: dict[str, Any]) -> None:
    rows = uninterrupted["rows"]
    assert [row["step"] for row in rows] == [4, 5, 8, 10, 12, 12]
    assert [row["step"] for row in rows if "train/loss" in row] == [5, 10, 12]
    assert [row["step"] for row in rows if "valid/loss" in row] == [4, 8, 12]
    assert [row["step"] for row in rows if "test/loss" in row] == [12]


@pytest.mark.parametrize("kills", [(1,), (6,), (9, 9), (3, 7, 11, 12), (5, 6, 7, 8, 9)])
def test_killed_at_any_step_any_number_of_times(
    kills: tuple[int, ...],
    tiny: ConfigDict,
    uninterrupted: dict[str, Any],
    fingerprint: Fingerprint,
    tmp_path: pathlib.Path,
) -> None:
    for step in kills:
        with pytest.MonkeyPatch.context() as monkeypatch:
            at_step(monkeypatch, step, kill)
            with pytest.raises(Killed):
                train(tiny, tmp_path / "run")
    train(tiny, tmp_path / "run")
    assert fingerprint(tiny, tmp_path / "run") == uninterrupted


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_says_so_twice(
    number: signal.Signals,
    tiny: ConfigDict,
    uninterrupted: dict[str, Any],
    fingerprint: Fingerprint,
    tmp_path: pathlib.Path,
) -> None:
    before = signal.getsignal(number)
    for step in (3, 7):
        with pytest.MonkeyPatch.context() as monkeypatch:
            at_step(monkeypatch, step, lambda: signal.raise_signal(number))
            with pytest.raises(Interrupted, match=f"stopped by signal {int(number)} after step {step}") as caught:
                train(tiny, tmp_path / "run")
        assert caught.value.signal == number
        assert signal.getsignal(number) is before
        with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
            assert checkpoints.steps()[-1] == step
    assert read_result(tmp_path / "run") is None
    train(tiny, tmp_path / "run")
    assert fingerprint(tiny, tmp_path / "run") == uninterrupted


def test_killed_between_a_row_and_its_checkpoint(
    tiny: ConfigDict, uninterrupted: dict[str, Any], fingerprint: Fingerprint, tmp_path: pathlib.Path
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Checkpoints, "save", kill)
        with pytest.raises(Killed):
            train(tiny, tmp_path / "run")
    assert (tmp_path / "run/metrics.jsonl").read_text() != ""
    train(tiny, tmp_path / "run")
    assert fingerprint(tiny, tmp_path / "run") == uninterrupted


def test_killed_between_the_last_checkpoint_and_the_result(
    tiny: ConfigDict, uninterrupted: dict[str, Any], fingerprint: Fingerprint, tmp_path: pathlib.Path
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(loop_module, "finish", kill)
        with pytest.raises(Killed):
            train(tiny, tmp_path / "run")
    result = train(tiny, tmp_path / "run")
    assert result.metrics["test/loss"] == uninterrupted["rows"][-1]["test/loss"]
    assert fingerprint(tiny, tmp_path / "run") == uninterrupted


def test_a_full_disk_at_any_write_loses_nothing(
    tiny: ConfigDict, uninterrupted: dict[str, Any], fingerprint: Fingerprint, tmp_path: pathlib.Path
) -> None:
    """The fault is injected at the call that writes: of a row, then of a checkpoint whose folder is half written."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    write_row = Log.row
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Log, "row", lambda log, step, row: fail() if step > 5 else write_row(log, step, row))
        with pytest.raises(OSError, match="No space left on device"):
            train(tiny, tmp_path / "run")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("orbax.checkpoint.JsonCheckpointHandler.async_save", fail)
        monkeypatch.setattr("orbax.checkpoint.JsonCheckpointHandler.save", fail)
        with pytest.raises(CheckpointError, match=r"step 8 was not saved in .*No space left on device"):
            train(tiny, tmp_path / "run")
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [4]
    train(tiny, tmp_path / "run")
    assert fingerprint(tiny, tmp_path / "run") == uninterrupted


def test_a_torn_last_line_is_repaired(
    tiny: ConfigDict, uninterrupted: dict[str, Any], fingerprint: Fingerprint, tmp_path: pathlib.Path
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        at_step(monkeypatch, 7, kill)
        with pytest.raises(Killed):
            train(tiny, tmp_path / "run")
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "train/lo')
    train(tiny, tmp_path / "run")
    assert fingerprint(tiny, tmp_path / "run") == uninterrupted


def test_a_checkpoint_under_the_name_of_another_step_is_refused(tiny: ConfigDict, tmp_path: pathlib.Path) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        at_step(monkeypatch, 6, kill)
        with pytest.raises(Killed):
            train(tiny, tmp_path / "run")
    (tmp_path / "run/checkpoints/4").rename(tmp_path / "run/checkpoints/40")
    with pytest.raises(CheckpointError, match=r"checkpoints/40 holds the state of step 4$"):
        train(tiny, tmp_path / "run")


def test_a_finished_run_returns_at_once_and_changes_nothing(
    tiny: ConfigDict, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = train(tiny, tmp_path / "run")
    files = {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "run").rglob("*"))}
    monkeypatch.setattr(loop_module, "build_task", kill)
    assert train(tiny, tmp_path / "run") == first
    assert files == {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "run").rglob("*"))}
    assert first.status == "finished"
    assert json.loads((tmp_path / "run/result.json").read_text())["metrics"] == dict(first.metrics)


def test_a_used_directory_is_refused_with_the_differences(tiny: ConfigDict, tmp_path: pathlib.Path) -> None:
    train(tiny, tmp_path / "run")
    with pytest.raises(WorkdirError, match=r"another config: seed 0 -> 5, model\.attention\.num_heads 2 -> 4; choose"):
        train(override(tiny, {"seed": 5, "model.attention.num_heads": 4}), tmp_path / "run")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/precious.txt").write_text("mine")
    with pytest.raises(WorkdirError, match=r"holds no config\.json, but precious\.txt; choose another"):
        train(tiny, tmp_path / "notes")
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["precious.txt"]


def test_two_processes_do_not_share_a_directory(tiny: ConfigDict, tmp_path: pathlib.Path) -> None:
    def meanwhile() -> None:
        with pytest.raises(WorkdirError, match="another process is training in"):
            train(tiny, tmp_path / "run")
        kill()

    with pytest.MonkeyPatch.context() as monkeypatch:
        at_step(monkeypatch, 2, meanwhile)
        with pytest.raises(Killed):
            train(tiny, tmp_path / "run")
