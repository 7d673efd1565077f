"""Sessions of tools with state: whose they are, when they end, and what a branch finds in its own."""

import asyncio
import random
import time
from contextlib import closing

import pytest
from helpers.fakes import EchoTool, ScriptedEngine
from helpers.scripted_rollout import ANSWER, CODEC, LONG, NO_BRANCHES, SHORT, TOKENIZER, play, prompt
from helpers.stateful import Forgetful, ForkedNotes, Losing, Notes, shared_texts, sharing

from arpo.log.step_line import console_text
from arpo.metrics import rollout_metrics
from arpo.options import BranchingConfig, is_retrospective
from arpo.retrospective import EXPANSIONS
from arpo.sampling.sampler import rollout
from arpo.tools.base import ToolContext, ToolResult, ToolRunner
from arpo.trajectory import Group, StopReason, ToolCall
from extras.tools.sessions import ToolSessions

ALWAYS = BranchingConfig(selector="random", base=1.0, num_initial_rollouts=2, entropy_tokens=4)


def searches(*arguments: str):
    """A script: these searches, each named after the trajectory that makes it, then an answer."""
    return lambda _prompt, path, turn: (
        f"<think>t</think><search>{arguments[turn]}@{path}</search>" if turn < len(arguments) else ANSWER
    )


def wandering(seed: int):
    """A script of random trees: searches, other calls, malformed ones, ends."""

    def script(prompt_id: str, path: str, turn: int) -> tuple[str, float]:
        rng = random.Random(f"{seed}|{prompt_id}|{path}|{turn}")
        what = rng.choices(["search", "python", "empty", "end"], [6, 2, 1, 1])[0] if turn < 6 else "end"
        name, entropy = f"{turn}@{path}", rng.uniform(0.2, 2.0)
        text = {
            "search": f"<think>t</think><search>{name}</search>", "python": f"<think>t</think><python>{name}</python>",
            "empty": "<search> </search>", "end": ANSWER,
        }[what]  # fmt: skip
        return text, entropy

    return script


def searched(calls: list[ToolCall]) -> list[ToolCall]:
    """The searches that ran."""
    return [call for call in calls if call.tag == "search" and call.executed]


def check_states(groups: list[Group]) -> int:
    """Compare what every trajectory read with what it had read alone. Return the number of branches that called."""
    trajectories = [t for group in groups for t in group.trajectories]
    for t in trajectories:
        calls = searched(t.tool_calls)
        assert [call.result for call in calls] == shared_texts(calls), (t.trajectory_id, calls)
    return sum(bool(t.parent_id and searched(t.own_tool_calls)) for t in trajectories)


# ---- what a call knows


def test_the_context_reaches_tools_that_ask_for_it_and_others_are_called_as_ever():
    class Asking(EchoTool):
        async def run(self, argument, context=None):
            self.arguments.append(context)
            return ToolResult("found", ok=True, info={"reward": 0.5})

    asking, plain = Asking("search"), EchoTool("python")
    script = lambda _p, _t, turn: ["<search>a</search>", "<python>b</python>", ANSWER][turn]  # noqa: E731
    row = prompt()
    row.meta["level"] = 3
    [group] = play(script, tools=[asking, plain], prompts=[row], prices={"search": 0.25})
    contexts = asking.arguments
    assert {c.owner for c in contexts} == {("p0", str(i)) for i in range(4)} and {c.turn for c in contexts} == {0}
    assert contexts[0].row == {"level": 3} and len({c.seed for c in contexts}) == 1
    assert plain.arguments == ["b"] * 4
    call = group.trajectories[0].tool_calls[0]
    assert call.info == {"reward": 0.5} and call.cost == 0.25
    assert asyncio.run(asking.run("direct")).ok and asking.arguments[-1] is None


def test_a_group_shares_its_seed_and_another_prompt_or_run_has_another():
    def seeds(seed: int) -> dict[str, set[int]]:
        tool = Notes()
        play(searches("a"), tools=[tool], prompts=[prompt("p0"), prompt("p1")], seed=seed)
        return {p: {c.seed for c in tool.contexts if c.prompt_id == p} for p in ("p0", "p1")}

    first, again, other = seeds(0), seeds(0), seeds(1)
    assert first == again and all(len(found) == 1 for found in first.values())
    assert len(set.union(*first.values(), *other.values())) == 4


