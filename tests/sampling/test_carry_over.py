"""Groups that are carried from step to step: nothing is lost, nothing comes twice, no cut can be seen.

On a scripted engine, whose output does not depend on the step; test_carry_over_run.py has real ranks and real engines,
and test_validation.py what runs beside it.
"""

import gzip
import json
import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from helpers.cut_rollout import CutEngine, PunctualRunner, advance, moved, plain, play_cut, saved, train
from helpers.fakes import EchoTool
from helpers.scripted_rollout import ANSWER, CODEC, SHORT, TOKENIZER, prompt, score
from helpers.stateful import ForkedNotes, shared_texts, sharing

from arpo.engine.team import Team
from arpo.errors import UserError
from arpo.growing import GroupState
from arpo.metrics import staleness
from arpo.options import BranchingConfig, RolloutConfig
from arpo.ranks import Ranks
from arpo.retrospective import EXPANSIONS
from arpo.rollout import Rollout
from arpo.sampling.carried_state import check_nothing_is_left, restore
from arpo.sampling.carry_over import Carried, CarryOver, StartedGroup
from arpo.sampling.sampler import rollout
from arpo.tools.base import ToolRunner
from arpo.trajectory import Group, Trajectory, Turn

NONE = BranchingConfig(selector="none", num_initial_rollouts=4)
FAST = [
    BranchingConfig(num_initial_rollouts=2, weight=1.0, entropy_tokens=6),
    BranchingConfig(selector="aepo", num_initial_rollouts=2, weight=1.0, dynamic_budget=True, entropy_tokens=4),
    BranchingConfig(selector="at2po", num_initial_rollouts=3),
    BranchingConfig(selector="random", base=0.2, num_initial_rollouts=2, entropy_tokens=6),
]
SLOW = [
    NONE,
    BranchingConfig(num_initial_rollouts=2, max_branches_per_turn=2),
    BranchingConfig(num_initial_rollouts=1, compat="upstream", base=0.9),
    *(BranchingConfig(selector=name, num_initial_rollouts=3) for name in EXPANSIONS if name != "at2po"),
]
ALGORITHMS = [*FAST, *(pytest.param(branching, marks=pytest.mark.slow) for branching in SLOW)]
NAMES = [f"{b.selector}-{b.compat}" for b in FAST + SLOW]
WORLD = RolloutConfig(
    group_size=6, max_response_tokens=900, max_result_tokens=200, answer_reserve_tokens=60, max_tool_calls=4
)
CARRIES = replace(WORLD, carry_over=2)


def world(seed: int):
    """A script of random trees: calls with words behind them, malformed ones, answers, runaway texts."""

    def script(prompt_id: str, path: str, turn: int) -> tuple[str, float]:
        rng = random.Random(f"{seed}|{prompt_id}|{path}|{turn}")
        what = rng.choices(["search", "python", "empty", "end", "runaway"], [6, 2, 1, 2, 0.3])[0]
        think = f"<think>{'word ' * rng.choice([0, 1, 8, 30])}</think>"
        text = {
            "search": f"{think}<search>{turn}@{path}</search> and what I had said after it",
            "python": f"{think}<python>{turn}@{path}</python></search>", "empty": "<search> </search>",
            "end": f"{think}<answer>\\boxed{{1}}</answer>", "runaway": "too long " * 150,
        }[what if turn < 6 else "end"]  # fmt: skip
        return text, rng.uniform(0.2, 2.0)

    return script


# ---- a turn that is cut


@pytest.mark.parametrize("branching", ALGORITHMS, ids=NAMES)
def test_a_rollout_that_is_cut_at_random_moments_is_the_one_that_is_not(branching):
    prompts = [prompt(f"p{i}") for i in range(2)]
    num_cut_turns = 0
    for seed in range(2):
        tools = [EchoTool("search", "found", jitter_s=0.001), EchoTool("python", "2", jitter_s=0.001)]
        runner = ToolRunner({tool.tag: tool for tool in tools})
        engines = [CutEngine(TOKENIZER, world(seed), tokens_per_step) for tokens_per_step in (7, 3)]
        rng = random.Random(seed)
        try:
            whole = rollout(prompts, engines[0], runner, CODEC, WORLD, branching, seed=0)
            loop = Rollout(engines[1], runner, CODEC, WORLD, branching)
            cut = play_cut(loop, prompts, rng, share=0.15)
        finally:
            runner.close()
        assert plain(cut) == plain(whole)
        assert all(len(group.trajectories) == WORLD.group_size for group in cut)
        num_cut_turns += len(engines[1].submitted) - len(engines[0].submitted)
    assert num_cut_turns > 20


