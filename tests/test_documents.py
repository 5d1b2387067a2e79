"""Every example in README.md and docs/ runs, every link in them leads somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import LANGUAGES, ROOT, Block, blocks, documents

RUN_BY = "run by "


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with links to all that is in the repository, so that examples write beside the checkout."""
    for path in ROOT.iterdir():
        if path.name != "runs":
            (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def execute(document: Path, block: Block, namespace: dict) -> None:
    """Run one block as its reader would; a traceback points at the line of the document."""
    if block.language == "python":
        exec(compile("\n" * (block.line - 1) + block.code, str(document), "exec"), namespace)
    elif block.language == "bash":
        # As after an editable install of this checkout: `python` is this interpreter and finds mha_kernels.
        paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}/kernels"}
        run = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.code],
            env=os.environ | paths,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, f"{document}:{block.line}\n{block.code}\n{run.stdout}\n{run.stderr}"


def name(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.mark.parametrize("document", documents(), ids=name)
def test_examples_run(document: Path, checkout: Path) -> None:
    namespace: dict = {"__name__": "__main__"}
    for block in blocks(document.read_text()):
        if not block.note:
            execute(document, block, namespace)


@pytest.mark.slow
@pytest.mark.parametrize("document", [path for path in documents() if "<!-- slow -->" in path.read_text()], ids=name)
def test_slow_examples_run(document: Path, checkout: Path) -> None:
    """From the first block to the last, because the later ones look at what the slow ones made."""
    namespace: dict = {"__name__": "__main__"}
    for block in blocks(document.read_text()):
        if not block.note.startswith(RUN_BY):
            execute(document, block, namespace)


@pytest.mark.parametrize("document", documents(), ids=name)
def test_no_example_escapes(document: Path) -> None:
    """Each fence is read, in a known language, with a known note; what runs elsewhere is really there."""
    text = document.read_text()
    found = blocks(text)
    assert len(re.findall(r"^\s*```", text, re.MULTILINE)) == 2 * len(found)
    for block in found:
        where = f"{document}:{block.line}"
        assert block.language in LANGUAGES, where
        assert block.note in ("", "slow") or block.note.startswith(RUN_BY), where
        if block.note.startswith(RUN_BY):
            script = (ROOT / block.note.removeprefix(RUN_BY)).read_text()
            commands = [line for line in block.code.splitlines() if line and not line.startswith("#")]
            assert all(command in script for command in commands), where


@pytest.mark.parametrize("document", documents(), ids=name)
def test_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", document.read_text())
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (document.parent / target).exists()] == []


def test_blocks_are_found_with_their_notes_and_lines() -> None:
    text = "# A\n\n```python\nx = 1\n```\n\n<!-- slow -->\n```bash\ntrue\nfalse\n```\n"
    assert blocks(text) == [Block("python", "", "x = 1\n", 4), Block("bash", "slow", "true\nfalse\n", 9)]


@pytest.mark.parametrize("code, language", [("assert 1 == 2", "python"), ("false\ntrue", "bash")])
def test_a_wrong_example_fails(code: str, language: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        execute(tmp_path / "x.md", Block(language, "", code, 1), {})
