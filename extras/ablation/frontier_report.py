"""The report of the frontier (frontier.py): each rule at its best settings against GRPO at its best, by world."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from arpo.evals.tables import markdown_table
from extras.ablation.frontier_runs import IN_A_ROW, TARGET, cost, tuning_cost
from extras.ablation.frontier_settings import RULES, WORLDS, Setting
from extras.ablation.results import draw_forest, estimate, estimate_share

RIVALS = ("grpo", "grpo_keep", "grpo_dr", "grpo_decay", "grpo_anchored")
COSTS = {"calls": "tool calls", "tokens": "sampled tokens", "steps": "steps"}
TOLERANCE = 0.1
"""Share of failed seeds by which two settings may differ and still count as equally safe: chance does as much."""
COLLAPSED = 0.8
"""A run has collapsed if the last accuracy on held-out trails is below this share of the highest accuracy."""
Comparison = dict[Setting, dict[int, dict]]
"""Setting -> seed -> run."""


def setting_of(line: dict) -> Setting:
    """Return the setting of a run."""
    return Setting(line["rule"], line["group_size"], line["num_roots"], line["rate"])


def by_setting(lines: Sequence[dict]) -> Comparison:
    """Group runs by setting, in the order of RULES, then from large groups to small."""
    found: Comparison = {}
    for line in sorted(lines, key=lambda line: (rank_of(line["rule"]), -line["group_size"], line["rate"])):
        found.setdefault(setting_of(line), {})[line["seed"]] = line
    return found


def rank_of(rule: str) -> tuple[int, str]:
    """Return the sort key of a rule: first the rules of RULES in order, then custom rules by name."""
    order = list(RULES)
    return (order.index(rule) if rule in order else len(order), rule)


def strongest_rival(runs: Comparison) -> Setting | None:
    """Return GRPO's best setting on exactly these seeds: the one with the fewest calls of the safe ones.

    Safe are the settings whose share of failed seeds is at most TOLERANCE above the smallest share. Calls are compared
    seed by seed with those of the safe setting that ran on the most seeds, since seeds differ more than settings.
    """
    rivals = {setting: of_setting for setting, of_setting in runs.items() if setting.rule in RIVALS}
    failures = {
        setting: sum(cost(line) is None for line in of_setting.values()) / len(of_setting)
        for setting, of_setting in rivals.items()
    }
    safe = {setting: rivals[setting] for setting in rivals if failures[setting] <= min(failures.values()) + TOLERANCE}
    if not safe:
        return None
    most_run = max(safe, key=lambda setting: len(safe[setting]))
    calls = {setting: ratios(safe[setting], safe[most_run], "calls").get("mean", math.inf) for setting in safe}
    return min(safe, key=(calls | {most_run: 1.0}).__getitem__)


def ratios(ours: dict[int, dict], theirs: dict[int, dict], what: str) -> dict[str, float]:
    """Return the cost of one setting relative to another, paired by seed: geometric mean with a 95 % t interval.

    {} if no pair has learnt. A pair is left out if one of the runs never learnt; the column `never` and the rank test
    count these pairs.
    """
    pairs = [(cost(line, what), cost(theirs[seed], what)) for seed, line in ours.items() if seed in theirs]
    logs = [math.log(mine / other) for mine, other in pairs if mine and other]
    if not logs or ours is theirs:
        return {}
    return {name: math.exp(value) for name, value in estimate(logs).items() if name != "seeds"}


def rank_test(ours: dict[int, dict], theirs: dict[int, dict], what: str = "calls") -> float | None:
    """Return the two-sided p of Wilcoxon's signed-rank test on log costs. The cost is infinite if a run never learnt.

    Two runs are equal if both never learnt. None for fewer than six pairs, because p cannot be below 0.05 then.
    """
    from scipy.stats import wilcoxon

    differences = []
    for seed, line in ours.items():
        if seed in theirs:
            mine = cost(line, what)
            other = cost(theirs[seed], what)
            if mine and other:
                differences.append(math.log(mine / other))
            else:
                differences.append(0.0 if mine == other else 1e3 if other else -1e3)  # ranked behind all others
    return float(wilcoxon(differences).pvalue) if len(differences) >= 6 and any(differences) else None


def has_collapsed(line: dict) -> bool:
    """Return whether a run has lost more than a fifth of its highest accuracy."""
    accuracy = line["curve"]["trail"]
    return accuracy[-1] < COLLAPSED * max(accuracy)


def interval(estimated: dict[str, float]) -> str:
    """Return a ratio as text. {"mean": 0.5, "low": 0.4, "high": 0.6} -> "0.50 [0.40, 0.60]" """
    if not estimated:
        return ""
    bounds = f" [{estimated['low']:.2f}, {estimated['high']:.2f}]" if "low" in estimated else ""
    return f"{estimated['mean']:.2f}{bounds}"


def comparison(runs: Comparison, reference: Setting) -> list[str]:
    """Return the table of a world's stage 2, relative to the strongest rival."""
    head = [
        "setting",
        "seeds",
        "never",
        "calls to 80 % held",
        *(f"{name}, of {reference.name}" for name in COSTS.values()),
    ]
    head += ["p (ranks)", "accuracy at the end: mean, least", "collapsed", "right of what it sampled last"]
    rows = []
    for setting, of_setting in runs.items():
        lines = of_setting.values()
        known = [calls for line in lines if (calls := cost(line))]
        accuracies = [line["curve"]["trail"][-1] for line in lines]
        p = None if setting == reference else rank_test(of_setting, runs[reference])
        rows.append([
            setting.folder_name,
            str(len(lines)),
            str(len(lines) - len(known)),
            f"{fmean(known):,.0f}" if known else "",
            *(
                "1" if setting == reference else interval(ratios(of_setting, runs[reference], what))
                for what in COSTS
            ),
            "" if p is None else f"{p:.3f}",
            f"{fmean(accuracies):.2f}, {min(accuracies):.2f}",
            str(sum(map(has_collapsed, lines))),
            f"{fmean(fmean(line['curve']['solved'][-IN_A_ROW:]) for line in lines):.2f}",
        ])  # fmt: skip
    return markdown_table(head, rows)


