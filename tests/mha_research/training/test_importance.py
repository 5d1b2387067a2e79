"""An importance-weighted DropHead from the config: heads are scored by every update, and the scores are resumed."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from mha_research.config import override
from mha_research.factory.build import build_task
from mha_research.run_dir import Checkpoints
from mha_research.training import train
from mha_research.training.step import build_program

LAYERS, HEADS, BATCH = 2, 2, 4


def weighted(tiny: ConfigDict, **more: Any) -> ConfigDict:
    fields = {"name": "drop_head", "rate": 0.0, "importance_power": 1.0}
    return override(
        tiny,
        {f"model.attention.drop_head.{name}": value for name, value in fields.items()}
        | {"model.num_layers": LAYERS, "model.dropout_rate": 0.0, "model.attention.dropout_rate": 0.0}
        | {"train.batch_size": BATCH, "train.steps": 4}
        | more,
    )


def placed(state: Any) -> Any:
    """Where the loop puts it; a state placed otherwise would have the update compiled once more."""
    return jax.device_put(state, jax.devices()[0])


def scores(state: dict[str, Any]) -> np.ndarray:
    return np.stack(jax.tree.leaves(state["importance"]))


def test_one_update_against_finite_differences(tiny: ConfigDict) -> None:
    """I_h = mean over examples of |dL/dgate_h|, over the mean of its layer, a hundredth of the way from 1.

    At rate 0 every head is kept, so the gates are 1 and the loss can be differentiated from outside. The update is made
    in two parts, each with two of the examples.
    """
    config = weighted(tiny)
    task = build_task(config)
    program = build_program(config, task.spec)
    batch, state = task.train_batches(0, BATCH)[0], placed(program.init(3))
    model = program.model(jax.tree.map(jnp.copy, state["params"]))

    @jax.jit
    def loss(gates: jax.Array) -> jax.Array:
        logits = jax.nn.log_softmax(model(batch["tokens"], head_gates=gates))
        chosen = jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
        return -jnp.sum(chosen * batch["mask"]) / batch["mask"].sum()

    gradient, width = np.zeros((LAYERS, BATCH, HEADS)), 0.05
    for place in np.ndindex(gradient.shape):
        step = np.zeros_like(gradient, np.float32)
        step[place] = width
        gradient[place] = (float(loss(1 + step)) - float(loss(1 - step))) / (2 * width)
    mean = np.abs(gradient).mean(1)
    state, _ = program.update(state, batch)
    np.testing.assert_allclose(scores(state), 0.99 + 0.01 * mean / mean.mean(1, keepdims=True), atol=2e-4)
    assert np.ptp(scores(state)) > 2e-3


def test_scores_are_saved_and_go_on_as_if_never_stopped(tiny: ConfigDict, tmp_path: pathlib.Path) -> None:
    config = weighted(
        tiny, **{"model.attention.drop_head.rate": 0.5, "train.eval_every": 4, "train.checkpoint_every": 2}
    )
    train(config, tmp_path / "whole")
    program = build_program(config, build_task(config).spec)
    with Checkpoints(tmp_path / "whole/checkpoints") as checkpoints:
        _, middle = checkpoints.restore(program.init(0), 2)
        _, end = checkpoints.restore(program.init(0), 4)
    batches = build_task(config).train_batches(config.seed, BATCH)
    for step in (2, 3):
        middle, _ = program.update(middle, batches[step])
    np.testing.assert_array_equal(scores(middle), scores(end))
    assert (scores(end) != 1).all()
    rows = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    assert np.isfinite(rows[-1]["test/loss"])


def test_an_update_that_is_not_finite_leaves_the_scores(tiny: ConfigDict) -> None:
    config = weighted(tiny)
    task = build_task(config)
    program = build_program(config, task.spec)
    state = placed(program.init(0))
    state["params"]["norm"]["scale"] = jnp.full_like(state["params"]["norm"]["scale"], jnp.nan)
    state, metrics = program.update(state, task.train_batches(0, BATCH)[0])
    assert int(metrics["skipped"]) == 1
    np.testing.assert_array_equal(scores(state), 1)
