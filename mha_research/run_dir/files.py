"""Files of a run that survive a kill and a full disk: atomic replacement, and lines that are only ever appended."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO


class WorkdirError(ValueError):
    """The directory holds something else or is damaged, or another process is using it. The message is one line."""


def write_atomically(path: Path, text: str) -> None:
    """The file holds either what it held before or all of `text`, whatever happens in between."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Adds a line to a JSON-lines file, and ends the one before it where a kill tore that."""
    with path.open("ab+") as file:
        torn = file.tell() and not _ends_a_line(file)
        file.write((b"\n" if torn else b"") + json.dumps(row).encode() + b"\n")


def _ends_a_line(file: BinaryIO) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, each with its `step`, without a last line that was torn by a kill. No file: no rows.

    Raises WorkdirError naming the file and line for damage anywhere else.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().rstrip(b"\n").split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line else None
            if line and not (isinstance(row, dict) and isinstance(row.get("step"), int)):
                raise ValueError("it is no row with a step")
        except ValueError as error:
            if number < len(lines):
                raise WorkdirError(f"{path}, line {number} is damaged: {error}; take the line away") from None
            break
        if row is not None:
            rows.append(row)
    return rows


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Holds a lock on the file, which ends with the process however that ends. BlockingIOError when it is taken."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
