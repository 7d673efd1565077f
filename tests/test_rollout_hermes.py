"""The rollout with calls in JSON, on scripted turns: what ends a turn, what the model reads, and what counts."""

import json
import threading
from dataclasses import replace

import pytest
from helpers.fakes import EchoTool
from helpers.families import HERMES_FAMILIES, SCHEMAS, hermes_codec
from helpers.rollout_checks import assert_children_fork_behind_results
from helpers.scripted_rollout import SHORT, play
from helpers.stateful import ForkedNotes, Notes

from arpo.log.dumps import read_dump
from arpo.metrics import rollout_metrics
from arpo.options import BranchingConfig
from arpo.protocol import HermesCodec
from arpo.protocol.schema import ToolSchema
from arpo.tools.base import ToolResult
from arpo.trajectory import Prompt, StopReason
from extras.viewer.groups import trajectory_view

ANSWER = "It is \\boxed{1}."
ONE = replace(SHORT, group_size=1, max_response_tokens=1500, max_result_tokens=400)


def block(name: str, argument: object) -> str:
    name_of_argument = {"python": "code", "search": "query"}.get(name, "x")
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {name_of_argument: argument}})}\n</tool_call>"


CALL = block("search", "q")


@pytest.fixture(scope="module")
def codec() -> HermesCodec:
    return hermes_codec("qwen2_5")


def asked(codec: HermesCodec, tools=None) -> list[Prompt]:
    messages = [{"role": "user", "content": "question"}]
    return [Prompt("p0", messages, ["1"], tools=tools, token_ids=tuple(codec.render_prompt(messages, tools)))]


def roll(codec: HermesCodec, *turns: str, cfg=ONE, tools=None, offered=None, **how):
    """The group of one prompt whose trajectories all sample these turns, the last one again and again."""
    script = how.pop("script", lambda _prompt, _path, turn: turns[min(turn, len(turns) - 1)])
    [group] = play(script, cfg=cfg, tools=tools, prompts=asked(codec, offered), codec=codec, **how)
    return group


def kinds(trajectory) -> list[tuple[str, str | None]]:
    return [(call.tag, call.error_kind) for call in trajectory.tool_calls]


@pytest.mark.parametrize("family", HERMES_FAMILIES)
def test_a_trajectory_is_the_whole_conversation_and_only_what_was_sampled_has_a_loss(family):
    codec = hermes_codec(family)
    turns = [f"I search. {CALL}", f"{block('python', 'print(1)')}\n{CALL}", ANSWER]
    [t] = roll(codec, *turns).trajectories
    tokenizer, eos = codec.tokenizer, codec.tokenizer.eos_token_id
    made, mask = [], []
    for text, calls in zip(turns, ([("search", "found")], [("python", "2"), ("search", "found")], []), strict=True):
        sampled = [*tokenizer.encode(text), eos]
        after = tokenizer.encode(codec._after_calls(*zip(*calls, strict=True))) if calls else []
        made, mask = [*made, *sampled, *after], [*mask, *[1] * len(sampled), *[0] * len(after)]
    assert t.stop_reason == StopReason.EOS
    assert t.token_ids == made and t.loss_mask == mask
    assert t.rollout_logprobs == [-0.5 * m for m in mask]
    assert kinds(t) == [("search", None), ("python", None), ("search", None)]
    assert [len(turn.tool_calls) for turn in t.turns] == [1, 2, 0]
    assert [by_model for _, by_model in t.segments] == [True, False, True, False, True]
    assert t.segments[0] == (turns[0], True) and "found" in t.segments[1][0]
    t.check()


