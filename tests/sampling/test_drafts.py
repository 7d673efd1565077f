"""Earlier rollouts as drafts, on an engine whose numbers depend on the token alone; see test_drafts_vllm.py too."""

import math
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
from helpers.cut_rollout import CutEngine
from helpers.fakes import EchoTool
from helpers.scripted_rollout import ANSWER, CALL, CODEC, NO_BRANCHES, TOKENIZER, prompt

from arpo.engine import Chunk
from arpo.errors import UserError
from arpo.metrics import rollout_metrics
from arpo.options import BranchingConfig, RolloutConfig
from arpo.rollout import rollout
from arpo.sampling.drafts import Drafts, num_accepted
from arpo.tools.base import ToolResult, ToolRunner
from arpo.trajectory import StopReason, Trajectory

CFG = RolloutConfig(
    group_size=4, max_response_tokens=600, max_result_tokens=200, answer_reserve_tokens=60, reuse_last_epoch=True
)
ONE = SimpleNamespace(rank=0, world_size=1, together=lambda make: make())
FOUND = " <result>\nfound\n</result>"
TWO_CALLS = [CALL, "<think>u</think><search>r</search>", ANSWER]


def two_calls(_prompt, _path, turn):
    return TWO_CALLS[turn]


@dataclass
class ScoringEngine(CutEngine):
    """The logprob and the entropy of a token depend on it alone; `never` are those that the policy has turned from."""

    never: str = ""
    num_sampled: int = 0
    scored: dict[str, list[int]] = field(default_factory=dict)

    @property
    def num_running(self) -> int:
        return len(self._running) + len(self.scored)

    def logprob(self, token: int) -> float:
        return -50.0 if self.never and token in TOKENIZER.encode(self.never) else -0.125 * (token % 7 + 1)

    def submit(self, request_id, token_ids, spec):
        if spec.num_scored_tokens:
            self.scored[request_id] = token_ids[-spec.num_scored_tokens :]
        else:
            super().submit(request_id, token_ids, spec)

    def step(self):
        chunks = [Chunk(name, ids, finish="scored") for name, ids in self.scored.items()]
        self.scored = {}
        for chunk in super().step() if self._running else ():
            self.num_sampled += len(chunk.token_ids)
            chunks.append(chunk)
        for chunk in chunks:
            chunk.logprobs[:] = [self.logprob(token) for token in chunk.token_ids]
            measured = chunk.token_ids if chunk.finish == "scored" else chunk.token_ids[: len(chunk.entropies)]
            chunk.entropies[:] = [0.1 * (token % 5) for token in measured]
        return chunks


def play(drafts, script=two_calls, *, never="", cfg=CFG, branching=NO_BRANCHES, tool=None, step=1):
    """(group, engine, search tool) of a rollout with these drafts; None = without any."""
    engine, search = ScoringEngine(TOKENIZER, script, never=never), tool or EchoTool("search", "found")
    runner = ToolRunner({"search": search})
    loop = drafts.loop if drafts else None
    try:
        [group] = rollout([prompt()], engine, runner, CODEC, cfg, branching, seed=0, step=step, make_loop=loop)
    finally:
        runner.close()
    return group, engine, search


def drafts_of(tmp_path, group, cfg=CFG) -> Drafts:
    drafts = Drafts(tmp_path / "drafts", cfg, {})
    drafts.add(1, [group], ONE)
    return drafts


def numbers(t: Trajectory) -> tuple:
    turns = [(turn.start, turn.end, turn.result_end, turn.entropy, turn.token_entropies) for turn in t.turns]
    calls = [(call.tag, call.argument, call.result, call.ok, call.error_kind, call.executed) for call in t.tool_calls]
    return t.token_ids, t.loss_mask, t.rollout_logprobs, turns, calls, t.stop_reason, t.text


# ---- which tokens stay


class Draws:
    def __init__(self, *draws: float):
        self.draws = list(draws)

    def random(self) -> float:
        return self.draws.pop(0)


