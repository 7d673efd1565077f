"""Turns flags into a dataclass, by tyro. Tyro's error message, a box of several lines, becomes one line."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import TypeVar

C = TypeVar("C")


def parse(root: type[C], flags: list[str]) -> C:
    """Return the config of flags. Raises ValueError with one line. For --help the function prints the help and
    exits."""
    import tyro

    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            return tyro.cli(root, args=flags, config=(tyro.conf.FlagConversionOff,), prog=Path(sys.argv[0]).name)
    except SystemExit as stop:
        if not stop.code:  # after --help
            raise
        raise ValueError(one_line(captured.getvalue())) from None


def one_line(tyro_box: str) -> str:
    """Return tyro's message, a drawn box of several lines, as one line."""
    text = re.sub(r"\s+", " ", re.sub(r"[^\x20-\x7e]|-{9,}", " ", tyro_box))
    text = re.sub(r"^ ?(Parsing|Value) error |^ ?(Invalid choice|Missing argument) |Error parsing \w+: ", "", text)
    text = text.replace("Unrecognized options Unrecognized options", "Unrecognized options")
    return re.sub(r" (Argument helptext: .*)?For full helptext, .*", "; see --help", text).strip()
