"""The frontier: what a run has cost, the search for settings, the comparison, the control, the exact right moves."""

import json
import random
from collections import Counter

import numpy as np
import pytest
import torch
from helpers.scripted_rollout import call_then_answer, play
from transformers import AutoTokenizer

from arpo.log.dumps import DumpWriter
from arpo.options import BranchingConfig
from arpo.retrospective import Fork
from arpo.start.load import load_config
from arpo.trajectory import Group, Prompt, StopReason, Trajectory, Turn
from extras.ablation import frontier
from extras.ablation import positions as control
from extras.ablation.frontier import best_setting, following
from extras.ablation.frontier_report import (
    by_setting,
    comparison,
    has_collapsed,
    interval,
    rank_test,
    ratios,
    settings_tried,
    strongest_rival,
    write_report,
)
from extras.ablation.frontier_runs import KEPT, Runs, cost, step_learnt, tuning_cost
from extras.ablation.frontier_settings import GROUP_SIZES, ROOT, RULES, WITHOUT_ROOTS, WORLDS, Setting, World
from extras.ablation.right_moves import RightMoves, right_trajectory
from extras.demo import build as demo
from train_rl import RLConfig

SIZES = dict(zip(GROUP_SIZES, (3.0, 2.0, 1.0, 1.5, 2.0, 4.0), strict=True))


def line_of(rule: str, seed: int, decisive: list[float], **more) -> dict:
    """A run of ten calls a step that has kept its certain moves, unless `more` says otherwise."""
    steps = len(decisive)
    curve = {"calls": [10.0] * steps, "tokens": [100.0] * steps, "decisive": decisive, "certain": [0.9] * steps,
             "trail": decisive, "solved": decisive, "mixed": [1.0] * steps} | more  # fmt: skip
    return {"world": "steps", "stage": 2, "seed": seed, "rule": rule, "group_size": 4, "num_roots": 1, "rate": 2,
            "curve": curve}  # fmt: skip


def test_a_run_has_learnt_at_the_first_of_three_steps_that_hold_and_only_if_it_ends_there():
    assert step_learnt(line_of("grpo", 0, [0.7, 0.8, 0.9, 0.8])["curve"]) == 4
    assert cost(line_of("grpo", 0, [0.7, 0.9, 0.9, 0.9])) == pytest.approx(10 + 10 * (0.8 - 0.7) / 0.2)
    assert cost(line_of("grpo", 0, [0.7, 0.9, 0.9, 0.9]), "steps") == pytest.approx(1.5)
    assert cost(line_of("grpo", 0, [0.9, 0.7, 0.7, 0.9, 0.9, 0.9])) == pytest.approx(35.0)  # did not hold at first
    assert cost(line_of("grpo", 0, [0.9, 0.9, 0.9])) == pytest.approx(10.0)
    assert cost(line_of("grpo", 0, [0.9, 0.9, 0.9, 0.7])) is None  # lost at the end
    assert cost(line_of("grpo", 0, [0.5, 0.6, 0.9, 0.9])) is None


def test_right_moves_that_cost_the_certain_ones_count_for_nothing():
    """Seed 24's kind: the decisive moves are learnt, and a move that was certain is lost, so nothing is solved."""
    assert cost(line_of("grpo", 0, [0.9] * 4, certain=[0.9, 0.9, 0.9, 0.8])) is None
    assert cost(line_of("grpo", 0, [0.9] * 4, certain=[0.9, 0.88, 0.8, 0.8])) is None
    assert has_collapsed(line_of("grpo", 0, [0.9] * 4, trail=[0.2, 0.8, 0.7, 0.6]))
    assert not has_collapsed(line_of("grpo", 0, [0.9] * 4, trail=[0.2, 0.8, 0.7, 0.65]))


def test_a_setting_that_never_learns_on_a_seed_is_worse_than_one_that_is_dear():
    dear = [line_of("grpo", seed, [0.5] * 9 + [0.9] * 3) for seed in (0, 1)]
    never = [line_of("grpo", 0, [0.9] * 3), line_of("grpo", 1, [0.5] * WORLDS["steps"].max_steps)]
    cut_off = [line_of("grpo", seed, [0.5] * 5) for seed in (0, 1)]
    assert tuning_cost(cut_off) == pytest.approx(2 * 50.0)
    assert tuning_cost(dear) < tuning_cost(never)


@pytest.mark.parametrize("rule", ["grpo", "top_h"])
def test_the_search_finds_the_best_of_costs_that_are_products(rule):
    tried = []

    def evaluate(settings):
        tried.extend(settings)
        return [SIZES[s.group_size] * (1 + abs(s.rate - 2)) * (1 + (s.num_roots == 2)) for s in settings]

    best = best_setting(rule, GROUP_SIZES, (1, 2, 4), evaluate)
    assert (best.group_size, best.rate) == (4, 2) and best.num_roots == (4 if rule == "grpo" else 1)
    assert {s.group_size for s in tried} == set(GROUP_SIZES)
    assert all(s.num_roots < s.group_size or rule == "grpo" for s in tried)


def test_the_rules_of_the_command_line_are_searched_and_the_others_follow_top_h(tmp_path, monkeypatch, capsys):
    made = {1: [], 2: []}

    def all_of(self, world, settings, seeds, stage):
        """As if groups of six with two roots were the cheapest."""
        made[stage] += settings
        costs = [20 + abs(s.group_size - 6) + (s.num_roots != 2) for s in settings]
        return [[line_of(s.rule, 0, [0.5] * n + [0.9] * 3)] for s, n in zip(settings, costs, strict=True)]

    def run(*argv):
        made[1].clear()
        made[2].clear()
        monkeypatch.setattr("sys.argv", ["frontier", "--dir", str(tmp_path), "--worlds", "signal", *argv])
        frontier.main()

    monkeypatch.setattr(Runs, "all_of", all_of)
    run(
        "--tuned",
        "random",
        "top_h",
        "--rules",
        "random",
        "arpo",
        "aepo",
        "--rates",
        "1",
        "--group_sizes",
        "2",
        "4",
        "6",
    )
    assert {s.rule for s in made[1]} == {"random", "top_h"} and {s.rate for s in made[1]} == {1}
    assert [s.name for s in made[2]] == ["random_g6_r2_x1", "arpo_g6_r2_x1", "aepo_g6_x1"]
    run("--tuned", "random", "--rules", "random")
    assert {s.rule for s in made[1]} == {"random"} and {s.rate for s in made[1]} == {*WORLDS["signal"].rates}
    with pytest.raises(SystemExit, match="2"):
        run("--tuned", "random", "--rules", "random", "arpo")
    assert "--tuned random leaves out top_h" in capsys.readouterr().err and not made[1]


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_a_config_and_takes_over_the_settings(rule):
    setting = following(Setting("top_h", 6, 2, 4), rule)
    config = load_config(RLConfig, ["--data.train", "x", *setting.flags])
    assert config.rollout.group_size == 6 and config.optim.lr == pytest.approx(28e-4)
    assert rule in WITHOUT_ROOTS or config.branching.num_initial_rollouts == 2


