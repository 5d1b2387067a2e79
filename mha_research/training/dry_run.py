"""A run in shapes alone, before anything is written: what the model or the data refuse, they refuse here."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from mha_research.config import ConfigError
from mha_research.factory.errors import as_config_error
from mha_research.tasks import CharLM, Task
from mha_research.training.evaluate import held_out_sets
from mha_research.training.step import build_program, Program


def dry_run(config: ConfigDict, task: Task, update: bool = True) -> None:
    """Traces the start, an evaluation of each held-out set and an update; the run itself finds them traced.

    Without the `update`, the costly part, it is a plan's look at an arm.

    Raises ConfigError for settings that do not fit each other or the task, such as a head width that rotary positions
    cannot turn, an implementation that declines, or text longer than a table of learned positions.
    """
    options, program = config.train, build_program(config, task.spec)
    sets = held_out_sets(task, options.eval_limit)
    width = max(held_out.documents for held_out in sets.values())
    _check_table(config, task, max(len(held_out.example(0)["mask"]) for held_out in sets.values()))

    def trace() -> None:
        state = jax.eval_shape(program.init, config.seed)
        if update:
            jax.eval_shape(program.update, state, task.train_batches(config.seed, options.batch_size)[0])
        for held_out in sets.values():
            batch: Any = held_out.batches(options.eval_batch_size or options.batch_size)[0]
            jax.eval_shape(program.evaluate, state["params"], program.held_out_zero(width), batch)

    as_config_error("model", trace)
    params = jax.eval_shape(program.init, config.seed)["params"]
    if config.run.head_statistics:
        batch = sets["valid"].batches(options.eval_batch_size or options.batch_size)[0]
        as_config_error("run.head_statistics", lambda: jax.eval_shape(program.head_statistics, params, batch))
    if config.run.sample_length and isinstance(task, CharLM):
        as_config_error("run.sample_length", lambda: jax.eval_shape(functools.partial(_decoded, program), params))


def _decoded(program: Program, params: Any) -> jax.Array:
    """Logits of one token through a cache, as a sample needs them."""
    model = program.model(params)
    return model.decode(jnp.zeros((1, 1), jnp.int32), model.init_cache(1, 1))[0]


def _check_table(config: ConfigDict, task: Task, longest: int) -> None:
    """A table of learned positions ends: beyond it a model gives NaN in a held-out set."""
    if config.model.position.name == "learned" and longest > task.spec.length:
        raise ConfigError(
            f"task.test_lengths reaches position {longest}, beyond the {task.spec.length} of task.length that "
            "model.position.name = 'learned' has a table for"
        )
