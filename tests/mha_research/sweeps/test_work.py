"""One run of a sweep: idempotent, its failures kept, tuning decided by validation alone. Results are made up: no
training."""

import json
import math

import pytest

from mha_research.run_dir import Result
from mha_research.sweeps import local, work
from mha_research.sweeps.plan import plan
from mha_research.sweeps.work import NotReady, best_value, do, record_failure, state, tuned
from mha_research.training import Interrupted
from tests.mha_research.sweeps import tiny


@pytest.fixture
def manifest():
    return plan("?", "x.py", tiny.get_config(), tiny.tuned())


def result(status="finished", **metrics):
    return Result(status, 8, metrics, 10, 20, 30, 1.0, 1)


def write(workdir, run, **how):
    folder = run.folder(workdir)
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(result(**how).to_json())


def test_state_is_read_from_the_directory(tmp_path, manifest):
    one, two, three, four = manifest.runs[:4]
    write(tmp_path, one)
    write(tmp_path, two, status="diverged")
    record_failure(tmp_path, three, "OSError: disk full")
    assert [state(tmp_path, run) for run in (one, two, three, four)] == ["finished", "diverged", "failed", "waiting"]


def test_do_leaves_what_ended_and_keeps_why_it_failed(tmp_path, manifest, monkeypatch):
    calls = []

    def train(config, workdir):
        calls.append((config.seed, config.optimizer.learning_rate, workdir))
        print("step 1\nstep 2")
        raise OSError("disk\nfull")

    monkeypatch.setattr(work, "train", train)
    run = manifest.runs[0]
    assert do(tmp_path, manifest, run) == "failed"
    assert calls == [(1000, 0.001, tmp_path / "runs/h1/tune0-seed1000")]
    failure = json.loads((tmp_path / "failures/h1/tune0-seed1000.json").read_text())
    assert failure["reason"] == "OSError: disk full"
    assert failure["log"][:2] == ["step 1", "step 2"]
    assert do(tmp_path, manifest, run) == "failed"
    assert len(calls) == 1
    write(tmp_path, manifest.runs[1])
    assert do(tmp_path, manifest, manifest.runs[1]) == "finished"
    assert len(calls) == 1


def test_an_interruption_is_no_failure(tmp_path, manifest, monkeypatch):
    def train(config, workdir):
        raise Interrupted("stopped", 15)

    monkeypatch.setattr(work, "train", train)
    with pytest.raises(Interrupted):
        do(tmp_path, manifest, manifest.runs[0])
    assert state(tmp_path, manifest.runs[0]) == "waiting"


def test_tuning_takes_the_best_mean_and_divergence_is_the_worst(tmp_path, manifest):
    main = next(run for run in manifest.runs if run.name == "h1/seed0")
    tune = [run for run in manifest.runs if run.arm == "h1" and run.phase == "tune"]
    with pytest.raises(NotReady, match="h1/tune0-seed1000 has no result"):
        tuned(tmp_path, manifest, main)
    write(tmp_path, tune[0], **{"valid/loss": 1.5})
    write(tmp_path, tune[1], status="diverged")
    assert best_value(tmp_path, manifest, "h1") == (0.001, {0.001: 1.5, 0.003: math.inf})
    assert tuned(tmp_path, manifest, main) == {"optimizer.learning_rate": 0.001}
    assert tuned(tmp_path, manifest, tune[0]) == {}


def test_a_main_run_without_its_tuning_fails_with_the_reason(tmp_path, manifest):
    main = next(run for run in manifest.runs if run.name == "h3/seed2")
    assert do(tmp_path, manifest, main) == "failed"
    assert "NotReady: the tuning run h3/tune0" in (tmp_path / "failures/h3/seed2.json").read_text()


def test_workers_prefer_what_they_have_compiled(manifest):
    left = [run for run in manifest.runs if run.phase == "main"]
    assert local.choose(left, {"h3"}, {"h1", "h3"}, {"h1"}).name == "h3/seed0"
    assert local.choose(left, set(), {"h1"}, {"h1"}).name == "h3/seed0"
    assert local.choose(left, set(), {"h1", "h3"}, set()).name == "h1/seed0"
    assert local.choose(left, set(), {"h1", "h3"}, {"h1"}).name == "h3/seed0"
    assert local.choose(left, set(), {"h1", "h3"}, {"h1", "h3"}) is None  # the cache will have them soon
    assert local.choose(left, {"h1"}, {"h1", "h3"}, {"h1", "h3"}).name == "h1/seed0"


def test_replicates_are_seeds_of_one_arm_and_setting(manifest):
    tune, main = manifest.runs[0], manifest.runs[-1]
    assert local.replicates(manifest.runs, tune) == [tune]  # the grid's other value is another setting
    assert [run.name for run in local.replicates(manifest.runs, main)] == ["h3/seed0", "h3/seed1", "h3/seed2"]


def test_together_every_run_has_an_end_of_its_own(tmp_path, manifest, monkeypatch):
    main = [run for run in manifest.runs if run.phase == "main" and run.arm == "h1"]
    for run in manifest.runs:
        if run.phase == "tune":
            write(tmp_path, run, **{"valid/loss": 1.5})
    write(tmp_path, main[0])

    def train_together(configs, folders):
        assert [config.seed for config in configs] == [1, 2]
        write(tmp_path, main[2], status="diverged")
        return [OSError("disk full"), result("diverged")]

    monkeypatch.setattr(work, "train_together", train_together)
    assert work.do_together(tmp_path, manifest, main) == ["finished", "failed", "diverged"]


def test_slots(monkeypatch):
    monkeypatch.setattr(local.os, "sched_getaffinity", lambda _: {2, 3, 5}, raising=False)
    monkeypatch.setattr(local.glob, "glob", lambda _: [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert local.slots() == [local.Slot((2,)), local.Slot((3,)), local.Slot((5,))]
    assert local.slots(2) == [local.Slot((2,)), local.Slot((3,))]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,4")
    assert local.slots(8) == [local.Slot((2, 5), "1"), local.Slot((3,), "4")]
