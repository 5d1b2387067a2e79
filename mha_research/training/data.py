"""Batches for the loop: made ahead by threads or processes, in an order that does not depend on how many there are."""

import os
import threading
import time
from collections.abc import Iterator

import grain
from absl import flags
from ml_collections import ConfigDict

from mha_research.tasks import Task

_AHEAD = 4


def train_batches(task: Task, config: ConfigDict, start: int) -> Iterator[dict]:
    """The batches of updates start, start + 1, ... (from 0) until `train.steps`.

    Random access makes the position the step, so nothing of it needs to be saved. `run.data_workers` processes make
    them, or one thread of this process.
    """
    options = config.train
    batches = task.train_batches(config.seed, options.batch_size).slice(slice(start, options.steps))
    workers = config.run.data_workers
    if not workers:
        return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=_AHEAD)))
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # grain's workers read absl flags, which nobody here parses
    ahead = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=_AHEAD)
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=0)).mp_prefetch(ahead, _end_with_parent))


def _end_with_parent(*_: int) -> None:
    """Ends a worker whose parent was killed, which would otherwise wait for ever."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
