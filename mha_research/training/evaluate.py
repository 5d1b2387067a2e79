"""Exact evaluation: sums and counts over the whole of a held-out set, divided once."""

from typing import Any

import grain
import jax

from mha_research.tasks import Evaluation, Task
from mha_research.training.step import Program, zero_sums


def evaluate(program: Program, params: Any, evaluation: Evaluation, batch_size: int) -> dict[str, float]:
    """Sum of the losses (nats), of the hits, and their number, over every target of the set."""
    sums = zero_sums()
    batches = evaluation.batches(batch_size).to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4))
    for batch in batches:
        sums = program.evaluate(params, sums, batch)
    return {name: float(value) for name, value in jax.device_get(sums).items()}


def evaluation_row(task: Task, program: Program, params: Any, batch_size: int, every: bool) -> dict[str, float]:
    """`valid/...` metrics, and with `every` those of the other held-out sets; `test@512` gives `test/...@512`."""
    row: dict[str, float] = {}
    for name, held_out in task.evaluations().items():
        if name == "valid" or every:
            sums = evaluate(program, params, held_out, batch_size)
            split, at, length = name.partition("@")
            values = task.metrics(sums["loss"] / sums["count"], sums["hits"] / sums["count"])
            row |= {f"{split}/{metric}{at}{length}": value for metric, value in values.items()}
    return row
