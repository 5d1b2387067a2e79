"""What a run was made with: code revision, package versions, device, command."""

import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "ml-collections", "numpy", "mha_research")


def provenance(overrides: dict[str, Any]) -> dict[str, Any]:
    """A JSON-ready record of how this process came to run: overrides, code, packages, device, command, time."""
    import jax

    device = jax.devices()[0]
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": sys.argv,
        "overrides": overrides,
        "code": code_revision(),
        "python": platform.python_version(),
        "packages": package_versions(),
        "device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": jax.device_count(),
            "processes": jax.process_count(),
            "host": platform.machine(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        },
    }


def records(path: Path) -> list[dict[str, Any]]:
    """The objects of a file with one JSON object a line, such as provenance.jsonl; without what a kill tore or damaged.

    No file: no objects.
    """
    found = []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [record for record in found if isinstance(record, dict)]


def code_revision(directory: Path = Path(__file__).parent) -> dict[str, Any]:
    """The commit of the code and whether tracked files differ from it; both None outside a checkout or without git."""
    try:
        commit = _git(directory, "rev-parse", "HEAD")
        dirty = bool(_git(directory, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}
    return {"commit": commit, "dirty": dirty}


def package_versions() -> dict[str, str | None]:
    """The version of each package that a result may depend on; None where it is not installed."""
    versions: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _git(directory: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=directory, capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()
