"""Tools from environments with `reset` and `step`: their states in branches, and their rewards in the record."""

import asyncio
import json
import random

import pytest
from helpers.scripted_rollout import ANSWER, play, prompt

from arpo.options import BranchingConfig, RolloutConfig
from arpo.tools.base import ToolContext, ToolResult
from extras.tools.environment import EnvironmentTool

CFG = RolloutConfig(
    group_size=8, max_response_tokens=6000, max_result_tokens=600, answer_reserve_tokens=60, max_tool_calls=6
)


class Walk:
    """A walk on the integers with gusts of wind, to the row's goal."""

    num_open = 0

    def __init__(self, goal: int):
        self.goal = goal
        Walk.num_open += 1

    def reset(self, *, seed: int):
        self.rng, self.place = random.Random(seed), 0
        return self.place, {}

    def step(self, action: int):
        self.place += action + self.rng.choice([-1, 0, 0, 1])
        return self.place, float(self.place >= self.goal), self.place >= self.goal, self.place < -20, {}

    def close(self) -> None:
        Walk.num_open -= 1


class WalkTool(EnvironmentTool):
    tag = "search"

    def make(self, context):
        return Walk(context.row["goal"])

    def parse(self, argument, env):
        if (action := super().parse(argument, env)) not in (-1, 1, 2):
            raise ValueError(f"{argument!r} is no step")
        return action

    def show(self, observation):
        return f"you are at {observation}"


class CopiedWalk(WalkTool):
    copies_exactly = True

    async def fork(self, session, context):
        Walk.num_open += 1
        return await super().fork(session, context)


def wandering(tag: str, actions: tuple):
    def script(prompt_id, path, turn):
        rng = random.Random(f"{prompt_id}|{path}|{turn}")
        text = f"<{tag}>{rng.choice(actions)}</{tag}>" if turn < 6 else ANSWER
        return text, rng.uniform(0.2, 2.0)

    return script


def alone(tool: EnvironmentTool, context: ToolContext, actions: list[str]) -> list[ToolResult]:
    async def go() -> list[ToolResult]:
        session = await tool.open(context)
        results = [await tool.run(action, context, session) for action in actions]
        await tool.close(session)
        return results

    return asyncio.run(go())


def check(group, tool: EnvironmentTool, context: ToolContext, tag: str) -> None:
    for t in group.trajectories:
        calls = [call for call in t.tool_calls if call.tag == tag and call.executed]
        found = alone(tool, context, [call.argument for call in calls])
        assert [(c.result, c.info) for c in calls] == [(r.text, r.info) for r in found], t.trajectory_id
        assert not t.has_replay_mismatch
    assert any(t.parent_id for t in group.trajectories)


@pytest.mark.parametrize("kind", [WalkTool, CopiedWalk])
def test_branches_of_an_environment_go_on_where_it_was(kind):
    row = prompt()
    row.meta.update(goal=5, seed=11)
    always = BranchingConfig(selector="random", base=1.0, num_initial_rollouts=2)
    [group] = play(
        wandering("search", (2, 1, -1, "look", "jump")), tools=[kind()], cfg=CFG, prompts=[row], branching=always
    )
    assert Walk.num_open == 0
    check(group, kind(), ToolContext("p0", "0", 0, row=row.meta), "search")
    assert Walk.num_open == 0
    assert any(c.replayed for t in group.trajectories for c in t.tool_calls) == (kind is WalkTool)


def test_rewards_ends_and_bad_actions_are_in_the_record():
    context = ToolContext("p", "0", 0, seed=3, row={"goal": 1})
    look, bad, deep, *steps = alone(WalkTool(), context, ["look", "fly", "[" * 100_000, *["2"] * 4])
    assert look.text == "you are at 0" and look.info == {
        "reward": 0.0, "return": 0.0, "terminated": False, "truncated": False
    }  # fmt: skip
    assert bad.error_kind == deep.error_kind == "bad_action" and "'fly' is no step" in bad.text
    won = next(step for step in steps if step.info["reward"])
    assert won.info["terminated"] and won.info["return"] == 1.0 and won.text.endswith("The episode has ended.")
    assert steps[-1].error_kind == "ended" and steps[-1].info["return"] == 1.0
    json.dumps(won.info)


def test_the_first_state_is_the_groups():
    def first(seed: int) -> set[str]:
        row = prompt()
        row.meta["goal"] = 100
        [group] = play(
            lambda _p, _t, turn: "<search>1</search>" if turn < 3 else ANSWER, tools=[WalkTool()], cfg=CFG,
            prompts=[row], seed=seed,
        )  # fmt: skip
        return {str([c.result for c in t.tool_calls]) for t in group.trajectories}

    assert all(len(first(seed)) == 1 for seed in range(3)) and len(set.union(*map(first, range(6)))) > 1


def test_a_gymnasium_environment_is_a_tool():
    gymnasium = pytest.importorskip("gymnasium", exc_type=ImportError)

    class Lake(EnvironmentTool):
        tag = "lake"

        def make(self, context):
            return gymnasium.make("FrozenLake-v1", map_name="8x8", is_slippery=True)

    row = prompt(tools=("lake",))
    row.meta["seed"] = 5
    always = BranchingConfig(selector="random", base=1.0, num_initial_rollouts=2)
    script = wandering("lake", (0, 1, 2, 3, 9, "up"))
    [group] = play(script, tools=[Lake()], cfg=CFG, prompts=[row], branching=always)
    check(group, Lake(), ToolContext("p0", "0", 0, row=row.meta), "lake")
    bad = [c for t in group.trajectories for c in t.tool_calls if c.error_kind == "bad_action"]
    assert bad and "is no action of Discrete(4)" in bad[0].result
    for t in group.trajectories:
        json.dumps(t.to_dict())
