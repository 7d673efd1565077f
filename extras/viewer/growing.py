"""A growing branch tree, as an animated SVG: `python -m extras.viewer.growing PAGE.html GROUP OUT.svg`.

PAGE is a page of the viewer, GROUP the number of a question on the page, from 0. Chromium draws the tree; docs/tree.svg
is an example. The tree grows from left to right, over and over. Readers with "reduced motion" see the whole tree at
once.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from importlib import resources
from pathlib import Path

from arpo.errors import UserError
from arpo.start.load import run_or_exit

GROW_S = 6.0
HOLD_S = 6.0
"""Seconds of growth, and seconds with the complete tree."""
COLUMN = 125
"""Width of the part appearing at once, in pixels: half a turn."""
FIRST = 2
"""Columns visible from the start: the first turn of the roots. Without them the animation begins with an empty box."""
RULES = re.compile(r":root \{.*?\}|^(?:svg|\.dim) [^\n]*", re.DOTALL | re.MULTILINE)
"""The parts of the viewer's style used by a drawing."""


def growing(page: Path, group: int) -> str:
    """Return the tree of a question on a page as an SVG. The parts appear one after another. Raises UserError."""
    address = f"{page.resolve().as_uri()}#{group}/&poster"
    chromium = ["chromium", "--headless", "--no-sandbox", "--virtual-time-budget=5000", "--window-size=1300,500"]
    try:
        html = subprocess.run([*chromium, "--dump-dom", address], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"{page}: chromium cannot draw it ({error}); install chromium") from None
    question = re.search(r'<section id="about".*?<h2[^>]*>(.*?)</h2>', html, re.DOTALL)
    drawing = re.search(r'<section id="tree".*?<svg [^>]*height="(\d+)[^>]*>(.*?)</svg>', html, re.DOTALL)
    if not question or not drawing:
        raise UserError(f"{page}: no tree on it; name a page that arpo-view wrote")
    shapes = re.sub(r"<title>.*?</title>|<rect[^>]*band[^>]*></rect>| on-path", "", drawing[2], flags=re.DOTALL)
    ends = [float(x) + 7 * len(words) for x, words in re.findall(r'<text x="([\d.]+)"[^>]*>([^<]*)', shapes)]
    latest = 0

    def timed(shape: re.Match) -> str:  # the class of a shape sets the time of appearance
        nonlocal latest
        x = re.search(r' (?:x="|d="M)([\d.]+)', shape[0])
        latest = max(latest, int(float(x[1])) // COLUMN)
        return shape[0].replace('class="', f'class="at-{int(float(x[1])) // COLUMN} ')

    shapes = re.sub(r"<(?:rect|path|text)[^>]*>", timed, shapes)
    style = "\n".join(RULES.findall(resources.files("extras.viewer").joinpath("viewer.css").read_text()))
    for column in range(latest + 1):
        if column < FIRST:
            continue
        start = 100 * GROW_S / (GROW_S + HOLD_S) * (column - FIRST + 1) / (latest + 1)
        frames = f"0%, {start:.1f}% {{ opacity: 0; }} {start + 3:.1f}%, 100% {{ opacity: 1; }}"
        style += f"\n@keyframes at-{column} {{ {frames} }} .at-{column} {{ animation-name: at-{column}; }}"
    motion = f"[class^=at-] {{ animation-duration: {GROW_S + HOLD_S}s; animation-iteration-count: infinite; }}"
    style += f"\n@media (prefers-reduced-motion: no-preference) {{ {motion} }}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {max(ends) + 14:.0f} {drawing[1]}">'
    legend = '<tspan dx="24" class="soft" font-weight="400">H: entropy of a turn, nats; ◆ branched, ◇ not</tspan>'
    asked = f'<text x="14" y="16" font-weight="700">{question[1]}{legend}</text>'
    return f"{head}\n<style>\n{style}\n</style>\n{asked}\n{shapes}\n</svg>\n"


def write(args: argparse.Namespace) -> None:
    args.out.write_text(growing(args.page, args.group))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m extras.viewer.growing", description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path, help="runs/NAME/viewer.html")
    parser.add_argument("group", type=int, help="number of the question on it, from 0")
    parser.add_argument("out", type=Path, help="SVG to write")
    run_or_exit(write, parser.parse_args())


if __name__ == "__main__":
    main()
