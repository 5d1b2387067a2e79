"""The user's own files: how they are held out, and what is refused in one line."""

import os
import pathlib

import pytest

from mha_research.tasks import TaskError
from mha_research.tasks.corpus import Corpus, user_files


def write(folder: pathlib.Path, **texts: str) -> str:
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf8")
    return str(folder / "*.txt")


def test_by_position_every_document_is_cut(tmp_path: pathlib.Path) -> None:
    pattern = write(tmp_path, one="0123456789", two="abcdefghijklmnopqrst")
    corpus = user_files(pattern, valid_fraction=0.2, test_fraction=0.1)
    assert corpus.train == ("0123456", "abcdefghijklmn")
    assert corpus.valid == ("78", "opqr")
    assert corpus.test == ("9", "st")
    assert corpus.note.startswith("2 files, split by position")


def test_by_document_each_lies_in_one_split(tmp_path: pathlib.Path) -> None:
    texts = {f"n{i}": f"{i}" * 10 for i in range(10)}
    pattern = write(tmp_path, **texts)
    corpus = user_files(pattern, valid_fraction=0.2, test_fraction=0.3)
    parts = [corpus.train, corpus.valid, corpus.test]
    assert [len(part) for part in parts] == [5, 2, 3]
    assert sorted(text for part in parts for text in part) == sorted(texts.values())
    assert corpus == user_files(pattern, valid_fraction=0.2, test_fraction=0.3)
    assert "split by document (valid: n" in corpus.note


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1000, 1, 1), (1, 1000, 1), (1, 1, 1000)])
def test_three_documents_make_three_splits(tmp_path: pathlib.Path, sizes: tuple[int, ...]) -> None:
    corpus = user_files(write(tmp_path, **{f"d{i}": "x" * size for i, size in enumerate(sizes)}), "document")
    assert (len(corpus.train), len(corpus.valid), len(corpus.test)) == (1, 1, 1)


def test_what_cannot_be_used_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(TaskError, match=r"no file matches task\.files="):
        user_files(str(tmp_path / "*.txt"))
    pattern = write(tmp_path, good="some text", empty="")
    with pytest.raises(TaskError, match=r"empty\.txt is empty"):
        user_files(pattern)
    (tmp_path / "empty.txt").write_bytes(b"ab\xff")
    with pytest.raises(TaskError, match=r"cannot read .*empty\.txt: byte 2 is not UTF-8"):
        user_files(pattern)
    with pytest.raises(TaskError, match=r"needs three files or more, task\.files matches 1"):
        user_files(str(tmp_path / "good.txt"), "document")
    with pytest.raises(TaskError, match="nothing is left for valid"):
        user_files(write(tmp_path, good="ab", empty="c") and str(tmp_path / "good.txt"))
    with pytest.raises(TaskError, match=r"must be positive and sum to less than 1, got 0\.5 and 0\.5"):
        user_files(pattern, valid_fraction=0.5, test_fraction=0.5)


def test_a_link_out_of_the_folder_is_refused(tmp_path: pathlib.Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "secret").write_text("secret")
    (inside / "link.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(TaskError, match=r"link\.txt leads out of .*inside"):
        user_files(str(inside / "*.txt"))


def test_a_dangling_link_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(TaskError, match="gone"):
        user_files(str(tmp_path / "*.txt"))


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: pathlib.Path) -> None:
    pattern = write(tmp_path, good="some text")
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(TaskError, match=r"pipe\.txt is no regular file"):
        user_files(pattern)
    (tmp_path / "pipe.txt").unlink()
    (tmp_path / "round.txt").symlink_to(tmp_path / "round.txt")
    with pytest.raises(TaskError, match=r"cannot read .*round\.txt: "):
        user_files(pattern)


def test_a_name_that_is_no_text_is_escaped(tmp_path: pathlib.Path) -> None:
    for name in (b"a\xff", b"b", b"c", b"d"):
        pathlib.Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name + b".txt")).write_text("some text")
    note = user_files(str(tmp_path / "*.txt"), valid_fraction=0.3, test_fraction=0.3).note
    assert note.encode("utf8")
    os.rename(os.fsencode(tmp_path) + b"/a\xff.txt", os.fsencode(tmp_path) + b"/e\xff.txt")
    (tmp_path / "empty.txt").touch()
    pathlib.Path(os.fsdecode(os.fsencode(tmp_path) + b"/e\xff.txt")).write_text("")
    with pytest.raises(TaskError) as caught:
        user_files(str(tmp_path / "e?.txt"))
    assert str(caught.value).endswith("e\\udcff.txt is empty")


def test_the_fingerprint_is_of_every_document_and_its_place() -> None:
    parts = {"train": ("ab", "c"), "valid": ("d",), "test": ("e",)}
    changes = [{}, {"train": ("a", "bc")}, {"train": ("abc",)}, {"valid": ("e",), "test": ("d",)}, {"test": ("f",)}]
    prints = [Corpus(**(parts | change), note="").fingerprint() for change in changes]
    assert len(set(prints)) == len(changes)
    assert prints[0] == Corpus(**parts, note="other words").fingerprint()
