"""Calls in JSON on a real engine, with real Python calls, by a tiny model that has learnt to call, well and wrongly."""

from dataclasses import replace

import pytest
from helpers.calling_model import DIALOGUES, ERROR, LLAMA_ERROR, build_calling_model, codec_for, conversation
from helpers.fakes import EchoTool
from helpers.python_tools import start
from helpers.rollout_checks import assert_children_fork_behind_results, assert_rollout_logprobs, teacher_forced
from transformers import AutoTokenizer

from arpo.config.rewards import RewardConfig
from arpo.config.sections import EngineConfig
from arpo.engine import Engine
from arpo.options import BranchingConfig, RolloutConfig
from arpo.rewards import score_groups
from arpo.sampling.sampler import rollout
from arpo.tools.base import ToolRunner
from arpo.trajectory import Prompt, StopReason

pytestmark = pytest.mark.slow
CFG = RolloutConfig(group_size=4, max_response_tokens=400, max_tool_calls=3, answer_reserve_tokens=40)
BRANCHING = BranchingConfig(selector="random", base=0.5, num_initial_rollouts=2, entropy_tokens=8)


@pytest.fixture(scope="module", params=["qwen3", "llama3_1"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def parts(tmp_path_factory, family):
    """(codec, folder, sampled, greedy): two rollouts of one prompt per dialogue, and their groups scored."""
    folder = build_calling_model(tmp_path_factory.mktemp("calling"), family=family)
    codec = codec_for(AutoTokenizer.from_pretrained(folder))
    engine_cfg = EngineConfig(dtype="float32", kv_cache_gib=0.1, max_num_seqs=16)
    engine = Engine(str(folder), engine_cfg, max_model_len=1200, seed=0)
    runner = ToolRunner({"python": start(), "search": EchoTool("search", "found")})
    messages = {question: [{"role": "user", "content": question}] for question in DIALOGUES}
    prompts = [Prompt(q, m, ["42"], "math", token_ids=tuple(codec.render_prompt(m))) for q, m in messages.items()]
    try:
        sampled = rollout(prompts, engine, runner, codec, CFG, BRANCHING, seed=1)
        alone = BranchingConfig(selector="none", num_initial_rollouts=1)
        greedy = rollout(prompts, engine, runner, codec, replace(CFG, temperature=0.0, group_size=1), alone, seed=1)
        score_groups([*sampled, *greedy], RewardConfig(bonus_tools=("python",)), tools=codec.tools, form=codec.format)
        yield codec, folder, sampled, greedy
    finally:
        runner.close()
        engine.close()


def test_the_model_calls_reads_and_answers(parts, family):
    error, turns_of_two = (LLAMA_ERROR, [1, 1, 0]) if family == "llama3_1" else (ERROR, [2, 0])
    [one], [two], [wrong] = [group.trajectories for group in parts[3]]
    assert [[(c.error_kind, c.result) for c in t.tool_calls] for t in (one, two, wrong)] == [
        [(None, "42")], [(None, "42")] * 2, [("bad_json", error), (None, "42")],
    ]  # fmt: skip
    assert [len(turn.tool_calls) for turn in two.turns] == turns_of_two and len(wrong.turns) == 3
    assert {t.stop_reason for t in (one, two, wrong)} == {StopReason.EOS}
    assert [(t.reward, t.reward_reason) for t in (one, two, wrong)] == [(1.1, ""), (1.1, ""), (-1.0, "malformed_call")]


def test_greedy_trajectories_are_the_rows_of_sft(parts, family):
    """SFT and RL make the same tokens of the same conversation, from the prompt's first to the answer's last."""
    codec = parts[0]
    for group in parts[3]:
        row = codec.render_conversation(conversation(group.prompt.prompt_id, family))
        [t] = group.trajectories
        end = len(row.loss_mask) - row.loss_mask[::-1].index(1)
        assert [*group.prompt.token_ids, *t.token_ids] == row.token_ids[:end]
        assert [0] * len(group.prompt.token_ids) + t.loss_mask == row.loss_mask[:end]


def test_logprobs_are_those_of_the_whole_response(parts):
    _, folder, groups, _ = parts
    for t, logprobs in teacher_forced(folder, groups):
        assert_rollout_logprobs(t, logprobs, atol=1e-3)


def test_branches_share_everything_up_to_the_template_behind_the_results(parts):
    assert_children_fork_behind_results(parts[2])
