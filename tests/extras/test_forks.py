"""The experiment on where to fork: its costs, its ratios, its control, and the exact probability of the right moves."""

import json
import random
from collections import Counter

import numpy as np
import pytest
import torch
from helpers.scripted_rollout import call_then_answer, play
from transformers import AutoTokenizer

from arpo.config.load import load_config
from arpo.log.dumps import DumpWriter
from arpo.options import BranchingConfig
from arpo.trajectory import Group, Prompt, StopReason, Trajectory, Turn
from extras.ablation import positions as control
from extras.ablation.forks import ARMS, POSITIONS_OF, draw, ratio, reach, read_results, report
from extras.ablation.right_moves import RightMoves, right_trajectory
from extras.demo import build as demo
from extras.demo.long import LongWorld
from train_rl import RLConfig


def test_the_cost_until_a_target_lies_between_the_steps_around_it():
    costs, right = np.array([10.0, 20.0, 30.0]), np.array([0.4, 0.5, 0.9])
    assert reach(costs, right, 0.45) == pytest.approx(15.0) and reach(costs, right, 0.5) == pytest.approx(20.0)
    assert reach(costs, right, 0.3) == 10.0 and reach(costs, right, 0.95) is None


def test_ratios_are_paired_by_seed_and_leave_out_runs_that_never_got_there():
    costs = {("grpo", 0): 100.0, ("grpo", 1): 200.0, ("grpo", 2): 80.0, ("grpo", 3): 50.0,
             ("top_h_2", 0): 50.0, ("top_h_2", 1): 100.0, ("top_h_2", 2): 40.0, ("top_h_2", 3): None}  # fmt: skip
    lines = [{"arm": arm, "seed": seed, "calls_80": cost} for (arm, seed), cost in costs.items()]
    assert ratio(lines, "top_h_2", "grpo", "calls_80") == "0.50 [0.50, 0.50]"
    assert ratio(lines, "grpo", "grpo", "calls_80") == ""


def test_the_report_has_a_row_per_arm_and_says_how_many_never_got_there():
    keys = ["calls", "calls_50", "calls_80", "calls_to_accuracy", "tokens_80", "seconds_80", "cpu_s_80", "steps_80",
            "decisive", "accuracy"]  # fmt: skip
    lines = [{"arm": arm, "seed": 0, **dict.fromkeys(keys, 2.0)} for arm in ("grpo", "random_2")]
    lines[1]["calls_80"] = None
    text = report(lines)
    assert "| grpo | 1 | 2 | 2 | 2 |" in text and "(1 never)" in text and "relative to random_2" in text


def test_the_calls_until_the_accuracy_are_read_off_the_curve_and_the_picture_is_drawn(tmp_path):
    curve = [[10, 0.5, 0.0], [10, 0.9, 0.6], [20, 0.9, 1.0]]
    lines = [
        {"arm": arm, "seed": seed, "curve": curve, "calls_80": 15.0 + seed, "tokens_80": 9.0}
        for arm in ("grpo", "top_h_2")
        for seed in (0, 1)
    ]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_results(tmp_path / "results.jsonl")
    assert [line["calls_to_accuracy"] for line in found] == pytest.approx([30.0] * 4)
    draw(tmp_path, found)
    assert (tmp_path / "calls.png").stat().st_size > 9000


def test_every_arm_has_a_config_of_its_own_and_a_control_comes_behind_what_it_controls():
    configs = [load_config(RLConfig, ["--data.train", "x", *flags]) for flags in ARMS.values()]
    assert all(config not in configs[:number] for number, config in enumerate(configs))
    assert all(list(ARMS).index(arm) > list(ARMS).index(other) for arm, other in POSITIONS_OF.items())


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


def test_positions_are_counted_from_a_runs_dumps(tmp_path):
    groups = play(call_then_answer, branching=BranchingConfig(selector="top_h", num_initial_rollouts=1))
    writer = DumpWriter(tmp_path)
    writer.write(1, groups, "step")
    writer.write(2, groups, "step")
    writer.close()
    num_branches = sum(t.parent_id is not None for t in groups[0].trajectories)
    assert control.counted(tmp_path) == {1: 2 * num_branches} and num_branches == 3


@pytest.fixture(scope="module")
def moves(tmp_path_factory):
    """The right moves of a task whose model is untrained, and the folder of its model."""
    data = tmp_path_factory.mktemp("long")
    tokenizer, _ = demo.write_data(data, 0, "long")
    model = demo.build_model(tokenizer, 0)
    for part in (model, tokenizer):
        part.save_pretrained(data / "model")
    (data / "stamp.json").write_text(json.dumps({"task": "long", "seed": 0}))
    return RightMoves(str(data / "model"), data), data / "model"


@pytest.mark.slow
def test_the_probabilities_are_those_of_a_plain_forward_pass(moves):
    measure, folder = moves
    world, tokenizer = LongWorld(0), AutoTokenizer.from_pretrained(folder)
    code, _ = world.trails["test"][0]
    text = right_trajectory(world, code)
    asked = [{"role": "user", "content": f"where does trail {code} end?"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(ids + text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    assert measure.ids[0, : len(ids)].tolist() == ids  # cut into turns, the text has the same tokens
    logprobs = torch.log_softmax(measure.model(input_ids=torch.tensor([ids])).logits[0], -1)
    turns, total = measure.turn[0].tolist(), {True: [], False: []}
    for number, is_decisive in enumerate(measure.decisive[0]):
        places = [k for k, turn in enumerate(turns) if turn == number]
        total[is_decisive].append(sum(logprobs[k - 1, ids[k]].item() for k in places))
    alone = replace_rows(measure, 1)
    assert alone["right/decisive"] == pytest.approx(np.mean(np.exp(total[True])), rel=1e-3)
    assert alone["right/certain"] == pytest.approx(np.mean(np.exp(total[False])), rel=1e-3)
    assert alone["right/trail"] == pytest.approx(np.exp(sum(total[True]) + sum(total[False])), rel=1e-3)
    assert sum(measure.decisive[0]) == text.count("<think>try")


def replace_rows(measure: RightMoves, number: int) -> dict[str, float]:
    """What `measure` says of its first trails alone."""
    ids, turn, decisive = measure.ids, measure.turn, measure.decisive
    measure.ids, measure.turn, measure.decisive = ids[:number], turn[:number], decisive[:number]
    try:
        return measure()
    finally:
        measure.ids, measure.turn, measure.decisive = ids, turn, decisive