@pytest.mark.parametrize(
    ("draws", "lenience", "expected"),
    [
        ((0.9, 0.9, 0.49, 0.9), 1.0, 5),  # ratios 1, 2, 0.5 and 1, and a result before the last
        ((0.9, 0.9, 0.51), 1.0, 2),
        ((0.9, 0.9, 0.51, 0.9), 1.1, 5),  # up to 0.55
        ((0.9, 0.9, 0.56), 1.1, 2),
        ((0.51,), 0.5, 0),
        ((0.49, 0.99, 0.24, 0.51), 0.5, 4),  # twice as likely as it was, at half the lenience: certain
        ((0.0,), 0.0, 5),
    ],
)
def test_a_token_stays_with_its_ratio_of_probabilities_times_the_lenience(draws, lenience, expected):
    then = [math.log(p) for p in (0.3, 0.2, 0.4)] + [0.0, math.log(0.25)]
    now = [math.log(p) for p in (0.3, 0.4, 0.2)] + [0.0, math.log(0.25)]
    if lenience == 0.0:
        draws = (0.0,) * 4  # a draw of exactly 0 stays, whatever the ratio
    rng = Draws(*draws)
    assert num_accepted(now, then, [1, 1, 1, 0, 1], rng, lenience=lenience) == expected
    assert rng.draws == []  # one draw per sampled token up to the cut, none for results


def test_a_token_that_has_become_impossible_never_stays_and_one_that_was_always_does():
    assert num_accepted([-math.inf], [-1.0], [1], Draws(0.001)) == 0
    assert num_accepted([-1.0], [-2000.0], [1], Draws(0.999)) == 1


def test_the_first_token_is_distributed_between_the_old_policy_and_the_new_one():
    """min(p, q) + (1 - sum min(p, q)) p for the new policy p and the old one q, as the docs say."""
    old, new, rng, counts = (0.5, 0.5), (0.8, 0.2), random.Random(0), Counter()
    for _ in range(20_000):
        draft = int(rng.random() < old[1])
        stays = num_accepted([math.log(new[draft])], [math.log(old[draft])], [1], rng)
        counts[draft if stays else int(rng.random() < new[1])] += 1
    assert counts[0] / 20_000 == pytest.approx(0.5 + 0.3 * 0.8, abs=0.01)


# ---- what a rollout makes of it


def test_a_policy_that_has_not_changed_takes_over_everything_and_samples_and_calls_nothing(tmp_path):
    branching = BranchingConfig(selector="arpo", num_initial_rollouts=3, entropy_tokens=5, weight=2.0)
    before, *_ = play(None, branching=branching)
    after, engine, search = play(drafts_of(tmp_path, before), branching=branching)
    roots = [t for t in after.trajectories if t.parent_id is None]
    assert [numbers(t) for t in after.trajectories] == [numbers(t) for t in before.trajectories]
    assert [[turn.decision for turn in t.turns] for t in after.trajectories] == [
        [turn.decision for turn in t.turns] for t in before.trajectories
    ]
    assert any(turn.decision for t in roots for turn in t.turns) and len(after.trajectories) == 4
    children = [t for t in after.trajectories if t.parent_id is not None]
    assert engine.num_sampled == sum(len(t.token_ids) - t.fork_at - sum(m == 0 for m in t.loss_mask[t.fork_at :])
                                     for t in children)  # fmt: skip
    assert len(search.arguments) == sum(
        not turn.inherited and bool(turn.tool_calls) for t in children for turn in t.turns
    )
    assert all(t.reused_until == len(t.token_ids) and t.num_draft_tokens == sum(t.loss_mask) for t in roots)
    assert all(call.cached and not call.seconds for t in roots for call in t.tool_calls)
    for child in children:
        parent = next(t for t in after.trajectories if t.trajectory_id == child.parent_id)
        assert child.reused_until == min(child.fork_at, parent.reused_until) and not child.num_draft_tokens


@pytest.mark.parametrize(
    ("never", "kept", "answered"),
    [
        ("<", "", [False, False]),  # the first token of all
        ("h", "<t", [False, False]),
        ("u", CALL + FOUND + "<think>", [True, False]),  # within the second turn
        ("a", CALL + FOUND + "<think>u</think><search>r</search>", [True, True]),
    ],
)
def test_the_draft_is_cut_at_the_first_token_that_does_not_stay(tmp_path, never, kept, answered):
    """Whole turns keep their results. What is sampled from the cut on has the policy's numbers, as what stays has."""
    script = lambda _p, _t, turn: ["<think>t</think><search>q</search>", TWO_CALLS[1], "a" + ANSWER][turn]  # noqa: E731
    before, *_ = play(None, script)
    after, engine, search = play(drafts_of(tmp_path, before), script, never=never)
    for t, old in zip(after.trajectories, before.trajectories, strict=True):
        assert t.token_ids == old.token_ids and t.stop_reason == StopReason.EOS  # the script goes on as it was
        assert t.rollout_logprobs == [m * engine.logprob(x) for x, m in zip(t.token_ids, t.loss_mask, strict=True)]
        assert [turn.token_entropies for turn in t.turns] == [turn.token_entropies for turn in old.turns]
        assert CODEC.decode(t.token_ids[: t.reused_until]).startswith(kept)
        assert t.reused_until - len(CODEC.encode(kept)) == (len(CODEC.encode(FOUND)) if never == "a" else 0)
        assert [call.cached for call in t.tool_calls] == answered
    assert len(search.arguments) == 4 * answered.count(False)
    assert engine.num_sampled == sum(sum(t.loss_mask[t.reused_until :]) for t in after.trajectories)