def test_ratios_are_paired_and_never_counts_in_ranks_and_in_its_column(tmp_path):
    lines = []
    for seed in range(7):
        slow = 4 + seed % 3
        lines.append(line_of("grpo", seed, [0.5] * (2 * slow) + [0.9] * 3))
        reached = [0.5] * slow + [0.9] * 3 if seed else [0.5] * 20
        lines.append(line_of("top_h", seed, reached))
        lines.append(line_of("grpo", seed, [0.5] + [0.9] * 3 if seed else [0.5] * 20) | {"group_size": 2})
    runs = by_setting(lines)
    [eight, two, ours] = runs
    assert strongest_rival(runs) == eight  # the other is far cheaper, and fails on a seed
    found = ratios(runs[ours], runs[eight], "calls")
    assert found["mean"] == pytest.approx(0.5, abs=0.05) and found["low"] < found["mean"] < found["high"]
    assert ratios(runs[eight], runs[eight], "calls") == {} and (eight.group_size, two.group_size) == (4, 2)
    # six are better, one that never learnt is the worst: ranks 1 to 6 against 7
    assert rank_test(runs[ours], runs[eight]) == pytest.approx(0.297, abs=0.02)
    assert rank_test(dict(list(runs[ours].items())[:4]), runs[eight]) is None
    write_report(lines + [line | {"stage": 1} for line in lines[:4]], tmp_path)
    table = (tmp_path / "TABLE.md").read_text()
    assert "| top_h_g4_r1_x2 | 7 | 1 |" in table and "Settings tried" in table
    assert (tmp_path / "steps.png").stat().st_size > 9000


@pytest.mark.parametrize("name", ["grpo_g8_x1", "aepo_g16_x0.5", "top_h_g8_r2_x1", "positions_g4_r1_x4"])
def test_a_setting_is_known_by_its_name(name):
    assert Setting.named(name).name == name


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("grpo", "'grpo' is no setting"),
        ("grpo_g8_r2_x1", "grpo has no number of roots"),
        ("top_h_g8_x1", "top_h has a number of roots"),
        ("best_g8_x1", "'best' is no rule"),
        ("none.py:deep_g8_r2_x1", "there is no file none.py"),
    ],
)
def test_what_is_no_setting_is_refused(name, reason):
    with pytest.raises(ValueError, match=reason):
        Setting.named(name)


DEEP = """
from arpo.retrospective import Fork

def last_turn(group, budget, cfg, rng):
    \"\"\"Fork each finished trajectory at its last turn.\"\"\"
    ends = [(t, len(t.turns) - 1) for t in group.trajectories if len(t.turns) > 1]
    return [Fork(t.trajectory_id, turn, None) for t, turn in ends[:budget]]
"""


def results(name: str) -> list[dict]:
    """The runs of a committed file of results."""
    return [json.loads(line) for line in (ROOT / f"benchmarks/ablation/{name}.jsonl").read_text().splitlines()]


def searched(world: str) -> list[dict]:
    """The runs of a world's search for settings, on seeds 30 and 31."""
    return [line for line in results("frontier") if (line["world"], line["stage"]) == (world, 1)]


def compared(section: str) -> list[dict]:
    """The runs of a table of benchmarks/ablation/frontier.md: of a world, or those with an anchor and their rivals."""
    if section != "anchored":
        return [line for line in results("frontier") if (line["world"], line["stage"]) == (section, 2)]
    rivals = ("grpo", "grpo_decay", "top_h_mixed_decay")
    fresh = [line for line in compared("signal") if line["rule"] in rivals and line["seed"] >= 60]
    return [*fresh, *results("anchored")]


def on_page(*pages: str) -> str:
    """The text of pages, on one line."""
    return " ".join(word for page in pages for word in (ROOT / page).read_text().split())


RECORD = "benchmarks/ablation/frontier.md"


@pytest.mark.parametrize(
    ("section", "heading"),
    [
        ("signal", "A step is mostly noise"),
        ("anchored", "With an anchor"),
        ("steps", "A step is mostly signal"),
        ("unready", "Success is rare at first"),
        ("silent", "A wrong way does not end the trail"),
        ("first", "The first turn decides"),
    ],
)
def test_the_tables_of_the_record_are_those_of_the_results(section, heading):
    runs = by_setting(compared(section))
    tried = by_setting(searched(section))
    text = (ROOT / RECORD).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    expected = comparison(runs, strongest_rival(runs)) + (settings_tried(tried) if tried else [])
    assert [line for line in text.splitlines() if line.startswith("|")] == expected


GROWING = "top_h_mixed_anchored_g8_r2_x1"
ONE_ROOT = "top_h_anchored_g4_r1_x1"
LEAST_SURE = "at2po_anchored_g4_r1_x1"
ONE_FORK = "top_h_anchored_g2_r1_x1"


def named_runs(section: str) -> dict[str, dict[int, dict]]:
    """The runs of a table: name of the setting -> seed -> run."""
    return {setting.name: of_setting for setting, of_setting in by_setting(compared(section)).items()}


def failures(runs: dict[int, dict]) -> str:
    """ "(1 of 8)": how many of the runs do not hold."""
    return f"({sum(cost(line) is None for line in runs.values())} of {len(runs)})"


def repeats(section: str) -> dict[int, dict]:
    """GRPO's best setting of a world again, on the machine of the runs that are compared with it: seed -> run."""
    lines = [line for line in results("tried") if line["world"] == section and line["flags"].startswith("repeated")]
    return {line["seed"]: line for line in lines}


@pytest.mark.parametrize("page", ["README.md", "docs/branching.md"])
def test_the_first_table_of_a_page_is_that_of_the_results(page):
    """Calls of GRPO at its best, and the runs that do not hold."""
    table = (ROOT / page).read_text().partition("| calls, of those of GRPO at its best |")[2].partition("\n\n")[0]
    rows = [line.strip("|").split(" | ")[1:] for line in table.splitlines()[2:]]
    of_another_machine = {("steps", LEAST_SURE), ("silent", LEAST_SURE), ("silent", ONE_FORK)}  # than the record's GRPO
    for section, cells in zip(("anchored", "steps", "unready", "silent", "first"), rows, strict=True):
        runs = named_runs(section)
        reference = strongest_rival(by_setting(compared(section)))
        for name, cell in zip((LEAST_SURE, ONE_ROOT, ONE_FORK), cells, strict=False):
            if name not in runs:
                tried = by_setting(searched("signal" if section == "anchored" else section))
                expected = f"fails in the search {failures(tried[Setting.named(name)])}"
            else:
                grpo = repeats(section) if (section, name) in of_another_machine else runs[reference.name]
                expected = f"{interval(ratios(runs[name], grpo, 'calls'))} {failures(runs[name])}"
            assert cell.replace("*", "") == expected, (section, name)
        size = {2: "two", 3: "three", 4: "four"}[reference.group_size]
        anchored = ", anchored" if reference.rule == "grpo_anchored" else ""
        assert cells[3].strip() == f"{size}{anchored} {failures(runs[reference.name])}"


