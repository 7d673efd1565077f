"""Signals to processes that have a mark in their environment, and so to all that they started, whatever its session."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

MARK = "ARPO_GPU_SECTION"


def signal_all(mark: str, number: int) -> None:
    """Signal all processes that have the mark in their environment, one after the other, so that what they write at
    their end into one log stays readable. One that has not ended after a second is left to itself."""
    for folder in Path("/proc").glob("[0-9]*"):
        if has_mark(folder, mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(folder.name), number)
            give_up_at = time.monotonic() + 1.0
            while has_mark(folder, mark) and time.monotonic() < give_up_at:
                time.sleep(0.02)


def has_mark(process: Path, mark: str) -> bool:
    try:
        return f"{MARK}={mark}".encode() in (process / "environ").read_bytes()
    except OSError:  # it has ended, or is another user's
        return False
