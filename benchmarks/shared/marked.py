"""Signals to processes with a mark in the environment. Child processes inherit the mark, also in other sessions."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

MARK = "ARPO_GPU_SECTION"


def signal_all(mark: str, number: int) -> None:
    """Signal all processes with the mark, one after the other, so that their last lines in a common log stay readable.
    Wait at most one second for the end of each process."""
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
    except OSError:  # the process has ended, or belongs to another user
        return False
