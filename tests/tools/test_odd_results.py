"""One odd result of a tool of the user's costs its trajectory at most, and never the run: not at once, and not at the
first dump. The kinds are of public reports, which the cases name."""

import gzip
import json
import math

import numpy as np
import pytest
import torch
from helpers.fakes import EchoTool
from helpers.families import hermes_codec
from helpers.models import build_tiny_tokenizer
from helpers.scripted_rollout import CODEC, call_then_answer, play

from arpo.log.dumps import DumpWriter, read_dump
from arpo.protocol import TagsCodec
from arpo.protocol.calls import TRUNCATION_MARK
from arpo.tools.interface import ToolResult, plain
from arpo.trajectory import StopReason, ToolCall


def returning(result: object) -> EchoTool:
    return EchoTool("search", lambda _: result)


def dumped(folder, groups) -> list[dict]:
    said = []
    writer = DumpWriter(folder, say=said.append)
    writer.write(1, groups, "step")
    writer.close()
    assert not said
    [file] = folder.glob("step_*")
    return [json.loads(line, parse_constant=lambda word: pytest.fail(word)) for line in gzip.open(file, "rt")]


FINE = [
    # openai/tiktoken #82, aider #3693: half of a character, of JSON, a PDF or a name of a file
    (ToolResult("half \ud83d of it", ok=True), "half \ufffd of it", {}),
    (ToolResult("\udcff", ok=True), "\ufffd", {}),
    (ToolResult("pair \ud83d\ude00", ok=True), "pair 😀", {}),  # agent-zero #1773: both halves, decoded one by one
    (ToolResult(np.str_("text"), ok=np.bool_(True), seconds=np.float32(1)), "text", {}),
    # verl PR #6167, Agent-R1 #83, livekit/agents PR #2855: NumPy in what is dumped
    (ToolResult("t", ok=True, info={"score": np.float32(0.5), "n": np.int64(2)}), "t", {"score": 0.5, "n": 2}),
    (ToolResult("t", ok=True, info={"a": np.arange(2), "b": torch.ones(1)}), "t", {"a": [0, 1], "b": [1.0]}),
    (ToolResult("t", ok=True, info={"a": {3}, "b": b"\xff", "c": "\ud83d", 1: None}), "t",
     {"a": [3], "b": "\ufffd", "c": "\ufffd", "1": None}),
    (ToolResult("t", ok=True, info=None), "t", {}),
    (ToolResult("", ok=False, error_kind="late\n\ud83d" + "x" * 99, cached=np.bool_(False)), "", {}),
]  # fmt: skip


@pytest.mark.parametrize("result, text, info", FINE)
def test_a_result_that_has_a_plain_form_is_read_and_dumped(tmp_path, result, text, info):
    groups = play(call_then_answer, tools=[returning(result)])
    for row in dumped(tmp_path, groups):
        [call] = row["turns"][0]["tool_calls"]
        assert (row["stop_reason"], call["result"], call["info"]) == ("eos", text, info)
        assert call["error_kind"] is None or len(call["error_kind"]) == 60
    assert len(list(read_dump(next(tmp_path.glob("step_*"))))) == 4


ODD = [
    ToolResult(None, ok=True),  # nodetool PR #3766: a page without a body
    ToolResult(b"text", ok=True),  # swarmauri-sdk #399, fastmcp #3829
    ToolResult({"a": 1}, ok=True),  # hermes-agent PR #19877
    ToolResult(["text"], ok=True),  # hermes-agent #28639
    ToolResult("t", ok=True, info={"a": object()}),
    ToolResult("t", ok=True, info={"a": math.nan}),
    ToolResult("t", ok=True, info={(1, 2): 3}),
    ToolResult("t", ok=True, info=[1]),
    ToolResult("t", ok=True, seconds=math.inf),
    ToolResult("t", ok=np.ones(2)),
    None,  # a branch that forgot its return
]


