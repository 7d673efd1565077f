"""Who samples which prompts: the queue on real ranks (gloo, the real store) with scripted engines of unequal speed.
Whoever samples what, the same groups come back in the same order; test_pulled_run.py has whole runs on vLLM."""

import asyncio
import random
import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.fakes import EchoTool, ScriptedEngine
from helpers.ranks import run_ranks
from helpers.scripted_rollout import ANSWER, CALL, CODEC, NO_BRANCHES, SHORT, TOKENIZER, call_then_answer, prompt

from arpo.engine import SamplingSpec
from arpo.engine.team import Team
from arpo.growing import GroupState
from arpo.log import Console
from arpo.options import BranchingConfig, RolloutConfig
from arpo.ranks import Ranks
from arpo.sampling.sampler import Sampler
from arpo.sampling.sources import OneRollout, Refilled
from arpo.tools.base import ToolResult, ToolRunner
from arpo.trajectory import Group, Prompt, StopReason, Trajectory

NUM_PROMPTS, NUM_WANTED = 24, 6
PULL = replace(SHORT, dispatch="pull")
BRANCHES = BranchingConfig(num_initial_rollouts=2, entropy_tokens=4)


class SeededEngine(ScriptedEngine):
    """Samples by the seed of each request: a call or not, and a short or a long answer. Each step takes `step_s`."""

    step_s = 0.0

    def submit(self, request_id: str, token_ids: list[int], spec: SamplingSpec) -> None:
        rng = random.Random(spec.seed)
        calls = rng.random() < 0.5 and request_id.endswith("|0")
        self.script = lambda *_: (CALL if calls else "x" * rng.randrange(100) + ANSWER, rng.random())
        super().submit(request_id, token_ids, spec)

    def step(self):
        time.sleep(self.step_s)
        return super().step()


def by_length(groups: list[Group]) -> None:
    """A reward by which about half of the groups are dead."""
    for t in (t for group in groups for t in group.trajectories if t.reward is None):
        t.reward = float(len(t.token_ids) % 8 == 0)


def sampler_with(team: Team, engine, tools: ToolRunner, **options) -> Sampler:
    fixed = {"codec": CODEC, "log": Console(is_main=False), "seed": 0, "rollout": SHORT, "branching": NO_BRANCHES}
    return Sampler(team=team, engine=engine, tools=tools, **fixed | options)


def sampler_of(ranks: Ranks, team: Team | None = None, *, max_num_seqs: int = 8) -> Sampler:
    """One whose engine is the slower the higher the rank."""
    team = team or Team(ranks)
    engine = SeededEngine(TOKENIZER, None)
    engine.step_s = 0.002 * ranks.rank
    tools = team.tool_runner({"search": EchoTool("search", "found", jitter_s=0.003)})
    return sampler_with(team, engine, tools, branching=BRANCHES, max_num_seqs=max_num_seqs, score=by_length)


def prompts(count: int = NUM_PROMPTS) -> list[Prompt]:
    return [prompt(f"p{i}") for i in range(count)]


def sampled(sampler: Sampler, cfg: RolloutConfig, *, num_wanted: int = 0) -> tuple[list[tuple], int]:
    """What came of each prompt, in order, and the number of groups that were cut off."""
    sampler = replace(sampler, rollout=cfg)
    source = OneRollout(sampler, prompts(), 3, label="test")
    if num_wanted:
        source = Refilled(sampler, prompts(), 3, num_wanted=num_wanted)
    sampler.run(source, "test", NUM_PROMPTS)
    sampler.score(source.to_score if sampler.team.is_first else [])
    groups = source.exchange()
    sampler.team.ranks.barrier()  # rank 0 has deleted the keys of this rollout, whose name the next one has too
    assert sampler.tools.num_pending == sampler.engine.num_running == 0
    return [what_came_of(group) for group in groups], source.num_cut_off if num_wanted else 0


def what_came_of(group: Group) -> tuple:
    return group.prompt.prompt_id, [(t.trajectory_id, t.token_ids, t.reward) for t in group.trajectories]