def test_all_runs_of_the_config_for_forks_hold():
    runs = [
        line
        for section in ("anchored", "steps", "unready", "silent")
        for line in named_runs(section)[LEAST_SURE].values()
    ]
    assert all(cost(line) for line in runs)
    for page in ("README.md", "docs/branching.md"):
        assert f"All {len(runs)} " in on_page(page) and "runs in the first four worlds hold" in on_page(page)
        assert "In the third and the fourth its interval reaches beyond 1" in on_page(page)
    upper_ends = [
        ratios(named_runs(section)[LEAST_SURE], grpo, "calls")["high"]
        for section, grpo in (
            ("anchored", named_runs("anchored")["grpo_anchored_g2_x1"]),
            ("steps", repeats("steps")),
            ("unready", named_runs("unready")["grpo_g2_x1"]),
            ("silent", repeats("silent")),
        )
    ]
    assert [end > 1 for end in upper_ends] == [False, False, True, True]


@pytest.mark.parametrize("section", ["anchored", "steps", "unready", "silent"])
def test_one_root_and_three_forks_take_fewer_calls_than_grpo_at_its_best_and_do_not_fail_more_often(section):
    runs = named_runs(section)
    ours = runs[ONE_ROOT]
    theirs = runs[strongest_rival(by_setting(compared(section))).name]
    assert rank_test(ours, theirs) < 0.05 and ratios(ours, theirs, "calls")["mean"] < 1
    failed, failed_of_theirs = (np.mean([cost(line) is None for line in of.values()]) for of in (ours, theirs))
    assert failed <= failed_of_theirs


