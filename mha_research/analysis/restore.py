"""A trained model back from its run's directory. It builds the model, so it brings JAX; reading results does
without."""

from pathlib import Path
from typing import Any

import jax

from mha_research.factory import build_task
from mha_research.run_dir import Checkpoints
from mha_research.run_dir.sources import read_config
from mha_research.training.step import build_program


def restore(path: Path, step: int | None = None, trust_sources: bool = False) -> Any:
    """The model of a run with the parameters of its last checkpoint, or of the one of a step.

    Raises FileNotFoundError where there is none, and CheckpointError for one that does not fit the run's config.
    """
    config = read_config(path, trust_sources)
    program = build_program(config, build_task(config).spec)
    if not (path / "checkpoints").exists():
        raise FileNotFoundError(f"{path} holds no checkpoint")
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here),
        jax.eval_shape(program.init, config.seed),
    )
    with Checkpoints(path / "checkpoints") as checkpoints:
        _, state = checkpoints.restore(like, step)
    return program.model(state["params"])
