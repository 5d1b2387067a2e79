"""The fenced blocks of README.md and docs/, so that every example in them can be executed.

A comment on the line before a fence says what is special about the block:

    <!-- slow -->              too slow for scripts/test; scripts/slow runs it
    <!-- run by scripts/x -->  cannot run inside the tests; scripts/x has every command of it

`python tests/documents.py FILE` prints the Python blocks of a file as one program.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LANGUAGES = {"python", "bash", "text"}  # text is not executed: output, trees, formulas

_FENCE = re.compile(r"^(?:<!-- (?P<note>.+?) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, the comment before it, its code, and the line that the code begins on."""

    language: str
    note: str
    code: str
    line: int


def documents() -> list[Path]:
    return [ROOT / "README.md", ROOT / "kernels/README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text: str) -> list[Block]:
    return [
        Block(match["language"], match["note"] or "", match["code"], text.count("\n", 0, match.start("code")) + 1)
        for match in _FENCE.finditer(text)
    ]


if __name__ == "__main__":
    print("\n".join(block.code for block in blocks(Path(sys.argv[1]).read_text()) if block.language == "python"))
