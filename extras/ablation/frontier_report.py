"""The report of the frontier (frontier.py): each rule at its best settings against GRPO at its best, by world."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from arpo.evals.tables import markdown_table
from extras.ablation.frontier_runs import IN_A_ROW, RULES, TARGET, WORLDS, Setting, cost, tuning_cost
from extras.ablation.results import draw_forest, estimate

REFERENCE = "grpo"
COSTS = {"calls": "tool calls", "tokens": "sampled tokens", "steps": "steps"}
COLLAPSED = 0.8
"""A run has collapsed where its last accuracy on held-out trails is below this share of its highest."""


def setting_of(line: dict) -> Setting:
    """Return what a run trained with."""
    return Setting(line["rule"], line["group_size"], line["num_roots"], line["rate"])


def ratios(lines: Sequence[dict], rule: str, reference: str, what: str) -> dict[str, float]:
    """Return a rule's cost relative to the reference's, paired by seed: geometric mean with its 95 % t interval.

    {} where no pair has learnt. Pairs of which one never learnt are left out here; `never` and `wins` count them.
    """
    costs = {(line["rule"], line["seed"]): cost(line, what) for line in lines}
    pairs = [(value, costs.get((reference, seed))) for (name, seed), value in costs.items() if name == rule]
    logs = [math.log(ours / theirs) for ours, theirs in pairs if ours and theirs]
    if not logs or rule == reference:
        return {}
    return {name: math.exp(value) for name, value in estimate(logs).items() if name != "seeds"}


def rank_test(lines: Sequence[dict], rule: str, reference: str, what: str = "calls") -> float | None:
    """Return the two-sided p of Wilcoxon's signed-rank test on log costs; a run that never learnt has cost infinity.

    Two that both never learnt are equal. None with fewer than six pairs, of which no p can be below 0.05.
    """
    from scipy.stats import wilcoxon

    costs = {(line["rule"], line["seed"]): cost(line, what) for line in lines}
    differences = []
    for (name, seed), ours in costs.items():
        if name == rule and (reference, seed) in costs:
            theirs = costs[reference, seed]
            if ours and theirs:
                differences.append(math.log(ours / theirs))
            else:
                differences.append(0.0 if ours == theirs else 1e3 if theirs else -1e3)  # ranked behind all others
    return float(wilcoxon(differences).pvalue) if len(differences) >= 6 and any(differences) else None


def has_collapsed(line: dict) -> bool:
    """Return whether a run has lost more than a fifth of the accuracy that it once had."""
    accuracy = line["curve"]["trail"]
    return accuracy[-1] < COLLAPSED * max(accuracy)


def interval(estimated: dict[str, float]) -> str:
    """Return a ratio as text. {"mean": 0.5, "low": 0.4, "high": 0.6} -> "0.50 [0.40, 0.60]" """
    if not estimated:
        return ""
    bounds = f" [{estimated['low']:.2f}, {estimated['high']:.2f}]" if "low" in estimated else ""
    return f"{estimated['mean']:.2f}{bounds}"


def comparison(lines: Sequence[dict]) -> list[str]:
    """Return the table of a world's stage 2."""
    head = [
        "rule at its best",
        "seeds",
        "never",
        "calls to 80 % held",
        *(f"{name}, of GRPO's" for name in COSTS.values()),
    ]
    head += ["p (ranks)", "accuracy at the end: mean, least", "collapsed", "right of what it sampled last"]
    rows = []
    for rule in RULES:
        runs = [line for line in lines if line["rule"] == rule]
        if not runs:
            continue
        known = [calls for line in runs if (calls := cost(line))]
        accuracies = [line["curve"]["trail"][-1] for line in runs]
        p = rank_test(lines, rule, REFERENCE)
        rows.append([
            setting_of(runs[0]).name,
            str(len(runs)),
            str(len(runs) - len(known)),
            f"{fmean(known):,.0f}" if known else "",
            *(interval(ratios(lines, rule, REFERENCE, what)) for what in COSTS),
            "" if p is None else f"{p:.3f}",
            f"{fmean(accuracies):.2f}, {min(accuracies):.2f}",
            str(sum(map(has_collapsed, runs))),
            f"{fmean(fmean(line['curve']['solved'][-IN_A_ROW:]) for line in runs):.2f}",
        ])  # fmt: skip
    return markdown_table(head, rows)


def settings_tried(lines: Sequence[dict]) -> list[str]:
    """Return the table of a world's stage 1: each setting's calls, relative to the best of GRPO."""
    by_setting: dict[Setting, list[dict]] = {}
    for line in lines:
        by_setting.setdefault(setting_of(line), []).append(line)
    costs = {setting: tuning_cost(runs) for setting, runs in by_setting.items()}
    reference = min((value for setting, value in costs.items() if setting.rule == REFERENCE), default=math.nan)
    rows = [
        [
            setting.name,
            str(len(by_setting[setting])),
            f"{value / reference:.2f}",
            str(sum(cost(run) is None for run in by_setting[setting])),
        ]
        for setting, value in sorted(costs.items(), key=lambda item: (list(RULES).index(item[0].rule), item[1]))
    ]
    return markdown_table(["setting", "runs", "calls, of the best GRPO's", "ended before they had learnt"], rows)


def write_report(lines: Sequence[dict], folder: Path) -> None:
    """Write FOLDER/TABLE.md, and FOLDER/WORLD.png of each world that has been compared."""
    parts = []
    for world, variant in WORLDS.items():
        final = [line for line in lines if (line["world"], line["stage"]) == (world, 2)]
        tuned = [line for line in lines if (line["world"], line["stage"]) == (world, 1)]
        if not final and not tuned:
            continue
        parts += [f"## {world}", "", f"{variant}", ""]
        if final:
            parts += [*comparison(final), ""]
            draw(final, folder / f"{world}.png")
        if tuned:
            parts += ["<details><summary>Settings tried</summary>", "", *settings_tried(tuned), "", "</details>", ""]
    (folder / "TABLE.md").write_text("\n".join(parts))
    print("\n".join(parts))


def draw(lines: Sequence[dict], path: Path) -> None:
    """Draw what each rule needed relative to GRPO, and the accuracy at the end of its runs."""
    names = {line["rule"]: setting_of(line).name for line in lines}
    rules = [rule for rule in RULES if rule in names]
    panels: list[tuple[str, float | None, dict]] = []
    for what in ("calls", "tokens"):
        cells = {names[rule]: ratios(lines, rule, REFERENCE, what) or None for rule in rules}
        cells[names.get(REFERENCE, REFERENCE)] = {"mean": 1.0}
        panels.append((f"{COSTS[what]} to {TARGET:.0%} right moves\nrelative to GRPO at its best", 1.0, cells))
    ends = {
        names[rule]: estimate([line["curve"]["trail"][-1] for line in lines if line["rule"] == rule]) for rule in rules
    }
    panels.append(("accuracy at the end", None, ends))
    draw_forest(panels, path)