@pytest.mark.parametrize("result", ODD)
def test_a_result_that_has_none_costs_its_trajectory(tmp_path, caplog, result):
    groups = play(call_then_answer, tools=[returning(result)])
    for row in dumped(tmp_path, groups):
        [call] = row["turns"][0]["tool_calls"]
        assert (row["stop_reason"], call["error_kind"], call["executed"]) == (StopReason.ERROR, "exception", True)
    assert len(caplog.records) == 1 and "its trajectory ends" in caplog.text


def test_a_call_is_paid_by_its_price_and_other_fields_stay():
    result = ToolResult("t", ok=True, cost=0.25, replayed=2, infra_error=True)
    assert plain(result) == result


def test_what_a_dump_cannot_hold_is_a_lost_dump_and_no_end(tmp_path):
    """The second fence: a part of a trajectory that no door has seen."""
    [group] = play(call_then_answer)
    group.trajectories[1].reward_reason = "\ud83d"
    said = []
    writer = DumpWriter(tmp_path, say=said.append)
    writer.write(1, [group], "step")
    writer.close()
    assert writer.num_lost == 1 and "cannot write the trajectory dump (UnicodeEncodeError" in said[0]
    assert not list(tmp_path.iterdir())


# ---- megabytes


class Counting:
    """A tokenizer, and the number of characters that it was asked to tokenise."""

    def __init__(self, tokenizer):
        self.tokenizer, self.num_chars = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def encode(self, text, **options):
        self.num_chars += len(text)
        return self.tokenizer.encode(text, **options)


@pytest.mark.parametrize("make", [TagsCodec, lambda tokenizer: CODEC])
@pytest.mark.parametrize(
    "text", ["word " * 400_000, "x" * 2_000_000, "é\n" * 1_000_000, "<result>" * 250_000], ids=lambda text: text[:8]
)
def test_a_huge_result_is_cut_before_it_is_tokenised(make, text):
    """firecrawl PR #3707, Bamboo-agent PR #108, Context-Gateway PR #44: tokenised whole, on the thread of all else."""
    codec = make(build_tiny_tokenizer())
    original, codec.tokenizer = codec.tokenizer, Counting(codec.tokenizer)
    try:
        cut, token_ids = codec.encode_result(text, 64)
        num_chars = codec.tokenizer.num_chars
    finally:
        codec.tokenizer = original
    assert num_chars < 100_000 and len(token_ids) <= 64 and cut.endswith(TRUNCATION_MARK)
    assert (cut, token_ids) == codec.encode_result(text[:3_000], 64)  # as a text that is cut afterwards


def test_a_text_that_just_fits_is_whole_however_many_characters_its_tokens_have():
    codec = TagsCodec(build_tiny_tokenizer())
    for text in ("word " * 5_000, " " * 20_000, "the of and " * 3_000):
        num_tokens = len(codec.encode(f" <result>\n{text}\n</result>"))
        shown, token_ids = codec.encode_result(text, num_tokens)
        assert shown == text and len(token_ids) == num_tokens
        shown, _ = codec.encode_result(text, num_tokens - 1)
        assert shown.endswith(TRUNCATION_MARK)


def test_megabytes_of_a_tool_do_not_hold_up_a_rollout(tmp_path):
    [group] = play(call_then_answer, tools=[returning(ToolResult("word " * 2_000_000, ok=True))])
    assert {t.stop_reason for t in group.trajectories} == {StopReason.EOS}
    assert all(len(t.tool_calls[0].result) < 300 for t in group.trajectories)
    assert all(len(json.dumps(row)) < 20_000 for row in dumped(tmp_path, [group]))


# ---- several calls


def test_results_of_several_calls_are_cut_in_every_form():
    codec = hermes_codec("qwen2_5")
    calls = [ToolCall("search", "q", text, ok=True) for text in ("short", "\ud83d " + "word " * 400_000)]
    texts, token_ids = codec.encode_results(calls, 120, last_token=codec.tokenizer.eos_token_id)
    assert texts[0] == "short" and texts[1].startswith("\ufffd word") and texts[1].endswith(TRUNCATION_MARK)
    assert len(token_ids) <= 120