def test_the_history_tells_apart_calls_that_follow_other_calls():
    seen = []

    class Keyed(Notes):
        async def run(self, argument, context, session):
            seen.append((context.history, argument, context.trajectory_id))
            return await super().run(argument, context, session)

    script = lambda _p, path, turn: [f"<search>{path}</search>", "<search>x</search>", ANSWER][turn]  # noqa: E731
    play(script, tools=[Keyed()])
    assert [history for history, argument, _ in seen if argument != "x"] == [""] * 4
    assert len({history for history, argument, _ in seen if argument == "x"}) == 4


# ---- the life of a session


def test_a_session_begins_with_a_call_lasts_as_long_as_its_trajectory_and_is_its_own():
    tool = Notes()
    play(lambda *_: ANSWER, tools=[tool])
    assert tool.contexts == []
    [group] = play(searches("a", "b", "c"), tools=[tool], cfg=LONG)
    assert len(tool.contexts) == tool.most_open == 8 and tool.num_open == 0
    last = group.trajectories[3].tool_calls[-1]
    assert (last.argument, last.result) == ("c@3", "a@3 b@3 c@3")


@pytest.mark.parametrize("end", ["length", "tool_limit", "error"])
def test_sessions_are_closed_however_the_trajectory_ends(end):
    class Failing(Notes):
        async def run(self, argument, context, session):
            failed = ToolResult("", ok=False, error_kind="down", infra_error=True)
            return failed if end == "error" else await super().run(argument, context, session)

    script = {"length": lambda _p, _t, turn: "<search>a</search>" if turn == 0 else "y" * 9000}
    tool = Failing()
    [group] = play(script.get(end, lambda *_: "<search>a</search>"), tools=[tool])
    assert {t.stop_reason for t in group.trajectories} == {StopReason(end)}
    assert tool.most_open > 0 and tool.num_open == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_exception_in_the_rollout_closes_what_is_open_and_gives_up_what_runs(error):
    class Hanging(ForkedNotes):
        async def run(self, argument, context, session):
            if argument.startswith("hang") and session:
                await asyncio.sleep(3600)
            return await super().run(argument, context, session)

    class Interrupted(ScriptedEngine):
        def step(self):
            chunks = super().step()
            if sum(request.endswith("|1") for request, *_ in self.submitted) >= 4 and not self._running:
                raise error
            return chunks

    tool = Hanging()
    engine = Interrupted(TOKENIZER, searches("a", "hang"))
    with closing(ToolRunner({"search": tool})) as runner:
        with pytest.raises(error):
            rollout([prompt()], engine, runner, CODEC, SHORT, NO_BRANCHES, seed=0)
        assert tool.most_open == 4 and tool.num_open == 0  # though the runner lives on


@pytest.mark.parametrize("kind", [Notes, ForkedNotes])
@pytest.mark.parametrize("limit", [1, 3])
def test_more_trajectories_than_sessions_wait_for_one(kind, limit):
    tool = kind(max_sessions=limit, jitter_s=0.001)
    prompts = [prompt(f"p{i}") for i in range(3)]
    groups = play(searches("a", "b", "c"), tools=[tool], cfg=LONG, branching=ALWAYS, prompts=prompts)
    assert check_states(groups) == 3 * 6
    assert tool.most_open == limit and tool.num_open == 0


@pytest.mark.parametrize("seed", range(20))
def test_turns_that_call_two_full_tools_end_though_sessions_are_lost(seed):
    rng = random.Random(seed)
    first, second = (Losing(tag, max_sessions=1, jitter_s=0.002, rng=rng) for tag in ("search", "python"))
    waiting: dict[str, list[str]] = {}  # trajectory -> calls of its turn that run
    turns = dict.fromkeys(map(str, range(6)), 0)
    end_s = time.monotonic() + 20
    with closing(ToolRunner({"search": first, "python": second})) as runner:
        while turns or waiting:
            assert time.monotonic() < end_s, (waiting, "wait for ever")
            for t in [t for t in turns if t not in waiting]:
                waiting[t] = [f"{t} {turns[t]} {tag}" for tag in rng.sample(["search", "python"], 2)]
                for call in waiting[t]:
                    runner.start(call, call.split()[2], call, ToolContext("p", t, turns[t]))
            for call, _ in runner.collect(block=False):
                t = call.split()[0]
                waiting[t].remove(call)
                if not waiting[t]:
                    del waiting[t]
                    turns[t] += 1
                    if turns[t] == 3:
                        del turns[t]
                        runner.sessions.end(("p", t))
            time.sleep(0.001)
    assert first.num_lost + second.num_lost > 0


