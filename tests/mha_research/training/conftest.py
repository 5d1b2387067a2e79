"""A run that takes a second: one small block on short generated words, with every kind of dropout and accumulation."""

import hashlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from mha_research.config import default_config, override
from mha_research.factory.build import build_task
from mha_research.run_dir import Checkpoints
from mha_research.training import train
from mha_research.training.step import build_program

TINY = {
    "task.name": "copy",
    "task.length": 6,
    "task.vocabulary_size": 5,
    "task.evaluation_size": 7,
    "model.num_layers": 1,
    "model.d_model": 8,
    "model.attention.num_heads": 2,
    "model.attention.implementation": "reference",
    "model.attention.dropout_rate": 0.3,
    "model.dropout_rate": 0.2,
    "optimizer.warmup_steps": 2,
    "train.steps": 12,
    "train.batch_size": 6,
    "train.accumulate": 2,
    "train.log_every": 5,
    "train.eval_every": 4,
    "train.checkpoint_every": 4,
    "train.max_skipped": 3,
    "run.tensorboard": False,
    "run.baselines": False,
}


@pytest.fixture(scope="session")
def tiny() -> ConfigDict:
    return override(default_config(), TINY)


@pytest.fixture(scope="session")
def fingerprint() -> Callable[..., dict[str, Any]]:
    """What must not depend on interruptions: a hash of the last state, and all rows but their times."""

    def of(config: ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
        program = build_program(config, build_task(config).spec)
        with Checkpoints(workdir / "checkpoints") as checkpoints:
            step, state = checkpoints.restore(program.init(config.seed))
        state["key"] = jax.random.key_data(state["key"])
        leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]
        rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        return {
            "step": step,
            "state": hashlib.sha256(b"".join(leaves)).hexdigest(),
            "rows": [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows],
        }

    return of


@pytest.fixture(scope="session")
def uninterrupted(
    tiny: ConfigDict, fingerprint: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The fingerprint of a run of `tiny` that nothing happened to."""
    workdir = tmp_path_factory.mktemp("runs") / "uninterrupted"
    train(tiny, workdir)
    return fingerprint(tiny, workdir)
