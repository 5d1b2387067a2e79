"""Pictures and pages as a real browser shows them, and what it finds wrong with them."""

import html
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WHY_NOT = "no Chromium here (apt-get install chromium); CI installs it"
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--enable-logging=stderr"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def browse(page: Path, profile: Path, *options: str) -> tuple[str, list[str]]:
    """(the document after its scripts ran, what the console said); the profile is a folder that is not there yet."""
    command = [str(BROWSER), *OPTIONS, f"--user-data-dir={profile}", *options, "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


def problems(files: list[Path], scratch: Path) -> list[str]:
    """What is wrong with the files: malformed, an image that does not show, or a message on the console."""
    found = []
    images = [path for path in files if path.suffix in (".svg", ".png")]
    for path in images:
        if path.suffix == ".svg":
            try:
                ElementTree.parse(path)
            except ElementTree.ParseError as error:
                found.append(f"{path.name} is malformed: {error}")
    pages = [path for path in files if path.suffix == ".html"]
    if images:
        sheet = scratch / "sheet.html"
        shown = "".join(f'<img src="{html.escape(path.resolve().as_uri())}" alt="{path.name}">' for path in images)
        sheet.write_text(f'<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">{shown}')
        pages.append(sheet)
    for number, page in enumerate(pages):
        probe = page.with_name(f".{number}-{page.name}")  # beside the page, so that its relative links hold
        script = (
            "<script>addEventListener('load', () => document.body.dataset.broken = [...document.images]"
            ".filter(i => !i.naturalWidth).map(i => i.alt || i.src).join(' '))</script>"
        )
        probe.write_text(page.read_text(encoding="utf8") + script, encoding="utf8")
        try:
            document, said = browse(probe, scratch / f"profile{number}", "--virtual-time-budget=5000")
        finally:
            probe.unlink()
        found += [f"{page.name}: {line}" for line in said]
        broken = re.search(r'data-broken="([^"]*)"', document)
        if broken is None or broken[1]:
            found.append(f"{page.name}: images do not show: {broken[1] if broken else 'the page did not load'}")
    return found
