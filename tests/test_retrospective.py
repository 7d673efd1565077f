"""Retrospective selectors on trees small enough to compute by hand; and in rollouts, where they act after the end."""

import random
from collections import Counter
from dataclasses import replace
from zlib import crc32

import pytest
import torch
from helpers.cut_rollout import sampler_with
from helpers.fakes import EchoTool, ScriptedEngine
from helpers.scripted_rollout import ANSWER, CALL, SHORT, TOKENIZER, call_then_answer, play, prompt

from arpo.options import BranchingConfig, RolloutConfig
from arpo.ranks import Ranks
from arpo.retrospective import EXPANSIONS, Fork, turn_starts
from arpo.sampling.sources import OneRollout
from arpo.selection import is_dead
from arpo.tools.base import ToolResult
from arpo.trajectory import Group, Prompt, StopReason, Trajectory, Turn

CFG = BranchingConfig(selector="at2po")


def chain(name: str, logprobs: list[float], reward: float = 0.0, num_inherited: int = 0) -> Trajectory:
    """A finished trajectory of which each turn has two sampled tokens of that logprob, and one token of a result. Its
    entropies are a tenth as large."""
    t = Trajectory("p", name, reward=reward, stop_reason=StopReason.EOS)
    t.parent_id = name.rpartition(".")[0] or None
    t.fork_at = 3 * num_inherited
    for k, logprob in enumerate(logprobs):
        t.turns.append(Turn(3 * k, 3 * k + 2, 3 * k + 3, entropy=-logprob / 10, inherited=k < num_inherited))
        t.rollout_logprobs += [logprob, logprob, 0.0]
    return t


def group(*trajectories: Trajectory) -> Group:
    return Group(Prompt("p", [], []), list(trajectories))


def chosen(name: str, g: Group, budget: int, seed: int = 0) -> list[tuple[str, int]]:
    return [fork[:2] for fork in EXPANSIONS[name](g, budget, CFG, random.Random(seed))]


TREE = group(
    chain("0", [-1.0, -0.2, -0.5], reward=1.0),
    chain("0.0", [-1.0, -0.9, -0.1], reward=0.0, num_inherited=1),
    chain("1", [-0.3], reward=0.0),
)
"""Root 0 of three turns with a branch after its first; root 1 answered at once."""


def test_turns_that_begin_at_the_same_place_of_the_tree_are_known():
    assert turn_starts(TREE) == {
        ("0", 0): ("", 0), ("0", 1): ("0", 1), ("0", 2): ("0", 2),
        ("0.0", 0): ("", 0), ("0.0", 1): ("0", 1), ("0.0", 2): ("0.0", 2),
        ("1", 0): ("", 0),
    }  # fmt: skip


def test_tree_grpo_draws_evenly_among_roots_and_answered_turns():
    # Both trees' roots, after turns 0 and 1 of "0", after turn 1 of "0.0"; not after "0"'s turn 0 a second time.
    drawn = Counter(chosen("tree_grpo", TREE, 10_000))
    assert set(drawn) == {("0", 0), ("1", 0), ("0", 1), ("0", 2), ("0.0", 2)}
    assert all(abs(count - 2000) < 200 for count in drawn.values())


def test_at2po_takes_the_turns_that_the_policy_was_least_sure_of():
    # -log pi of the own turns: 0: 1.0, .2, .5; 0.0: .9, .1; 1: .3. Two turns begin at the prompt, and two after the
    # first turn of "0": each of these four loses 0.05.
    forks = EXPANSIONS["at2po"](TREE, 6, CFG, random.Random(0))
    assert [fork[:2] for fork in forks] == [("0", 0), ("0.0", 1), ("0", 2), ("1", 0), ("0", 1), ("0.0", 2)]
    assert [fork.score for fork in forks] == pytest.approx([0.95, 0.85, 0.5, 0.25, 0.15, 0.1])


def test_top_h_takes_the_most_uncertain_turns_after_a_result():
    # H of the own turns behind a result: 0: .02, .05; 0.0: .09, .01. The two after the first turn of "0" lose 0.05.
    forks = EXPANSIONS["top_h"](TREE, 6, CFG, random.Random(0))
    assert [fork[:2] for fork in forks] == [("0", 2), ("0.0", 1), ("0.0", 2), ("0", 1)]
    assert [fork.score for fork in forks] == pytest.approx([0.05, 0.04, 0.01, -0.03])


@pytest.mark.parametrize("name", EXPANSIONS)
def test_an_empty_group_has_no_forks(name):
    assert EXPANSIONS[name](group(), 4, CFG, random.Random(0)) == []


# ---- in a rollout


class Uneven(ScriptedEngine):
    """Its turns differ in their logprobs."""

    def step(self):
        return [
            replace(chunk, logprobs=[-(crc32(chunk.request_id.encode()) % 97) / 50] * len(chunk.token_ids))
            for chunk in super().step()
        ]