def test_the_rest_of_a_turn_has_a_seed_and_an_entropy_window_of_its_own():
    engine = CutEngine(TOKENIZER, lambda *_: ANSWER, tokens_per_step=7)
    loop = Rollout(engine, ToolRunner({}), CODEC, replace(SHORT, group_size=1), NONE)
    try:
        loop.start_group(prompt(), "0|0")
        for _ in range(2):  # the second time nothing has been sampled since
            advance(loop)
            engine.abort(list(loop.decoding))
            for live in loop.decoding.values():
                loop.submit(live)
    finally:
        loop.tools.close()
    specs = [spec for _, _, spec in engine.submitted]
    assert len({spec.seed for spec in specs}) == 3
    assert [spec.num_entropy_tokens for spec in specs] == [20, 13, 6]
    assert [spec.max_tokens for spec in specs] == [600, 593, 586]
    num_tokens = [len(token_ids) - len(prompt().token_ids) for _, token_ids, _ in engine.submitted]
    assert num_tokens == [0, 7, 14]


# ---- steps


@pytest.mark.parametrize("branching", ALGORITHMS, ids=NAMES)
def test_every_prompt_is_trained_on_once_and_none_is_older_than_the_bound(carrying, branching):
    prompts = [prompt(f"p{i}") for i in range(20)]
    for bound in (1, 3):
        tools = [EchoTool("search", "found", jitter_s=0.001), EchoTool("python", "2")]
        cfg = replace(WORLD, carry_over=bound)
        carry = carrying(world(bound), tools, cfg, branching, num_prompts=4, score=score)
        steps = train(carry, prompts, 1, 5, 5)
        trained = [group.prompt.prompt_id for groups in steps for group in groups]
        assert [len(groups) for groups in steps] == [4] * 5 and sorted(trained) == sorted(p.prompt_id for p in prompts)
        assert not carry.carried and not carry.waiting and not carry.loop.num_unfinished
        for step, groups in enumerate(steps, 1):
            numbers = [int(group.prompt.prompt_id[1:]) for group in groups]
            assert numbers == sorted(numbers)  # as they were drawn
            for t in (t for group in groups for t in group.trajectories):
                t.check()
                starts, versions = zip(*t.versions, strict=True)
                assert starts[0] == 0 and list(starts) == sorted(set(starts)) and starts[-1] < len(t.token_ids)
                assert list(versions) == sorted(set(versions)) and step - bound <= versions[0] <= versions[-1] <= step


LONG = "p1"


def one_slow(prompt_id: str, _path: str, _turn: int) -> str:
    return "<think>" + "slow " * 90 + "</think>" + ANSWER if prompt_id == LONG else ANSWER


TWO = replace(NONE, num_initial_rollouts=2)


@pytest.mark.parametrize("bound", [1, 2])
def test_a_slow_prompt_is_carried_and_then_waited_for(carrying, bound):
    cfg = replace(WORLD, carry_over=bound, group_size=2)
    carry = carrying(one_slow, [EchoTool("search")], cfg, TWO, num_prompts=2)
    prompts = [prompt(f"p{i}") for i in range(10)]
    steps = train(carry, prompts, 1, 1, 5)
    # p1 and the last of p0 to p3 go on: whoever begins again from the data alone begins with p1
    first = carry.started_groups[0]
    assert (first.number, first.is_finished, carry.num_to_redraw) == (1, False, 3)
    steps += train(carry, prompts, 2, 5, 5, num_drawn=carry.num_drawn)
    names = [[group.prompt.prompt_id for group in groups] for groups in steps]
    assert names[0] == ["p0", "p2"] and LONG in names[bound]
    assert sorted(name for step in names for name in step) == [f"p{i}" for i in range(10)]
    [slow] = [group for group in steps[bound] if group.prompt.prompt_id == LONG]
    assert [version for _, version in slow.trajectories[0].versions] == list(range(1, bound + 2))
    values = staleness([slow], bound + 1).values()
    assert values["carry_over/groups"] == 1 and values["carry_over/staleness_max"] == bound
    assert 0 < values["carry_over/tokens"] < sum(t.num_sampled_tokens for t in slow.trajectories)


