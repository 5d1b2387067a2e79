"""The command line: real processes that are stopped and killed, and wrong commands answered in one line."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import pytest

from experiments.train import main

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = """
from mha_research.config import default_config

def get_config():
    config = default_config()
    config.task.files = "{folder}/*.txt"
    config.task.length = 8
    config.model.num_layers = 1
    config.model.d_model = 8
    config.model.attention.num_heads = 2
    config.model.attention.dropout_rate = 0.3
    config.optimizer.warmup_steps = 2
    config.train.steps = 40
    config.train.batch_size = 4
    config.train.accumulate = 2
    config.train.log_every = 3
    config.train.eval_every = 10
    config.train.checkpoint_every = 5
    config.run.sample_length = 20
    return config
"""

# Kills its own process as soon as Orbax has begun to write the folder of a step.
KILL_IN_MID_SAVE = """
import os, pathlib, runpy, signal, sys, threading
workdir = pathlib.Path(sys.argv[1]) / "checkpoints"
def watch():
    while not list(workdir.glob("*tmp*")):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=watch, daemon=True).start()
sys.argv = ["experiments.train", *sys.argv[2:]]
runpy.run_module("experiments.train", run_name="__main__")
"""

# No file may grow beyond some kilobytes, as on a disk that is nearly full: a checkpoint does not fit.
FULL_DISK = """
import os, resource, runpy, signal, sys
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
sys.argv = ["experiments.train", *sys.argv[1:]]
runpy.run_module("experiments.train", run_name="__main__")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("command")
    (folder / "config.py").write_text(CONFIG.format(folder=folder))
    for name in "abc":
        (folder / f"{name}.txt").write_text(f"the {name} of the sea. " * 9)
    return folder


def command(folder: pathlib.Path, name: str, *more: str) -> list[str]:
    return [f"--config={folder / 'config.py'}", f"--workdir={folder / name}", *more]


def start(folder: pathlib.Path, arguments: list[str], program: tuple[str, ...]) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}", "PYTHONUNBUFFERED": "1"}
    environment["JAX_COMPILATION_CACHE_DIR"] = str(folder / "cache")
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    command = [sys.executable, *program, *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def deterministic(workdir: pathlib.Path) -> dict[str, object]:
    """All that must be equal: rows but for their times, the sample, and the metrics of the result."""
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {
        "rows": [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows],
        "sample": (workdir / "sample.txt").read_text(),
        "result": json.loads((workdir / "result.json").read_text())["metrics"],
    }


def test_a_process_that_is_stopped_and_killed_in_mid_save_ends_with_the_same_bits(folder: pathlib.Path) -> None:
    module = ("-m", "experiments.train")
    whole = start(folder, command(folder, "whole"), module)
    output, errors = whole.communicate(timeout=300)
    assert whole.returncode == 0, errors
    assert "split by document (valid: " in output
    for expected in ("uniform", "unigram", "bz2", "bz2_primed", "tokens/s", "sample:", "everything lies in"):
        assert expected in output

    stopped = start(folder, command(folder, "parts"), module)
    metrics = folder / "parts/metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size) and stopped.poll() is None:
        time.sleep(0.01)
    stopped.send_signal(signal.SIGTERM)
    _, errors = stopped.communicate(timeout=300)
    assert stopped.returncode == 128 + signal.SIGTERM, errors
    assert errors.count("\n") == 1
    assert "stopped by signal 15 after step " in errors
    assert "the same command goes on from there" in errors

    arguments = command(folder, "parts", "--config.run.data_workers=1")
    killed = start(folder, [str(folder / "parts"), *arguments], ("-c", KILL_IN_MID_SAVE))
    killed.communicate(timeout=300)
    assert killed.returncode == -signal.SIGKILL
    assert list((folder / "parts/checkpoints").glob("*tmp*"))

    last = start(folder, command(folder, "parts", "--config.run.data_workers=2"), module)
    output, errors = last.communicate(timeout=300)
    assert last.returncode == 0, errors
    assert "goes on after step" in output
    assert deterministic(folder / "parts") == deterministic(folder / "whole")
    starts = [json.loads(line) for line in (folder / "parts/provenance.jsonl").read_text().splitlines()]
    assert [row["overrides"] for row in starts] == [{}, {"run.data_workers": "1"}, {"run.data_workers": "2"}]


def test_a_checkpoint_that_does_not_fit_on_the_disk_is_one_line(folder: pathlib.Path) -> None:
    full = start(folder, command(folder, "full"), ("-c", FULL_DISK))
    _, errors = full.communicate(timeout=300)
    assert full.returncode == 1
    assert errors.startswith("experiments.train: step 5 was not saved in ")
    assert errors.count("\n") == 1
    assert "File too large" in errors


@pytest.mark.parametrize(
    "more,message",
    [
        (
            ["--config.model.d_modle=3"],
            "there is no field 'model.d_modle' in the config; did you mean 'model.d_model'?",
        ),
        (["--config.model.d_model=wide"], "model.d_model must be int, got 'wide'"),
        (["--config.optimizer.clip_norm=abc"], "optimizer.clip_norm must be float or None, got 'abc'"),
        (["--config.task.split_by=line"], "task.split_by must be 'document' or 'position' or None, got 'line'"),
        (["--config.model.attention.num_heads=3"], "num_heads=3"),
        (["--config.task.files=nothing/*.txt"], "no file matches task.files='nothing/*.txt'"),
        (["--colour=red"], "unknown option --colour"),
        (["--config=absent.py"], "there is no Python config file 'absent.py'"),
        (["--workdir="], "--workdir is missing"),
        (["red"], "unexpected argument 'red'"),
    ],
)
def test_a_wrong_command_is_one_line_and_exit_code_2(
    more: list[str], message: str, folder: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(folder, "wrong", *more)) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not (folder / "wrong").exists()


def test_help_lists_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    output = capsys.readouterr().out
    assert "--config.model.attention.num_heads  query heads H [int; 4]" in output
    assert "--config.optimizer.clip_norm  largest global norm of the gradient [float or None; None]" in output


def test_help_shows_the_values_of_a_config_file_and_of_overrides(
    folder: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--help", f"--config={folder / 'config.py'}", "--config.seed=7"]) == 0
    output = capsys.readouterr().out
    assert "--config.model.attention.num_heads  query heads H [int; 2]" in output
    assert "dropout [int; 7]" in output
    assert main(["--help", "--config=absent.py"]) == 2
    assert capsys.readouterr().err == "experiments.train: there is no Python config file 'absent.py'\n"


@pytest.mark.parametrize("name", ["train", "sweep", "report", "quickstart"])
def test_run_as_a_file_it_says_in_one_line_how_to_run_it(name: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ended = subprocess.run(
        [sys.executable, f"experiments/{name}.py"], cwd=ROOT, env=environment, text=True, capture_output=True
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith(
        f"experiments.{name}: run it from the folder above, as `python -m experiments.{name}`"
    )
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "error", [MemoryError("cannot allocate 9 TB"), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of\nmemory")]
)
def test_too_little_memory_is_one_line_that_says_what_to_lower(
    error: Exception, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("mha_research.training.train", fail)
    assert main(command(folder, "memory")) == 1
    said = capsys.readouterr().err
    assert "out of memory: lower train.batch_size or raise train.accumulate" in said
    assert said.count("\n") == 1


def test_another_failure_of_the_device_is_not_hidden(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: the chip is on fire")

    monkeypatch.setattr("mha_research.training.train", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="on fire"):
        main(command(folder, "fire"))
