"""Every shipped config is built, checked, and its update evaluated in shape, without training a step."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

from mha_research.config import load_config, load_module
from mha_research.tasks import TaskSpec
from mha_research.training import check
from mha_research.training.step import build_program

CONFIGS = sorted((pathlib.Path(__file__).parents[3] / "configs").glob("*.py"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_config_can_be_run_and_says_what_it_asks(path: pathlib.Path) -> None:
    config = check(load_config(path))
    length, batch_size = config.task.length or 32, config.train.batch_size
    program = build_program(config, TaskSpec("language_model", 101, length))
    ids = jax.ShapeDtypeStruct((batch_size, length), jnp.int32)
    batch = {"tokens": ids, "targets": ids, "mask": jax.ShapeDtypeStruct((batch_size, length), bool)}
    state = jax.eval_shape(program.init, 0)
    after, metrics = jax.eval_shape(program.update, state, batch)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert metrics["sums"]["loss"].shape == ()
    documentation = load_module(path).__doc__
    assert documentation.split("\n")[0].endswith("?")
    assert f"python -m experiments.train --config=configs/{path.name} --workdir=" in documentation


def test_there_are_configs() -> None:
    assert {"char_lm", "char_lm_large"} <= {path.stem for path in CONFIGS}
