"""Runs as TensorBoard events: curves, and at the end a row of the hyperparameters' table and the files as text."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboardX.proto import event_pb2, summary_pb2
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData
from tensorboardX.record_writer import RecordWriter
from tensorboardX.summary import hparams, text

from mha_research.export.record import Record


class TensorBoardTracker:
    """A folder for each run, with one file of events that only grows, so that an open TensorBoard follows.

    The file follows from the run alone, times included: what is there already begins what is to be there, and only the
    rest is written. Where it does not, because a killed run went on from an earlier checkpoint, the file is made anew.
    """

    def __init__(self, output: str, project: str) -> None:
        self._folder = Path(output, project)

    def write(self, record: Record) -> int:
        """Add the steps that the run's file lacks; returns how many."""
        path = self._folder / record.unique_name / f"events.out.tfevents.{record.id}"
        path.parent.mkdir(parents=True, exist_ok=True)
        old = path.read_bytes() if path.exists() else b""
        temporary = path.with_name(f".{record.id}")
        ends = _write_events(temporary, record)
        new = temporary.read_bytes()
        if not new.startswith(old):
            old = b""
        if old:
            with path.open("ab") as file:
                file.write(new[len(old) :])
            temporary.unlink()
        else:
            temporary.replace(path)
        return sum(end > len(old) for end in ends)


def _write_events(path: Path, record: Record) -> list[int]:
    """Write the whole file of a run; returns where each of its steps ends, in bytes."""
    writer, ends, size = RecordWriter(str(path)), [], 0
    for event in _events(record):
        data = event.SerializeToString(deterministic=True)
        writer.write(data)
        size += len(data) + 16  # its length and two checksums
        if event.HasField("summary") and event.summary.value[0].HasField("simple_value"):
            ends.append(size)
    writer.close()
    return ends


def _events(record: Record) -> Iterator[event_pb2.Event]:
    last = record.rows[-1].time if record.rows else 0.0
    yield event_pb2.Event(wall_time=record.rows[0].time if record.rows else 0.0, file_version="brain.Event:2")
    for row in record.rows:
        values = [summary_pb2.Summary.Value(tag=name, simple_value=x) for name, x in row.values.items()]
        yield event_pb2.Event(wall_time=row.time, step=row.step, summary=summary_pb2.Summary(value=values))
    if record.over:
        for summary in itertools.chain(_hyperparameters(record), _texts(record)):
            yield event_pb2.Event(wall_time=last, summary=summary)


def _hyperparameters(record: Record) -> Iterator[summary_pb2.Summary]:
    """A row of the table: settings and tags, beside the last value of each metric of the result."""
    settings = {name: _plain(value) for name, value in {**record.config, **record.tags}.items()}
    logged = {name for row in record.rows for name in row.values}
    for summary in hparams(settings, [name for name in record.summary if name in logged]):
        data = summary.value[0].metadata.plugin_data
        # Its fields lie in a map, whose order protobuf leaves open unless it is asked for a fixed one.
        data.content = HParamsPluginData.FromString(data.content).SerializeToString(deterministic=True)
        yield summary


def _texts(record: Record) -> Iterator[summary_pb2.Summary]:
    for path in record.files:
        yield text(path.name, f"```\n{path.read_text(encoding='utf8')}\n```")


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)
