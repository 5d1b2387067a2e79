"""Every notebook runs from top to bottom, and its page in the docs shows the code that ran."""

from pathlib import Path

import pytest

from notebooks.render import FOLDER, PAGES, cells, render

NOTEBOOKS = sorted(path for path in FOLDER.glob("*.py") if path.name != "render.py")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_its_page_is_of_this_code(path, tmp_path, monkeypatch):
    monkeypatch.chdir(FOLDER.parent)
    page = render(path, tmp_path).read_text()
    published = (PAGES / f"{path.stem}.md").read_text()
    for kind, source in cells(path.read_text()):
        shown = source if kind == "markdown" else "\n".join(f"    {line}".rstrip() for line in source.splitlines())
        assert shown in page
        assert shown in published
    assert page.count("![") == published.count("![")
    assert "Traceback" not in page


def test_cells():
    text = "# %% [markdown]\n# # Title\n#\n# text\n\n# %%\nx = 1\n# a comment\n\n# %%\nx\n"
    assert cells(text) == [("markdown", "# Title\n\ntext"), ("code", "x = 1\n# a comment"), ("code", "x")]


def test_outputs(tmp_path):
    path = Path(tmp_path, "n.py")
    path.write_text("# %%\nprint('said')\n1 + 1\n# %%\nfrom matplotlib.figure import Figure\nFigure()\n")
    text = render(path, tmp_path / "pages").read_text()
    assert "    said\n\n    2" in text
    assert "![n, cell 1](n_1.svg)" in text
    assert (tmp_path / "pages/n_1.svg").read_text().count(' xmlns="http://www.w3.org/2000/svg"') == 1
    path.write_text("# %%\n1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        render(path, tmp_path / "pages")
