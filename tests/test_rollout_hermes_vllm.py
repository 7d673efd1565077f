"""Calls in JSON on a real engine, with real Python calls, by a tiny model that has learnt to call, well and wrongly."""

import json

import pytest
import torch
from helpers.calling_model import DIALOGUES, build_calling_model, codec_for, conversation
from helpers.fakes import EchoTool
from helpers.python_tools import start
from transformers import AutoModelForCausalLM, AutoTokenizer

from arpo.engine import Engine
from arpo.options import BranchingConfig, RewardConfig, RolloutConfig
from arpo.rewards import score_groups
from arpo.rollout import rollout
from arpo.run_options import EngineConfig
from arpo.tools.base import ToolRunner
from arpo.trajectory import Prompt, StopReason

pytestmark = pytest.mark.slow
CFG = RolloutConfig(group_size=4, max_response_tokens=400, max_tool_calls=3, answer_reserve_tokens=40)
BRANCHING = BranchingConfig(selector="random", base=0.5, num_initial_rollouts=2, entropy_tokens=8)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """(codec, folder, groups): a rollout of one prompt per dialogue, and its groups scored."""
    folder = build_calling_model(tmp_path_factory.mktemp("calling"))
    codec = codec_for(AutoTokenizer.from_pretrained(folder))
    engine_cfg = EngineConfig(dtype="float32", kv_cache_gib=0.1, max_num_seqs=16)
    engine = Engine(str(folder), engine_cfg, max_model_len=1000, seed=0)
    runner = ToolRunner({"python": start(), "search": EchoTool("search", "found")})
    messages = {question: [{"role": "user", "content": question}] for question in DIALOGUES}
    prompts = [Prompt(q, m, ["42"], "math", token_ids=tuple(codec.render_prompt(m))) for q, m in messages.items()]
    try:
        groups = rollout(prompts, engine, runner, codec, CFG, BRANCHING, seed=1)
        score_groups(groups, RewardConfig(bonus_tools=("python",)), tools=codec.tools, form=codec.format)
        yield codec, folder, groups
    finally:
        runner.close()
        engine.close()


def trajectories(parts) -> list:
    return [t for group in parts[2] for t in group.trajectories]


def test_the_model_calls_reads_and_answers(parts):
    _, _, (one, two, wrong) = parts
    for group, kinds in ((one, [None]), (two, [None, None]), (wrong, ["bad_json", None])):
        results = [None if kind else "42" for kind in kinds]
        assert any(
            [call.error_kind for call in t.tool_calls] == kinds
            and [call.result if call.executed else None for call in t.tool_calls] == results
            and t.stop_reason == StopReason.EOS
            for t in group.trajectories
        ), [t.text for t in group.trajectories]
    assert any(len(turn.tool_calls) == 2 for t in two.trajectories for turn in t.turns)
    assert any(t.parent_id for t in trajectories(parts))


def test_answers_earn_their_reward_and_malformed_calls_cost_it(parts):
    _, _, (one, two, wrong) = parts
    for t in [*one.trajectories, *two.trajectories]:
        if t.stop_reason == StopReason.EOS and not any(call.error_kind for call in t.tool_calls):
            assert (t.reward, t.reward_reason) == (1.1, "") or t.reward <= 0
    assert max(t.reward for t in [*one.trajectories, *two.trajectories]) == 1.1
    assert "malformed_call" in {t.reward_reason for t in wrong.trajectories}


def test_masked_tokens_are_what_the_template_writes_around_the_results(parts):
    codec = parts[0]
    for t in trajectories(parts):
        for turn in t.turns:
            between = t.token_ids[turn.end : turn.result_end]
            assert t.loss_mask[turn.start : turn.result_end] == [1] * (turn.end - turn.start) + [0] * len(between)
            if between:
                calls, last = turn.tool_calls, t.token_ids[turn.end - 1]
                after = codec._after_calls([call.tag for call in calls], [call.result for call in calls])
                ending = "" if last == codec.tokenizer.eos_token_id else codec.tokenizer.eos_token
                assert codec.tokenizer.decode(between) == ending + after


def test_logprobs_are_those_of_the_whole_response(parts):
    _, folder, groups = parts
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for group in groups:
        for t in group.trajectories:
            ids = torch.tensor([[*group.prompt.token_ids, *t.token_ids]])  # (1, P + T)
            with torch.no_grad():
                logprobs = model(ids).logits.log_softmax(-1)[0, len(group.prompt.token_ids) - 1 : -1]  # (T, V)
            ours, mask = torch.tensor(t.rollout_logprobs), torch.tensor(t.loss_mask, dtype=torch.bool)
            theirs = logprobs.gather(-1, torch.tensor(t.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(ours[mask], theirs[mask], atol=1e-3, rtol=0)


def test_a_trajectory_that_did_as_it_learnt_is_the_row_of_sft(parts):
    """SFT and RL make the same tokens of the same conversation, from the prompt's first to the answer's last."""
    codec, _, (one, two, _) = parts
    for group in (one, two):
        row = codec.render_conversation(conversation(group.prompt.prompt_id))
        whole = [[*group.prompt.token_ids, *t.token_ids] for t in group.trajectories]
        assert row.token_ids[:-1] in whole, json.dumps([t.text for t in group.trajectories])


def test_branches_share_everything_up_to_the_template_behind_the_results(parts):
    for group in parts[2]:
        by_id = {t.trajectory_id: t for t in group.trajectories}
        for child in (t for t in group.trajectories if t.parent_id is not None):
            parent = by_id[child.parent_id]
            assert child.fork_at in {turn.result_end for turn in parent.turns}
            assert child.token_ids[: child.fork_at] == parent.token_ids[: child.fork_at]
