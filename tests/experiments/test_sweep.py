"""The command line of an ablation, for real: plan, run, resume, kill, report."""

import json
import random
import subprocess

import numpy as np
import pytest

from experiments import report, sweep
from mha_research.analysis import compare, load_runs
from mha_research.analysis.manifest import Manifest
from mha_research.run_dir.files import exclusive
from mha_research.sweeps.plan import load_sweep, plan, run_config
from mha_research.training import train
from tests.experiments.interrupting import SWEEP, kill_at_random, results, start


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A sweep that ran through, and what it printed."""
    workdir = tmp_path_factory.mktemp("sweep") / "whole"
    process = start(workdir, "--config.train.log_every=2")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    return workdir, out


def test_plan_and_runs(finished):
    workdir, out = finished
    assert "h1" in out
    assert "every arm has the same parameters" in out
    assert "6 runs to do" in out
    # Cohen: one-sided t at 5 %, 3 values, 80 % power needs 2.30.
    assert "with 3 seeds, 80 % power needs an effect of 2.30 standard deviations" in out
    assert "expect inconclusive verdicts" in out
    assert len(results(workdir)) == 6
    assert "6 of 6 done" in out
    assert Manifest.read(workdir).options == ("--config.train.log_every=2",)
    assert "finished 8 steps" in (workdir / "logs/h1/seed0.log").read_text()
    assert not (workdir / "failures").exists()


def test_a_worker_gives_what_a_run_alone_gives(finished, tmp_path):
    workdir, _ = finished
    manifest = plan(*_loaded())
    run = next(run for run in manifest.runs if run.name == "h3/seed1")
    alone = train(run_config(manifest, run), tmp_path / "alone")
    together = json.loads((workdir / "runs/h3/seed1/result.json").read_text())
    # A worker has one core, and XLA's sums over batches depend on the number of threads in the last bits.
    assert together["metrics"] == pytest.approx(alone.metrics, rel=1e-5)
    assert together["step"] == alone.step == 8


def _loaded():
    title, base, described = load_sweep(SWEEP)
    return title, str(SWEEP), base, described


def test_the_same_command_repeats_nothing(finished, capsys):
    workdir, _ = finished
    before = {path: path.stat().st_mtime_ns for path in workdir.rglob("runs/**/*") if path.is_file()}
    assert sweep.main([f"--workdir={workdir}"]) == 0
    assert "0 runs to do" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in workdir.rglob("runs/**/*") if path.is_file()} == before


def test_report_and_notebook_functions(finished, capsys):
    workdir, _ = finished
    assert report.main([f"--workdir={workdir}"]) == 0
    assert "Three heads beat one" in capsys.readouterr().out
    assert (workdir / "report/index.html").exists()
    assert (workdir / "report/results.parquet").exists()
    runs = load_runs(workdir)
    assert list(compare(runs, "test/loss", "h1")["seeds"]) == [3, 3]
    model = runs[0].restore()
    assert model(np.arange(11)[None] % 7).shape == (1, 11, 7)


def test_killed_three_times_gives_the_same_results(finished, tmp_path):
    workdir, _ = finished
    kill_at_random(tmp_path / "killed", 3, random.Random(5), 9.0)
    process = start(tmp_path / "killed")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert results(tmp_path / "killed") == results(workdir)


def test_two_sweeps_on_one_directory(finished, capsys):
    workdir, _ = finished
    with exclusive(workdir / ".lock"):
        assert sweep.main([f"--workdir={workdir}"]) == 2
    assert capsys.readouterr().err.startswith(f"experiments.sweep: another sweep is running in {workdir}")


def test_dry_run_creates_nothing(tmp_path, capsys):
    assert sweep.main([f"--config={SWEEP}", f"--workdir={tmp_path / 'new'}", "--dry_run", "--only=h3"]) == 0
    out = capsys.readouterr().out
    assert "3 runs to do" in out
    assert "\nh3: model.attention.num_heads=3\n" in out
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "--workdir is missing"),
        (["--workdir=x", "--config=no.py"], "no Python config file 'no.py'"),
        (["--workdir=x", "--what=1"], "unknown option --what"),
        (["--workdir=x", "--executor=kubernetes"], "invalid choice: 'kubernetes'"),
        (["--workdir=x", "--quick"], "need --config=FILE"),
        (["--workdir=no"], "no is no sweep"),
        (["--workdir=x", f"--config={SWEEP}", "--only=h9"], "--only names the arm 'h9'; there are h1, h3"),
        (["--workdir=x", f"--config={SWEEP}", "--max_parallel=0"], "--max_parallel is 1 or more"),
        (["--workdir=x", f"--config={SWEEP}", "--config.model.dd_model=3"], "did you mean 'model.d_model'"),
        (["--workdir=x", f"--config={SWEEP}", "--config.model.d_model=13"], "arm 'h3': model: "),
        (["--workdir=tests", f"--config={SWEEP}"], "tests is not empty and holds no manifest.json"),
        (["--workdir=no", "--run=h1/seed0"], "no is no sweep"),
        (["--workdir=x", "--run="], "argument --run: it is empty"),  # an unset variable must not run everything
        (["--workdir=x", "--only=,"], "argument --only: it is empty"),
        (["--workdir=x", "--config="], "argument --config: it is empty"),
        (["--workdir=x", "--run=h1/seed0", "--retry_failed"], "takes no option but --workdir"),
        (["--workdir=x", "--sbatch='a"], "argument --sbatch"),
        (
            [
                "--workdir=x",
                f"--config={SWEEP}",
                "--config.model.attention.position.name=rotary",
                "--config.model.d_model=15",
            ],
            "arm 'h1': model: rotate: the head width must be even, got 15",
        ),
        ([f"--workdir={SWEEP}", f"--config={SWEEP}"], "cannot be made a directory"),
    ],
)
def test_wrong_commands_are_one_line_and_create_nothing(arguments, message, capsys):
    assert sweep.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert error.startswith("experiments.sweep: ")


def test_options_for_sbatch_reach_the_engine_as_words(tmp_path, monkeypatch):
    asked = []

    def engine_for(executor, manifest, max_parallel, sbatch):
        asked.append((executor, sbatch))
        return None, 1

    monkeypatch.setattr("mha_research.sweeps.engines.engine_for", engine_for)
    command = [f"--workdir={tmp_path / 'new'}", f"--config={SWEEP}", "--dry_run", "--executor=slurm"]
    assert sweep.main([*command, "--sbatch=--partition=gpu --comment='two words'"]) == 0
    assert sweep.main(command) == 0
    assert asked == [("slurm", ["--partition=gpu", "--comment=two words"]), ("slurm", [])]


@pytest.mark.parametrize(
    "arguments, message",
    [([], "--workdir is missing"), (["--workdir=no"], "neither a sweep"), (["--x=1"], "unknown option --x")],
)
def test_wrong_report_commands(arguments, message, capsys):
    assert report.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_one_run_as_the_engines_call_it(finished, capsys):
    workdir, _ = finished
    assert sweep.main([f"--workdir={workdir}", "--run=h1/seed0"]) == 0
    assert capsys.readouterr().out == "h1/seed0 finished\n"
    assert sweep.main([f"--workdir={workdir}", "--run=h1/seed9"]) == 2


def test_failed_runs_are_kept_counted_and_tried_again(finished, tmp_path, capsys):
    workdir = tmp_path / "s"
    subprocess.run(["cp", "-r", finished[0], workdir], check=True)
    (workdir / "runs/h1/seed0/result.json").unlink()
    checkpoints = workdir / "runs/h1/seed0/checkpoints"
    kept = (workdir / "runs/h1/seed0/config.json").read_text()
    (workdir / "runs/h1/seed0/config.json").write_text(kept.replace('"batch_size": 3', '"batch_size": 5'))
    assert sweep.main([f"--workdir={workdir}"]) == 1
    assert "1 runs failed" in capsys.readouterr().err
    assert "holds a run with another config" in (workdir / "failures/h1/seed0.json").read_text()
    assert load_runs(workdir)[0].status == "failed"
    assert checkpoints.exists()
    (workdir / "runs/h1/seed0/config.json").write_text(kept)
    assert sweep.main([f"--workdir={workdir}"]) == 1  # not without being asked
    assert sweep.main([f"--workdir={workdir}", "--retry_failed"]) == 0
    assert results(workdir) == results(finished[0])
