"""What a run records about where it came from, with git and without."""

import json
import pathlib
import subprocess

import jax
import pytest

from mha_research.config.provenance import code_revision, provenance, records


def test_the_record_is_json_and_names_code_packages_and_device() -> None:
    record = json.loads(json.dumps(provenance({"seed": "1"})))
    assert record["overrides"] == {"seed": "1"}
    assert record["packages"]["jax"] == jax.__version__
    assert record["device"]["platform"] == jax.devices()[0].platform


def test_the_revision_says_whether_tracked_files_differ(tmp_path: pathlib.Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e@x"]
        return subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "m")
    assert code_revision(tmp_path) == {"commit": git("rev-parse", "HEAD").strip(), "dirty": False}
    (tmp_path / "a").write_text("2")
    assert code_revision(tmp_path)["dirty"] is True


def test_without_git_the_revision_is_unknown(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = {"commit": None, "dirty": None}
    assert code_revision(tmp_path) == unknown
    monkeypatch.setenv("PATH", str(tmp_path))
    assert code_revision() == unknown


def test_records_leave_out_what_was_torn_or_damaged(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert records(path) == []
    path.write_bytes(b'{"a": 1}\n{"a": {"b"\n\xff\n[3]\n\n{"a": 2}\n{"a": ')
    assert records(path) == [{"a": 1}, {"a": 2}]
