"""What a run says: TensorBoard events that another reader can read, and progress for a person, on a terminal or not."""

import io
import json
import pathlib
import struct
import time

import pytest
from rich.console import Console
from tensorboardX.proto import event_pb2

from mha_research.run_dir import log as log_module
from mha_research.run_dir.log import Log

ROWS = {5: {"train/loss": 1.5, "time/tokens_per_second": 12345.6, "time/seconds_left": 65.0}, 7: {"valid/loss": 2.25}}


def crc32c(data: bytes) -> int:
    """The Castagnoli checksum bit by bit (RFC 3720, appendix B.4), masked as TensorFlow's record format asks."""
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = (register >> 1) ^ (0x82F63B78 * (register & 1))
    value = register ^ 0xFFFFFFFF
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF


def events(path: pathlib.Path) -> list[event_pb2.Event]:
    """Records of length, checksum of the length, data, checksum of the data, as TensorFlow writes them."""
    content, found = path.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        data = content[12 : 12 + length]
        assert struct.unpack("<I", content[8:12]) == (crc32c(content[:8]),)
        assert struct.unpack("<I", content[12 + length : 16 + length]) == (crc32c(data),)
        found.append(event_pb2.Event.FromString(data))
        content = content[16 + length :]
    return found


def scalars(folder: pathlib.Path) -> dict[tuple[str, int], float]:
    """What TensorBoard shows: a start of session at step s takes back everything from s on."""
    shown: dict[tuple[str, int], float] = {}
    for path in sorted(folder.iterdir(), key=lambda path: events(path)[0].wall_time):
        for event in events(path):
            if event.HasField("session_log"):
                assert event.session_log.status == event_pb2.SessionLog.START
                shown = {name: value for name, value in shown.items() if name[1] < event.step}
            shown |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
    return shown


def write(workdir: pathlib.Path, rows: dict[int, dict[str, float]], step: int = 0) -> None:
    with Log(workdir, 10, step, tensorboard=True) as log:
        for number, values in rows.items():
            log.row(number, values)


def test_events_are_those_of_the_rows_also_after_a_resume(tmp_path: pathlib.Path) -> None:
    write(tmp_path, ROWS)
    write(tmp_path, {6: {"train/loss": 1.25}, 7: {"valid/loss": 2.5}}, step=5)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    expected = {(name, row["step"]): value for row in rows for name, value in row.items() if name != "step"}
    assert scalars(tmp_path / "tensorboard") == pytest.approx(expected, rel=1e-6)
    assert expected["valid/loss", 7] == 2.5
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2


def test_events_reach_the_disk_while_the_run_goes_on(tmp_path: pathlib.Path) -> None:
    """A run that is killed has lost none but those of its last moment."""
    with Log(tmp_path, 10, 0, tensorboard=True) as log:
        log.row(5, ROWS[5])
        end = time.monotonic() + 60
        while not any(path.stat().st_size for path in tmp_path.glob("tensorboard/*")):
            assert time.monotonic() < end
            time.sleep(0.05)
        assert len(scalars(tmp_path / "tensorboard")) == 3


def test_an_event_that_cannot_be_written_is_an_error(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tensorboardX.record_writer.RecordWriter.flush", fail)
    with pytest.raises(OSError, match="No space left on device"):
        write(tmp_path, ROWS)


def test_plain_lines_tell_rate_and_time_left(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Log(tmp_path, 10, 0, tensorboard=False) as log:
        log.row(5, ROWS[5])
        log.row(6, ROWS[5])  # within five seconds: only evaluations are said
        log.row(7, ROWS[7])
    assert capsys.readouterr().out.splitlines() == [
        "step 5/10  train/loss 1.5  time/tokens_per_second 12,346  0:01:05 left",
        "step 7/10  valid/loss 2.25",
    ]


def test_a_terminal_gets_one_line_that_moves(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=120, legacy_windows=False)
    monkeypatch.setattr(log_module, "Console", lambda: console)
    with Log(tmp_path, 10, 2, tensorboard=False) as log:
        log.advance(3)
        log.row(5, ROWS[5])
        log.say("saved [step] 5")
        log.row(7, ROWS[7])
    output = terminal.getvalue()
    for expected in (
        "5/10",
        "train/loss 1.5",
        "tokens_per_second 12,346",
        "0:01:05 left",
        "saved [step] 5",
        "loss 2.25",
    ):
        assert expected in output
    assert "\x1b[2K" in output  # erases the line in place
