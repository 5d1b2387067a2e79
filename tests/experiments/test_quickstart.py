"""The quickstart on a text of a few kilobytes: it trains, draws, and only draws when the run is over."""

from pathlib import Path

import pytest
from matplotlib.image import imread

from experiments import quickstart

SMALL = (
    "task.length=16",
    "model.d_model=16",
    "model.num_layers=1",
    "model.attention.num_heads=2",
    "model.attention.implementation=reference",  # compiles sooner
    "train.steps=3",
    "train.batch_size=2",
    "run.sample_length=5",
    "run.tensorboard=False",
)


def test_it_trains_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("How vainly men themselves amaze\nTo win the palm, the oak, or bays.\n" * 20)
    workdir = tmp_path / "run"
    command = [
        f"--workdir={workdir}",
        f"--config.task.files={tmp_path}/*.txt",
        *(f"--config.{field}" for field in SMALL),
    ]
    assert quickstart.main(command) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("uniform", "unigram", "bz2", "sample:", "loss.png", "heads.png"))
    for name in ("loss.png", "heads.png"):
        image = imread(workdir / name)
        assert image.std() > 0.01, f"{name} is blank"
    before = (workdir / "metrics.jsonl").read_text()
    assert quickstart.main(command) == 0
    assert (workdir / "metrics.jsonl").read_text() == before


def test_a_wrong_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert quickstart.main(["--config.model.d_mode=3", "--workdir=x"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
