"""Files of a run that survive a kill and a full disk: atomic replacement, and lines that are only ever appended."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


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


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file, without a last line that was torn by a kill. No file: no rows.

    Raises ValueError naming the file and line for damage anywhere else.
    """
    if not path.exists():
        return []
    *lines, last = path.read_text(encoding="utf8").split("\n")
    rows = []
    for number, line in enumerate([*lines, last], 1):
        try:
            if line:
                rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number <= len(lines) - 1:
                raise ValueError(f"{path}, line {number} is no JSON: {error}") from None
    return rows


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Holds a lock on the file, which ends with the process however that ends. BlockingIOError when it is taken."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