def in_all_ways(ranks: Ranks, team_size: int = 1) -> dict:
    sampler = sampler_of(ranks, Team(ranks) if team_size == 1 else team_of(ranks, team_size))
    results = {
        "fixed": sampled(sampler, SHORT),
        "pull": sampled(sampler, PULL),
        "refilled": sampled(sampler, PULL, num_wanted=NUM_WANTED),
        "refilled from a share": sampled(sampler, SHORT, num_wanted=NUM_WANTED),
    }
    sampler.tools.close()
    return results


def team_of(ranks: Ranks, size: int) -> Team:
    return Team(ranks, size, dist.new_subgroups(size, backend="gloo")[0])


class HeldEngine(SeededEngine):
    """Rank 1's decodes nothing until rank 0 is done, and rank 0's nothing until rank 1 has begun a prompt."""

    def submit(self, *args) -> None:
        super().submit(*args)
        self.ranks.store.set(f"rank {self.ranks.rank} has begun", "")

    def step(self):
        other = ("rank 1 has begun", "rank 0 is done")[self.ranks.rank]
        self.ranks.store.wait([other], timedelta(minutes=5))
        return super().step()


def two_ranks(ranks: Ranks) -> dict:
    results, sampler = in_all_ways(ranks), sampler_of(ranks, max_num_seqs=SHORT.group_size)
    engine = HeldEngine(TOKENIZER, None)
    engine.ranks = ranks
    held = replace(sampler, engine=engine, rollout=PULL, branching=NO_BRANCHES)
    source = OneRollout(held, prompts(), "held")
    held.run(source, "held", NUM_PROMPTS)
    ranks.store.set(f"rank {ranks.rank} is done", "")
    groups = source.exchange()
    sampler.tools.close()
    return results | {"held by": [group.sampled_by for group in groups]}


@pytest.fixture(scope="module")
def on_one_rank(alone) -> dict:
    return in_all_ways(alone)


@pytest.fixture(scope="module")
def on_two_ranks() -> list[dict]:
    return run_ranks(2, two_ranks)


def test_pulled_prompts_give_the_groups_that_dealt_ones_give_on_any_number_of_ranks(on_one_rank, on_two_ranks):
    expected, none_cut_off = on_one_rank["fixed"]
    assert [prompt_id for prompt_id, _ in expected] == [f"p{i}" for i in range(NUM_PROMPTS)]
    assert len({str(trajectories) for _, trajectories in expected}) == NUM_PROMPTS and none_cut_off == 0
    for rank in [on_one_rank, *on_two_ranks]:
        assert all(rank[way] == (expected, 0) for way in ("fixed", "pull"))


def first_enough(groups: list[tuple]) -> list[tuple]:
    """The prompts up to the one whose group is the NUM_WANTED-th mixed one."""
    mixed = [number for number, (_, ts) in enumerate(groups, start=1) if len({reward for *_, reward in ts}) > 1]
    return groups[: mixed[NUM_WANTED - 1]]


def test_a_refilled_step_ends_with_the_prompt_that_completes_it_on_any_number_of_ranks(on_one_rank, on_two_ranks):
    expected = first_enough(on_one_rank["fixed"][0])
    assert NUM_WANTED + 2 < len(expected) < NUM_PROMPTS  # some are dead
    for rank in [on_one_rank, *on_two_ranks]:
        for way in ("refilled", "refilled from a share"):
            groups, num_cut_off = rank[way]
            assert groups == expected and 0 <= num_cut_off <= NUM_PROMPTS - len(expected)


@pytest.mark.slow
def test_ranks_that_share_an_engine_pull_as_one(on_one_rank):
    for rank in run_ranks(4, in_all_ways, 2):
        assert rank["pull"] == on_one_rank["pull"] and rank["refilled"][0] == on_one_rank["refilled"][0]
        assert rank["refilled from a share"][0] == on_one_rank["refilled"][0]