def test_a_cut_within_the_text_that_ends_a_turn_still_ends_it_there(tmp_path):
    """The closing tag begins in the draft and ends in what is sampled, where the engine does not see it."""
    tag = lambda _p, _t, turn: "<python>1</python>" if turn == 0 else ANSWER  # noqa: E731  (no token of its own)
    cfg = replace(CFG, group_size=1)
    runs = []
    for number, never in enumerate(("", "y")):
        engine, python = ScoringEngine(TOKENIZER, tag, never=never), EchoTool("python", "2")
        runner = ToolRunner({"python": python})
        try:
            loop = drafts_of(tmp_path, runs[0], cfg).loop if runs else None
            [group] = rollout([prompt()], engine, runner, CODEC, cfg, NO_BRANCHES, seed=0, step=number, make_loop=loop)
        finally:
            runner.close()
        runs.append(group)
    [old], [new] = (group.trajectories for group in runs)
    assert CODEC.decode(new.token_ids[: new.reused_until]) == "<p" and new.text == old.text
    assert [call.argument for call in new.tool_calls] == ["1"]


@pytest.mark.parametrize(
    ("cfg", "script", "reply", "reason"),
    [
        (replace(CFG, max_tool_calls=1), lambda *_: CALL, "found", StopReason.TOOL_LIMIT),
        (replace(CFG, max_response_tokens=100), lambda *_: "x" * 200, "found", StopReason.LENGTH),
        # no room for a result and an answer behind it
        (replace(CFG, max_response_tokens=100), lambda *_: "y" * 20 + CALL, "z" * 90, StopReason.LENGTH),
        (CFG, lambda _p, _t, turn: ["oops</search>", ANSWER][turn], "found", StopReason.EOS),
    ],
)
def test_whatever_ended_a_trajectory_ends_it_again(tmp_path, cfg, script, reply, reason):
    before, *_ = play(None, script, cfg=cfg, tool=EchoTool("search", reply))
    after, engine, search = play(drafts_of(tmp_path, before, cfg), script, cfg=cfg, tool=EchoTool("search", reply))
    assert [numbers(t) for t in after.trajectories] == [numbers(t) for t in before.trajectories]
    assert all(t.stop_reason == reason for t in after.trajectories) and search.arguments == []
    # one that has no room left is scored without its last token, which is sampled
    num_full = sum(len(t.token_ids) == cfg.max_response_tokens for t in after.trajectories)
    assert engine.num_sampled == num_full == (4 if "xxx" in after.trajectories[0].text else 0)


def test_a_failure_of_ours_is_no_draft_and_neither_is_what_the_limits_no_longer_allow(tmp_path):
    fails = EchoTool("search", lambda _: ToolResult("died", ok=False, error_kind="sandbox", infra_error=True))
    before, *_ = play(None, tool=fails)
    after, *_ = play(drafts_of(tmp_path, before))
    assert all(t.stop_reason == StopReason.EOS and not t.num_draft_tokens for t in after.trajectories)
    shorter = replace(CFG, max_response_tokens=len(after.trajectories[0].token_ids) - 1)
    cut, *_ = play(drafts_of(tmp_path, after, shorter), cfg=shorter)
    assert all(not t.num_draft_tokens for t in cut.trajectories)


def test_the_metrics_say_what_was_taken_over_and_do_not_count_it_as_sampled(tmp_path):
    before, *_ = play(None)
    after, engine, _ = play(drafts_of(tmp_path, before), never="u")
    first, second = rollout_metrics([before]).values(), rollout_metrics([after]).values()
    kept = sum(after.trajectories[0].loss_mask[: after.trajectories[0].reused_until])
    assert second["drafts/reused_tokens"] == 4 * kept and second["drafts/accepted_tokens"] == kept
    assert second["drafts/accepted_share"] == kept / sum(before.trajectories[0].loss_mask)
    assert second["drafts/whole_share"] == 0.0 and not any(name.startswith("drafts/") for name in first)
    assert second["tokens/sampled"] == engine.num_sampled == first["tokens/sampled"] - 4 * kept
    assert second["tools/all/cached"] == 4 and second["response/sampled_tokens"] == first["response/sampled_tokens"]


