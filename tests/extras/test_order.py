"""Prompts that are mixed on purpose, and a rest for what teaches nothing."""

import json
from collections import Counter

import pytest
from helpers.files import read_jsonl
from helpers.toy_run import build_toy_world, train

from arpo.errors import UserError
from arpo.trajectory import Group, Prompt, StopReason, Trajectory
from extras.order import MixedOrder

PROMPTS = [Prompt(f"p{i}", messages=[], answers=["1"], data_source="abc"[i % 3]) for i in range(240)]  # 80 of each

ORDER = """
from extras.order import MixedOrder

class Order(MixedOrder):
    weights = {"odd": 0}
    rest_epochs = 1
"""


def order_of(num_per_step: int = 40, **attributes) -> MixedOrder:
    return type("Order", (MixedOrder,), attributes)(PROMPTS, num_per_step, 0)


def group(prompt: Prompt, num_solved: int) -> Group:
    trajectories = [Trajectory(prompt.prompt_id, str(i), stop_reason=StopReason.EOS) for i in range(4)]
    for i, t in enumerate(trajectories):
        t.reward = float(i < num_solved)
        t.reward_parts = {"accuracy": t.reward}
    return Group(prompt, trajectories)


def steps_of(order: MixedOrder, number: int, solved=lambda prompt: 2, num_drawn: int = 0) -> tuple[list, list, int]:
    """The prompts and metrics of some steps, in which so many of four trajectories of a prompt are solved."""
    drawn, values = [], []
    for _ in range(number):
        found = order.queue(num_drawn, order.num_per_step)
        drawn.append([PROMPTS[index].prompt_id for index, _ in found])
        values.append(order.add([group(PROMPTS[index], solved(PROMPTS[index])) for index, _ in found]))
        num_drawn = found[-1][1]
    return drawn, values, num_drawn


def test_without_weights_each_epoch_has_each_prompt_once():
    drawn, values, _ = steps_of(order_of(), 12)
    epochs = [[name for step in part for name in step] for part in (drawn[:6], drawn[6:])]
    assert [sorted(epoch) for epoch in epochs] == [sorted(p.prompt_id for p in PROMPTS)] * 2 and epochs[0] != epochs[1]
    assert values[-1]["order/resting"] == 0


def test_a_weight_is_times_the_share_of_the_file_and_no_step_has_a_prompt_twice():
    drawn, values, _ = steps_of(order_of(weights={"a": 3, "b": 0}), 60)
    total = Counter(PROMPTS[int(name[1:])].data_source for step in drawn for name in step)
    assert total["b"] == 0 and total["a"] == pytest.approx(3 * total["c"], rel=0.1)
    assert all(len({*step}) == 40 for step in drawn)
    times = Counter(name for step in drawn for name in step)
    assert min(n for name, n in times.items() if int(name[1:]) % 3 == 0) >= 18  # each of "a" comes as often, nearly
    assert sum(row.get("order/drawn/a", 0) for row in values) == total["a"]


def test_what_is_always_or_never_solved_rests_for_an_epoch_and_comes_back():
    solved = {"a": 4, "b": 0, "c": 2}
    order = order_of(rest_epochs=1)
    _, values, num_drawn = steps_of(order, 6, lambda prompt: solved[prompt.data_source])
    assert values[-1]["order/resting"] == 160
    [*second], _, num_drawn = steps_of(order, 2, lambda prompt: solved[prompt.data_source], num_drawn)
    assert {int(name[1:]) % 3 for step in second for name in step} == {2}  # the second epoch is of "c" alone
    third, _, _ = steps_of(order, 6, lambda prompt: solved[prompt.data_source], num_drawn)
    assert {int(name[1:]) % 3 for step in third for name in step} == {0, 1, 2}


def test_one_group_does_not_put_a_prompt_to_rest_that_was_solved_now_and_then():
    order = order_of(rest_epochs=1)
    for num_solved, rests in ((2, False), (4, False), (4, False), (4, False), (4, True)):
        order.add([group(PROMPTS[0], num_solved)])
        assert (order.state["p0"][1] > 0) is rests


def test_a_run_goes_on_from_its_state_with_the_same_prompts():
    solved = {"a": 4, "b": 1, "c": 0}
    attributes = {"rest_epochs": 2, "weights": {"c": 2}}
    whole, _, _ = steps_of(order_of(**attributes), 20, lambda prompt: solved[prompt.data_source])
    first = order_of(**attributes)
    begun, _, num_drawn = steps_of(first, 9, lambda prompt: solved[prompt.data_source])
    second = order_of(**attributes)
    second.state = json.loads(json.dumps(first.state))
    rest, _, _ = steps_of(second, 11, lambda prompt: solved[prompt.data_source], num_drawn)
    assert begun + rest == whole


@pytest.mark.parametrize(
    ("weights", "complaint"),
    [({"d": 1}, "weights has 'd'; data.train has a, b, c"), ({"a": 0, "b": 0}, "leaves 80 prompts")],
)
def test_weights_that_make_no_sense_are_refused(weights, complaint):
    with pytest.raises(UserError, match=complaint):
        order_of(num_per_step=120, weights=weights)


@pytest.mark.slow
def test_a_run_with_an_order_of_its_own_logs_it_and_goes_on_the_same(tmp_path):
    world = build_toy_world(tmp_path)
    rows = read_jsonl(world / "train.jsonl")
    for number, row in enumerate(rows):
        row["data_source"] = "even" if number % 2 == 0 else "odd"
    (world / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = world / "my_order.py"
    file.write_text(ORDER)
    flags = "--data.order", f"{file}:Order", "--run.validate_every", "0", "--rollout.group_size", "4"
    flags = *flags, "--branching.num_initial_rollouts", "2"
    whole = train(world, "whole", *flags, "--run.num_steps", "4", ranks=2)
    assert all(row["order/drawn/even"] == 4 and "order/drawn/odd" not in row for row in whole)
    train(world, "halves", *flags, "--run.num_steps", "2", ranks=2)
    halves = train(world, "halves", *flags, "--run.num_steps", "4", ranks=2)
    assert [(row["reward/mean"], row["order/resting"]) for row in halves] == [
        (row["reward/mean"], row["order/resting"]) for row in whole
    ]
