"""Best forks against best GRPO: the tool calls needed by each rule, at its best group size, roots and rate.

    python -m extras.ablation.frontier --dir runs/frontier --worlds signal steps --parallel 2

    python -m extras.ablation.frontier --worlds signal --settings grpo_g4_x1 top_h_g8_r2_x1 my_rules.py:deep_g8_r2_x1

The second form compares named settings, also with a rule of a custom file: NAME_gGROUP_rROOTS_xRATE.

Each world is a variant of the demo's task `long`. Stage 1 searches the best settings of GRPO and of top_h (or of
`--tuned`), on separate seeds; the other rules use the best settings of top_h. Stage 2 compares the rules on fresh
seeds, to the end of the runs. Every run adds a line to DIR/results.jsonl. The same command skips finished runs and
continues; `--report_only` writes DIR/TABLE.md and the pictures of the finished runs (frontier_report.py).

A run has learnt if the right moves at the decisive positions have a probability of 80 % after each of three steps in a
row, and the other right moves have kept their probability. A run of stage 1 ends there. It also ends after twice the
calls of the rule's best run of this seed so far. A run of stage 2 continues for the same number of steps again.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from extras.ablation.frontier_report import write_report
from extras.ablation.frontier_runs import Runs, tuning_cost
from extras.ablation.frontier_settings import GROUP_SIZES, RULES, WITHOUT_ROOTS, WORLDS, Setting

TUNING_SEEDS = (30, 31)
FRESH_SEEDS = tuple(range(40, 48))


def roots_of(rule: str, group_size: int) -> list[int]:
    """Return the numbers of roots to try: 1, 2, and half of the group."""
    if rule in WITHOUT_ROOTS:
        return [group_size]
    return sorted({n for n in (1, 2, group_size // 2) if 0 < n < group_size})


def best_setting(
    rule: str, group_sizes: Sequence[int], rates: Sequence[float], evaluate: Callable[[Sequence[Setting]], list[float]]
) -> Setting:
    """Search a rule's best setting, one coordinate after the other. GRPO, the rival, gets a second round."""
    has_roots = rule not in WITHOUT_ROOTS
    best = Setting(rule, 4, 1 if has_roots else 4, rates[len(rates) // 2])
    for vary in ("size", "rate", "size", "rate") if rule == "grpo" else ("size", "rate", "roots", "rate"):
        if vary == "rate":
            tried = [dataclasses.replace(best, rate=rate) for rate in rates]
        elif vary == "roots":
            tried = [dataclasses.replace(best, num_roots=n) for n in roots_of(rule, best.group_size)]
        else:
            sizes = [size for size in group_sizes if size > best.num_roots or not has_roots]
            tried = [
                dataclasses.replace(best, group_size=n, num_roots=best.num_roots if has_roots else n) for n in sizes
            ]
        costs = evaluate(tried)
        best = tried[costs.index(min(costs))]
    return best


def following(best: Setting, rule: str) -> Setting:
    """Return a rule's setting, taken from the best setting of another rule."""
    roots = best.group_size if rule in WITHOUT_ROOTS else best.num_roots
    return dataclasses.replace(best, rule=rule, num_roots=roots)


def tune(runs: Runs, world: str, args: argparse.Namespace, rule: str) -> Setting:
    """Return the rule's setting with the fewest calls on the tuning seeds."""

    def evaluate(settings: Sequence[Setting]) -> list[float]:
        return [tuning_cost(lines) for lines in runs.all_of(world, settings, args.tuning_seeds, stage=1)]

    return best_setting(rule, args.group_sizes, args.rates or WORLDS[world].rates, evaluate)


def best_settings(runs: Runs, world: str, args: argparse.Namespace) -> list[Setting]:
    """Return the best setting of each rule. The rules that are not searched for use the best setting of top_h."""
    with ThreadPoolExecutor(len(args.tuned)) as threads:
        found = threads.map(partial(tune, runs, world, args), args.tuned)
        best = dict(zip(args.tuned, found, strict=True))
    return [best.get(rule) or following(best["top_h"], rule) for rule in args.rules]


def main() -> None:
    """Read the command line, make the runs, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/frontier"), help="folder of all runs")
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--tuned", nargs="+", choices=RULES, default=["grpo", "top_h"], help="rules to search for")
    parser.add_argument(
        "--settings",
        type=Setting.named,
        nargs="+",
        help="compare these, and tune none: grpo_g8_x1 top_h_g8_r2_x1 FILE.py:NAME_g8_r2_x1",
    )
    parser.add_argument("--group_sizes", type=int, nargs="+", default=list(GROUP_SIZES), help="those to try")
    parser.add_argument("--rates", type=float, nargs="+", help="those to try, in place of the world's")
    parser.add_argument("--tuning_seeds", type=int, nargs="+", default=list(TUNING_SEEDS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(FRESH_SEEDS))
    parser.add_argument("--parallel", type=int, default=2, help="runs at the same time, one core each")
    parser.add_argument("--report_only", action="store_true", help="run nothing; write the report of what is there")
    args = parser.parse_args()
    if not args.settings and not {*args.rules} <= {*args.tuned} and "top_h" not in args.tuned:
        parser.error(f"--tuned {' '.join(args.tuned)} leaves out top_h, whose settings the other rules use; add it")
    runs = Runs(args.dir.resolve(), args.parallel)
    for world in () if args.report_only else args.worlds:
        settings = args.settings or best_settings(runs, world, args)
        print(f"{world}: {', '.join(setting.name for setting in settings)}", flush=True)
        for with_positions in (False, True):
            some = [setting for setting in settings if (setting.rule == "positions") == with_positions]
            runs.all_of(world, some, args.seeds, stage=2)
    write_report(runs.lines, args.dir)


if __name__ == "__main__":
    main()