@pytest.mark.parametrize(
    ("section", "ours", "theirs", "text"),
    [
        ("anchored", "at2po_anchored_g4_r1_x1", "grpo_anchored_g2_x1", "`at2po` {} (0 of 8 fail), random"),
        ("anchored", "random_anchored_g4_r1_x1", "grpo_anchored_g2_x1", "random {} (0 of 8 fail), `arpo`"),
        ("anchored", "arpo_anchored_g4_r1_x1", "grpo_anchored_g2_x1", "`arpo` {} (1 of 8 fails), threshold"),
        ("anchored", "threshold_anchored_g4_r1_x1", "grpo_anchored_g2_x1", "threshold {} (1 of 8 fails). For"),
        (
            "anchored",
            "aepo_anchored_g4_x1",
            "grpo_anchored_g2_x1",
            "For AEPO the search chose groups of four: {} (0 of 8 fail).",
        ),
        ("anchored", ONE_ROOT, "random_anchored_g4_r1_x1", "`top_h` takes {} of the calls of random forks, and"),
        ("anchored", ONE_ROOT, "at2po_anchored_g4_r1_x1", "{} of `at2po`'s"),
        ("anchored", ONE_ROOT, "threshold_anchored_g4_r1_x1", "takes {} of the threshold's calls, and"),
        ("anchored", ONE_ROOT, "aepo_anchored_g4_x1", "{} of AEPO's (eight seeds each)"),
        ("steps", ONE_ROOT, "grpo_g3_x1", "take {} of the calls of GRPO with three"),
        ("steps", "grpo_anchored_g3_x1", "grpo_g3_x1", "{} of GRPO 3's calls with three"),
        ("steps", "at2po_g4_r1_x1", "grpo_g3_x1", "`at2po` {} (1 of 6 fail)"),
        ("steps", "random_g4_r1_x1", "grpo_g3_x1", "random {} (1 of 6 fail)"),
        ("steps", "threshold_g4_r1_x1", "grpo_g3_x1", "threshold {} (1 of 6 fail)"),
        ("steps", "aepo_g4_x1", "grpo_g3_x1", "AEPO {} (2 of 6 fail)"),
        ("steps", "top_h_g4_r1_x1", "random_g4_r1_x1", "`top_h` takes {} of the calls of random forks"),
        ("steps", "grpo_anchored_g2_x1", "grpo_g3_x1", "with three, {} with two. But none of these 14 runs fails"),
        ("steps", ONE_FORK, "grpo_g3_x1", "on seeds 60 to 67: `top_h` {} (1 of 8 fails)"),
        ("steps", "at2po_anchored_g2_r1_x1", "grpo_g3_x1", "`at2po` {} (0 of 8 fail), threshold"),
        ("steps", "threshold_anchored_g2_r1_x1", "grpo_g3_x1", "threshold {} (1 of 8 fails), AEPO"),
        ("steps", "aepo_anchored_g2_x1", "grpo_g3_x1", "AEPO {} (0 of 8 fail), `arpo`"),
        ("steps", "arpo_anchored_g2_r1_x1", "grpo_g3_x1", "`arpo` {} (0 of 8 fail), random"),
        ("steps", "random_anchored_g2_r1_x1", "grpo_g3_x1", "random {} (0 of 8 fail)."),
        ("steps", ONE_FORK, "random_anchored_g2_r1_x1", "`top_h` takes {} of the calls of random forks, 0.78"),
        ("steps", ONE_FORK, "arpo_anchored_g2_r1_x1", "{} of those of `arpo`, and 0.96"),
        ("steps", ONE_FORK, "at2po_anchored_g2_r1_x1", "{} of those of `at2po` (one root and one fork each)"),
        ("steps", "at2po_anchored_g2_r1_x1", "grpo_anchored_g3_x1", "Of anchored GRPO with three, `at2po` takes {}"),
        ("steps", ONE_FORK, ONE_ROOT, "One root and one fork take {} of the calls of one root and three forks"),
        (
            "unready",
            ONE_FORK,
            "grpo_g2_x1",
            "One root and one fork, with the anchor, take {} of the calls of GRPO with two**, its",
        ),
        ("unready", ONE_FORK, "random_anchored_g2_r1_x1", "`top_h` takes {} of the calls of random forks: here"),
        ("unready", "at2po_anchored_g2_r1_x1", "grpo_g2_x1", "`at2po` takes {} (1 of 8 fails), random"),
        ("unready", "random_anchored_g2_r1_x1", "grpo_g2_x1", "random forks {} (0 of 8 fail). `top_h`"),
        ("unready", ONE_ROOT, "grpo_g2_x1", "on 14 seeds. It takes {} of the calls of GRPO with two (1 of 14 fails),"),
        ("unready", ONE_ROOT, "grpo_g2_x1", "Three forks learn all fourteen there, and take {} of GRPO's calls."),
        ("unready", ONE_ROOT, "grpo_g3_x1", "(1 of 14 fails), {} of those with three (1 of 14 fails),"),
        ("unready", ONE_ROOT, "grpo_g4_x1", "and {} of those with four (0 of 12 fail)"),
        ("unready", "top_h_anchored_g4_r2_x1", "grpo_g2_x1", "Two roots of four take {} of the calls of GRPO with two"),
        ("silent", "top_h_anchored_g4_r2_x1", "grpo_g2_x1", "and {} where a wrong way does not end the trail (eight"),
        (
            "silent",
            "top_h_anchored_g4_r2_x1",
            "grpo_g2_x1",
            "Two roots of four (`top_h`) take {} of the older runs' (0 of",
        ),
        ("unready", "top_h_anchored_g4_r2_x1", "grpo_g2_x1", "(six seeds, all hold), {} where success is rare, and"),
        (
            "steps",
            "top_h_anchored_g4_r2_x1",
            "grpo_g3_x1",
            "(8 seeds, all hold), {} where a step is mostly signal (six",
        ),
        (
            "unready",
            GROWING,
            "grpo_g2_x1",
            "Growing groups with the anchor take {} of the calls of GRPO with two. One of 12",
        ),
        ("unready", "top_h_g4_r1_x1", "grpo_g2_x1", "fails on one of four seeds ({})"),
        ("unready", "random_g4_r1_x1", "grpo_g2_x1", "and so do random forks ({})"),
        ("unready", "grpo_anchored_g2_x1", "grpo_g2_x1", "takes {} of the calls without it (1 of 14 fails)"),
        ("unready", "top_h_g2_r1_x1", "grpo_g2_x1", "One root and one fork without the anchor take {} (2 of 6 fail)"),
        ("unready", "at2po_g4_r1_x1", "grpo_g2_x1", "`at2po` {} (0 of 4 fail), blind"),
        ("unready", "positions_g4_r1_x1", "grpo_g2_x1", "blind {} (0 of 4 fail), `arpo`"),
        ("unready", "arpo_g4_r1_x1", "grpo_g2_x1", "`arpo` {} (two pairs, 1 of 4 fails), threshold"),
        ("unready", "threshold_g4_r1_x1", "grpo_g2_x1", "threshold {} (0 of 4 fail), AEPO"),
        ("unready", "aepo_g4_x1", "grpo_g2_x1", "AEPO {} (0 of 4 fail). - A large"),
        ("silent", "at2po_g4_r1_x1", "grpo_g2_x1", "`at2po` {} (0 of 4 fail), threshold"),
        ("silent", "threshold_g4_r1_x1", "grpo_g2_x1", "threshold {} (0 of 4 fail), `arpo`"),
        ("silent", "arpo_g4_r1_x1", "grpo_g2_x1", "`arpo` {} (0 of 4 fail)."),
        ("silent", "top_h_g4_r1_x1", "positions_g4_r1_x1", "{} of the blind forks' calls"),
        ("silent", ONE_ROOT, "grpo_g2_x1", "With the anchor it is {}."),
        ("silent", ONE_FORK, "grpo_g2_x1", "compares them with GRPO's older runs: {}."),
        ("silent", "at2po_anchored_g2_r1_x1", "grpo_g2_x1", "`at2po` takes {} of those of GRPO's older runs (1 of 8"),
        ("silent", ONE_FORK, ONE_ROOT, "One root and one fork take {} of the calls of one root and three forks (again"),
        ("silent", LEAST_SURE, "grpo_g2_x1", "{} of those of the older runs, and"),
        ("silent", LEAST_SURE, ONE_ROOT, "and {} of those of `top_h`. Two roots"),
        ("silent", ONE_FORK, "random_anchored_g2_r1_x1", "`top_h` takes {} of the calls of random forks, 0.80"),
        ("silent", ONE_FORK, "arpo_anchored_g2_r1_x1", "{} of those of `arpo`, 0.81"),
        ("silent", ONE_FORK, "aepo_anchored_g2_x1", "{} of AEPO's, and"),
        ("silent", ONE_FORK, "threshold_anchored_g2_r1_x1", "{} of the threshold's."),
        ("silent", "random_g4_r1_x1", "grpo_g2_x1", "without the anchor, takes {} of GRPO 2's calls"),
        ("unready", LEAST_SURE, "grpo_g2_x1", "(`configs/forks.yaml`) take {} of the calls of GRPO with two (0 of 8"),
        ("unready", "threshold_anchored_g2_r1_x1", "grpo_g2_x1", "anchored: threshold {} (0 of 8 fail), AEPO"),
        ("unready", "aepo_anchored_g2_x1", "grpo_g2_x1", "AEPO {} (0 of 8 fail), `arpo`"),
        ("unready", "arpo_anchored_g2_r1_x1", "grpo_g2_x1", "`arpo` {} (0 of 8 fail). The threshold"),
        ("unready", ONE_FORK, "threshold_anchored_g2_r1_x1", "`top_h` takes {} of its calls where both learn"),
        ("unready", ONE_ROOT, LEAST_SURE, "`top_h` takes {} of theirs: no difference"),
        ("unready", ONE_ROOT, LEAST_SURE, "calls of `at2po`, and {} where success is rare."),
        ("anchored", ONE_ROOT, LEAST_SURE, "where a step is mostly noise `top_h` takes {} of the calls of `at2po`"),
        ("anchored", GROWING, "grpo_anchored_g2_x1", "save where a step is mostly noise: {} of the calls of the best"),
        ("steps", GROWING, "grpo_g3_x1", "They take {} where a step is mostly signal, and more"),
        ("unready", GROWING, "grpo_g2_x1", "in the other two worlds: {} and"),
        ("silent", GROWING, "grpo_g2_x1", "and {}. - **Both halves"),
        ("silent", "top_h_g4_r1_x1", "random_g4_r1_x1", "`top_h` takes {} of theirs"),
        (
            "steps",
            "top_h_anchored_g2_r1_x2",
            ONE_FORK,
            "takes {} of the calls with the usual rate (1 of 8 fails), `at2po`",
        ),
        (
            "anchored",
            "top_h_anchored_g4_r1_x2",
            ONE_ROOT,
            "takes {} times the calls with the usual rate (1 of 8 fails).",
        ),
        ("silent", "top_h_anchored_g4_r1_x2", ONE_ROOT, "3 of 8 ({} of the calls with the usual rate on the others)"),
        ("silent", "at2po_anchored_g4_r1_x2", LEAST_SURE, "`at2po` on 3 of 8 ({}). With the usual rate neither"),
        (
            "first",
            "aepo_anchored_g2_x1",
            "grpo_anchored_g2_x1",
            "AEPO with two takes {} of the calls of GRPO with two (1 of 8",
        ),
        (
            "first",
            "at2po_anchored_g3_r1_x1",
            "grpo_anchored_g2_x1",
            "`at2po` take {}, and hold on all eight (0 of 8 fail)",
        ),
        ("first", "at2po_anchored_g3_r1_x2", "grpo_anchored_g2_x1", "they take {} where they hold, and 3 of 8 fail"),
        ("steps", "at2po_anchored_g2_r1_x2", "at2po_anchored_g2_r1_x1", "`at2po` {} (3 of 8 fail), GRPO with two"),
        ("steps", "grpo_anchored_g2_x2", "grpo_anchored_g2_x1", "GRPO with two {} (2 of 8 fail), with three"),
        ("steps", "grpo_anchored_g3_x2", "grpo_anchored_g3_x1", "with three {} (2 of 8 fail). With the usual"),
    ],
)
def test_what_the_page_says_of_a_world_is_in_the_results(section, ours, theirs, text):
    runs = named_runs(section)
    page = on_page("docs/branching.md", RECORD)
    assert text.format(interval(ratios(runs[ours], runs[theirs], "calls"))) in page


