"""Reading and comparing runs in tests."""

from fnmatch import fnmatch
from itertools import zip_longest
from pathlib import Path

from arpo.log import read_metrics

MEASURED = ("time/*", "memory/*", "tokens/*_per_second", "tools/*/seconds_*", "tools/*/cached")
"""Metrics in which two runs of the same steps may differ. (Of two ranks that ask the same, either may be first.)"""


def learnt(run: Path) -> list[dict[str, float]]:
    """The metrics of a run but for times and memory."""
    return [
        {name: value for name, value in row.items() if not any(fnmatch(name, pattern) for pattern in MEASURED)}
        for row in read_metrics(run)
    ]


def differing(one: Path, other: Path) -> list[tuple[float, str]]:
    """(step, name) of what the two runs did not log alike, times and memory left out."""
    return [
        (a.get("step", -1), name)
        for a, b in zip_longest(learnt(one), learnt(other), fillvalue={})
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    ]
