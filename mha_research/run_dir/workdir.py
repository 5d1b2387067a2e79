"""The directory of one run: whose it is, whether it is done, and what lies where.

config.json          the config; another config is refused
provenance.jsonl     one row a start: overrides, code revision, package versions, device
sources/             the files from outside that the config names, and what they import beside them
metrics.jsonl        one row a log point; tensorboard/ the same as events
checkpoints/STEP/    state, config and metrics of a step
baselines.json       nats per target of simple predictors on the held-out sets
sample.txt           generated text, where asked for
documents.json       held-out set -> loss, hits and count at the last step, each summed over every document's targets
result.json          written last: the run is over
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from mha_research.config import provenance, records, saved_differences, to_json
from mha_research.run_dir.sources import keep_sources
from mha_research.run_dir.files import WorkdirError, append_row, exclusive, write_atomically


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended. `status` is finished or diverged; `metrics` are those of its last evaluation, tests included."""

    status: str
    step: int
    metrics: Mapping[str, float]
    parameters: int
    flops_per_step: int
    tokens_per_step: int
    seconds: float  # of training, all starts together, evaluation and checkpoints included
    peak_memory_bytes: int
    skipped: int = 0
    message: str = ""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def read_result(workdir: Path) -> Result | None:
    """The result of a run that is over, None for one that is not. Raises WorkdirError for one that cannot be read."""
    path = workdir / "result.json"
    if not path.exists():
        return None
    try:
        return Result(**json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        said = " ".join(str(error).split())
        raise WorkdirError(
            f"{path} is damaged: {said}; take it away, and the run ends again from its last checkpoint"
        ) from None


@contextlib.contextmanager
def claim(workdir: Path, config: ConfigDict) -> Iterator[None]:
    """Makes the directory this config's, for this process alone, while the context lasts.

    Raises WorkdirError when it cannot be made, when another process holds it, when it was made with another config (the
    message shows the differences), or when it holds files but no config.
    """
    make_folder(workdir)
    with contextlib.ExitStack() as stack:
        foreign = not (workdir / "config.json").exists() and sorted(
            path.name for path in workdir.iterdir() if not path.name.startswith(".")
        )
        if foreign:
            raise WorkdirError(
                f"{workdir} is not empty and holds no config.json, but {', '.join(foreign[:3])}; choose another"
            )
        try:
            stack.enter_context(exclusive(workdir / ".lock"))
        except BlockingIOError:
            raise WorkdirError(f"another process is training in {workdir}") from None
        check_config(workdir, config)
        yield


def make_folder(workdir: Path) -> None:
    """Makes the directory, unless it is there. Raises WorkdirError where that is impossible: a file is in the way."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        raise WorkdirError(f"{str(workdir)!r} cannot be made a directory: {reason}") from None


def check_config(workdir: Path, config: ConfigDict) -> None:
    """Writes the config, or checks that the one that is there is the same. Raises WorkdirError with the differences."""
    path = workdir / "config.json"
    if not path.exists():
        if (workdir / "result.json").exists():
            raise WorkdirError(f"{workdir} holds a result but no config.json that says of what; choose another")
        write_atomically(path, to_json(config))
        return
    try:
        changed = saved_differences(path.read_text(encoding="utf8"), config)
    except ValueError as error:  # a ConfigError, or bytes that are no text
        raise WorkdirError(f"{path} is not a config of this version: {error}") from None
    if changed:
        shown = ", ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in changed.items())
        raise WorkdirError(f"{workdir} holds a run with another config: {shown}; choose another directory")


def write_document_sums(workdir: Path, sums: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """Writes documents.json."""
    plain = {split: {name: values.tolist() for name, values in parts.items()} for split, parts in sums.items()}
    write_atomically(workdir / "documents.json", json.dumps(plain) + "\n")


def record_start(workdir: Path, config: ConfigDict, overrides: Mapping[str, Any], data: str) -> None:
    """Adds a row to provenance.jsonl; `data` is the fingerprint of what is learned from.

    Raises WorkdirError when an earlier start read other data or ran other code from outside: its results would be of
    neither.
    """
    path = workdir / "provenance.jsonl"
    kept = {name: text for row in records(path) for name, text in row.get("sources", {}).items()}
    hashes = keep_sources(workdir, config, kept)
    if changed := [row["data"] for row in records(path) if row.get("data", data) != data]:
        raise WorkdirError(
            f"{workdir} holds a run on other data: what task.files names has changed ({changed[-1]} -> {data}); "
            "restore it, or choose another directory"
        )
    append_row(path, provenance(dict(overrides)) | {"data": data, "sources": hashes})