def test_what_the_page_says_of_a_seed_whose_sft_is_not_through_is_in_the_results():
    runs = {name: of_setting[69] for name, of_setting in named_runs("unready").items() if 69 in of_setting}
    calls = {name: f"{cost(line):,.0f}" if cost(line) else None for name, line in runs.items()}
    decisive = {name: f"{line['curve']['decisive'][-1]:.2f}" for name, line in runs.items()}
    assert max(line["curve"]["solved"][0] for line in runs.values()) == 1 / 32
    assert {name for name in calls if not calls[name]} == {
        "grpo_g3_x1",
        "top_h_g2_r1_x1",
        ONE_FORK,
        "at2po_anchored_g2_r1_x1",
    }
    page = on_page(RECORD)
    for text in (
        f"certain moves at {runs[ONE_ROOT]['curve']['certain'][0]:.2f}, and at most 3 % of the",
        f"One root of four learns it with {calls[ONE_ROOT]} calls. GRPO with two needs {calls['grpo_g2_x1']}, growing",
        f"groups {calls[GROWING]}, one root and one random fork {calls['random_anchored_g2_r1_x1']}, GRPO with four",
        f"GRPO with four {calls['grpo_g4_x1']}. One",
        f"(`top_h` ends at {decisive[ONE_FORK]} of the decisive moves, `at2po` at",
        f"`at2po` at {decisive['at2po_anchored_g2_r1_x1']}): few",
        f"the certain moves end at {runs['top_h_g2_r1_x1']['curve']['certain'][-1]:.2f}. GRPO with three",
    ):
        assert text in page, text


def test_what_the_page_says_of_the_anchor_is_in_the_results():
    runs = named_runs("anchored")
    ours = runs["top_h_mixed_anchored_g8_r2_x1"]
    one_root = runs["top_h_anchored_g4_r1_x1"]
    two_roots = runs["top_h_anchored_g4_r2_x1"]
    unseen = {seed: line for seed, line in ours.items() if seed not in (61, 66, 71, 74, 76, 80)}
    with_kl = runs["top_h_mixed_decay_kl_g8_r2_x1"].values()
    halves = [np.array_split(np.array(line["curve"]["grad_norm"], dtype=float), 2) for line in with_kl]
    failed = [line for line in compared("signal") if line["rate"] == 1 and cost(line) is None]
    lost = [line for line in failed if line["curve"]["certain"][-1] < KEPT * line["curve"]["certain"][0]]
    largest = [np.nanmax(late) for _, late in halves]
    clip_alone = [line for line in results("tried") if line["flags"].endswith("linear --optim.max_grad_norm 0.1")]
    assert sum(cost(line) is None for line in clip_alone) == 1 and len(clip_alone) == 6
    page = on_page("docs/branching.md", RECORD)
    for text in (
        f"{interval(ratios(ours, runs['top_h_mixed_decay_g8_r2_x1'], 'calls'))} of those without it",
        f"{interval(ratios(ours, runs['grpo_anchored_g4_x1'], 'calls'))} of the calls of anchored groups of four",
        f"it reaches {min(largest):.1f} to {max(largest):.1f} ({len(largest)} runs)",
        f"{interval(ratios(ours, runs['grpo_g4_x1'], 'calls'))} of plain GRPO's",
        f"on the other {len(unseen)} it takes {interval(ratios(unseen, runs['grpo_anchored_g2_x1'], 'calls'))}",
        f"Of the {len(failed)} runs above that failed at the usual rate, {len(lost)} had lost moves",
        f"its norm is {np.median([np.nanmedian(early) for early, _ in halves]):.2f}",
        f"One root of four takes {interval(ratios(one_root, ours, 'calls'))} of the calls of growing groups",
        f"of four** cost more: {interval(ratios(two_roots, runs['grpo_anchored_g2_x1'], 'calls'))} ({len(two_roots)}",
    ):
        assert text in page, text
    random_forks = interval(ratios(runs["random_anchored_g4_r1_x1"], runs["grpo_anchored_g2_x1"], "calls"))
    readme = on_page("README.md")
    assert f"with the same anchor, take {random_forks} (eight seeds)" in readme
    steps = named_runs("steps")
    by_chance, by_entropy = (
        interval(ratios(steps[name], steps["grpo_g3_x1"], "calls")) for name in ("random_anchored_g2_r1_x1", ONE_FORK)
    )
    assert f"random fork take {by_chance}, and with the fork at the most uncertain turn {by_entropy} (eight" in readme


def test_what_is_said_of_one_fork_in_the_silent_world_holds_against_repeats_on_its_own_machine():
    one_fork = named_runs("silent")[ONE_FORK]
    grpo = repeats("silent")
    assert [sum(cost(line) is None for line in of.values()) for of in (one_fork, grpo)] == [0, 1]
    calls = interval(ratios(one_fork, grpo, "calls"))
    p = f"ranks: p = {rank_test(one_fork, grpo):.3f})"
    page = on_page("docs/branching.md", RECORD)
    assert (
        f"with the anchor, take {calls} of the calls of GRPO with two** on the same machine (eight seeds, {p}" in page
    )


