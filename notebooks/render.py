"""Notebooks are Python files in percent format; this executes one and writes it with its output as a page of the docs.

    python -m notebooks.render notebooks/comparing_an_ablation.py     writes docs/notebooks/comparing_an_ablation.md

A cell's output is what it prints, then its last expression: a table, a figure (SVG beside the page), or its repr.
Jupyter opens the same files through jupytext.
"""

import ast
import contextlib
import io
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

FOLDER = Path(__file__).parent
PAGES = FOLDER.parent / "docs" / "notebooks"


def cells(text: str) -> list[tuple[str, str]]:
    """(kind, source) of every cell, kind `markdown` or `code`."""
    parts = re.split(r"^# %%(.*)\n", text, flags=re.MULTILINE)[1:]
    found = []
    for title, source in zip(parts[::2], parts[1::2]):
        if "[markdown]" in title:
            found.append(
                ("markdown", "\n".join(line.removeprefix("#").removeprefix(" ") for line in source.splitlines()))
            )
        else:
            found.append(("code", source.strip()))
    return [(kind, source.strip()) for kind, source in found]


def execute(path: Path) -> list[tuple[str, str, str, Any]]:
    """(kind, source, printed, value) of every cell. Raises what a cell raises."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    done = []
    for number, (kind, source) in enumerate(cells(path.read_text(encoding="utf8"))):
        printed, value = "", None
        if kind == "code":
            tree = ast.parse(source)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(tree, f"{path.name}, cell {number}", "exec"), namespace)
                if last is not None:
                    value = eval(compile(ast.Expression(last.value), f"{path.name}, cell {number}", "eval"), namespace)
            printed = out.getvalue()
        done.append((kind, source, printed, value))
    return done


def render(path: Path, pages: Path = PAGES) -> Path:
    """Executes the notebook and writes its page; returns the page's path."""
    pages.mkdir(parents=True, exist_ok=True)
    parts = [f"<!-- made from notebooks/{path.name} by python -m notebooks.render -->"]
    for number, (kind, source, printed, value) in enumerate(execute(path)):
        if kind == "markdown":
            parts.append(source)
            continue
        # Indented, not fenced: the tests execute the notebook itself and not its page.
        parts.append(_indented(source))
        parts += [_indented(printed.rstrip())] if printed.strip() else []
        if isinstance(value, Figure):
            from mha_research.analysis.report.ablation_plots import svg

            file = pages / f"{path.stem}_{number}.svg"
            file.write_text(svg(value, file.stem))
            parts.append(f"![{path.stem}, cell {number}]({file.name})")
        elif isinstance(value, pd.DataFrame):
            parts.append(_indented(value.to_string()))
        elif value is not None:
            parts.append(_indented(repr(value)))
    page = pages / f"{path.stem}.md"
    text = re.sub(
        rf"{re.escape(tempfile.gettempdir())}/\w+", "DIR", "\n\n".join(parts)
    )  # whose machine it was is no output
    page.write_text(text + "\n", encoding="utf8")
    return page


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(render(Path(argument)))