def test_a_look_at_the_other_ranks_does_not_go_through_all_groups_that_they_have_begun(carrying):
    """There are 16,000 on 1,024 ranks, and the engine stands still while this rank looks."""

    class CountedOnce(list):
        num_left = 2  # how many are finished, and how many must finish

        def __iter__(self):
            self.num_left -= 1
            assert self.num_left >= 0
            return super().__iter__()

    ticks = iter(range(1, 999))
    carry = carrying(one_slow, [EchoTool("search")], replace(WORLD, carry_over=1), NONE, num_prompts=4)
    carry._store, carry._poller.clock = dist.HashStore(), lambda: next(ticks)
    started = [(0, 1, False), (1, 1, True), (2, 1, True), (3, 1, False)]
    carry.started_groups = CountedOnce(StartedGroup(*group) for group in started)
    carry.begin_step(2, [])
    counts = []
    for begun in (2, 1, 2, 1):  # a group of this step, one that was due, and again
        counts.append(carry.is_done)
        state = GroupState(prompt(), 0, budget=None)
        carry.carried = [Carried(9, begun, state)]
        carry.on_finished(state)
    assert [*counts, carry.is_done] == [False, False, False, False, True]  # enough after two, but one more is due


def test_a_prompt_of_the_next_epoch_waits_for_its_earlier_group(carrying):
    cfg = replace(WORLD, carry_over=1, group_size=2)
    carry = carrying(one_slow, [EchoTool("search")], cfg, TWO, num_prompts=2)
    steps = train(carry, [prompt(f"p{i}") for i in (0, 1, 1, 0, 0, 1)], 1, 3, 3)
    names = [group.prompt.prompt_id for groups in steps for group in groups]
    assert sorted(names) == ["p0"] * 3 + ["p1"] * 3
    seeds = [spec.seed for key, _, spec in carry.sampler.engine.submitted if key == "p0|0|0"]
    assert len(set(seeds)) == 3  # another draw of the same prompt is sampled anew


def test_staleness_counts_each_sampled_token_with_the_trajectory_that_sampled_it():
    parent = Trajectory(
        "p", "0", [1] * 6, [1, 1, 1, 0, 1, 1], [-1.0] * 3 + [0.0] + [-1.0] * 2, [Turn(0, 3, 4), Turn(4, 6, 6)]
    )
    parent.versions = [(0, 3), (2, 4), (5, 6)]
    child = parent.branch("0.0", 1)
    assert child.versions == [(0, 3), (2, 4)] and len(child.token_ids) == 4
    child.record_step(6)
    child.token_ids, child.loss_mask, child.rollout_logprobs = [1] * 5, [1, 1, 1, 0, 1], [-1.0] * 3 + [0.0, -1.0]
    assert child.versions == [(0, 3), (2, 4), (4, 6)]
    values = staleness([Group(prompt(), [parent, child])], step=6).values()
    # the parent's tokens are 3, 3, 2, (result), 2, 0 steps old, the child's own one 0
    assert values == {
        "carry_over/staleness": pytest.approx(10 / 6), "carry_over/staleness_max": 3.0, "carry_over/tokens": 4.0,
        "carry_over/groups": 1.0,
    }  # fmt: skip


# ---- checkpoints


@pytest.mark.parametrize("branching", ALGORITHMS, ids=NAMES)
def test_a_run_that_is_cut_off_after_any_step_goes_on_to_the_same_groups(carrying, branching):
    prompts = [prompt(f"p{i}") for i in range(16)]

    def fresh() -> CarryOver:
        tools = [EchoTool("search", "found"), EchoTool("python", "2")]
        options = {"score": score, "runner": PunctualRunner, "per_step": 5}
        return carrying(world(3), tools, CARRIES, branching, num_prompts=4, **options)

    uncut = train(fresh(), prompts, 1, 4, 4)
    carry, num_unfinished = fresh(), 0
    resumed = []
    for step in range(1, 5):
        resumed += train(carry, prompts, step, step, 4, num_drawn=carry.num_drawn)
        num_unfinished += carry.loop.num_unfinished
        carry = moved(carry, fresh(), prompts)
    assert [plain(groups, without=()) for groups in resumed] == [plain(groups, without=()) for groups in uncut]
    assert num_unfinished > 8 and not carry.carried