@pytest.mark.parametrize(
    ("section", "ours", "text"),
    [
        (
            "steps",
            LEAST_SURE,
            "take {} of the calls of GRPO with three on the same machine (eight seeds (0 of 8 fail), ",
        ),
        ("silent", LEAST_SURE, "take {} of the calls of GRPO with two on the same machine (0 of 8 fail), "),
        ("silent", "threshold_anchored_g2_r1_x1", "same machine: threshold {} (1 of 8 fails), AEPO"),
        ("silent", "aepo_anchored_g2_x1", "AEPO {} (1 of 8 fails), random"),
        ("silent", "random_anchored_g2_r1_x1", "random {} (0 of 8 fail), `arpo`"),
        ("silent", "arpo_anchored_g2_r1_x1", "`arpo` {} (1 of 8 fails). `top_h` takes"),
    ],
)
def test_what_is_said_of_runs_on_the_same_machine_is_in_the_results(section, ours, text):
    calls = interval(ratios(named_runs(section)[ours], repeats(section), "calls"))
    assert text.format(calls) in on_page(RECORD)


def test_what_is_said_of_a_first_turn_that_decides_is_in_the_results():
    runs = named_runs("first")
    best = strongest_rival(by_setting(compared("first")))
    assert best.name == "grpo_anchored_g2_x1" and failures(runs[best.name]) == failures(runs[LEAST_SURE]) == "(1 of 8)"
    calls = interval(ratios(runs[LEAST_SURE], runs[best.name], "calls"))
    for page in ("README.md", "docs/branching.md", RECORD):
        assert f"{calls} of the calls of GRPO with two, anchored" in on_page(page)
    two_roots = interval(ratios(runs["at2po_anchored_g4_r2_x1"], runs[best.name], "calls"))
    assert f"Two roots of four take {two_roots} (1 of 8 fails)" in on_page(RECORD)
    steps = [interval(ratios(runs[name], runs[best.name], "steps")) for name in (ONE_ROOT, LEAST_SURE)]
    assert f"(`top_h`) take {steps[0]} times the steps of GRPO with two, and 3 of 8" in on_page(RECORD)
    assert f"Forks after results take {steps[0]} times the steps of GRPO with two, anchored" in on_page("README.md")
    assert f"`at2po` takes {steps[1]} of GRPO's steps" in on_page(RECORD)
    lost = [{seed for seed, line in runs[name].items() if cost(line) is None} for name in (LEAST_SURE, best.name)]
    assert lost == [{83}, {83}]
    both = {seed: cost(line) / cost(runs[best.name][seed]) for seed, line in runs[LEAST_SURE].items() if seed != 83}
    assert [seed for seed in both if both[seed] < 1] == [86] and both[86] == pytest.approx(0.5, abs=0.005)
    first_six = {seed: line for seed, line in runs[LEAST_SURE].items() if seed < 86}
    assert f"alone said {interval(ratios(first_six, runs[best.name], 'calls'))}" in on_page(RECORD)


def test_what_is_said_of_the_searches_is_in_the_results():
    def of_search(section: str, name: str) -> str:
        tried = by_setting(searched(section))
        costs = {setting.name: tuning_cost(list(of_setting.values())) for setting, of_setting in tried.items()}
        return f"{costs[name] / min(cost for name, cost in costs.items() if name.startswith('grpo')):.2f}"

    two_forks = "at2po_anchored_g3_r1_x1"
    page, record = on_page("docs/branching.md"), on_page(RECORD)
    rare = of_search("unready", LEAST_SURE)
    assert f"where success is rare ({rare} of the calls)" in page and f"forks takes {rare} of the calls" in record
    silent = of_search("silent", two_forks), of_search("silent", LEAST_SURE)
    assert f"end the trail ({silent[0]}, with three forks {silent[1]})" in page
    one_fork = of_search("silent", ONE_FORK), of_search("silent", "at2po_anchored_g2_r1_x1")
    assert f"dearer, {one_fork[0]} of GRPO's calls" in page
    assert f"{one_fork[0]} (`top_h`) and {one_fork[1]} (`at2po`)" in record
    others = [
        of_search("unready", name)
        for name in ("arpo_anchored_g3_r1_x1", "threshold_anchored_g2_r1_x1", "top_h_anchored_g3_r1_x1")
    ]
    assert of_search("unready", "random_anchored_g3_r1_x1") == others[0]
    assert f"random forks take {others[0]} with two forks, the threshold {others[1]} with one" in record
    aepo = of_search("unready", "aepo_anchored_g2_x1")
    assert f"`top_h` {others[2]} with two, AEPO {aepo}. Seed 31" in record
    aepo, two_forks, *first = [
        of_search("first", name)
        for name in (
            "aepo_anchored_g2_x1", "threshold_anchored_g3_r1_x1", "at2po_anchored_g3_r1_x1", LEAST_SURE,
            "top_h_anchored_g4_r2_x1", "random_anchored_g4_r2_x1", "arpo_anchored_g4_r2_x1", "at2po_anchored_g3_r1_x2",
        )
    ]  # fmt: skip
    assert f"AEPO with two takes {aepo} of the calls of GRPO with two, a threshold with two forks {two_forks}" in record
    said = "`at2po` with two forks {} and with three {}, `top_h` with two roots of four {}, random forks with two {}, "
    assert (said + "`arpo` with two {}.").format(*first[:5]) in record
    assert f"the best for `at2po` alone (two forks: {first[5]})." in record


def test_where_success_is_rare_no_rule_learns_both_seeds_of_the_search_with_a_higher_rate():
    faster = {setting: runs for setting, runs in by_setting(searched("unready")).items() if setting.rate > 1}
    assert Counter(setting.rate for setting in faster) == {2: 8, 4: 8}
    assert len({setting.rule for setting in faster}) == 8 and all(len(runs) == 2 for runs in faster.values())
    learnt = Counter((setting.rate, seed) for setting, runs in faster.items() for seed in runs if cost(runs[seed]))
    assert learnt == {(2, 30): 6}


@pytest.mark.parametrize("world", ["signal", "steps", "unready", "silent"])
def test_all_sizes_and_rates_of_every_rule_were_searched(world):
    tried = [setting for setting, runs in by_setting(searched(world)).items() if runs.keys() >= {30, 31}]
    rules = {setting.rule for setting in tried}
    assert len([rule for rule in rules if rule.endswith("_anchored")]) == 7
    for rule in rules - {"top_h"}:
        assert {s.group_size for s in tried if s.rule == rule and s.rate == 1} == {2, 3, 4, 6, 8, 16}, rule
        assert {s.rate for s in tried if s.rule == rule} >= {1, 2, 4}, rule


