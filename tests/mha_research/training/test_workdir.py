"""A directory whose files are damaged, foreign or of other data: one line that names the file, and nothing is lost."""

import json
import pathlib
from typing import Any

import pytest
from ml_collections import ConfigDict

from mha_research.config import override, to_json
from mha_research.run_dir import WorkdirError, read_result
from mha_research.run_dir.files import append_row, read_rows
from mha_research.run_dir.workdir import Result, claim, record_start
from mha_research.training import train

RESULT = Result("finished", 8, {"test/loss": 1.0}, 10, 20, 30, 1.0, 1).to_json()


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    return {name: content for name, content in found.items() if name != ".lock"}


@pytest.mark.parametrize(
    "name,content",
    [
        ("result.json", b"{"),
        ("result.json", b""),
        ("result.json", b"[]"),
        ("result.json", b'{"status": "finished"}'),
        ("result.json", b"\xff\x00"),
        ("config.json", b"\xff\x00"),
        ("config.json", b"{"),
        ("config.json", b"null"),
        ("metrics.jsonl", b'{"step": 1}\n{"st\n{"step": 2}\n'),
    ],
)
def test_a_damaged_file_is_named_and_left(name: str, content: bytes, tiny: ConfigDict, tmp_path: pathlib.Path) -> None:
    files = {"config.json": to_json(tiny).encode(), name: content}
    for file, written in files.items():
        (tmp_path / file).write_bytes(written)
    with pytest.raises(WorkdirError, match=rf"{name}") as caught:
        train(tiny, tmp_path)
    assert "\n" not in str(caught.value)
    left = contents(tmp_path)
    assert {file: left[file] for file in files} == files


def test_a_result_without_a_config_is_nobodys(tiny: ConfigDict, tmp_path: pathlib.Path) -> None:
    (tmp_path / "result.json").write_text(RESULT)
    with pytest.raises(WorkdirError, match=r"holds a result but no config\.json"):
        train(tiny, tmp_path)
    assert list(contents(tmp_path)) == ["result.json"]


def test_a_directory_that_cannot_be_made_is_named(tiny: ConfigDict, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file/below", tmp_path / ("x" * 300), tmp_path / "a\0b"):
        with pytest.raises((WorkdirError, OSError), match=r"cannot be made a directory|File name too long") as caught:
            train(tiny, path)
        assert "\n" not in str(caught.value)
    assert (tmp_path / "file").read_text() == "mine"


def test_other_data_than_that_of_the_first_start_is_refused(tiny: ConfigDict, tmp_path: pathlib.Path) -> None:
    with claim(tmp_path, tiny):
        record_start(tmp_path, {}, "aaaa")
        record_start(tmp_path, {}, "aaaa")
        with pytest.raises(WorkdirError, match=r"a run on other data: .* \(aaaa -> bbbb\)"):
            record_start(tmp_path, {}, "bbbb")
    assert [row["data"] for row in rows(tmp_path / "provenance.jsonl")] == ["aaaa", "aaaa"]


def test_text_that_changed_between_two_starts_is_refused(tiny: ConfigDict, tmp_path: pathlib.Path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be " * 9)
    text = {"task.name": "char_lm", "task.vocabulary_size": None, "task.evaluation_size": None}
    config = override(tiny, text | {"task.files": str(tmp_path / "*.txt"), "train.steps": 1})
    train(config, tmp_path / "run")
    (tmp_path / "run/result.json").unlink()
    (tmp_path / "text.txt").write_text("to be or not to bee " * 9)
    with pytest.raises(WorkdirError, match=r"what task\.files names has changed"):
        train(config, tmp_path / "run")
    assert read_result(tmp_path / "run") is None


def rows(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_row_after_a_torn_one_stands_on_a_line_of_its_own(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_row(path, {"a": 1})
    append_row(path, {"a": 2})
    assert path.read_text() == '{"a": 1}\n{"a": 2}\n'
    path.write_text('{"a": 1}\n{"a"')
    append_row(path, {"a": 2})
    assert path.read_text() == '{"a": 1}\n{"a"\n{"a": 2}\n'


@pytest.mark.parametrize("torn", [b"", b'{"st', b'{"step": 3', b'{"st\n', b"\x00\x00\x00", b"\n\n"])
def test_rows_without_a_torn_last_one(torn: bytes, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_rows(path) == []
    path.write_bytes(b'{"step": 1, "a": 2.0}\n{"step": 2}\n' + torn)
    assert read_rows(path) == [{"step": 1, "a": 2.0}, {"step": 2}]


@pytest.mark.parametrize("damage", [b"{", b"\xff", b'{"loss": 1}', b"3", b'{"step": 1.5}', b'{"step": "1"}'])
def test_damage_before_the_last_row_is_named_with_its_line(damage: bytes, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damage + b'\n{"step": 2}\n')
    with pytest.raises(WorkdirError, match=r"metrics\.jsonl, line 2 is damaged: .*; take the line away"):
        read_rows(path)