# ---- where they are kept


def test_drafts_are_found_again_from_what_the_checkpoint_keeps(tmp_path):
    before, *_ = play(None)
    other = replace(before, prompt=prompt("p1"))
    drafts = Drafts(tmp_path / "drafts", CFG, {})
    drafts.add(1, [other, before], ONE)
    again = Drafts(tmp_path / "drafts", CFG, {name: list(place) for name, place in drafts.state.items()})
    [t, *_] = before.trajectories
    for name in ("p0", "p1"):
        draft = again.of(name, "0")
        assert (
            draft.token_ids == t.token_ids and draft.loss_mask == t.loss_mask and draft.logprobs == t.rollout_logprobs
        )
        assert draft == drafts.of(name, "0") and [d.tool_calls for d in draft.turns] == [u.tool_calls for u in t.turns]
    assert again.of("p0", "7") is None and again.of("p2", "0") is None
    newer, *_ = play(None, lambda *_: ANSWER)
    again.add(2, [newer], ONE)
    assert again.of("p0", "0").token_ids == newer.trajectories[0].token_ids
    assert again.of("p1", "0").token_ids == t.token_ids and drafts.of("p0", "0").token_ids == t.token_ids


def test_each_rank_writes_its_share_which_all_find_also_when_there_are_fewer(tmp_path):
    group, *_ = play(None)
    groups = [replace(group, prompt=prompt(f"p{number}")) for number in range(5)]
    ranks = [SimpleNamespace(rank=rank, world_size=3, together=lambda make: make()) for rank in range(3)]
    drafts = [Drafts(tmp_path / "drafts", CFG, {}) for _ in ranks]
    for mine, rank in zip(drafts, ranks, strict=True):
        mine.add(1, groups, rank)
    assert drafts[0].state == drafts[1].state == drafts[2].state and len(list((tmp_path / "drafts").iterdir())) == 3
    alone = Drafts(tmp_path / "drafts", CFG, drafts[2].state)
    alone.add(2, groups[1:2], ONE)
    assert {alone.of(f"p{number}", "0").token_ids == group.trajectories[0].token_ids for number in range(5)} == {True}
    assert alone.state["p1"] == (2, 0, 0) and alone.state["p4"] == (1, 1, 4)


def test_nothing_is_written_where_nothing_is_reused(tmp_path):
    group, *_ = play(None)
    off = Drafts(tmp_path / "drafts", replace(CFG, reuse_last_epoch=False), {})
    off.add(1, [group], ONE)
    off.prune({})
    assert off.state == {} and list(tmp_path.iterdir()) == []


def test_files_go_when_the_oldest_checkpoint_needs_them_no_longer(tmp_path):
    group, *_ = play(None)
    groups, states = [replace(group, prompt=prompt(f"p{number}")) for number in range(2)], [{}]
    drafts = Drafts(tmp_path / "drafts", CFG, {})
    for step, names in enumerate(([0], [1], [0], [1]), 1):
        drafts.add(step, [groups[number] for number in names], ONE)
        states.append(dict(drafts.state))
        drafts.prune(states[step - 1])  # a checkpoint after each step, and two are kept
    left = sorted(path.name for path in (tmp_path / "drafts").iterdir())
    assert left == [f"step_{step:06d}.0.zip" for step in (2, 3, 4)]
    for state in states[-2:]:
        again = Drafts(tmp_path / "drafts", CFG, state)
        assert all(again.of(f"p{number}", "0") for number in range(2))


@pytest.mark.parametrize("damage", ["gone", "cut", "another prompt's"])
def test_a_draft_that_cannot_be_read_is_one_line(tmp_path, damage):
    group, *_ = play(None)
    drafts = drafts_of(tmp_path, group)
    path = drafts.path(1, 0)
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    else:
        drafts.state["p9"] = (1, 0, 0)
    with pytest.raises(UserError, match=r"step_000001.0.zip: cannot read the draft of p\d .*; put the file back"):
        drafts.of("p9" if damage == "another prompt's" else "p0", "0")


def test_where_nothing_can_be_written_all_ranks_say_so(tmp_path):
    group, *_ = play(None)
    (tmp_path / "drafts").write_text("a file in the folder's place")
    with pytest.raises(UserError, match=r"cannot write the drafts of the next epoch .*; free some space"):
        drafts_of(tmp_path, group)