def test_a_lost_session_is_brought_back_by_its_calls():
    tool = Forgetful()
    [group] = play(searches("a", "b"), tools=[tool])
    assert check_states([group]) == 0 and tool.lost == [1]
    assert sum(c.replayed for t in group.trajectories for c in t.tool_calls) == 1
    assert tool.num_open == 0


# ---- branches


@pytest.mark.parametrize("kind", [Notes, ForkedNotes])
@pytest.mark.parametrize("branching", [
    ALWAYS,
    BranchingConfig(selector="random", base=1.0, num_initial_rollouts=2, max_branches_per_turn=3),
    BranchingConfig(selector="aepo", num_initial_rollouts=2, weight=1.0, dynamic_budget=True, entropy_tokens=4),
    BranchingConfig(selector="aepo", compat="upstream", num_initial_rollouts=2, entropy_tokens=4),
    *(BranchingConfig(selector=name, num_initial_rollouts=3) for name in EXPANSIONS),
], ids=lambda b: f"{b.selector}-{b.compat}-{b.max_branches_per_turn}")  # fmt: skip
def test_in_random_trees_every_branch_finds_the_state_that_it_would_have_made_alone(kind, branching):
    num_branches = 0
    for seed in range(3):
        tools = [kind(jitter_s=0.002, max_sessions=seed * 5), EchoTool("python", "2", jitter_s=0.002)]
        prompts = [prompt(f"p{i}") for i in range(2)]
        groups = play(wandering(seed), tools=tools, cfg=LONG, branching=branching, prompts=prompts, seed=seed)
        num_branches += check_states(groups)
        assert tools[0].num_open == 0
        own = searched([call for g in groups for t in g.trajectories for call in t.own_tool_calls])
        replayed = sum(call.replayed for call in own)
        assert len(tools[0].ran) == len(own) + replayed
        if kind is ForkedNotes and not is_retrospective(branching.selector) and not tools[0].max_sessions:
            assert replayed == 0 and "tools/replayed" not in rollout_metrics(groups).values()
    assert num_branches >= 3, branching


@pytest.mark.parametrize("kind", [Notes, ForkedNotes])
def test_tools_that_share_a_session_find_in_it_what_the_others_did_also_in_branches(kind):
    num_branches = 0
    for seed in range(3):
        tools = sharing(kind, jitter_s=0.002, max_sessions=seed * 5)
        prompts = [prompt(f"p{i}") for i in range(2)]
        groups = play(wandering(seed), tools=tools, cfg=LONG, branching=ALWAYS, prompts=prompts, seed=seed)
        for t in (t for group in groups for t in group.trajectories):
            calls = [call for call in t.tool_calls if call.executed]
            assert [call.result for call in calls] == shared_texts(calls), (t.trajectory_id, calls)
            num_branches += bool(t.parent_id and len({call.tag for call in calls}) == 2)
        own = [c for g in groups for t in g.trajectories for c in t.own_tool_calls if c.executed]
        assert len(tools[0].ran) == len(own) + sum(call.replayed for call in own)
        assert tools[0].num_open == 0 and (not seed or tools[0].most_open <= seed * 5)
    assert num_branches >= 3


def test_the_order_in_which_tools_answer_changes_neither_trees_nor_states():
    def one(jitter_s: float) -> list[tuple]:
        tool = ForkedNotes(jitter_s=jitter_s)
        groups = play(wandering(5), tools=[tool, EchoTool("python")], cfg=LONG, branching=ALWAYS)
        return [(t.trajectory_id, t.text) for g in groups for t in g.trajectories]

    assert one(0.0) == one(0.004) == one(0.004)


def test_no_copies_are_made_where_nothing_branches_or_the_fork_comes_after_the_end():
    for branching in (BranchingConfig(selector="none"), BranchingConfig(selector="tree_grpo", num_initial_rollouts=4)):
        tool = ForkedNotes()
        play(searches("a", "b"), tools=[tool], cfg=LONG, branching=branching)
        assert tool.num_forks == 0


