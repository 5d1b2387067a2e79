"""A tuned sweep that is stopped anywhere goes on with the same command to the end it would have had."""

import dataclasses
import json

import pytest

from experiments import sweep
from mha_research.analysis.manifest import Manifest
from mha_research.config import default_config
from mha_research.run_dir import Result
from mha_research.sweeps import vary, work
from mha_research.sweeps.plan import extend, plan
from mha_research.training import Interrupted
from tests.mha_research.sweeps import tiny

FILE = """from tests.mha_research.sweeps.tiny import get_config, tuned as get_sweep"""


@pytest.fixture
def stop(monkeypatch):
    """Runs have an end at once, `stop["after"]` of them in a start; the next one is interrupted."""
    stop = {"after": 0}

    def train(config, folder):
        if not stop["after"]:
            raise Interrupted("stopped", 15)
        stop["after"] -= 1
        folder.mkdir(parents=True)
        loss = 1 + 100 * config.optimizer.learning_rate * (config.model.attention.num_heads - 2) + config.seed
        result = Result("finished", 8, {"valid/loss": loss, "test/loss": loss}, 10, 20, 30, 1.0, 1)
        (folder / "result.json").write_text(result.to_json())
        return result

    def engine(workdir, manifest, runs, watch):
        for run in runs:
            watch.tell(run, work.do(workdir, Manifest.read(workdir), run))

    monkeypatch.setattr(work, "train", train)
    monkeypatch.setattr("mha_research.sweeps.engines.engine_for", lambda *_: (engine, 1))
    return stop


def ends(workdir):
    return {str(path): json.loads(path.read_text())["metrics"] for path in workdir.glob("runs/*/*/result.json")}


# Four tuning runs (two arms, two values), then six: nothing, inside tuning, all of it, inside the rest, all.
@pytest.mark.parametrize("after", [0, 1, 3, 4, 5, 9, 10])
def test_interrupted_in_every_phase(after, stop, tmp_path, capsys):
    (tmp_path / "tuned.py").write_text(FILE)
    workdir, command = tmp_path / "s", [f"--config={tmp_path / 'tuned.py'}", f"--workdir={tmp_path / 's'}"]
    stop["after"] = after
    assert sweep.main(command) == (0 if after == 10 else 143)
    frozen = Manifest.read(workdir)
    assert len(ends(workdir)) == after
    stop["after"] = 100
    assert sweep.main(command) == 0, capsys.readouterr().err
    assert stop["after"] == 90 + after  # nothing was repeated
    assert Manifest.read(workdir) == frozen
    assert frozen.later is None
    # The best rate: the lower one where more of it makes the loss worse (three heads), the higher one for one head.
    assert ends(workdir)[str(workdir / "runs/h1/seed0/result.json")]["test/loss"] == pytest.approx(1 - 0.3)
    assert ends(workdir)[str(workdir / "runs/h3/seed0/result.json")]["test/loss"] == pytest.approx(1 + 0.1)


def test_grids_and_arms_of_tuples_go_on_too(tmp_path):
    """A field that holds a tuple, as an arm's setting and as the values of the grid."""
    arms = vary("task.test_lengths", [(16, 32), (64,)], "t{}")
    tune = dataclasses.replace(tiny.tuned().tune, field="optimizer.learning_rate", values=(1e-3, 2e-3))
    for described in (
        dataclasses.replace(tiny.get_sweep(), arms=arms, claims=(), tune=tune),
        dataclasses.replace(tiny.tuned(), tune=dataclasses.replace(tune, field="task.test_lengths", values=[(), (8,)])),
    ):
        planned = plan("?", "x.py", default_config(), described)
        (tmp_path / "manifest.json").write_text(planned.to_text())
        read = Manifest.read(tmp_path)
        assert read == planned
        assert extend(read, planned) == planned
        run = next(run for run in read.runs if run.phase == "main")
        for tuning in (run for run in read.runs if run.phase == "tune"):
            folder = tuning.folder(tmp_path)
            folder.mkdir(parents=True, exist_ok=True)
            result = Result("finished", 8, {"valid/loss": 1.0}, 10, 20, 30, 1.0, 1)
            (folder / "result.json").write_text(result.to_json())
        assert work.best_value(tmp_path, read, run.arm)[0] == planned.frozen.tune["values"][0]