def world(prompt_id: str, path: str, turn: int) -> tuple[str, float]:
    """A random world: zero to four calls, some malformed, some answers far too long."""
    dice = random.Random(f"{prompt_id} {path} {turn}")
    text = dice.choices([CALL, ANSWER, "oops</search>", "z" * 900], [6, 3, 1, 0.5])[0]
    return text, dice.uniform(0.1, 2.0)


def explore(selector: str, *, seed: int, size: int, rounds: int, step_tokens: int = 7, tools=None) -> list[Group]:
    prompts = [prompt("p0"), prompt("p1"), prompt("p2")]
    branching = BranchingConfig(selector=selector, num_initial_rollouts=min(3, size), expansion_rounds=rounds)
    cfg = RolloutConfig(group_size=size, max_response_tokens=800, max_result_tokens=200, answer_reserve_tokens=60)
    return play(
        None, engine=Uneven(TOKENIZER, world, step_tokens), cfg=cfg, branching=branching, prompts=prompts, seed=seed,
        tools=tools or [EchoTool("search", "found", jitter_s=0.003)],
    )  # fmt: skip


@pytest.mark.parametrize("selector", EXPANSIONS)
def test_in_any_world_groups_are_exact_and_do_not_depend_on_the_order_of_arrival(selector):
    for seed in range(6):
        size, rounds = 4 + seed, 1 + seed % 3
        runs = [
            [[t.to_dict() | {"turns": None} for t in g.trajectories] + [decisions_of(g)] for g in groups]
            for groups in (explore(selector, seed=seed, size=size, rounds=rounds, step_tokens=n) for n in (7, 3, 40))
        ]
        assert runs[0] == runs[1] == runs[2]
    for g in explore(selector, seed=1, size=9, rounds=2):
        assert len({t.trajectory_id for t in g.trajectories}) == 9
        by_id = {t.trajectory_id: t for t in g.trajectories}
        for t in g.trajectories:
            t.check()
            if t.parent_id is not None:
                parent, turn = by_id[t.parent_id], sum(k.inherited for k in t.turns)
                assert t.fork_at == parent.turns[turn].start == t.turns[turn].start
                assert t.token_ids[: t.fork_at] == parent.token_ids[: t.fork_at]
                assert not parent.turns[turn - 1].inherited  # the parent sampled the last turn that they share


def decisions_of(g: Group) -> dict:
    """(trajectory, turn) -> its record."""
    return {
        (t.trajectory_id, k): turn.decision for t in g.trajectories for k, turn in enumerate(t.turns) if turn.decision
    }


@pytest.mark.parametrize("selector", EXPANSIONS)
def test_every_fork_is_recorded_in_the_turn_that_was_chosen(selector):
    groups = [g for seed in range(3) for g in explore(selector, seed=seed, size=8, rounds=3)]
    records = [(g, place, d) for g in groups for place, d in decisions_of(g).items()]
    assert records and any(t.parent_id for g in groups for t in g.trajectories)
    for g in groups:
        num_chosen = sum(d.num_children for d in decisions_of(g).values())
        num_branches = sum(t.parent_id is not None for t in g.trajectories)
        num_late_roots = len(g.trajectories) - num_branches - 3
        assert num_branches <= num_chosen <= num_branches + num_late_roots
    for g, (name, turn), d in records:
        t = next(t for t in g.trajectories if t.trajectory_id == name)
        assert not t.turns[turn].inherited and d.entropy == t.turns[turn].entropy
        assert (d.outcome, d.probability, d.draw) == ("branched", None, None) and 1 <= d.budget_left <= 5
        assert (d.score is None) == (selector == "tree_grpo")


def test_a_later_round_sees_how_the_forks_of_the_one_before_went(monkeypatch):
    seen = []

    def first_turns(g, budget, cfg, rng):
        seen.append(([t.trajectory_id for t in g.trajectories], budget))
        return [Fork(g.trajectories[-1].trajectory_id, 1)] * 2

    monkeypatch.setitem(EXPANSIONS, "at2po", first_turns)
    cfg = RolloutConfig(group_size=10, max_response_tokens=600, max_result_tokens=200, answer_reserve_tokens=60)
    branching = BranchingConfig(selector="at2po", num_initial_rollouts=2, expansion_rounds=3)
    [g] = play(call_then_answer, cfg=cfg, branching=branching)
    # 8 are missing: 3 in the first round; then 6 in two rounds; then 4 in the last, of which 2 are fresh roots.
    # A fork of "1.1" at turn 1, which it shares with "1", is another child of "1".
    assert seen == [
        (["0", "1"], 3),
        (["0", "1", "1.0", "1.1"], 3),
        (["0", "1", "1.0", "1.1", "1.2", "1.3"], 4),
    ]
    assert [t.trajectory_id for t in g.trajectories] == ["0", "1", *(f"1.{i}" for i in range(6)), "2", "3"]
    assert {d.num_children for d in decisions_of(g).values()} == {2}


