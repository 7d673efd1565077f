"""Tools from environments with `reset` and `step`: their states in branches, and their rewards in the record."""

import asyncio
import json
import random
import subprocess
import sys
from dataclasses import make_dataclass, replace

import pytest
from helpers.edits import ROOT
from helpers.files import write_jsonl
from helpers.scripted_rollout import ANSWER, CODEC, LONG, play, prompt

from arpo.config.named import find
from arpo.data import load_prompts
from arpo.options import BranchingConfig
from arpo.tools.base import ToolContext, ToolResult
from extras.tools.environment import EnvironmentTool, FromOpenEnv

ALWAYS = BranchingConfig(selector="random", base=1.0, num_initial_rollouts=2)


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
        assert not any(call.replay_mismatches for call in t.tool_calls)
    assert any(t.parent_id for t in group.trajectories)


@pytest.mark.parametrize("kind", [WalkTool, CopiedWalk])
def test_branches_of_an_environment_go_on_where_it_was(kind):
    row = prompt()
    row.meta.update(goal=5, seed=11)
    script = wandering("search", (2, 1, -1, "look", "jump"))
    [group] = play(script, tools=[kind()], cfg=LONG, prompts=[row], branching=ALWAYS)
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
        script = lambda _p, _t, turn: "<search>1</search>" if turn < 3 else ANSWER  # noqa: E731
        [group] = play(script, tools=[WalkTool()], cfg=LONG, prompts=[row], seed=seed)
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
    script = wandering("lake", (0, 1, 2, 3, 9, "up"))
    [group] = play(script, tools=[Lake()], cfg=LONG, prompts=[row], branching=ALWAYS)
    check(group, Lake(), ToolContext("p0", "0", 0, row=row.meta), "lake")
    bad = [c for t in group.trajectories for c in t.tool_calls if c.error_kind == "bad_action"]
    assert bad and "is no action of Discrete(4)" in bad[0].result
    for t in group.trajectories:
        json.dumps(t.to_dict())


HOUSE = '''
import random
from extras.tools.environment import EnvironmentTool


class House:
    """A key lies behind one of two doors."""

    def reset(self, *, seed):
        self.side = random.Random(seed).choice(["left", "right"])
        return f"It smells of iron from the {self.side}.", {}

    def step(self, action):
        return "The door opens.", float(action == f"go {self.side}"), True, False, {}


class HouseTool(EnvironmentTool):
    tag = "search"

    def make(self, context):
        return House()
'''


def test_a_text_game_is_won_from_the_first_observation_in_the_prompt(tmp_path):
    file, rows, out = (tmp_path / name for name in ("house.py", "rows.jsonl", "train.jsonl"))
    file.write_text(HOUSE)
    # in rows of Search-R1's form the question counts, and not the prompt
    search_r1 = {"question": "{observation} Well?", "golden_answers": ["1"], "data_source": "nq"}
    write_jsonl(rows, [{"prompt": "Find it.", "answer": "1"}, search_r1])
    command = [sys.executable, "-m", "extras.tools.environment", f"{file}:HouseTool", str(rows), "--out", str(out)]
    subprocess.run([*command, "--seeds", "8"], check=True, cwd=ROOT)
    prompts = load_prompts(out)
    texts = [prompt.messages[-1]["content"] for prompt in prompts]
    assert texts[0].startswith("Find it.\n\nIt smells of iron from") and texts[8].endswith(" Well?")
    assert {text.count("iron from the left") for text in texts} == {0, 1} and len(prompts) == 16
    tool = find("tools.names", f"{file}:HouseTool", {})()
    prompts = [replace(p, tools=("search",), token_ids=tuple(CODEC.render_prompt(p.messages))) for p in prompts]
    asked = {prompt.prompt_id: text for prompt, text in zip(prompts, texts, strict=True)}

    def player(prompt_id, _path, turn):
        """It wins only if the prompt is of the environment that it plays."""
        side = "left" if "from the left" in asked[prompt_id] else "right"
        return f"<search>go {side}</search>" if turn == 0 else ANSWER

    groups = play(player, tools=[tool], cfg=LONG, prompts=prompts, branching=ALWAYS, seed=5)
    ends = [t.tool_calls[-1].info for group in groups for t in group.trajectories]
    assert len(ends) == 16 * LONG.group_size and all(info["return"] == 1.0 and info["terminated"] for info in ends)


def test_a_step_result_of_openenv_is_a_step():
    StepResult = make_dataclass("StepResult", ["observation", ("reward", float, None), ("done", bool, False)])

    class Client:
        walk, is_open = Walk(goal=2), True

        def reset(self, **options):
            return StepResult(self.walk.reset(**options)[0])

        def step(self, action):
            place, reward, reached, _, _ = self.walk.step(action["by"])
            return StepResult(place, reward or None, reached)

        def close(self):
            self.walk.close()

    class Remote(WalkTool):
        def make(self, context):
            return FromOpenEnv(Client(), to_action=lambda by: {"by": by})

    context = ToolContext("p", "0", 0, seed=3, row={"goal": 2})
    actions = ["look", *["1"] * 6]
    before = Walk.num_open
    assert alone(Remote(), context, actions) == alone(WalkTool(), context, actions)
    assert Walk.num_open == before - 1  # the client was closed
