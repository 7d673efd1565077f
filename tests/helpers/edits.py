"""What docs/extending.md shows: files of a researcher, and edits of a copy of the package, which a process uses."""

import ast
import contextlib
import importlib
import io
import os
import re
import shutil
import sys
from pathlib import Path

import torch
from helpers.forked import in_processes

ROOT = Path(__file__).resolve().parents[2]
OURS = {"arpo", "helpers", "use", *(script.stem for script in ROOT.glob("*.py"))}

Edit = tuple[str, str]
"""A place as a paragraph names it, and the code below it."""


def edits_of(title: str) -> list[Edit]:
    """The code blocks of a section of docs/extending.md, or the page on tools, each with the paragraph above it."""
    pages = [ROOT / "docs" / "extending.md", ROOT / "extras" / "tools" / "README.md"]
    page = next(text for text in (page.read_text() for page in pages) if f"\n## {title}\n" in text)
    section = page.split(f"\n## {title}\n")[1].split("\n## ")[0]
    pieces = re.split(r"```python\n(.*?)```", section, flags=re.DOTALL)
    edits: list[Edit] = []
    for text, code in zip(pieces[::2], pieces[1::2], strict=False):
        paragraph = text.strip().rpartition("\n\n")[2]
        edits.append((paragraph or edits[-1][0], code))
    return edits


def write_own_file(title: str, folder: Path) -> str:
    """Write the file that a section shows to `folder`, and return its path, as the command line takes it."""
    [(place, code)] = [edit for edit in edits_of(title) if "Your file" in " ".join(edit[0].split())]
    path = folder / re.findall(r"`(\w+\.py)`", place)[-1]
    path.write_text(code)
    return str(path)


def edited_copy(folder: Path, edits: list[Edit]) -> Path:
    """Copy the package and the scripts to `folder`, and make the edits there; returns `folder`."""
    shutil.copytree(ROOT / "arpo", folder / "arpo", ignore=shutil.ignore_patterns("__pycache__"))
    for script in ROOT.glob("*.py"):
        shutil.copy(script, folder)
    file = ""
    for place, code in edits:
        names = re.findall(r"`([^`]+)`", place.partition(":")[0])
        file = next((name for name in names if name.endswith(".py")), file)  # else in the file of the edit before
        target = next((name for name in names if not name.endswith(".py")), "")
        path = folder / file
        path.write_text("".join(make(path.read_text().splitlines(keepends=True), place, target, code)))
    return folder


def make(lines: list[str], place: str, target: str, code: str) -> list[str]:
    """The lines of a file with the edit. Raises AssertionError where the paragraph names a place that is not there."""
    tree = ast.parse("".join(lines))
    if place.startswith("One field in "):
        [section] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == target]
        at = [node.end_lineno for node in section.body if isinstance(node, ast.AnnAssign | ast.Expr)][-1]
    else:
        found = [node for node in tree.body if isinstance(node, ast.AnnAssign) and node.target.id == target]
        assert len(found) == 1, f"there is no {target}"
        at = found[0].lineno if place.startswith("One line in ") else found[0].lineno - 1
        code = code if place.startswith("One line in ") else code + "\n\n"
    return [*lines[:at], code, *lines[at:]]


def run_in(folder: Path, code: str) -> str:
    """Return what Python code prints that runs in the copy, in a process of its own; raises what the code raises.

    The process is forked from this one, which has torch behind it, and forgets this project's own modules.
    """

    (folder / "use.py").write_text(code)

    def work(_: int) -> str:
        for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
            del sys.modules[name]
        sys.path[:0] = [str(folder), str(ROOT / "tests")]
        os.chdir(folder)
        torch.set_num_threads(1)  # threads of the process that this one was forked from are not here
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            importlib.import_module("use")
        assert sys.modules["arpo"].__file__ == str(folder / "arpo/__init__.py")
        return printed.getvalue()

    return in_processes(work)[0]


def make_diffs(folder: Path, title: str) -> None:
    """Make the edits of a section that shows them as differences. `--- FILE` begins the lines of a file.

    Raises AssertionError where the lines before an edit are not in the file exactly once.
    """
    section = (ROOT / "docs" / "extending.md").read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    for block in re.findall(r"```diff\n(.*?)```", section, flags=re.DOTALL):
        for edit in re.split(r"^--- ", block, flags=re.MULTILINE)[1:]:
            name, *lines = edit.splitlines()
            before = "".join(line[1:] + "\n" for line in lines if line[0] in " -")
            after = "".join(line[1:] + "\n" for line in lines if line[0] in " +")
            text = (folder / name).read_text()
            assert text.count(before) == 1, f"{name} has these lines {text.count(before)} times:\n{before}"
            (folder / name).write_text(text.replace(before, after))
