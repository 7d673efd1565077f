"""The rollout on a real vLLM engine with real tokens: what the scripted tests cannot show."""

import json
import random
import sys
from collections import Counter
from dataclasses import replace

import pytest
from helpers.cut_rollout import play_cut
from helpers.fakes import EchoTool
from helpers.ranks import ROOT
from helpers.rollout_checks import assert_children_fork_behind_results, assert_rollout_logprobs, teacher_forced
from transformers import AutoTokenizer

from arpo.config.sections import EngineConfig
from arpo.engine import Engine
from arpo.options import BranchingConfig, RolloutConfig
from arpo.protocol import TagsCodec
from arpo.retrospective import EXPANSIONS
from arpo.rollout import Rollout
from arpo.sampling.sampler import rollout
from arpo.tools.base import ToolRunner
from arpo.trajectory import Prompt, StopReason

CFG = RolloutConfig(
    group_size=6, max_response_tokens=260, max_tool_calls=3, max_result_tokens=60, answer_reserve_tokens=20
)
BRANCHING = BranchingConfig(num_initial_rollouts=3, weight=2.0, entropy_tokens=8)


@pytest.fixture(scope="module")
def parts(tiny_model_dir):
    """(codec, groups): a rollout of three prompts with branching, tools answering after random delays."""
    codec = TagsCodec(AutoTokenizer.from_pretrained(tiny_model_dir))
    engine_cfg = EngineConfig(dtype="float32", kv_cache_gib=0.05, max_num_seqs=32)
    engine = Engine(str(tiny_model_dir), engine_cfg, max_model_len=500, seed=0)
    tools = [EchoTool("search", "the book", jitter_s=0.02), EchoTool("python", "42", jitter_s=0.02)]
    runner = ToolRunner({tool.tag: tool for tool in tools})
    messages = [{"role": "user", "content": "who wrote the book?"}]
    prompts = [Prompt(f"p{i}", messages, ["42"], token_ids=tuple(codec.render_prompt(messages))) for i in range(3)]
    try:
        groups = rollout(prompts, engine, runner, codec, CFG, BRANCHING, seed=1)
        yield codec, groups, prompts, engine, runner
    finally:
        runner.close()
        engine.close()


def test_real_engine_fills_every_group_calls_tools_and_branches(parts):
    _, groups, prompts, *_ = parts
    assert [g.prompt for g in groups] == prompts
    assert all(len({t.trajectory_id for t in g.trajectories}) == 6 for g in groups)
    trajectories = [t for g in groups for t in g.trajectories]
    assert any(c.executed for t in trajectories for c in t.tool_calls)
    assert {t.stop_reason for t in trajectories} <= {StopReason.EOS, StopReason.LENGTH, StopReason.TOOL_LIMIT}
    for t in trajectories:
        assert len(t.token_ids) <= CFG.max_response_tokens
        assert len(t.token_chars) == len(t.token_ids) and sum(t.token_chars) == len(t.text)


def test_rollout_logprobs_and_entropies_are_those_of_the_whole_response(parts, tiny_model_dir):
    check_numbers(parts[1], tiny_model_dir)


def check_numbers(groups, tiny_model_dir):
    for t, logprobs in teacher_forced(tiny_model_dir, groups):
        assert_rollout_logprobs(t, logprobs, atol=1e-4)
        entropy = -(logprobs.exp() * logprobs).sum(-1)  # (T,)
        for turn in t.turns:
            head = entropy[turn.start : min(turn.end, turn.start + 8)]
            assert turn.entropy == pytest.approx(float(head.mean()), abs=1e-4)
            assert turn.token_entropies == pytest.approx(head.tolist(), abs=1e-4)


def cut_at_random(parts, cfg, branching):
    """The rollout with cuts at random moments, and how many turns they cut."""
    codec, _, prompts, engine, runner = parts
    loop, num_cut = Rollout(engine, runner, codec, cfg, branching), 0

    def count():
        nonlocal num_cut
        num_cut += len(loop.decoding)

    return play_cut(loop, prompts, random.Random(1), share=0.1, between=count), num_cut


@pytest.mark.slow
def test_turns_that_are_cut_and_sampled_further_have_the_numbers_of_the_whole_response(parts, tiny_model_dir):
    groups, num_cut = cut_at_random(parts, CFG, BRANCHING)
    assert num_cut > 20 and [len(group.trajectories) for group in groups] == [6] * 3
    check_numbers(groups, tiny_model_dir)
    assert any(c.executed for group in groups for t in group.trajectories for c in t.tool_calls)
    texts = {t.text for group in groups for t in group.trajectories}
    assert len(texts) > 14  # the rest of a turn does not repeat the numbers of its beginning; some end at once, alike


