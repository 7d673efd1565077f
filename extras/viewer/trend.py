"""The viewer's curves over the steps: a few of the numbers in metrics.jsonl."""

from __future__ import annotations

from math import inf, isfinite
from pathlib import Path

from arpo.log import read_metrics

CHARTS: list[tuple[str, dict[str, str]]] = [
    ("reward", {"reward/mean": "training", "valid/reward": "validation"}),
    ("right answers, share", {"reward/accuracy": "training", "valid/accuracy": "validation"}),
    ("tool calls per trajectory", {"tools/calls_per_trajectory": "training", "valid/tool_calls": "validation"}),
    ("failed tool calls", {"tools/all/failed": "training"}),
    ("response, tokens", {"response/tokens": "training", "valid/response_tokens": "validation"}),
    ("token entropy, nats", {"loss/entropy": "training"}),
    ("mixed groups, share", {"group/mixed_share": "training"}),
    ("branches per prompt", {"branching/branches_per_prompt": "training"}),
]
"""Titles with units, and the metrics of docs/metrics.md in each chart with the words of the legend."""
MAX_POINTS = 500
"""Most points of a line. With more steps, every second (third, ...) step is drawn, and the newest."""


def read_trend(run: Path) -> list[dict]:
    """Return the charts of a run: title and lines. A line has a label, a metric and (step, value) points.

    Charts without a number are left out. Raises UserError as `read_metrics` does.
    """
    rows = read_metrics(run, [name for _, names in CHARTS for name in names])
    charts = []
    for title, names in CHARTS:
        found = {name: [(row["step"], row[name]) for row in rows if name in row] for name in names}
        lines = [{"name": name, "label": names[name], "points": thinned(found[name])} for name in names if found[name]]
        if lines:
            charts.append({"title": title, "lines": lines})
    return charts


def entropy_scale(run: Path) -> float | None:
    """Return the entropy (nats) with the strongest colour on all pages of a run; None without entropies.

    This is twice the highest mean of a step: few turns are above, and the turns of a confident policy are pale.
    """
    names = ("entropy/root", "entropy/after_tool")
    means = [row[name] for row in read_metrics(run, names) for name in names if isfinite(row.get(name, inf))]
    return 2 * max(means) if means and max(means) > 0 else None


def thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return at most MAX_POINTS of the points, evenly spaced, including the newest."""
    every = -(-len(points) // MAX_POINTS)
    return points[::-every][::-1] if points else []
