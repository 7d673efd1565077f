"""The charts of a training run: curve.png, and those of TensorBoard's page "Custom Scalars"."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SMOOTHING_STEPS = 5
"""Number of steps in a running mean."""


@dataclass(frozen=True)
class Line:
    """A metric over the steps, as a line of curve.png."""

    metric: str
    label: str
    is_smoothed: bool = False
    """True = the line is the running mean, with the values themselves faint behind it."""
    on_right: bool = False
    """True = the right axis, which is of shares from 0 to 1."""


@dataclass(frozen=True)
class Charts:
    """The lines and axes of a script's curve.png, and its first charts in TensorBoard."""

    lines: tuple[Line, ...] = ()
    left: str = ""
    """Name of the left axis, with its unit."""
    right: str = ""
    """Name of the right axis; "" where no line is on it."""
    first: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(title, regular expressions of the tags) of each chart, in order. TensorBoard sorts its other pages by name."""

    def layout(self) -> dict[str, dict[str, list]]:
        """Return `first` as SummaryWriter.add_custom_scalars takes it."""
        return {"overview": {title: ["Multiline", [f"^{tag}$" for tag in tags]] for title, tags in self.first}}


NO_CHARTS = Charts()

SFT_CHARTS = Charts(
    lines=(
        Line("loss/nll", "training, of each step's conversations", is_smoothed=True),
        Line("valid/nll", "validation conversations"),
    ),
    left="loss: nats per loss token",
    first=(
        ("loss (nats per loss token)", ("loss/nll", "valid/nll")),
        ("gradient norm", ("optim/grad_norm",)),
        ("learning rate", ("optim/lr",)),
        ("tokens per second and rank", ("tokens/trained_per_second",)),
        ("memory (GiB)", ("memory/.*",)),
    ),
)


def rl_charts(temperature: float) -> Charts:
    """Return the charts of train_rl.py; `temperature` is the one that trajectories are sampled at."""
    return Charts(
        lines=(
            Line("reward/mean", f"training reward, sampled at temperature {temperature:g}", is_smoothed=True),
            Line("valid/accuracy", "validation accuracy, greedy", on_right=True),
        ),
        left="reward",
        right="accuracy",
        first=(
            ("reward", ("reward/mean", "valid/reward")),
            (
                "accuracy, also by data source",
                ("reward/accuracy", "accuracy/.*", "valid/accuracy", "valid/accuracy/.*"),
            ),
            ("spread of the reward", ("reward/std", "group/reward_std")),
            ("share of groups that teach", ("group/mixed_share",)),
            ("response length (tokens)", ("response/tokens", "response/sampled_tokens")),
            ("entropy (nats)", ("loss/entropy", "entropy/root", "entropy/after_tool")),
            ("tool calls per trajectory", ("tools/calls_per_trajectory",)),
            ("rollout against trainer: KL", ("mismatch/kl",)),
            ("tokens per second and rank", ("tokens/.*_per_second",)),
            ("memory (GiB)", ("memory/.*",)),
        ),
    )


def running_mean(values: Sequence[float]) -> np.ndarray:
    """Return for each value the mean of it and those before it, at most SMOOTHING_STEPS in all.

    >>> running_mean([1.0, 3.0]).tolist()
    [1.0, 2.0]
    """
    return np.array([np.mean(values[max(0, i + 1 - SMOOTHING_STEPS) : i + 1]) for i in range(len(values))])


def draw_curve(rows: Sequence[Mapping[str, float]], charts: Charts, title: str, path: Path) -> None:
    """Draw the lines of a run's metrics as a picture. A line without a finite value is left out."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    left = figure.subplots()
    left.set(title=title, xlabel="step", ylabel=charts.left)
    left.grid(alpha=0.3)
    right = left.twinx() if charts.right else left
    if charts.right:
        right.set(ylabel=charts.right, ylim=(-0.02, 1.02))
    for number, line in enumerate(charts.lines):
        axis, colour, label = (right if line.on_right else left), f"C{number}", line.label
        points = [(row["step"], row[line.metric]) for row in rows if math.isfinite(row.get(line.metric, math.nan))]
        if not points:
            continue
        steps, values = zip(*points, strict=True)
        if line.is_smoothed and len(points) > SMOOTHING_STEPS:
            axis.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
            values, label = running_mean(values), f"{label} (mean of the last {SMOOTHING_STEPS} steps)"
        axis.plot(steps, values, color=colour, label=label, marker="." if len(points) < 30 else None)
    if any(axis.lines for axis in figure.axes):
        figure.legend(loc="outside lower center", frameon=False)
    figure.savefig(path, dpi=120)
