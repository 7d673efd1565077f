"""Turns with several calls in JSON, in a real browser: each call is told of, and what the model read is shown once."""

import json
from dataclasses import replace

from helpers.browser import needs_browser
from helpers.fakes import EchoTool
from helpers.families import hermes_codec
from helpers.scripted_rollout import LONG, play
from helpers.viewer_pages import READY, page_of

from arpo.config.rewards import RewardConfig
from arpo.rewards import score_groups
from arpo.tools.base import ToolResult
from arpo.trajectory import Group, Prompt

pytestmark = needs_browser


def calls(*codes: str) -> str:
    blocks = [json.dumps({"name": "python", "arguments": {"code": code}}) for code in codes]
    return "".join(f"<tool_call>\n{block}\n</tool_call>" for block in blocks)


def played() -> Group:
    codec, messages = hermes_codec("qwen2_5"), [{"role": "user", "content": "question"}]
    turns = [calls("a", "b") + "<tool_call>{</tool_call>", "It is \\boxed{1}."]
    tool = EchoTool("python", lambda code: ToolResult(f"<b>result</b> of {code}", ok=code == "a", error_kind="error"))
    prompts = [Prompt("p0", messages, ["1"], token_ids=tuple(codec.render_prompt(messages)))]
    cfg = replace(LONG, group_size=1)
    [group] = play(lambda _prompt, _path, turn: turns[turn], codec=codec, tools=[tool], cfg=cfg, prompts=prompts)
    score_groups([group], RewardConfig(), tools=codec.tools, form="hermes")
    group.trajectories[0].advantage = 0.0
    return group


def test_every_call_of_a_turn_is_told_of_and_what_was_read_is_shown_once(browser, tmp_path):
    browser.open(page_of(tmp_path, played()), ready=READY)
    lines = browser.js("[...document.querySelectorAll('#turn-0 .masked.small')].map(line => line.textContent)")
    told = [line.split()[:2] for line in lines]
    assert told == [["python", "ok"], ["python", "error"], ["unknown", "bad_json,"]]
    assert "tokens, no loss" in lines[2] and "no loss" not in lines[0] + lines[1]
    [read] = browser.js("[...document.querySelectorAll('#turn-0 pre.masked')].map(pre => pre.textContent)")
    assert read.count("<tool_response>") == 3 and read.count("<b>result</b> of") == 2 and "not valid JSON" in read
    cells = browser.js("[...document.querySelectorAll('#tree .tool title')].map(title => title.textContent)")
    assert len(cells) == 1 and cells[0].count("python: ") == 2 and "unknown: bad_json, not run" in cells[0]
    assert "3 tool calls, 2 failed" in browser.js("document.getElementById('facts').textContent")
