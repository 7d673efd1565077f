"""The rollout with calls in Llama's JSON, on scripted turns: one call per turn, and results as turns of ipython."""

import json
from dataclasses import replace

import pytest
from helpers.families import dialogue, llama_codec
from helpers.scripted_rollout import SHORT, play

from arpo.config.rewards import RewardConfig
from arpo.options import BranchingConfig
from arpo.rewards import score_groups
from arpo.trajectory import Prompt, StopReason
from extras.llama import A_CALL, LlamaCodec
from extras.viewer.groups import trajectory_view

ANSWER = "It is \\boxed{1}."
ONE = replace(SHORT, group_size=1, max_response_tokens=1500, max_result_tokens=400)
CALL, CODE = (
    json.dumps({"name": name, "parameters": parameters})
    for name, parameters in (("search", {"query": "q"}), ("python", {"code": "print(1)"}))
)


@pytest.fixture(scope="module")
def codec() -> LlamaCodec:
    return llama_codec()


def roll(codec: LlamaCodec, *turns: str, cfg=ONE, **how):
    messages = dialogue("u:question")
    prompts = [Prompt("p0", messages, ["1"], "math", token_ids=tuple(codec.render_prompt(messages)))]
    script = how.pop("script", lambda _prompt, _path, turn: turns[min(turn, len(turns) - 1)])
    [group] = play(script, cfg=cfg, prompts=prompts, codec=codec, **how)
    score_groups([group], RewardConfig(bonus_tools=("search",)), tools=codec.tools, form=codec.format)
    return group


def test_a_trajectory_is_the_row_that_sft_makes_of_it(codec):
    turns = [f"<think>\nwhy\n</think>\n\n{CALL}", CODE, ANSWER]
    group = roll(codec, *turns)
    [t] = group.trajectories
    said = dialogue("u:question", f"a:{turns[0]}", "t:found", f"a:{CODE}", "t:2", f"a:{ANSWER}")
    row = codec.render_conversation(said)
    assert [*group.prompt.token_ids, *t.token_ids] == row.token_ids
    assert [0] * len(group.prompt.token_ids) + t.loss_mask == row.loss_mask
    assert t.rollout_logprobs == [-0.5 * m for m in t.loss_mask]
    assert [(call.tag, call.result) for call in t.tool_calls] == [("search", "found"), ("python", "2")]
    assert (t.stop_reason, t.reward, t.reward_reason) == (StopReason.EOS, 1.1, "")
    t.check()
    view = trajectory_view(t)["turns"]
    assert [call["tag"] for call in view[0]["tool_calls"]] == ["search"] and '"found"' in view[0]["result_text"]


def test_the_model_reads_what_is_wrong_and_goes_on(codec):
    turns = [f"{CALL}; {CODE}", CALL.replace("search", "find"), CALL.replace("query", "x"), CALL, ANSWER]
    [t] = roll(codec, *turns, cfg=replace(ONE, max_tool_calls=9, max_response_tokens=4000)).trajectories
    assert [(call.tag, call.error_kind) for call in t.tool_calls] == [
        ("unknown", "bad_json"), ("unknown", "unknown_tool"), ("search", "bad_arguments"), ("search", None),
    ]  # fmt: skip
    assert A_CALL in t.tool_calls[0].result and json.dumps(t.tool_calls[0].result) in t.segments[1][0]
    assert (t.stop_reason, t.reward, t.reward_reason) == (StopReason.EOS, -1.0, "malformed_call")


def test_the_limit_of_calls_holds(codec):
    [t] = roll(codec, CALL, cfg=replace(ONE, max_tool_calls=2)).trajectories
    assert [call.error_kind for call in t.tool_calls] == [None, None, "limit"]
    assert t.stop_reason == StopReason.TOOL_LIMIT and t.reward_reason == "missing_answer"


def test_branches_fork_behind_what_the_template_wrote(codec):
    branching = BranchingConfig(selector="random", base=1.0, num_initial_rollouts=2, entropy_tokens=4)
    script = lambda _prompt, path, turn: CALL if turn == 0 else f"Branch {path}. {ANSWER}"  # noqa: E731
    group = roll(codec, script=script, cfg=replace(ONE, group_size=4), branching=branching)
    by_id = {t.trajectory_id: t for t in group.trajectories}
    children = [t for t in group.trajectories if t.parent_id]
    assert len(children) == 2
    for child in children:
        parent = by_id[child.parent_id]
        shared = parent.token_ids[: child.fork_at]
        assert child.fork_at == parent.turns[0].result_end and child.token_ids[: child.fork_at] == shared
        assert codec.tokenizer.decode(shared).endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")