@pytest.mark.parametrize(
    ("is_right", "size"),
    [
        (lambda trajectory_id: trajectory_id == "0", 2),  # one of two roots
        (lambda trajectory_id: "." in trajectory_id, 4),  # the forks of the first round, one at each of two turns
        (lambda trajectory_id: False, 8),  # nothing: the group grows to its size
    ],
)
def test_until_mixed_a_group_grows_until_its_rewards_differ(is_right, size):
    scored = Counter()

    def score(groups: list[Group]) -> None:
        for t in (t for g in groups for t in g.trajectories if t.reward is None):
            t.reward = float(is_right(t.trajectory_id))
            scored[t.trajectory_id] += 1

    branching = BranchingConfig(selector="top_h", num_initial_rollouts=2, expansion_rounds=2, until_mixed=True)
    alone = Ranks(0, 1, torch.device("cpu"), mesh=None)
    tools, cfg = [EchoTool("search", "found")], replace(SHORT, group_size=8)
    sampler = sampler_with(alone, call_then_answer, tools, cfg, branching, score=score)
    source = OneRollout(sampler, [prompt("p0"), prompt("p1")], 1)
    try:
        sampler.run(source, "", 2)
    finally:
        sampler.tools.close()
    groups = source.to_score
    score(groups)
    assert [len(g.trajectories) for g in groups] == [size, size] and source.num_finished == 16
    assert max(scored.values()) == 2  # each trajectory is scored once, and there are two groups
    assert [is_dead(g) for g in groups] == [size == 8] * 2


def test_a_fork_at_the_first_turn_is_a_new_root(monkeypatch):
    monkeypatch.setitem(EXPANSIONS, "at2po", lambda g, budget, cfg, rng: [Fork("0", 0)] * budget)
    [g] = play(call_then_answer, branching=BranchingConfig(selector="at2po", num_initial_rollouts=2))
    assert [(t.trajectory_id, t.parent_id) for t in g.trajectories] == [(str(i), None) for i in range(4)]
    assert decisions_of(g)["0", 0].num_children == 2


def test_more_forks_than_were_asked_for_are_left_out(monkeypatch):
    monkeypatch.setitem(EXPANSIONS, "at2po", lambda g, budget, cfg, rng: [Fork("0", 1)] * (budget + 5))
    [g] = play(call_then_answer, branching=BranchingConfig(selector="at2po", num_initial_rollouts=1))
    assert [t.trajectory_id for t in g.trajectories] == ["0", "0.0", "0.1", "0.2"]


@pytest.mark.parametrize("selector", EXPANSIONS)
def test_a_trajectory_that_an_error_of_ours_ended_is_never_forked(selector):
    replies = iter([ToolResult("died", ok=False, error_kind="sandbox", infra_error=True)] * 2)
    broken = EchoTool("search", lambda _: next(replies, ToolResult("found", ok=True)))
    groups = explore(selector, seed=0, size=8, rounds=2, tools=[broken])
    failed = {
        (t.prompt_id, t.trajectory_id) for g in groups for t in g.trajectories if t.stop_reason == StopReason.ERROR
    }
    assert len(failed) == 2 and all(len(g.trajectories) == 8 for g in groups)
    assert not failed & {(t.prompt_id, t.parent_id) for g in groups for t in g.trajectories}
    assert not any(turn.decision for g in groups for t in g.trajectories if (t.prompt_id, t.trajectory_id) in failed
                   for turn in t.turns)  # fmt: skip


BEST = """
from arpo.retrospective import Fork

def best(group, budget, cfg, rng):
    return [Fork(max(group.trajectories, key=lambda t: len(t.turns)).trajectory_id, 1)] * budget
"""


@pytest.mark.parametrize("selector", [*EXPANSIONS, "own.py:best"])
def test_a_group_in_which_all_failed_is_filled_with_roots(selector, tmp_path, monkeypatch):
    """A user's selector is not asked about nothing: NovaSky-AI/SkyRL#1641 divides by the number of such rollouts."""
    (tmp_path / "own.py").write_text(BEST)
    monkeypatch.chdir(tmp_path)
    dead = EchoTool("search", lambda _: ToolResult("died", ok=False, error_kind="sandbox", infra_error=True))
    branching = BranchingConfig(selector=selector, num_initial_rollouts=2)
    [g] = play(call_then_answer, branching=branching, tools=[dead])
    assert [t.trajectory_id for t in g.trajectories] == ["0", "1", "2", "3"]
