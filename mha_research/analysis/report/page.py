"""The frame of the report: one HTML page with its styles and figures inside, for screen, phone and paper, light and
dark."""

from collections.abc import Iterable, Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2329; --soft: #5a6570; --paper: #fff; --line: #d5dade; --card: #f5f7f8;
  --supported: #00704d; --contradicted: #b3400b; --inconclusive: #5a6570; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8eb; --soft: #a4aeb7; --paper: #14181b; --line: #3a434a;
  --card: #1e2428; --supported: #3ecf9a; --contradicted: #ff9a66; --inconclusive: #a4aeb7; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 62rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 2.5rem 0 .6rem; }
h3 { font-size: 1rem; margin: 0; } p { margin: .4rem 0; } .soft, figcaption { color: var(--soft); }
small, figcaption { font-size: .85rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; width: 100%; overflow-wrap: normal;
} th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top;
  font-variant-numeric: tabular-nums; white-space: nowrap; } .text td, td:first-child { white-space: normal; }
.text td { overflow-wrap: anywhere; } .text td:first-child { overflow-wrap: normal; }
th { font-weight: 600; } th:first-child, td:first-child, .text td, .text th { text-align: left; }
.claim { border: 1px solid var(--line); border-left: .35rem solid var(--inconclusive); background: var(--card);
  padding: .8rem 1rem; margin: .8rem 0; border-radius: .3rem; break-inside: avoid; }
.supported { border-left-color: var(--supported); } .contradicted { border-left-color: var(--contradicted); }
.word { font-weight: 700; } .supported > h3 .word { color: var(--supported); }
.contradicted > h3 .word { color: var(--contradicted); } .inconclusive > h3 .word { color: var(--inconclusive); }
figure { margin: 1rem 0; break-inside: avoid; } figure svg { width: 100%; max-width: 31rem; height: auto; display:
block; } .figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 0
1.5rem; } pre { background: var(--card); border: 1px solid var(--line); padding: .6rem .8rem; overflow-x: auto;
font-size: .8rem; } details { margin: .6rem 0; } summary { cursor: pointer; }
@media print { :root { --ink: #000; --soft: #444; --paper: #fff; --line: #bbb; --card: #fff; --supported: #00704d;
  --contradicted: #b3400b; --inconclusive: #444; color-scheme: light; font-size: 10pt; }
  body { max-width: none; padding: 0; } .scroll { overflow: visible; break-inside: avoid; } table { font-size: .75rem; }
  th, td { padding: .15rem .4rem; } pre { white-space: pre-wrap; } h2, h2 + p { break-after: avoid; }
  .claim:has(.claim) { break-inside: auto; } .claim figure svg { max-width: 24rem; }
  .figures { grid-template-columns: 1fr 1fr; } figure svg { max-height: 15cm; } }
"""


def page(title: str, sections: Iterable[str]) -> str:
    """The whole document; `sections` are HTML, the title is text."""
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{_STYLE}</style>'
    )
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(sections) + "\n</body></html>\n"
    )


def table(header: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "", text: bool = False) -> str:
    """A table that scrolls by itself where it is too wide. `text`: all columns to the left."""
    kind = ' class="text"' if text else ""
    above = f"<p class=soft><small>{escape(caption)}</small></p>" if caption else ""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    inside = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'{above}<div class="scroll" tabindex="0"><table{kind}>{inside}</table></div>'


def figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def number(value: float | int | None, digits: int = 4) -> str:
    """Short, with thousands separated; a dash where there is none."""
    if value is None or value != value:
        return "–"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.{digits}g}"
