"""A profile that was asked for lies in the directory of the run and changes no number."""

import gzip
import json
import pathlib
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from mha_research.config import override
from mha_research.training import train


def test_the_steps_asked_for_are_traced(
    tiny: ConfigDict,
    uninterrupted: dict[str, Any],
    fingerprint: Callable[..., dict[str, Any]],
    tmp_path: pathlib.Path,
) -> None:
    train(override(tiny, {"run.profile_steps": 1}), tmp_path)
    (trace,) = tmp_path.glob("profile/plugins/profile/*/*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    steps = [event["args"]["step_num"] for event in events if event.get("name") == "train"]
    assert [int(step) for step in steps] == [11]
    assert list(tmp_path.glob("profile/plugins/profile/*/*.xplane.pb"))
    assert fingerprint(tiny, tmp_path) == uninterrupted