@pytest.mark.parametrize(
    ("world", "twice", "four_times"),
    [
        ("signal", {"top_h", "arpo"}, set()),
        ("steps", {"top_h", "at2po", "random", "arpo", "threshold", "aepo"}, {"grpo"}),
        ("unready", set(), set()),
        ("silent", {"top_h", "at2po", "aepo"}, set()),
    ],
)
def test_a_higher_rate_is_the_best_of_the_search_for_some_rules(world, twice, four_times):
    """With the anchor."""
    tried = {setting: runs for setting, runs in by_setting(searched(world)).items() if "anchored" in setting.rule}
    costs = {setting: tuning_cost(list(runs.values())) for setting, runs in tried.items()}
    best = [min((s for s in costs if s.rule == rule), key=costs.get) for rule in {s.rule for s in costs}]
    rules = {rate: {s.rule.removesuffix("_anchored") for s in best if s.rate == rate} for rate in (2, 4)}
    assert rules == {2: twice, 4: four_times} and len(best) == 7


def test_twice_the_rate_fails_more_often_on_fresh_seeds():
    """With the anchor. The runs with the usual rate are of the same settings and seeds."""
    twice, usual = [], []
    for section in ("anchored", "steps", "silent", "first"):
        runs = named_runs(section)
        for name in [name for name in runs if "_anchored_" in name and name.endswith("_x2")]:
            twice += runs[name].values()
            usual += [line for seed, line in runs[name.replace("_x2", "_x1")].items() if seed in runs[name]]
    failed, failed_of_usual = ([cost(line) is None for line in lines] for lines in (twice, usual))
    said = f"with the anchor {sum(failed)} of {len(failed)} runs do not hold, and {sum(failed_of_usual)} of "
    assert f"{said}{len(usual)} of the same settings and seeds with the usual rate" in on_page("docs/branching.md")


@pytest.mark.parametrize(
    ("world", "learnt"), [("unready", []), ("silent", []), ("signal", []), ("steps", ["grpo_anchored_g2_x4"])]
)
def test_with_four_times_the_rate_only_one_setting_learns_both_seeds_of_the_search(world, learnt):
    fastest = {setting: runs for setting, runs in by_setting(searched(world)).items() if setting.rate == 4}
    assert len({setting.rule for setting in fastest}) >= 8 and all(runs.keys() == {30, 31} for runs in fastest.values())
    assert [setting.name for setting, runs in fastest.items() if all(map(cost, runs.values()))] == learnt
    if world in ("unready", "silent"):
        assert not any(cost(line) for runs in fastest.values() for line in runs.values())


def test_four_times_the_rate_fails_on_fresh_seeds():
    runs = {name: of_setting for name, of_setting in named_runs("steps").items() if name.endswith("_x4")}
    failed = [cost(line) is None for of_setting in runs.values() for line in of_setting.values()]
    said = f"once the best of a search, fails on {sum(failed)} of {len(failed)}"
    assert len(failed) == 24 and said in on_page("docs/branching.md")
    grpo, at2po, top_h = (
        failures(runs[name])[1:-1]
        for name in ("grpo_anchored_g2_x4", "at2po_anchored_g2_r1_x4", "top_h_anchored_g2_r1_x4")
    )
    tried = {setting.name: tuning_cost(list(of.values())) for setting, of in by_setting(searched("steps")).items()}
    calls = f"{tried['grpo_anchored_g2_x4'] / tried['grpo_anchored_g2_x2']:.2f} of the calls of twice the rate"
    said = f"fails on {grpo}. So does one root and one fork: `at2po` on {at2po}, `top_h` on {top_h}."
    assert calls in on_page(RECORD) and said in on_page(RECORD)


def test_what_is_said_of_groups_of_three_is_in_the_results():
    runs = named_runs("anchored")
    lines = [line for line in results("tried") if line["flags"] == "anchored, groups of three"]
    three, two = {line["seed"]: line for line in lines}, runs["grpo_anchored_g2_x1"]
    assert failures(three) == "(0 of 8)" and failures({seed: two[seed] for seed in three}) == "(1 of 8)"
    forks = runs["at2po_anchored_g3_r1_x1"]
    for text in (
        f"root of three takes {interval(ratios(forks, two, 'calls'))} of the calls of GRPO with two {failures(forks)}",
        f"GRPO with three takes {interval(ratios(three, two, 'calls'))} of the calls of GRPO with two (0 of 8 fail",
        f"root of four would take {interval(ratios(runs[LEAST_SURE], three, 'calls'))} of its calls",
    ):
        assert text in on_page(RECORD), text


def test_what_is_said_of_a_threshold_with_one_fork_is_in_the_results():
    name = "threshold_anchored_g2_r1_x1"
    runs = {section: named_runs(section)[name] for section in ("anchored", "steps", "unready", "silent")}
    rivals = {section: named_runs(section)[strongest_rival(by_setting(compared(section))).name] for section in runs}
    rivals["silent"] = repeats("silent")
    calls = [ratios(runs[section], rivals[section], "calls")["mean"] for section in runs]
    failed = [cost(line) is None for of_setting in runs.values() for line in of_setting.values()]
    share = f"{sum(failed)} of {len(failed)} runs"
    said = f"{min(calls):.2f} to {max(calls):.2f} of GRPO's calls in the first four worlds, but {share} do not hold"
    assert said in on_page("docs/branching.md")


def test_the_table_of_echo_is_that_of_its_results():
    without = by_setting(compared("signal"))[Setting.named("grpo_g4_x1")]
    text = (ROOT / "docs/extending.md").read_text()
    for coefficient in (0.001, 0.005):
        flags = f"--loss.observation_coefficient {coefficient}"
        runs = {line["seed"]: line for line in results("tried") if line["flags"] == flags}
        num_failed = sum(cost(line) is None for line in runs.values())
        num_pairs = sum(bool(cost(line) and cost(without[seed])) for seed, line in runs.items())
        calls = interval(ratios(runs, without, "calls"))
        assert f"| {coefficient} | {num_failed} of 8 | {calls} ({num_pairs} pairs) |" in text
    assert f"| 0 | {sum(cost(without[seed]) is None for seed in runs)} of 8 | 1 |" in text


def test_the_second_table_of_echo_is_that_of_its_results():
    table = json.loads((ROOT / "benchmarks/ablation/echo_hard.json").read_text())
    text = (ROOT / "docs/extending.md").read_text()

    def shown(estimated: dict) -> str:
        return f"{estimated['mean']:.3f} [{estimated['low']:.3f}, {estimated['high']:.3f}]"

    for arm, coefficient in (("grpo", "0"), ("echo_5m", "0.005"), ("echo_50m", "0.05, that of the paper")):
        values = table[arm]
        difference = shown(values["minus_grpo"]) if arm != "grpo" else ""
        cells = [coefficient, shown(values["accuracy"]), difference, shown(values["at_calls"])]
        assert "| " + " | ".join(cells).replace("|  |", "| |") + " |" in text, cells
    assert {len(table[arm]["seeds"]) for arm in table} == {8}


