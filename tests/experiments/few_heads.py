"""One head or two? The ablation of the quickstart with half of its arms."""

import dataclasses
from pathlib import Path

from mha_research.config import load_module
from mha_research.sweeps import Claim

_shipped = load_module(Path(__file__).parents[2] / "configs/sweeps/quickstart.py")
get_config = _shipped.get_config


def get_sweep():
    sweep = _shipped.get_sweep()
    claim = Claim(text="Two heads beat one", metric="test/nats_per_char", contrast={"h1": 1, "h2": -1})
    return dataclasses.replace(sweep, arms={arm: sweep.arms[arm] for arm in ("h1", "h2")}, claims=[claim])