def test_a_rank_that_stands_still_holds_no_more_than_its_engine_does_and_the_others_take_the_rest(on_two_ranks):
    for rank in on_two_ranks:
        assert rank["held by"].count(1) == 1 and rank["held by"].count(0) == NUM_PROMPTS - 1


# ---- the sources by themselves


class IdleEngine:
    """Runs as many requests as the test says."""

    num_running = 0

    def abort(self, request_ids: list[str]) -> None:
        assert request_ids == []


def source_for(
    num_prompts: int, rank: int = 0, num_ranks: int = 1, store=None, *, clocks=None, max_num_seqs=8, group_size=4,
    dispatch="pull", **options,
) -> OneRollout:  # fmt: skip
    """One whose engine and tools are never asked for anything but their load."""
    team = Team(Ranks(rank, num_ranks, torch.device("cpu"), mesh=None, store=store))
    cfg = replace(SHORT, group_size=group_size, dispatch=dispatch)
    tools = ToolRunner({})
    tools.close()
    score = lambda groups: None  # noqa: E731
    sampler = sampler_with(
        team, IdleEngine(), tools, rollout=cfg, max_num_seqs=max_num_seqs, score=score, **clocks or {}
    )
    kind = Refilled if "num_wanted" in options else OneRollout
    return kind(sampler, prompts(num_prompts), "test", **options)


def taken(source: OneRollout, *loads: tuple[int, int]) -> list[int | None]:
    """What it takes where so many trajectories are unfinished, and so many of them decode."""
    found = []
    for source.loop.num_unfinished, source.sampler.engine.num_running in loads:
        found.append(source.take())
        if found[-1] is not None:
            source.started[f"p{found[-1]}"] = found[-1]
    return found


def both(*counts: int) -> list[tuple[int, int]]:
    return [(count, count) for count in counts]


def test_dealt_prompts_are_begun_at_once_or_while_few_are_unfinished():
    at_once, few = source_for(3, dispatch="fixed"), source_for(3, dispatch="fixed", max_at_once=5)
    assert taken(at_once, *both(0, 4, 8, 12)) == [0, 1, 2, None]
    assert taken(few, *both(0, 4, 5, 4, 0)) == [0, 1, None, 2, None]


@pytest.mark.parametrize("max_at_once", [0, 1, 6])
def test_groups_are_handed_out_whole_and_the_first_ones_early(max_at_once):
    """With a limit, a group is whole before the last ones have begun; what is sampled does not depend on it."""
    engine, handed_out = ScriptedEngine(TOKENIZER, call_then_answer), []

    def on_group(group, wall_s):
        assert len(wall_s) == 4 and all(seconds >= 0 for seconds in wall_s)
        assert all(t.stop_reason == StopReason.EOS for t in group.trajectories)
        handed_out.append((group.prompt.prompt_id, len({key.split("|")[0] for key, *_ in engine.submitted})))

    team = Team(Ranks(0, 1, torch.device("cpu"), mesh=None))
    tools = ToolRunner({"search": EchoTool("search", "found", jitter_s=0.002)})
    sampler = sampler_with(team, engine, tools, on_group=on_group)
    source = OneRollout(sampler, prompts(6), 0, max_at_once=max_at_once)
    try:
        sampler.run(source, "test", 6)
    finally:
        tools.close()
    names = [f"p{i}" for i in range(6)]
    assert [group.prompt.prompt_id for group in source.to_score] == names == sorted(p for p, _ in handed_out)
    begun_at_first = handed_out[0][1]
    assert begun_at_first == {0: 6, 1: 1, 6: 2}[max_at_once] or (max_at_once == 6 and begun_at_first == 3)
    texts = {t.text for group in source.to_score for t in group.trajectories}
    assert texts == {CALL + " <result>\nfound\n</result>" + ANSWER}


def test_a_prompt_is_pulled_while_the_engine_has_a_free_place():
    source = source_for(9)
    assert taken(source, *both(0, 7, 8)) == [0, 1, None]
    # those whose tools are at work leave their places to others, as long as others get their share
    assert taken(source, (35, 7), (36, 7), (36, 0), (0, 0)) == [2, None, None, 3]