def test_all_calls_of_a_turn_run_at_once_and_their_results_come_in_the_order_of_the_calls(codec):
    all_are_there = threading.Barrier(3, timeout=60)

    def slow(argument: str) -> ToolResult:
        return ToolResult(f"result of {argument}", ok=True)

    class Meeting(EchoTool):
        async def run(self, argument):
            import asyncio

            await asyncio.to_thread(all_are_there.wait)  # never together if one waited for another
            await asyncio.sleep(0.02 * (3 - int(argument)))
            return slow(argument)

    turn = "".join(block("search", str(i)) for i in (1, 2, 3))
    [t] = roll(codec, turn, ANSWER, tools=[Meeting("search"), EchoTool("python")]).trajectories
    assert [call.result for call in t.tool_calls] == [f"result of {i}" for i in (1, 2, 3)]
    text = t.segments[1][0]
    assert text.index("of 1") < text.index("of 2") < text.index("of 3")


def test_the_model_reads_what_is_wrong_and_goes_on(codec):
    turn = f'{CALL}<tool_call>{{"name": </tool_call>{block("clock", 1)}{block("python", 3)}<tool_call>{{"na'
    cfg = replace(ONE, max_tool_calls=9, max_response_tokens=2500, max_result_tokens=900)
    group = roll(codec, turn, ANSWER, cfg=cfg)
    [t] = group.trajectories
    assert kinds(t) == [
        ("search", None), ("unknown", "bad_json"), ("unknown", "unknown_tool"), ("python", "bad_arguments"),
        ("unknown", "unclosed_call"),
    ]  # fmt: skip
    assert [call.executed for call in t.tool_calls] == [True, False, False, False, False]
    read = t.segments[1][0]
    assert all(call.result in read for call in t.tool_calls) and "There are: search, python." in read
    assert t.stop_reason == StopReason.EOS
    values = rollout_metrics([group]).values()
    assert values["tools/all/calls"] == 1 and values["tools/all/not_run"] == 4 and values["tools/unknown/not_run"] == 3


def test_a_tool_that_the_prompt_does_not_offer_is_unknown_and_not_in_the_prompt(codec):
    [t] = roll(codec, block("python", "1"), ANSWER, offered=("search",)).trajectories
    assert kinds(t) == [("unknown", "unknown_tool")]
    [t] = roll(codec, CALL, ANSWER, offered=()).trajectories
    assert kinds(t) == [("unknown", "unknown_tool")]


def test_limits_hold_within_a_turn_too(codec):
    cfg = replace(ONE, max_tool_calls=3, max_calls_per_tool=("python=1",), max_result_tokens=600)
    code = block("python", "1")
    [t] = roll(codec, code + code + CALL, code + CALL, CALL, cfg=cfg).trajectories
    assert [call.tag for call in t.tool_calls] == ["python", "python", "search", "python", "search"]
    assert [call.error_kind for call in t.tool_calls] == [None, "limit", None, "limit", "limit"]
    assert "1 python calls" in t.tool_calls[1].result and "3 tool calls" in t.tool_calls[3].result
    assert t.stop_reason == StopReason.TOOL_LIMIT and not t.turns[-1].tool_calls


def test_the_results_of_a_turn_share_one_budget_and_leave_room_for_an_answer(codec):
    long = [EchoTool("search", "x y " * 900), EchoTool("python", "2")]
    cfg = replace(ONE, max_response_tokens=700, max_result_tokens=300, answer_reserve_tokens=100)
    [t] = roll(codec, CALL + block("python", "1") + CALL, ANSWER, cfg=cfg, tools=long).trajectories
    first, second = t.turns
    assert first.result_end - first.end <= 300 and second.start <= 600 and t.stop_reason == StopReason.EOS
    assert [call.result.endswith("[... result truncated]") for call in t.tool_calls] == [True, False, True]
    [t] = roll(codec, CALL * 3, ANSWER, cfg=replace(cfg, max_result_tokens=60), tools=long).trajectories
    assert t.stop_reason == StopReason.LENGTH and [call.result for call in t.tool_calls] == ["", "", ""]


def test_a_turn_that_is_cut_off_is_no_call(codec):
    [t] = roll(codec, "word " * 900 + CALL, cfg=replace(ONE, max_response_tokens=300)).trajectories
    assert t.stop_reason == StopReason.LENGTH and not t.tool_calls and len(t.token_ids) == 300


