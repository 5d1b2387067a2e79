"""The quickstart on a text of a few kilobytes: it sweeps, shows and draws, and only shows when everything is there."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from experiments import quickstart
from mha_research.config import default_config, override, to_json

SMALL = (
    "task.length=16",
    "model.d_model=16",
    "model.num_layers=1",
    "model.attention.implementation=reference",  # compiles sooner
    "train.steps=3",
    "train.log_every=1",
    "train.batch_size=2",
)


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    folder = tmp_path_factory.mktemp("quickstart")
    (folder / "text.txt").write_text("How vainly men themselves amaze\nTo win the palm, the oak, or bays.\n" * 20)
    command = [f"--workdir={folder / 'run'}", f"--config.task.files={folder}/*.txt"]
    return [*command, *(f"--config.{field}" for field in SMALL)], folder / "run"


def test_it_ends_with_what_a_person_wants_to_see(
    called: tuple[list[str], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command, workdir = called
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setattr(quickstart, "CONFIG", Path(__file__).with_name("few_heads.py"))
    assert quickstart.main(command) == 0
    shown = capsys.readouterr().out
    assert "6 of 6 done" in shown
    for arm in ("h1", "h2"):
        paths = sorted(workdir.glob(f"runs/{arm}/*/result.json"))
        results = [json.loads(path.read_text())["metrics"] for path in paths]
        assert len(results) == 3
        line = next(line for line in shown.splitlines() if f"{arm}, 3 seeds" in line)
        numbers = list(map(float, re.findall(r"\d+\.\d+", line)))
        valid, test = ([result[f"{split}/nats_per_char"] for result in results] for split in ("valid", "test"))
        mean_bits = [np.mean([result[f"{split}/bits_per_char"] for result in results]) for split in ("valid", "test")]
        expected = [
            number
            for values, bits in zip((valid, test), mean_bits)
            for number in (np.mean(values), np.std(values, ddof=1), bits)
        ]
        np.testing.assert_allclose(numbers, expected, atol=6e-4)
    documents = json.loads((paths[0].parent / "documents.json").read_text())["test"]
    assert sum(documents["loss"]) / sum(documents["count"]) == pytest.approx(test[0])
    assert all(text in shown for text in ("a uniform guess", "character frequencies", "bz2 of that", "bz2 after"))
    assert "the best run and the one that is drawn, writes:" in shown
    assert re.search(r"^(supported|contradicted|inconclusive): Two heads beat one", shown, re.M)
    assert "with 3 seeds, 80 % power needs an effect of" in shown
    assert (workdir / "report/index.html").exists()
    pictures = [Path(line.removeprefix("drawn: ")) for line in shown.splitlines() if line.startswith("drawn: ")]
    assert [path.name for path in pictures] == ["effect.png", "loss.png", "heads.png"]
    for path in pictures:
        assert imread(path).std() > 0.01, f"{path} is blank"
    assert f"everything lies in {workdir}" in shown
    before = {path: path.stat().st_mtime_ns for path in workdir.rglob("runs/**/*") if path.is_file()}
    assert quickstart.main(command) == 0
    assert "0 runs to do" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in workdir.rglob("runs/**/*") if path.is_file()} == before


@pytest.mark.parametrize(
    "arguments", [["--config.model.d_mode=3", "--workdir=x"], ["--config.seed=3"], ["--worksdir=x"]]
)
def test_a_wrong_command_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert quickstart.main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not Path("x").exists()


def test_only_characters_are_drawn(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(to_json(override(default_config(), {"task.name": "induction"})))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n')
    with pytest.raises(ValueError, match="holds a run of task 'induction'"):
        quickstart.draw(tmp_path)


def test_kinds_that_it_cannot_show_are_refused_before_it_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [f"--workdir={tmp_path / 'run'}", "--config.model.attention.kind=sigmoid"]
    assert quickstart.main(command) == 2
    said = capsys.readouterr().err
    assert said.startswith("experiments.quickstart: it draws plain heads and samples from them")
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()
