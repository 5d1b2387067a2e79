"""Events read back by TensorBoard's own reader."""

from pathlib import Path

import pytest

pytest.importorskip("tensorboard", reason="tensorboard is not installed; scripts/trackers runs this")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata

from tests.mha_research.export.sweeps import BEGUN, RUNNING, complete, export, finish, logged, make


def read(workdir: Path, name: str) -> EventAccumulator:
    (folder,) = (workdir / "export/tensorboard" / workdir.name).glob(f"{name}-*")
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def scalars(events: EventAccumulator) -> dict[tuple[str, int], float]:
    """Each number once, or the test fails."""
    found = [(tag, event.step, event.value) for tag in events.Tags()["scalars"] for event in events.Scalars(tag)]
    assert len({point[:2] for point in found}) == len(found)
    return {(tag, step): value for tag, step, value in found}


def test_a_sweep_while_it_runs_and_when_it_is_over(tmp_path: Path) -> None:
    sweep = make(tmp_path / "sweep")
    assert export(sweep, "tensorboard") == dict.fromkeys(BEGUN, 6) | {RUNNING: 3}
    for name in BEGUN:
        assert scalars(read(sweep, name)) == pytest.approx(complete(sweep, name), rel=1e-6)  # events hold float32
    assert export(sweep, "tensorboard") == dict.fromkeys(BEGUN, 0)
    following = read(sweep, RUNNING)
    finish(sweep)
    assert export(sweep, "tensorboard") == dict.fromkeys(BEGUN, 0) | {RUNNING: 3}
    following.Reload()  # a TensorBoard that was open sees the rest
    assert scalars(following) == pytest.approx(logged(sweep, RUNNING), rel=1e-6)
    assert scalars(read(sweep, RUNNING)) == pytest.approx(logged(sweep, RUNNING), rel=1e-6)


def test_settings_tags_and_files(tmp_path: Path) -> None:
    sweep = make(tmp_path / "sweep")
    export(sweep, "tensorboard", "--project=heads", f"--output={tmp_path / 'events'}")
    (folder,) = (tmp_path / "events/heads").glob("h1/seed1-*")
    events = EventAccumulator(str(folder))
    events.Reload()
    start = events.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    settings = metadata.parse_session_start_info_plugin_data(start).hparams
    assert settings["arm"].string_value == "h1"
    assert settings["seed"].string_value == "1"
    assert settings["model.attention.num_heads"].number_value == 1
    (result,) = events.Tensors("result.json/text_summary")
    assert (sweep / "runs/h1/seed1/result.json").read_text().encode() in result.tensor_proto.string_val[0]


def test_rows_that_a_killed_run_takes_back_are_taken_back(tmp_path: Path) -> None:
    sweep = make(tmp_path / "sweep")
    export(sweep, "tensorboard")
    path = sweep / "runs" / RUNNING / "metrics.jsonl"
    path.write_text("".join(line.replace("1.0", "1.5") for line in path.read_text().splitlines(keepends=True)[:5]))
    export(sweep, "tensorboard")
    expected = {key: value for key, value in logged(sweep, RUNNING).items() if key[1] < 30}
    assert scalars(read(sweep, RUNNING)) == pytest.approx(expected, rel=1e-6)