def test_one_failure_of_ours_drops_the_trajectory_once_all_calls_are_back(codec):
    def broken(_argument: str) -> ToolResult:
        return ToolResult("down", ok=False, error_kind="backend", infra_error=True)

    tools = [EchoTool("search", broken), EchoTool("python", "2", jitter_s=0.05)]
    [t] = roll(codec, CALL + block("python", "1"), ANSWER, tools=tools).trajectories
    assert t.stop_reason == StopReason.ERROR and kinds(t) == [("search", "backend"), ("python", None)]
    assert len(t.turns) == 1 and t.turns[0].result_end == t.turns[0].end == len(t.token_ids)


def test_branches_fork_behind_what_the_template_wrote(codec):
    def script(_prompt, path, turn):
        return (CALL, 0.1) if turn == 0 else (f"Branch {path}. {ANSWER}", 5.0)

    branching = BranchingConfig(num_initial_rollouts=2, threshold=0.5, weight=1.0)
    group = roll(codec, script=script, cfg=replace(ONE, group_size=4), branching=branching)
    assert_children_fork_behind_results([group])
    root, child = group.trajectories[0], next(t for t in group.trajectories if t.parent_id)
    shared = codec.tokenizer.decode(child.token_ids[: child.fork_at])
    assert shared.endswith("</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert child.turns[0].inherited and child.tool_calls == root.tool_calls and not child.own_tool_calls


def test_a_tool_of_several_arguments_gets_them_as_json(codec):
    parameters = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}
    other = HermesCodec(codec.tokenizer, tools=[*SCHEMAS, ToolSchema("add", "Adds.", parameters)])
    call = '<tool_call>{"name": "add", "arguments": {"b": 2, "a": 1}}</tool_call>'
    tool = EchoTool("add", "3")
    [t] = roll(other, call, ANSWER, tools=[tool]).trajectories
    assert tool.arguments == [t.tool_calls[0].argument] == ['{"a": 1, "b": 2}']


def test_dumps_of_several_calls_can_be_read(codec, tmp_path):
    def read_back(row: dict):
        (tmp_path / "dump.jsonl").write_text(json.dumps(row) + "\n")
        [(_, trajectory, _)] = read_dump(tmp_path / "dump.jsonl")
        return trajectory

    [t] = roll(codec, CALL + block("python", "1"), ANSWER).trajectories
    row = json.loads(json.dumps(t.to_dict()))
    assert read_back(row).tool_calls == t.tool_calls
    view = trajectory_view(t)["turns"]
    assert [call["tag"] for call in view[0]["tool_calls"]] == ["search", "python"] and view[1]["tool_calls"] == []
    assert "found" in view[0]["result_text"] and "result" not in view[0]["tool_calls"][0]


@pytest.mark.parametrize("kind", [Notes, ForkedNotes])
def test_several_calls_of_a_turn_act_on_a_session_in_their_order_and_branches_have_its_state(codec, kind):
    def script(_prompt: str, path: str, turn: int) -> str:
        return "".join(block("search", f"{turn}{letter}@{path}") for letter in "abc") if turn < 2 else ANSWER

    cfg = replace(ONE, group_size=6, max_tool_calls=9, max_response_tokens=4000, max_result_tokens=900)
    branching = BranchingConfig(selector="random", base=1.0, num_initial_rollouts=2, entropy_tokens=4)
    tools = [kind(jitter_s=0.01), EchoTool("python")]
    group = roll(codec, script=script, cfg=cfg, branching=branching, tools=tools)
    assert any(t.parent_id for t in group.trajectories)
    for t in group.trajectories:
        arguments = [call.argument for call in t.tool_calls]
        assert len(arguments) == 6  # each reads what it had read without a parent
        assert [call.result for call in t.tool_calls] == [" ".join(arguments[: n + 1]) for n in range(6)]
