"""Table and forest plot of an ablation, made from the folders of its runs.

A run's folder is `<algorithm>_seed<k>` with metrics.jsonl (training) and eval/scores.json (held-out questions). Only
the held-out numbers compare algorithms: the trajectories of a branched group are no independent samples of the policy,
so its training reward is a biased measure of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from arpo.evals import mean
from arpo.evals.tables import markdown_table, with_interval
from arpo.log import read_metrics

SMOOTHING_STEPS = 5
"""Number of steps in a running mean."""
REFERENCES = ("random", "grpo", "fixed")
"""Algorithms that the others are compared with, seed by seed."""
TOTALS = {
    "tool_calls": "tools/all/calls",
    "sampled_tokens": "tokens/sampled",
    "rollout_s": "time/rollout",
    "step_s": "time/step",
}
"""Column of the table -> the metric that is summed over all steps for it."""
REASONS = {
    "moves P by": "branching/signal",
    "std of dH, nats": "branching/delta_entropy_std",
    "H predicts failure": "branching/predicts_failure",
    "solved where branched": "branching/solved_where_branched",
    "solved where declined": "branching/solved_where_declined",
    "mixed groups": "group/mixed_share",
}
"""Column of the table of reasons -> the metric whose mean over the steps that have it stands there."""
VALID = "valid/accuracy"


@dataclass(frozen=True)
class RunResult:
    """Scores and metrics of one finished run."""

    algorithm: str
    seed: int
    scores: dict[str, dict[str, float]]
    """Question file -> its scores, as evaluate.py wrote them."""
    metrics: list[dict[str, float]]
    """The training steps, in order."""

    @property
    def accuracy(self) -> float:
        """Mean over the question files."""
        return mean(s["accuracy"] for s in self.scores.values())

    def series(self, metric: str) -> np.ndarray:
        return np.array([row[metric] for row in self.metrics])

    def mean_of(self, metric: str) -> float | None:
        """Return the mean over the steps that have the metric; None where none has."""
        values = [row[metric] for row in self.metrics if metric in row]
        return mean(values) if values else None

    @property
    def num_tokens(self) -> int:
        """Number of tokens sampled in training."""
        return int(self.series("tokens/sampled").sum())

    def accuracy_at(self, num_tokens: int) -> float | None:
        """Return the greedy validation accuracy when so many tokens had been sampled, interpolated between validations.

        None where the run was not validated before and after.
        """
        tokens = np.cumsum(self.series("tokens/sampled"))
        points = [(t, row[VALID]) for t, row in zip(tokens, self.metrics, strict=True) if VALID in row]
        if not points or not points[0][0] <= num_tokens <= points[-1][0]:
            return None
        return float(np.interp(num_tokens, *zip(*points, strict=True)))

    def steps_until(self, target_reward: float) -> int | None:
        """Return the first step at which the running mean of the training reward reaches the target; None = never."""
        reached = np.flatnonzero(running_mean(self.series("reward/mean")) >= target_reward)
        return int(self.metrics[reached[0]]["step"]) if len(reached) else None

    def seconds_until(self, target_reward: float) -> float | None:
        """Return the seconds of all steps up to that one, without validations and saves; None = never."""
        last = self.steps_until(target_reward)
        return None if last is None else sum(row["time/step"] for row in self.metrics if row["step"] <= last)


def read_run(folder: Path, algorithm: str, seed: int) -> RunResult | None:
    """Read a finished run; None where the run has not finished."""
    if not (scores := folder / "eval" / "scores.json").exists():
        return None
    steps = [row for row in read_metrics(folder) if "reward/mean" in row]  # step 0 is a validation only
    return RunResult(algorithm, seed, json.loads(scores.read_text()), steps)


def estimate(values: Sequence[float]) -> dict[str, float]:
    """Return the mean over n seeds with its 95 % t interval (n - 1 degrees of freedom); fewer than three have
    none: that of two would be 25 standard errors wide.

    A bootstrap over so few seeds would be too narrow: over five, it covers the mean in 85 % of cases.
    [0, 1, 2] -> mean 1, low 1 - 4.303 / sqrt(3), high 1 + 4.303 / sqrt(3)
    """
    from scipy.special import stdtrit

    n, centre = len(values), mean(values)
    if n < 3:
        return {"mean": centre, "seeds": n}
    half = float(stdtrit(n - 1, 0.975) * np.std(values, ddof=1) / np.sqrt(n))
    return {"mean": centre, "low": centre - half, "high": centre + half, "seeds": n}


def paired_difference(runs: list[RunResult], reference: list[RunResult]) -> dict[str, float] | None:
    """Estimate the accuracy of `runs` minus that of `reference`, seed by seed; None where no seed is in both."""
    base = {run.seed: run.accuracy for run in reference}
    differences = [run.accuracy - base[run.seed] for run in runs if run.seed in base]
    return estimate(differences) if differences else None


def by_algorithm(results: list[RunResult]) -> dict[str, list[RunResult]]:
    """Group runs by algorithm, in the order in which each first appears."""
    algorithms = dict.fromkeys(run.algorithm for run in results)
    return {algorithm: [run for run in results if run.algorithm == algorithm] for algorithm in algorithms}


def compare_algorithms(results: list[RunResult], target_reward: float) -> dict[str, dict]:
    """Algorithm -> {accuracy, reward, tool_calls, ..., steps_to_target, seconds_to_target, minus_random, minus_grpo,
    seeds, at_tokens}.

    `at_tokens` is the validation accuracy when the run that sampled the fewest tokens was at its end.
    """
    groups, table = by_algorithm(results), {}
    num_tokens = min(run.num_tokens for run in results)
    for algorithm, runs in groups.items():
        reached = [step for run in runs if (step := run.steps_until(target_reward)) is not None]
        seconds = [time for run in runs if (time := run.seconds_until(target_reward)) is not None]
        row = table[algorithm] = {
            "accuracy": estimate([run.accuracy for run in runs]),
            "reward": estimate([mean(s["reward"] for s in run.scores.values()) for run in runs]),
            "steps_to_target": {"mean": mean(reached) if reached else None, "seeds": len(reached)},
            "seconds_to_target": estimate(seconds) if seconds else None,
            "seeds": {run.seed: run.accuracy for run in runs},
        }
        at_tokens = [accuracy for run in runs if (accuracy := run.accuracy_at(num_tokens)) is not None]
        row["at_tokens"] = {"num_tokens": num_tokens} | estimate(at_tokens) if at_tokens else None
        row["reasons"] = {}
        for name, metric in REASONS.items():
            if known := [value for run in runs if (value := run.mean_of(metric)) is not None]:
                row["reasons"][name] = mean(known)
        for name, metric in TOTALS.items():
            row[name] = estimate([sum(step[metric] for step in run.metrics) for run in runs])
        for reference in REFERENCES:
            if reference != algorithm and reference in groups:
                row[f"minus_{reference}"] = paired_difference(runs, groups[reference])
    return table


def algorithms_table(table: dict[str, dict], target_reward: float) -> str:
    """Write what `compare_algorithms` returned as Markdown tables, one row per algorithm: the result, the validation
    accuracy at equal tokens (where runs were validated), and what the branching signal did.

    A number over n seeds has "n=...", from three on with its t interval; a difference may be over fewer seeds than its
    algorithm has.
    """

    def interval(cell: dict | None, sign: str = "", digits: int = 3) -> str:
        if not cell:
            return ""
        if "low" not in cell:
            return f"{cell['mean']:{sign}.{digits}f}" + (f" n={cell['seeds']}" if cell["seeds"] > 1 else "")
        return f"{with_interval(cell['mean'], cell['low'], cell['high'], sign, digits)} n={cell['seeds']}"

    references = [r for r in REFERENCES if any(f"minus_{r}" in row for row in table.values())]
    head = ["algorithm", "seeds", "accuracy [95 % t]", "reward", *(f"minus {r} [95 % t]" for r in references)]
    head += [name.removesuffix("_s").replace("_", " ") + (" s" if name.endswith("_s") else "") for name in TOTALS]
    head += [f"steps to reward {target_reward:g}", "seconds to it [95 % t]"]
    rows = []
    for algorithm, row in table.items():
        num_seeds, reached = len(row["seeds"]), row["steps_to_target"]
        cells = [algorithm, str(num_seeds), interval(row["accuracy"]), f"{row['reward']['mean']:.3f}"]
        cells += [interval(row.get(f"minus_{r}"), sign="+") for r in references]
        cells += [f"{row[name]['mean']:,.0f}" for name in TOTALS]
        cells += [f"{reached['mean']:.1f} ({reached['seeds']} of {num_seeds} seeds)" if reached["seeds"] else "never"]
        cells += [interval(row["seconds_to_target"], digits=1)]
        rows.append(cells)
    tables = [markdown_table(head, rows)]
    if at_tokens := {name: row["at_tokens"] for name, row in table.items() if row["at_tokens"]}:
        num_tokens = next(iter(at_tokens.values()))["num_tokens"]
        head = ["algorithm", "runs", f"greedy validation accuracy after {num_tokens:,} sampled tokens [95 % t]"]
        tables.append(markdown_table(head, [[n, str(c["seeds"]), interval(c)] for n, c in at_tokens.items()]))
    reasons = {name: row["reasons"] for name, row in table.items() if row["reasons"]}
    if reasons:
        rows = [[n, *(f"{r[c]:.3f}" if c in r else "" for c in REASONS)] for n, r in reasons.items()]
        tables.append(markdown_table(["algorithm, means over all steps", *REASONS], rows))
    return "\n\n".join("\n".join(lines) for lines in tables) + "\n"


def running_mean(values: Sequence[float]) -> np.ndarray:
    """Return for each value the mean of it and those before it, at most SMOOTHING_STEPS in all.

    >>> running_mean([1.0, 3.0]).tolist()
    [1.0, 2.0]
    """
    return np.array([np.mean(values[max(0, i + 1 - SMOOTHING_STEPS) : i + 1]) for i in range(len(values))])


def draw_forest(panels: Sequence[tuple[str, float | None, dict[str, dict | None]]], path: Path) -> None:
    """Draw estimates with their 95 % intervals: a panel for each (title, null, row -> estimate), a line per row.

    `null`: the value that says "no difference"; an interval that leaves it out is coloured. None = there is none.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = list(dict.fromkeys(name for _, _, cells in panels for name, cell in cells.items() if cell))
    size = (1.4 + 2.9 * len(panels), 0.9 + 0.24 * len(rows))
    figure, axes = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axis, (title, null, cells) in zip(axes[0], panels, strict=True):
        for place, cell in enumerate(cells.get(name) for name in rows):
            if cell:
                low, centre, high = (cell.get(key, cell["mean"]) for key in ("low", "mean", "high"))
                differs = null is not None and low < high and not low <= null <= high
                colour = "tab:blue" if differs else "0.35"
                axis.plot([low, high], [place, place], color=colour, linewidth=1.5)
                axis.plot(centre, place, marker="o", color=colour, markersize=5)
        if null is not None:
            axis.axvline(null, color="0.35", linestyle=":", linewidth=1)
        axis.set_title(title, fontsize=10)
        axis.grid(axis="x", alpha=0.3)
        axis.tick_params(axis="y", length=0)
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[0][0].set_yticks(range(len(rows)), rows)
    axes[0][0].set_ylim(len(rows) - 0.5, -0.5)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_table(table: dict[str, dict], path: Path) -> None:
    """Draw the forest of what `compare_algorithms` returned: accuracy, its differences, tool calls of training."""
    panels = [("held-out accuracy", None, {name: row["accuracy"] for name, row in table.items()})]
    for reference in (r for r in REFERENCES if any(f"minus_{r}" in row for row in table.values())):
        cells = {name: row.get(f"minus_{reference}") for name, row in table.items()}
        panels.append((f"accuracy minus {reference}", 0.0, cells))
    panels.append(("tool calls of training", None, {name: row["tool_calls"] for name, row in table.items()}))
    draw_forest(panels, path)