def test_whoever_comes_first_does_not_take_all_prompts_of_an_empty_engine():
    store = dist.HashStore()
    first, second = (source_for(4, rank, 2, store, max_num_seqs=256) for rank in (0, 1))
    assert taken(first, *both(0, 4, 8, 12)) == [0, 1, None, None]
    assert taken(second, *both(0, 4, 8)) == [2, 3, None]
    assert taken(first, (0, 0)) == [None] and first.is_done


def finish(source: Refilled, number: int, *, mixed: bool) -> None:
    state = GroupState(prompt(f"p{number}"), 2, budget=None)
    ends = {"token_ids": [1], "loss_mask": [1], "rollout_logprobs": [0.0]}
    for i in range(2):
        state.trajectories[(i,)] = Trajectory(f"p{number}", str(i), reward=float(i * mixed), **ends)
    source.on_finished(state)


def refilled(*, num_ranks: int = 1, num_prompts: int = 9, num_wanted: int = 3, dispatch="pull") -> list[Refilled]:
    """The sources of all ranks, on one clock that only waiting moves."""
    store, now = dist.HashStore(), [0.0]
    clocks = {"clock": lambda: now[0], "sleep": lambda seconds: now.__setitem__(0, now[0] + seconds)}
    sizes = {"num_wanted": num_wanted, "group_size": 2, "max_num_seqs": 64, "dispatch": dispatch}
    return [source_for(num_prompts, rank, num_ranks, store, clocks=clocks, **sizes) for rank in range(num_ranks)]


def test_further_prompts_are_begun_for_a_dead_group_and_none_before():
    [source] = refilled()
    assert taken(source, *both(0, 2, 4)) == [0, 1, 2]
    assert taken(source, (2, 2)) == [None]
    finish(source, 1, mixed=False)
    assert taken(source, *both(4, 4, 4, 4, 4)) == [3, 4, 5, 6, None]  # 1 + 3 / (1 / 2)
    for number in (0, 2, 3):
        finish(source, number, mixed=True)
    assert taken(source, (6, 6)) == [None] and source.is_done
    assert source.num_taken == 4


def test_a_slow_prompt_before_the_end_is_waited_for():
    [source] = refilled()
    taken(source, *both(0, 2, 4))
    finish(source, 2, mixed=False)
    assert taken(source, *both(4, 4, 4)) == [3, 4, 5]
    for number in (1, 3, 4):
        finish(source, number, mixed=True)
    assert taken(source, (4, 4)) == [None] and not source.is_done and source.num_taken is None
    finish(source, 0, mixed=True)  # with it, p3 is the third mixed one: p4 and p5 came too early
    assert taken(source, (0, 0)) == [None] and source.is_done and source.num_taken == 4


def test_a_step_that_cannot_be_filled_takes_all_it_may():
    [source] = refilled(num_prompts=4)
    for number in range(4):
        assert taken(source, (0, 0)) == [number]
        finish(source, number, mixed=False)
    assert taken(source, (0, 0)) == [None] and source.num_taken == 4 and source.is_done


@pytest.mark.parametrize("dispatch", ["fixed", "pull"])
def test_a_rank_without_work_waits_for_the_verdicts_of_others_and_ends_with_them(dispatch):
    busy, idle = refilled(num_ranks=2, num_wanted=2, dispatch=dispatch)
    assert taken(busy, (0, 0)) + taken(idle, (0, 0)) == [0, 1]
    finish(idle, 1, mixed=True)
    for _ in range(30):  # whether another one is needed depends on p0
        assert taken(idle, (0, 0)) == [None] and not idle.is_done
        idle.idle(has_calls=False)
    assert idle.sampler.clock() > 1.0
    finish(busy, 0, mixed=False)
    idle.idle(has_calls=False)
    # 2 + 1 / (2 / 3), rounded up, are allowed: p2 and p3, which dealt ones take from their own shares
    first, second = (busy, idle) if dispatch == "fixed" else (idle, busy)
    assert taken(first, (0, 0)) == [2] and taken(second, (0, 0)) == [3]
    finish(first, 2, mixed=True)
    for source in (first, second):
        source.sampler.sleep(1.0)
        assert taken(source, (0, 0)) == [None] and source.is_done and source.num_taken == 3  # p3 is given up