@pytest.mark.parametrize("tags", [("search",), ("search", "python")])
def test_calls_under_way_and_sessions_come_back(carrying, tags):
    """The session answers again all that the trajectory has read, and once only what it was asked when the run died."""

    def script(_prompt, path, turn):
        tag = tags[turn % len(tags)]
        return f"<{tag}>{turn}@{path}</{tag}>" if turn < 3 else ANSWER

    prompts, cfg = [prompt("p0")], replace(WORLD, group_size=2, carry_over=1)
    before, tools = (sharing(ForkedNotes) if len(tags) > 1 else [ForkedNotes()] for _ in range(2))
    carry = carrying(script, before, cfg, TWO, num_prompts=1, per_step=50)
    carry.begin_step(1, prompts)
    carry.start()
    for _ in range(3):
        advance(carry.loop)
    assert carry.sampler.tools.num_pending  # the last advance ended a turn in calls
    carry.end()
    fresh = moved(carry, carrying(script, tools, cfg, TWO, num_prompts=1), prompts)
    [group] = train(fresh, [], 2, 2, 2)[0]
    fresh.sampler.tools.sessions.end_all()
    for t in group.trajectories:
        assert [call.result for call in t.tool_calls] == shared_texts(t.tool_calls) and len(t.tool_calls) == 3
    assert sum(call.replayed for t in group.trajectories for call in t.tool_calls) >= 1 and tools[0].num_open == 0


def test_files_that_cannot_be_used_are_refused_in_one_line(carrying, tmp_path):
    carry, fresh = (
        carrying(world(3), [EchoTool("search"), EchoTool("python")], CARRIES, NONE, num_prompts=2) for _ in range(2)
    )
    prompts = [prompt(f"p{i}") for i in range(4)]
    train(carry, prompts, 1, 1, 3)
    files = saved(carry, tmp_path)
    with pytest.raises(UserError, match=r"rollout.carry_over=0 would drop; set it to 1$"):
        check_nothing_is_left(files)
    with pytest.raises(UserError, match=r"does not fit data.train .*; give the run the prompts that it had$"):
        restore(fresh, files, prompts[:1])
    tree = json.loads(gzip.decompress(files[0].read_bytes()))
    for live in (live for group in tree["groups"] for live in group["lives"]):
        live["calls"] = None  # as if all were decoding: which of them wait for a tool, chance decides
    # verl-tool 88 asked its engine for 0 tokens; slime 2122 and verl 7207 resumed beyond the limit
    decoding = tmp_path / "decoding.json.gz"
    decoding.write_bytes(gzip.compress(json.dumps(tree).encode()))
    shorter = carrying(world(3), [], replace(CARRIES, max_response_tokens=1), NONE, num_prompts=2)
    with pytest.raises(UserError, match=r"no room left, since rollout.max_response_tokens .*is smaller now"):
        restore(shorter, [decoding], prompts)
    train(carry, prompts, 2, 2, 2, num_drawn=4)
    fresh.team = Team(Ranks(1, 2, torch.device("cpu"), mesh=None))  # each rank names its own file
    with pytest.raises(UserError, match=r"carried_00000.json.gz: does not fit data.train"):
        restore(fresh, [tmp_path / "of rank 0", *files], prompts[:1])
    fresh.team = fresh.sampler.team
    check_nothing_is_left(saved(carry, tmp_path))  # the run had ended
    files[0].write_bytes(gzip.compress(b'{"num_drawn": 1}'))
    for read in (check_nothing_is_left, lambda files: restore(fresh, files, prompts)):
        with pytest.raises(UserError, match=r"carried_00000.json.gz: cannot be read \(not a file of carried groups\)"):
            read(files)
    files[0].write_bytes(gzip.compress(b"{")[:-3])
    with pytest.raises(UserError, match=r"carried_00000.json.gz: cannot be read"):
        restore(fresh, files, prompts)