@pytest.mark.slow
def test_without_chance_a_cut_cannot_be_seen(parts):
    codec, _, prompts, engine, runner = parts
    greedy, branching = replace(CFG, temperature=0.0), replace(BRANCHING, selector="random", base=0.5)
    whole = rollout(prompts, engine, runner, codec, greedy, branching, seed=0)
    cut, num_cut = cut_at_random(parts, greedy, branching)
    assert num_cut > 20
    for one, other in zip(whole, cut, strict=True):
        assert [t.token_ids for t in one.trajectories] == [t.token_ids for t in other.trajectories]
        assert [t.turns[-1].start for t in one.trajectories] == [t.turns[-1].start for t in other.trajectories]


def test_masked_tokens_are_exactly_the_results_that_were_read(parts):
    codec, groups, *_ = parts
    for t in (t for g in groups for t in g.trajectories):
        results = "".join(f" <result>\n{c.result}\n</result>" for c in t.tool_calls if c.result)
        assert codec.decode([x for x, m in zip(t.token_ids, t.loss_mask, strict=True) if not m]) == results


def test_children_start_where_the_tool_result_of_their_parent_ends(parts):
    assert_children_fork_behind_results(parts[1])
    for group in parts[1]:
        by_id = {t.trajectory_id: t for t in group.trajectories}
        assert all(t.token_ids != by_id[t.parent_id].token_ids for t in group.trajectories if t.parent_id is not None)


def test_the_same_seed_gives_the_same_trees_whatever_the_tool_latencies(parts):
    codec, groups, prompts, engine, runner = parts
    again = rollout(prompts, engine, runner, codec, CFG, BRANCHING, seed=1)
    for old, new in zip(groups, again, strict=True):
        assert [json.dumps(t.token_ids) for t in old.trajectories] == [
            json.dumps(t.token_ids) for t in new.trajectories
        ]


@pytest.mark.parametrize(
    "selector", [pytest.param(s, marks=[pytest.mark.slow] if s == "tree_grpo" else []) for s in EXPANSIONS]
)
def test_finished_groups_are_forked_where_the_selector_says_and_alike_each_time(parts, selector):
    codec, _, prompts, engine, runner = parts
    branching = BranchingConfig(selector=selector, num_initial_rollouts=2, expansion_rounds=2)

    runs = [rollout(prompts, engine, runner, codec, CFG, branching, seed=1) for _ in range(2)]
    assert [[t.to_dict()["token_ids"] for t in g.trajectories] for g in runs[0]] == [
        [t.to_dict()["token_ids"] for t in g.trajectories] for g in runs[1]
    ]
    assert all(len({t.trajectory_id for t in group.trajectories}) == 6 for group in runs[0])
    assert_children_fork_behind_results(runs[0])


MAX_INSTRUCTIONS = 265
"""Instructions of Python's bytecode in arpo/ for a sampled token. Seen with Python 3.11: 239 here, 175 with 64 rows."""


def instructions_of(function) -> Counter[str]:
    """Instructions of Python's bytecode that a call executes in arpo/, by function."""
    counts: Counter[str] = Counter()

    def begin(frame, event, arg):
        file = frame.f_code.co_filename
        if not file.startswith(f"{ROOT}/arpo/") or file.endswith("cpu_norms.py"):  # a part of the model's forward pass
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return count

    def count(frame, event, arg):
        counts[frame.f_code.co_qualname] += event == "opcode"
        return count

    before = sys.gettrace()
    sys.settrace(begin)
    try:
        function()
    finally:
        sys.settrace(before)
    return counts


def test_a_sampled_token_costs_a_bounded_number_of_instructions(parts):
    """While ours runs, a GPU waits; a timer would measure the machine, and this counts (benchmarks/host_waits.py)."""
    codec, _, prompts, engine, runner = parts
    no_branches = BranchingConfig("none", 10)
    counts, num_tokens = [], []
    for length in (24, 24, 96):  # the first one fills the codec's caches
        cfg = RolloutConfig(10, max_response_tokens=length, answer_reserve_tokens=8)
        before = engine.stats.generated_tokens
        counts.append(
            instructions_of(lambda cfg=cfg: rollout(prompts, engine, runner, codec, cfg, no_branches, seed=0))
        )
        num_tokens.append(engine.stats.generated_tokens - before)
    more = counts[2] - counts[1]
    num_more = num_tokens[2] - num_tokens[1]
    assert num_more > 1000
    assert more.total() / num_more < MAX_INSTRUCTIONS, more.most_common(10)