def test_a_rank_does_not_wait_for_others_longer_than_the_run_says():
    busy, idle = refilled(num_ranks=2, num_wanted=2)
    taken(idle, (0, 0))
    taken(busy, (0, 0))
    finish(idle, 0, mixed=True)
    with pytest.raises(dist.DistStoreError, match="the other ranks have not ended the rollout in 1:00:00"):
        for _ in range(10**6):
            assert taken(idle, (0, 0)) == [None]
            idle.idle(has_calls=False)


class Hanging(EchoTool):
    """Has the other rank fill the step, and does not answer before the test fails."""

    async def run(self, argument: str) -> ToolResult:
        for number in (1, 2):
            if number not in self.other.groups:
                finish(self.other, number, mixed=True)
        await asyncio.sleep(30)
        self.arguments.append(argument)
        return ToolResult("too late", ok=True)


def test_a_rank_that_waits_for_a_tool_ends_with_the_step():
    """What no longer counts holds up nobody: THUDM/slime#2218 cancels the calls of a filled step."""
    store, tool, engine = dist.HashStore(), Hanging("search"), ScriptedEngine(TOKENIZER, call_then_answer)
    runner = ToolRunner({"search": tool})
    tool.other, idle = (source_for(5, rank, 2, store, num_wanted=2) for rank in range(2))
    sampler = replace(idle.sampler, engine=engine, tools=runner)
    waiting = Refilled(sampler, prompts(5), "test", num_wanted=2)
    assert taken(tool.other, *both(0, 0)) == [0, 1]
    finish(tool.other, 0, mixed=False)
    assert taken(tool.other, (0, 0)) == [2]
    try:
        sampler.run(waiting, "", 2)
    finally:
        runner.close()
    assert waiting.started == {"p3": 3} and not waiting.groups and not tool.arguments
    assert waiting.num_taken == 3


def test_nothing_is_left_in_the_store():
    store = dist.HashStore()
    source = source_for(3, store=store, num_wanted=2)
    taken(source, (0, 0))
    finish(source, 0, mixed=True)
    before = store.num_keys()
    source.delete_keys()
    assert before == 3 and store.num_keys() == 0


def test_groups_count_up_to_the_last_that_is_needed(monkeypatch):
    """Also on a rank that has heard of none of them."""
    live, dead = ([Trajectory("p", str(i), reward=float(i * mixed)) for i in range(2)] for mixed in (1, 0))
    groups = [Group(prompt(), trajectories) for trajectories in (dead, live, dead, live, live, dead)]
    for begun, num_wanted, num_taken in ((groups, 2, 4), ([*groups, None], 3, 5), (groups, 4, 6)):
        monkeypatch.setattr(OneRollout, "exchange", lambda _, begun=begun: begun)
        [source] = refilled(num_prompts=len(begun), num_wanted=num_wanted)
        assert source.exchange() == groups[:num_taken] and source.num_cut_off == len(begun) - num_taken


def test_calls_that_were_given_up_do_not_answer_later_ones_of_the_same_name():
    gate = threading.Event()

    class Slow(EchoTool):
        async def run(self, argument):
            while argument == "first" and not gate.is_set():
                await asyncio.sleep(0.005)
            return ToolResult(argument, ok=True)

    runner = ToolRunner({"search": Slow("search")})
    try:
        runner.start("call", "search", "first")
        runner.abandon()
        assert runner.collect(block=False) == []
        runner.start("call", "search", "second")
        gate.set()
        [(call_id, result)] = runner.collect(block=True)
        assert (call_id, result.text, runner.num_pending) == ("call", "second", 0)
    finally:
        runner.close()
