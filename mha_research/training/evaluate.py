"""Exact evaluation: sums and counts over the whole of a held-out set, by document, divided once."""

from collections.abc import Mapping
from typing import Any

import grain
import jax
import numpy as np

from mha_research.tasks import Evaluation, Task
from mha_research.training.step import Program

DocumentSums = dict[str, np.ndarray]


def evaluate(
    program: Program, params: Any, evaluation: Evaluation, batch_size: int, width: int | None = None
) -> DocumentSums:
    """Sums of the losses (nats) and of the hits, and their number, of each document's targets: (documents,), float64.

    Sets evaluated with the same `width`, the largest of their numbers of documents, share one compiled program.
    """
    zero = program.held_out_zero(width or evaluation.documents)
    batches = evaluation.batches(batch_size).to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4))
    # A batch is summed in float32 on the device, and batches in float64 here: a long document has more targets than
    # float32 can count. Each is fetched once the next one is under way.
    total = jax.tree.map(lambda leaf: np.zeros(leaf.shape), zero)
    unread = zero
    for batch in batches:
        sums = program.evaluate(params, zero, batch)
        total, unread = _added(total, unread), sums
    return {name: value[: evaluation.documents] for name, value in _added(total, unread).items()}


def _added(total: DocumentSums, sums: Mapping[str, Any]) -> DocumentSums:
    return {name: value + np.asarray(sums[name], np.float64) for name, value in total.items()}


def held_out_sets(task: Task, limit: int | None = None) -> dict[str, Evaluation]:
    """The held-out sets by name, each thinned to at most `limit` of its examples."""
    return {name: held_out.thinned(limit) if limit else held_out for name, held_out in task.evaluations().items()}


def head_row(task: Task, program: Program, params: Any, batch_size: int) -> dict[str, float]:
    """`heads/entropy/1.3` and so on: what head 3 of layer 1 does on the first batch of the validation set."""
    found = program.head_statistics(params, task.evaluations()["valid"].batches(batch_size)[0])
    return {
        f"heads/{name}/{layer}.{head}": float(value)
        for name, values in found.items()
        for (layer, head), value in np.ndenumerate(np.asarray(values))
    }


def evaluation_row(
    task: Task, program: Program, params: Any, batch_size: int, every: bool, limit: int | None = None
) -> tuple[dict[str, float], dict[str, DocumentSums]]:
    """(`valid/...` metrics, and with `every` those of the other held-out sets; the sums by document behind them).

    `test@512` gives `test/...@512`; with a `limit` only so many examples of each set are scored.
    """
    row: dict[str, float] = {}
    found: dict[str, DocumentSums] = {}
    sets = held_out_sets(task, limit)
    width = max(held_out.documents for held_out in sets.values())
    for name, held_out in sets.items():
        if name == "valid" or every:
            found[name] = evaluate(program, params, held_out, batch_size, width)
            loss, hits, count = (float(found[name][part].sum()) for part in ("loss", "hits", "count"))
            split, at, length = name.partition("@")
            values = task.metrics(loss / count, hits / count)
            values |= {metric: float(found[name][metric].sum()) / count for metric in program.metrics}
            row |= {f"{split}/{metric}{at}{length}": value for metric, value in values.items()}
    return row, found