class Random(Notes):
    async def run(self, argument, context, session):
        result = await super().run(argument, context, session)
        return ToolResult(f"{result.text} {len(self.ran)}", ok=True)


@pytest.mark.parametrize(
    "tool", [Notes(), ForkedNotes(refuses=True), Random()], ids=["no fork", "cannot fork", "other"]
)
def test_replays_are_counted_shown_and_paid_and_marked_where_they_answer_otherwise(tool):
    [group] = play(searches("a", "b"), tools=[tool], cfg=LONG, branching=ALWAYS, prices={"search": 1.0})
    children = [t for t in group.trajectories if t.parent_id and t.own_tool_calls]
    assert children and all(t.own_tool_calls[0].replayed >= 1 for t in children)
    calls = [c for t in group.trajectories for c in t.own_tool_calls]
    assert sum(c.cost for c in calls) == len(calls) + sum(c.replayed for c in calls) > len(calls)
    for t in group.trajectories:
        t.reward = 1.0
    values = rollout_metrics([group]).values()
    shown = console_text(values | {"time/step": 1.0, "time/rollout": 1.0, "time/update": 1.0})
    assert values["tools/replayed"] == sum(t.own_tool_calls[0].replayed for t in children)
    assert f"replayed {values['tools/replayed']:.0f}" in shown
    marked = [t for t in group.trajectories if any(call.replay_mismatches for call in t.tool_calls)]
    is_other = isinstance(tool, Random)
    assert bool(marked) == (values["tools/replay_mismatch"] > 0) == ("otherwise)" in shown) == is_other
    assert all(t.parent_id for t in marked)


def test_a_session_of_which_there_can_be_no_second_one_keeps_its_trajectory_from_branching():
    script = lambda _p, path, turn: (  # noqa: E731
        ["<python>1</python>", "<search>a</search>", "<python>1</python>", ANSWER][turn],
        1.0,
    )
    tool = ForkedNotes(may_branch=False)
    [group] = play(script, tools=[tool, EchoTool("python")], cfg=LONG, branching=ALWAYS)
    assert tool.num_forks == 0
    decisions = {(t.trajectory_id, k): turn.decision for t in group.trajectories for k, turn in enumerate(t.turns)}
    after_the_call = [d for (_, k), d in decisions.items() if d and k >= 2]
    assert after_the_call and all(d.outcome == "refused" and d.refused_by == "search" for d in after_the_call)
    assert any(d and d.outcome == "branched" for (_, k), d in decisions.items() if k == 1)
    assert rollout_metrics([group]).values()["branching/refused"] == len(after_the_call)
    assert len(group.trajectories) == 8


@pytest.mark.parametrize("selector", sorted(EXPANSIONS))
def test_a_retrospective_selector_is_refused_alike(selector):
    tool = Notes(may_branch=False)
    branching = BranchingConfig(selector=selector, num_initial_rollouts=4)
    [group] = play(searches("a", "b"), tools=[tool], cfg=LONG, branching=branching)
    assert len(group.trajectories) == 8 and not any(t.parent_id for t in group.trajectories)
    assert check_states([group]) == 0


def test_a_runner_of_another_rank_keeps_no_sessions_but_refuses_alike():
    elsewhere = ToolSessions({"search": Notes(may_branch=False), "python": Notes("python")}, None)
    assert elsewhere.refusal(["python"]) == "" and elsewhere.refusal(["python", "search"]) == "search"
    elsewhere.mark(("p", "0"), 1)
    elsewhere.end_all()
    assert elsewhere.tools == {}


def test_several_calls_of_a_turn_are_answered_one_after_the_other_in_the_order_of_their_start():
    tool = Notes(jitter_s=0.005)
    results = {}
    with closing(ToolRunner({"search": tool})) as runner:
        for n in range(8):
            runner.start(str(n), "search", f"c{n}", ToolContext("p", "0", 0))
        while runner.num_pending:
            results |= dict(runner.collect(block=True))
    assert [results[str(n)].text.split()[-1] for n in range(8)] == [f"c{n}" for n in range(8)]
    assert results["7"].text == " ".join(f"c{n}" for n in range(8)) and len(tool.contexts) == 1
