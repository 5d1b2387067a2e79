"""The code from outside that a run was made with: copies under `sources/`, with their hashes in provenance.jsonl."""

import hashlib
from pathlib import Path

from ml_collections import ConfigDict

from mha_research.config import ConfigError, from_json, named_outside, sources, trust_kept
from mha_research.run_dir.files import WorkdirError, write_atomically

FOLDER = "sources"


def keep_sources(workdir: Path, config: ConfigDict, kept: dict[str, str]) -> dict[str, str]:
    """File name -> SHA-256 of each file that the config names from outside, once a copy of it lies in the directory.

    Args:
        workdir: the run's directory.
        config: its config.
        kept: what earlier starts of the run recorded.

    Raises:
        WorkdirError: for a file that has changed since the run began, naming it.
    """
    hashes = {}
    for name, path in sources.files(named_outside(config)).items():
        text = path.read_bytes()
        hashes[name] = hashlib.sha256(text).hexdigest()
        copy = workdir / FOLDER / name
        if kept.get(name, hashes[name]) != hashes[name] or (copy.exists() and copy.read_bytes() != text):
            raise WorkdirError(
                f"{path} has changed since the run in {workdir} began; restore it (a copy is {copy}), or choose another "
                "directory"
            )
        if not copy.exists():
            copy.parent.mkdir(exist_ok=True)
            write_atomically(copy, text.decode("utf8"))
    return hashes


def read_config(workdir: Path, trust_sources: bool = False) -> ConfigDict:
    """The config of a run, with the copies of the code that it was made with.

    Raises:
        ConfigError: for a config that cannot be read, and for code that this user has never named, unless
            `trust_sources` says that it may run.
    """
    text, folder = (workdir / "config.json").read_text(encoding="utf8"), workdir / FOLDER
    if trust_sources:
        trust_kept(text, folder)
    try:
        return from_json(text, folder)
    except ConfigError as error:
        raise ConfigError(f"{workdir / 'config.json'}: {error}") from error
