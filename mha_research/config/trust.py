"""Which code from outside may run: what this user has named in a config file or on a command line.

A run's directory keeps the code that it was made with. Read back from one's own runs, that code runs; from somebody
else's directory it would run whatever they wrote there, and is refused until the user says otherwise. What was named is
remembered by its SHA-256, for this process and, where it can be written, in
`$XDG_STATE_HOME/mha_research/trusted_sources` (`~/.local/state` unless set).
"""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

_NAMED: set[str] = set()


def remember(fingerprints: Iterable[str]) -> None:
    """Trusts code from now on."""
    if new := set(fingerprints) - _NAMED - _kept():
        file = _file()
        with contextlib.suppress(OSError):  # this process trusts it all the same
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="ascii") as lines:
                lines.write("".join(f"{fingerprint}\n" for fingerprint in sorted(new)))
        _NAMED.update(new)


def is_trusted(fingerprints: Iterable[str]) -> bool:
    """Whether all of it was named by this user."""
    left = set(fingerprints) - _NAMED
    return not left or left <= _kept()


def _kept() -> set[str]:
    try:
        return set(_file().read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return set()


def _file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "mha_research" / "trusted_sources"
