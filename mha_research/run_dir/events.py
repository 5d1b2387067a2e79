"""TensorBoard events, complete up to the last row however the run ended."""

import contextlib
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any


class Events:
    """Scalars in the event files of a folder, written in order by one thread, so that the training does not wait.

    Each start of a run has its own file; it tells TensorBoard to forget what earlier ones say after `step`. A write
    that fails raises OSError from the next call.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._folder, self._step = folder, step
        self._thread = ThreadPoolExecutor(1)
        self._writer: Future | None = None

    def write(self, step: int, values: dict[str, float]) -> None:
        """Adds the values under their names; they are on the disk some milliseconds later."""
        if self._writer is None:  # not before there is something to write, when the first update has been compiled
            self._writer = self._last = self._thread.submit(_open, self._folder, self._step)
        if self._last.done():
            self._last.result()
        self._last = self._thread.submit(_write, self._last, self._writer, step, values)

    def close(self) -> None:
        """Waits for what is still to be written."""
        self._thread.shutdown()
        if self._writer is not None:
            with contextlib.closing(self._writer.result()):
                self._last.result()


# tensorboardX is imported on the thread, for it takes half a second. Its SummaryWriter is not used: it keeps events in
# memory for two minutes, and waits for ever once a write has failed.
def _open(folder: Path, step: int) -> Any:
    from tensorboardX.proto import event_pb2
    from tensorboardX.record_writer import RecordWriter

    folder.mkdir(exist_ok=True)
    now = time.time()
    writer = RecordWriter(str(folder / f"events.out.tfevents.{now:.6f}.{os.getpid()}"))
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    for event in (
        event_pb2.Event(wall_time=now, file_version="brain.Event:2"),
        event_pb2.Event(wall_time=now, step=step + 1, session_log=start),
    ):
        writer.write(event.SerializeToString())
    return writer


def _write(before: Future, writer: Future, step: int, values: dict[str, float]) -> None:
    before.result()  # nothing is written after a write that failed, and its error is the one that is told
    from tensorboardX.proto import event_pb2, summary_pb2

    scalars = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
    event = event_pb2.Event(wall_time=time.time(), step=step, summary=summary_pb2.Summary(value=scalars))
    writer.result().write(event.SerializeToString())
    writer.result().flush()
