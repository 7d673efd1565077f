"""What a benchmark gives to the processes that it starts, and what it prints before it has ended."""

from __future__ import annotations

import json
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UNFINISHED = "unfinished"


def child_environment(**variables: str) -> dict[str, str]:
    """Return this process's environment with these variables, and with the repository first in PYTHONPATH.

    The caller's PYTHONPATH stays behind it. On a host without internet, packages are often in a folder that only
    PYTHONPATH names (pip install --target).
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | variables


def print_so_far(result: dict) -> None:
    """Print the numbers that a benchmark has so far. They stay in the report if a later part fails or has no time."""
    print(json.dumps(result | {UNFINISHED: True}), flush=True)
