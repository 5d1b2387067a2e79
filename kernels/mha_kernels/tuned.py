"""Tile sizes measured on a device: one small JSON for each kind of device, written by `autotune`, read by the drivers.

    {"device": "NVIDIA H200", "jax": "0.12.0.1",
     "sizes": {"PallasGPU bfloat16 64": {"4096": {"key_tile": 128, "backward_tile": 64, "stages": 3}}}}

Under the driver, the type and the head width, by length; the nearest length counts. Files lie in the folder that the
environment variable MHA_KERNELS_TUNED names, else in `tuned/` beside this module. A file that cannot be read, or sizes
that a driver refuses, are reported once in the log and not used.
"""

import dataclasses
import functools
import json
import logging
import math
import os
import re
from pathlib import Path
from typing import Any

import jax

log = logging.getLogger("mha_kernels")


def device_kind() -> str:
    """What the device calls itself that a program is compiled for: the mesh's, where that describes one, else ours."""
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return str(getattr(described, "device_kind", None) or jax.devices()[0].device_kind)


def path(kind: str) -> Path:
    """The file of a kind of device."""
    folder = os.environ.get("MHA_KERNELS_TUNED")
    name = re.sub(r"[^a-z0-9]+", "_", kind.lower()) + ".json"
    return (Path(folder) if folder else Path(__file__).parent / "tuned") / name


def entry(driver: Any, query: jax.Array) -> str:
    """Under which name sizes for arrays like `query` (B, L, H, E) are kept."""
    return f"{type(driver).__name__} {query.dtype} {query.shape[-1]}"


def settle(driver: Any, rule: dict[str, int], query: jax.Array) -> Any:
    """The driver with every size set: as its fields say, else as measured for arrays like `query`, else by `rule`.

    Args:
        driver: a frozen dataclass whose fields named in `rule` are sizes or None; it checks them when it is made.
    """
    given = {name: size for name in rule if (size := getattr(driver, name)) is not None}
    by_length = _read(path(device_kind())).get(entry(driver, query), {})
    if by_length:
        nearest = min(by_length, key=lambda length: abs(math.log(int(length) / query.shape[1])))
        try:
            return dataclasses.replace(driver, **(rule | by_length[nearest] | given))
        except (TypeError, ValueError) as error:
            _say(f"measured sizes {by_length[nearest]} are not used: {error}")
    return dataclasses.replace(driver, **(rule | given))


@functools.cache
def _read(file: Path) -> dict[str, dict[str, dict[str, int]]]:
    """The sizes in a file, none where it is absent or not what `autotune` writes."""
    try:
        sizes = json.loads(file.read_text())["sizes"]
        for by_length in sizes.values():
            if not all(int(length) > 0 and isinstance(found, dict) for length, found in by_length.items()):
                raise ValueError("a length is not positive, or its sizes are not a table")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        _say(f"{file.name} is not used: {type(error).__name__}: {error}")
        return {}
    return sizes


@functools.cache
def _say(message: str) -> None:
    """Once for each message."""
    log.warning("tile sizes: %s", message)