def settings_tried(runs: Comparison) -> list[str]:
    """Return the table of a world's stage 1: each setting's calls, relative to GRPO's best setting."""
    costs = {setting: tuning_cost(list(of_setting.values())) for setting, of_setting in runs.items()}
    reference = min((value for setting, value in costs.items() if setting.rule in RIVALS), default=math.nan)
    rows = [
        [
            setting.folder_name,
            str(len(runs[setting])),
            f"{value / reference:.2f}",
            str(sum(cost(run) is None for run in runs[setting].values())),
        ]
        for setting, value in sorted(costs.items(), key=lambda item: (rank_of(item[0].rule), item[1]))
    ]
    return markdown_table(["setting", "runs", "calls, of the best GRPO's", "ended before they had learnt"], rows)


def write_report(lines: Sequence[dict], folder: Path) -> None:
    """Write FOLDER/TABLE.md, and FOLDER/WORLD.png for each compared world."""
    parts = []
    for world, variant in WORLDS.items():
        final = by_setting([line for line in lines if (line["world"], line["stage"]) == (world, 2)])
        tuned = by_setting([line for line in lines if (line["world"], line["stage"]) == (world, 1)])
        if not final and not tuned:
            continue
        parts += [f"## {world}", "", f"{variant}", ""]
        if reference := strongest_rival(final):
            parts += [*comparison(final, reference), ""]
            draw(final, reference, folder / f"{world}.png")
        if tuned:
            parts += ["<details><summary>Settings tried</summary>", "", *settings_tried(tuned), "", "</details>", ""]
    (folder / "TABLE.md").write_text("\n".join(parts))
    print("\n".join(parts))


def draw(runs: Comparison, reference: Setting, path: Path) -> None:
    """Draw each setting's cost relative to the strongest rival, and the accuracy at the end of the runs."""
    rows = {setting: _row_label(setting, of_setting) for setting, of_setting in runs.items()}
    panels: list[tuple[str, float | None, dict]] = []
    for what in ("calls", "tokens"):
        cells = {
            rows[setting]: ratios(of_setting, runs[reference], what) or None for setting, of_setting in runs.items()
        }
        cells[rows[reference]] = {"mean": 1.0}
        title = f"{COSTS[what]} to\n{TARGET:.0%} right moves, of\n{reference.folder_name}"
        panels.append((title, 1.0, cells))
    ends = {
        rows[setting]: estimate_share([line["curve"]["trail"][-1] for line in of_setting.values()])
        for setting, of_setting in runs.items()
    }
    panels.append(("accuracy at the end", None, ends))
    draw_forest(panels, path)


def _row_label(setting: Setting, of_setting: dict[int, dict]) -> str:
    num_never = sum(cost(line) is None for line in of_setting.values())
    return f"{setting.folder_name}, {num_never} of {len(of_setting)} never"
