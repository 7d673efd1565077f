"""A copy of the project with a researcher's edit in it, and a process that uses the copy."""

import contextlib
import io
import os
import shutil
import sys
from pathlib import Path

import torch
from helpers.forked import in_processes

ROOT = Path(__file__).resolve().parents[2]
OURS = {"arpo", *(script.stem for script in ROOT.glob("*.py"))}


def edited_copy(folder: Path, edits: dict[str, list[tuple[str, str]]]) -> Path:
    """Copy the package and the scripts to `folder`, and edit them there; returns `folder`.

    `edits`: file -> [(a piece of its text, which must occur exactly once; the text to be put right behind it)]. A file
    that does not exist is created, from the second text of its only pair.
    """
    shutil.copytree(ROOT / "arpo", folder / "arpo", ignore=shutil.ignore_patterns("__pycache__"))
    for script in ROOT.glob("*.py"):
        shutil.copy(script, folder)
    for name, pairs in edits.items():
        path = folder / name
        text = path.read_text() if path.exists() else ""
        for place, more in pairs:
            assert not text or text.count(place) == 1, f"{name}: {place!r} occurs {text.count(place)} times"
            text = text.replace(place, place + more) if text else more
        path.write_text(text)
    return folder


def run_in(folder: Path, code: str) -> str:
    """What Python code prints that runs in the copy, in a process of its own; raises what the code raises.

    The process is forked from this one, which has torch behind it, and forgets this project's own modules.
    """

    def work(_: int) -> str:
        for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
            del sys.modules[name]
        sys.path.insert(0, str(folder))
        os.chdir(folder)
        torch.set_num_threads(1)  # threads of the process that this one was forked from are not here
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, {"__name__": "edited"})
        assert sys.modules["arpo"].__file__ == str(folder / "arpo/__init__.py")
        return printed.getvalue()

    return in_processes(work)[0]
