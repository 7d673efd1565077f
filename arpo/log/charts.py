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
class Charts:
    """The lines of a script's curve.png, and its first charts in TensorBoard."""

    axis: str = ""
    """Name of the axis of the lines, with its unit."""
    lines: tuple[tuple[str, str], ...] = ()
    """(metric, label) of each line. The first is of training, and so noisy that its running mean is drawn too."""
    first: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(title, regular expressions of the tags) of each chart, in order. TensorBoard sorts its other pages by name."""

    def layout(self) -> dict[str, dict[str, list]]:
        """Return `first` as SummaryWriter.add_custom_scalars takes it."""
        return {"overview": {title: ["Multiline", [f"^{tag}$" for tag in tags]] for title, tags in self.first}}


NO_CHARTS = Charts()

SFT_CHARTS = Charts(
    axis="loss: nats per loss token",
    lines=(
        ("loss/nll", "training, of each step's conversations"),
        ("valid/nll", "validation conversations"),
    ),
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
        axis="reward, accuracy",
        lines=(
            ("reward/mean", f"training reward, sampled at temperature {temperature:g}"),
            ("valid/accuracy", "validation accuracy, greedy"),
        ),
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
    axes = figure.subplots()
    axes.set(title=title, xlabel="step", ylabel=charts.axis)
    axes.grid(alpha=0.3)
    for number, (metric, label) in enumerate(charts.lines):
        points = [(row["step"], row[metric]) for row in rows if math.isfinite(row.get(metric, math.nan))]
        if not points:
            continue
        steps, values = zip(*points, strict=True)
        colour = f"C{number}"
        if number == 0 and len(points) > SMOOTHING_STEPS:
            axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
            values, label = running_mean(values), f"{label} (mean of the last {SMOOTHING_STEPS} steps)"
        axes.plot(steps, values, color=colour, label=label, marker="." if len(points) < 30 else None)
    if axes.lines:
        figure.legend(loc="outside lower center", frameon=False)
    figure.savefig(path, dpi=120)