def test_what_the_page_says_of_echo_on_a_pretrained_model_is_in_the_results():
    arms = {arm: [line for line in results("echo_llm") if line["arm"] == arm] for arm in ("grpo", "echo_50m")}
    reward = {arm: np.mean([line["reward/mean"] for line in lines]) for arm, lines in arms.items()}
    seconds = {arm: np.mean([line["time/update"] for line in lines]) for arm, lines in arms.items()}
    losses = [line["loss/observation"] for line in arms["echo_50m"]]
    page = " ".join((ROOT / "docs/extending.md").read_text().split())
    for text in (
        f"falls from {losses[0]:.1f} to {losses[-1]:.1f} nats, the update takes",
        f"takes {seconds['echo_50m'] / seconds['grpo']:.2f} times as long",
        f"these steps is {reward['echo_50m']:.2f}; without the term it is {reward['grpo']:.2f}",
    ):
        assert text in page, text


@pytest.mark.slow
def test_a_run_is_made_once_and_its_line_has_what_the_report_needs(tmp_path, monkeypatch):
    monkeypatch.setitem(WORLDS, "steps", World(num_sft_steps=2, num_prompts=2, max_steps=2))
    for name, small in (("RECALL_STEPS", 1), ("NUM_TRACES", {"sft_train": 200, "sft_valid": 10})):
        monkeypatch.setattr(demo, name, small)
    demo.build(tmp_path / "long/seed0/data", 0, "long")  # in full it takes a minute
    setting = Setting("top_h", 3, 1, 2)
    line = Runs(tmp_path, parallel=1).run("steps", setting, 0, 2)
    assert {"calls", "tokens", "decisive", "certain", "trail", "solved", "mixed"} <= set(line["curve"])
    assert len(line["curve"]["calls"]) == 2 and line["curve"]["calls"][0] > 0 and cost(line) is None
    assert (tmp_path / "steps/positions_seed0.json").exists() and not list((tmp_path / "steps").glob("top_h*"))
    again = Runs(tmp_path, parallel=1)
    assert again.run("steps", setting, 0, 1) == line and len((tmp_path / "results.jsonl").read_text().splitlines()) == 1

    # a rule of a user's file is an arm like the others
    (tmp_path / "rules.py").write_text(DEEP)
    monkeypatch.chdir(tmp_path)
    line = again.run("steps", Setting.named("rules.py:last_turn_g4_r2_x1"), 0, 2)
    assert len(line["curve"]["calls"]) == 2 and line["rule"] == f"{tmp_path / 'rules.py'}:last_turn"
    grpo = line | {"rule": "grpo", "num_roots": 4, "setting": "grpo_g4_x1"}
    write_report([*again.lines, grpo], tmp_path)
    assert "| last_turn_g4_r2_x1 | 1 |" in (tmp_path / "TABLE.md").read_text()


def chain(name: str, num_turns: int) -> Trajectory:
    turns = [Turn(k, k + 1, k + 1, entropy=1.0) for k in range(num_turns)]
    return Trajectory("p", name, token_ids=[0] * num_turns, turns=turns, stop_reason=StopReason.EOS)


def test_the_control_forks_at_the_given_positions_and_never_twice_at_the_same_turn(tmp_path, monkeypatch):
    path = tmp_path / "positions.json"
    path.write_text(json.dumps({"1": 10, "3": 30}))
    monkeypatch.setenv("FORK_POSITIONS", str(path))
    group = Group(Prompt("p", [], []), [chain("0", 5), chain("1", 4), chain("2", 2)])
    rng, cfg, drawn = random.Random(0), BranchingConfig(), Counter()
    for _ in range(4000):
        [fork] = control.positions(group, 1, cfg, rng)
        drawn[fork.turn] += 1
    assert set(drawn) == {1, 3} and abs(drawn[3] / drawn[1] - 3) < 0.4
    forks = control.positions(group, 9, cfg, rng)
    assert len(set(forks)) == len(forks) == 5 and all(fork.score is None for fork in forks)
    assert control.roots(group, 3, cfg, rng) == [Fork("0", 0)] * 3  # turn 0: a new root


def test_positions_are_counted_from_a_runs_dumps(tmp_path):
    groups = play(call_then_answer, branching=BranchingConfig(selector="top_h", num_initial_rollouts=1))
    writer = DumpWriter(tmp_path)
    writer.write(1, groups, "step")
    writer.write(2, groups, "step")
    writer.close()
    num_branches = sum(t.parent_id is not None for t in groups[0].trajectories)
    assert control.counted(tmp_path) == {1: 2 * num_branches} and num_branches == 3


@pytest.mark.parametrize("task", ["long", "long_first"])
def test_the_probabilities_are_those_of_a_plain_forward_pass(task, tmp_path, monkeypatch):
    """Of a model that is untrained."""
    tokenizer, _ = demo.write_data(tmp_path, 0, task)
    for part in (demo.build_model(tokenizer, 0), tokenizer):
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "stamp.json").write_text(json.dumps({"task": task, "seed": 0}))
    measure = RightMoves(str(tmp_path / "model"), tmp_path)
    world, tokenizer = demo.TASKS[task][0](0), AutoTokenizer.from_pretrained(tmp_path / "model")
    question = world.question_of(*world.trails["test"][0])
    text = right_trajectory(world, question)
    asked = [{"role": "user", "content": question.text}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(ids + text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    assert measure.ids[0, : len(ids)].tolist() == ids  # cut into turns, the text has the same tokens
    logprobs = torch.log_softmax(measure.model(input_ids=torch.tensor([ids])).logits[0], -1)
    turns, total = measure.turn[0].tolist(), {True: [], False: []}
    for number, is_decisive in enumerate(measure.decisive[0]):
        places = [k for k, turn in enumerate(turns) if turn == number]
        total[is_decisive].append(sum(logprobs[k - 1, ids[k]].item() for k in places))
    for rows in ("ids", "turn", "decisive"):
        monkeypatch.setattr(measure, rows, getattr(measure, rows)[:1])
    alone = measure()
    assert alone["right/decisive"] == pytest.approx(np.mean(np.exp(total[True])), rel=1e-3)
    assert alone["right/certain"] == pytest.approx(np.mean(np.exp(total[False])), rel=1e-3)
    assert alone["right/trail"] == pytest.approx(np.exp(sum(total[True]) + sum(total[False])), rel=1e-3)
    assert sum(measure.decisive[0]) == text.count("<think>try") and measure.decisive[0][0] == (task == "long_first")
