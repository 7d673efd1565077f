"""Table and forest plot of an ablation, made from the folders of its runs.

A run's folder is `<algorithm>_seed<k>` with metrics.jsonl (training) and eval/scores.json (held-out questions). Use
only the held-out numbers to compare algorithms. The trajectories of a branched group are not independent samples of the
policy, so the training reward is a biased measure of the policy.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from arpo.evals import mean, wilson_interval
from arpo.evals.tables import markdown_table, with_interval
from arpo.log import read_metrics

SMOOTHING_STEPS = 5
"""Number of steps in a running mean."""
TOTALS = {
    "tool_calls": "tools/all/calls",
    "sampled_tokens": "tokens/sampled",
    "rollout_s": "time/rollout",
    "step_s": "time/step",
}
"""Column of the table -> the metric to sum over all steps."""
REASONS = {
    "moves P by": "branching/signal",
    "std of dH, nats": "branching/delta_entropy_std",
    "H predicts failure": "branching/predicts_failure",
    "solved where branched": "branching/solved_where_branched",
    "solved where declined": "branching/solved_where_declined",
    "mixed groups": "group/mixed_share",
}
"""Column of the table of reasons -> the metric to average over the steps with this metric."""
VALID = "valid/accuracy"
EQUAL = {"at_calls": ("tools/all/calls", "tool calls"), "at_tokens": ("tokens/sampled", "sampled tokens")}
"""Entry of the table -> the metric to hold equal for all algorithms, and the name of the metric."""


@dataclass(frozen=True)
class RunResult:
    """Scores and metrics of one finished run."""

    algorithm: str
    seed: int
    scores: dict[str, dict[str, float]]
    """Question file -> scores, as written by evaluate.py."""
    metrics: list[dict[str, float]]
    """The training steps, in order."""

    @property
    def accuracy(self) -> float:
        """Mean over the question files."""
        return mean(s["accuracy"] for s in self.scores.values())

    def series(self, metric: str) -> np.ndarray:
        return np.array([row[metric] for row in self.metrics])

    def mean_of(self, metric: str) -> float | None:
        """Return the mean over the steps with this metric; None if no step has the metric."""
        values = [row[metric] for row in self.metrics if metric in row]
        return mean(values) if values else None

    def spent(self, metric: str) -> float:
        """Return the sum of a metric over the whole training."""
        return float(self.series(metric).sum())

    def accuracy_at(self, metric: str, spent: float) -> float | None:
        """Return the greedy validation accuracy after `spent` units of a metric, interpolated between validations.

        None if the run has no validation before or after this position.
        """
        totals = np.cumsum(self.series(metric))
        points = [(total, row[VALID]) for total, row in zip(totals, self.metrics, strict=True) if VALID in row]
        if not points or not points[0][0] <= spent <= points[-1][0]:
            return None
        return float(np.interp(spent, *zip(*points, strict=True)))

    def last_and_best(self) -> tuple[float, float] | None:
        """Return the last validation accuracy and the highest; None for a run without validations."""
        values = [row[VALID] for row in self.metrics if VALID in row]
        return (values[-1], max(values)) if values else None

    def steps_until(self, target_reward: float) -> int | None:
        """Return the first step with a running mean of the training reward at the target; None = never."""
        reached = np.flatnonzero(running_mean(self.series("reward/mean")) >= target_reward)
        return int(self.metrics[reached[0]]["step"]) if len(reached) else None

    def seconds_until(self, target_reward: float) -> float | None:
        """Return the seconds of all steps up to `steps_until`, without validations and saves; None = never."""
        last = self.steps_until(target_reward)
        return None if last is None else sum(row["time/step"] for row in self.metrics if row["step"] <= last)


def read_run(folder: Path, algorithm: str, seed: int) -> RunResult | None:
    """Read a finished run; None if the run has not finished."""
    if not (scores := folder / "eval" / "scores.json").exists():
        return None
    steps = [row for row in read_metrics(folder) if "reward/mean" in row]  # step 0 is a validation only
    return RunResult(algorithm, seed, json.loads(scores.read_text()), steps)


def estimate(values: Sequence[float]) -> dict[str, float]:
    """Return the mean over n seeds with a 95 % t interval (n - 1 degrees of freedom). Fewer than three seeds get no
    interval: for two seeds the interval would be 25 standard errors wide.

    A bootstrap over so few seeds would be too narrow: over five seeds, it covers the mean in 85 % of cases.
    [0, 1, 2] -> mean 1, low 1 - 4.303 / sqrt(3), high 1 + 4.303 / sqrt(3)
    """
    from scipy.special import stdtrit

    n = len(values)
    centre = mean(values)
    if n < 3:
        return {"mean": centre, "seeds": n}
    half = float(stdtrit(n - 1, 0.975) * np.std(values, ddof=1) / np.sqrt(n))
    return {"mean": centre, "low": centre - half, "high": centre + half, "seeds": n}


def estimate_share(values: Sequence[float]) -> dict[str, float]:
    """Return the mean over n seeds of accuracies in [0, 1], with a 95 % interval inside [0, 1]. Fewer than three seeds
    get no interval.

    A t interval can leave [0, 1]: 0.78, 0.95, 0.97 -> 0.90 [0.64, 1.16]. So this is Wilson's interval, with Student's t
    as the quantile, for an effective number of answers (Korn and Graubard 1998): a share of this many answers varies as
    much as the seeds vary.
    """
    from scipy.special import stdtrit

    n = len(values)
    centre = mean(values)
    if n < 3:
        return {"mean": centre, "seeds": n}
    variance = float(np.var(values, ddof=1)) / n
    if variance == 0:
        return {"mean": centre, "low": centre, "high": centre, "seeds": n}
    num_answers = centre * (1 - centre) / variance
    low, high = wilson_interval(centre, num_answers, quantile=float(stdtrit(n - 1, 0.975)))
    return {"mean": centre, "low": low, "high": high, "seeds": n}


def paired_difference(runs: list[RunResult], reference: list[RunResult]) -> dict[str, float] | None:
    """Estimate the accuracy of `runs` minus the accuracy of `reference`, seed by seed; None without a common seed."""
    base = {run.seed: run.accuracy for run in reference}
    differences = [run.accuracy - base[run.seed] for run in runs if run.seed in base]
    return estimate(differences) if differences else None


def by_algorithm(results: list[RunResult]) -> dict[str, list[RunResult]]:
    """Group runs by algorithm, in the order of first appearance."""
    algorithms = dict.fromkeys(run.algorithm for run in results)
    return {algorithm: [run for run in results if run.algorithm == algorithm] for algorithm in algorithms}


def compare_algorithms(
    results: list[RunResult], target_reward: float, references: Sequence[str] = ("random", "grpo")
) -> dict[str, dict]:
    """Algorithm -> {accuracy, reward, tool_calls, ..., steps_to_target, seconds_to_target, minus_REFERENCE, seeds,
    at_calls, at_tokens, end}.

    `at_calls` and `at_tokens` are validation accuracies at equal cost: the cost of the cheapest run at the end of
    training. `end` is the last validation accuracy, and the last minus the highest accuracy of the run.
    """
    groups = by_algorithm(results)
    least = {name: min(run.spent(metric) for run in results) for name, (metric, _) in EQUAL.items()}
    table = {}
    for algorithm, runs in groups.items():
        reached = [step for run in runs if (step := run.steps_until(target_reward)) is not None]
        seconds = [time for run in runs if (time := run.seconds_until(target_reward)) is not None]
        row = table[algorithm] = {
            "accuracy": estimate_share([run.accuracy for run in runs]),
            "reward": estimate([mean(s["reward"] for s in run.scores.values()) for run in runs]),
            "steps_to_target": {"mean": mean(reached) if reached else None, "seeds": len(reached)},
            "seconds_to_target": estimate(seconds) if seconds else None,
            "seeds": {run.seed: run.accuracy for run in runs},
        }
        for name, (metric, _) in EQUAL.items():
            known = [value for run in runs if (value := run.accuracy_at(metric, least[name])) is not None]
            row[name] = {"spent": least[name]} | estimate_share(known) if known else None
        ends = [end for run in runs if (end := run.last_and_best())]
        row["end"] = {"last": estimate_share([last for last, _ in ends])} if ends else None
        if ends:
            row["end"] |= {"least": min(last for last, _ in ends), "lost": max(best - last for last, best in ends)}
        row["reasons"] = {}
        for name, metric in REASONS.items():
            if known := [value for run in runs if (value := run.mean_of(metric)) is not None]:
                row["reasons"][name] = mean(known)
        for name, metric in TOTALS.items():
            row[name] = estimate([run.spent(metric) for run in runs])
        for reference in references:
            if reference != algorithm and reference in groups:
                row[f"minus_{reference}"] = paired_difference(runs, groups[reference])
    return table


def references_of(table: dict[str, dict]) -> list[str]:
    """Return the reference algorithms of the comparison."""
    keys = dict.fromkeys(key for row in table.values() for key in row)
    return [key.removeprefix("minus_") for key in keys if key.startswith("minus_")]


def interval(cell: dict | None, sign: str = "", digits: int = 3) -> str:
    """Return an estimate as text, with the number of seeds, and from three seeds on with the interval."""
    if not cell:
        return ""
    if "low" not in cell:
        return f"{cell['mean']:{sign}.{digits}f}" + (f" n={cell['seeds']}" if cell["seeds"] > 1 else "")
    return f"{with_interval(cell['mean'], cell['low'], cell['high'], sign, digits)} n={cell['seeds']}"


def algorithms_table(table: dict[str, dict], target_reward: float) -> str:
    """Write the result of `compare_algorithms` as Markdown tables, one row per algorithm.

    The tables show the result; the validation accuracy at equal calls and tokens, and at the end (if runs were
    validated); and the effect of the branching signal. A difference may cover fewer seeds than the algorithm has.
    """
    references = references_of(table)
    head = ["algorithm", "seeds", "accuracy [95 %]", "reward", *(f"minus {r} [95 % t]" for r in references)]
    head += [name.removesuffix("_s").replace("_", " ") + (" s" if name.endswith("_s") else "") for name in TOTALS]
    head += [f"steps to reward {target_reward:g}", "seconds to it [95 % t]"]
    rows = []
    for algorithm, row in table.items():
        num_seeds = len(row["seeds"])
        reached = row["steps_to_target"]
        cells = [algorithm, str(num_seeds), interval(row["accuracy"]), f"{row['reward']['mean']:.3f}"]
        cells += [interval(row.get(f"minus_{r}"), sign="+") for r in references]
        cells += [f"{row[name]['mean']:,.0f}" for name in TOTALS]
        cells += [f"{reached['mean']:.1f} ({reached['seeds']} of {num_seeds} seeds)" if reached["seeds"] else "never"]
        cells += [interval(row["seconds_to_target"], digits=1)]
        rows.append(cells)
    tables = [markdown_table(head, rows)]
    for entry, (_, name) in EQUAL.items():
        if known := {algorithm: row[entry] for algorithm, row in table.items() if row[entry]}:
            spent = next(iter(known.values()))["spent"]
            head = ["algorithm", "runs", f"greedy validation accuracy after {spent:,.0f} {name} [95 %]"]
            tables.append(markdown_table(head, [[n, str(c["seeds"]), interval(c)] for n, c in known.items()]))
    if ends := {algorithm: row["end"] for algorithm, row in table.items() if row["end"]}:
        head = ["algorithm", "validation accuracy at the end [95 %]", "least of a run", "most that a run has lost"]
        cells = [[n, interval(end["last"]), f"{end['least']:.3f}", f"{end['lost']:.3f}"] for n, end in ends.items()]
        tables.append(markdown_table(head, cells))
    reasons = {name: row["reasons"] for name, row in table.items() if row["reasons"]}
    if reasons:
        rows = [[n, *(f"{r[c]:.3f}" if c in r else "" for c in REASONS)] for n, r in reasons.items()]
        tables.append(markdown_table(["algorithm, means over all steps", *REASONS], rows))
    return "\n\n".join("\n".join(lines) for lines in tables) + "\n"


def running_mean(values: Sequence[float]) -> np.ndarray:
    """Return for each value the mean over this value and earlier values, at most SMOOTHING_STEPS in all.

    >>> running_mean([1.0, 3.0]).tolist()
    [1.0, 2.0]
    """
    return np.array([np.mean(values[max(0, i + 1 - SMOOTHING_STEPS) : i + 1]) for i in range(len(values))])


def draw_forest(panels: Sequence[tuple[str, float | None, dict[str, dict | None]]], path: Path) -> None:
    """Draw estimates with their 95 % intervals: a panel for each (title, null, row -> estimate), a line per row.

    `null`: the value for "no difference". An interval without this value is coloured. None = no such value.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

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
        axis.xaxis.set_major_locator(MaxNLocator(nbins=4))  # more labels like "-0.075" would overlap
        axis.grid(axis="x", alpha=0.3)
        axis.tick_params(axis="y", length=0)
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[0][0].set_yticks(range(len(rows)), rows)
    axes[0][0].set_ylim(len(rows) - 0.5, -0.5)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_table(table: dict[str, dict], path: Path) -> None:
    """Draw the forest of `compare_algorithms`: accuracy, differences of accuracy, tool calls of training."""
    panels = [("held-out accuracy", None, {name: row["accuracy"] for name, row in table.items()})]
    for reference in references_of(table):
        cells = {name: row.get(f"minus_{reference}") for name, row in table.items()}
        panels.append((f"accuracy minus {reference}", 0.0, cells))
    panels.append(("tool calls of training", None, {name: row["tool_calls"] for name, row in table.items()}))
    draw_forest(panels, path)
