"""What every command does around its `main`: Ctrl-C, a terminal without Unicode, and a reader that has gone."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = "import sys; from experiments.command_line import command_line; sys.exit(command_line(lambda _: {}))"


def start(body: str, **how: str) -> "subprocess.Popen[bytes]":
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"} | how
    command = [sys.executable, "-c", PROGRAM.format(body)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize(
    "body,code,errors",
    [
        ("0", 0, b""),
        ("2", 2, b""),
        ("(_ for _ in ()).throw(KeyboardInterrupt())", 130, b"stopped by Ctrl-C; the same command goes on"),
    ],
)
def test_exit_codes(body: str, code: int, errors: bytes) -> None:
    process = start(body)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert said.startswith(errors)
    assert said.count(b"\n") == bool(errors)


def test_a_terminal_without_a_character_is_shown_its_escape() -> None:
    process = start("print('caf\\xe9 \\u2423') or 0", PYTHONIOENCODING="ascii")
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (0, b"caf\\xe9 \\u2423\n", b"")


def test_a_reader_that_has_gone_is_no_traceback() -> None:
    with start("[print('x' * 999) for _ in range(999)] and 0") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1
