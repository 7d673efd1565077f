r"""Calls as JSON in <tool_call> blocks, one or more to a turn: the form of Hermes, Qwen2.5 and Qwen3.

    <think> ... </think>
    <tool_call>
    {"name": "search", "arguments": {"query": "Paris"}}
    </tool_call>

A turn ends with the model's end token. A turn without a block is the final answer. What follows a turn with calls, that
is their results and the begin of the next turn, is the chat template's to write: see template_codec.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

from arpo.protocol.calls import UNKNOWN, Call, name_of_call, read_call
from arpo.protocol.form import Form
from arpo.protocol.format_rules import FormatRules, Segments, has_unpaired_think, last_turn
from arpo.protocol.messages import BadRow, Conversation, parse_turns, whole_call
from arpo.protocol.schema import ToolSchema, read_json
from arpo.protocol.template_codec import QUESTION, TemplateCodec

A_CALL = '{"name": the name of a tool, "arguments": {...}}'
UNCLOSED_CALL = f"Error: the call is cut off. Write {A_CALL} and close the tool_call tag."

BLOCKS = re.compile(r"<think>.*?(?:</think>|\Z)|<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
"""Thoughts, and calls with groups 1 (what is in them) and 2 (the closing tag), one after the other."""
RESPONSE, END = "<tool_response>", "</tool_response>"
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_ERROR = re.compile(r'\s*(?:\{"name": "[^"]*", "content": ")?Error')  # some templates write results as JSON too


def call_bodies(text: str) -> list[tuple[str, bool]]:
    """Return (text, whether it is closed) of a turn's <tool_call> blocks. What a thought contains is none.

    >>> call_bodies("<think>a <tool_call></think><tool_call>{}</tool_call><tool_call>{")
    [('{}', True), ('{', False)]
    """
    return [(match[1], bool(match[2])) for match in BLOCKS.finditer(text) if match[1] is not None]


class HermesCodec(TemplateCodec):
    """Codec for models whose chat template lists tools, and has calls as JSON in <tool_call> blocks."""

    format = "hermes"
    call_form = "calls as <tool_call> JSON </tool_call>"
    tools_mark = "<tools>"
    reserved = ("think", "tool_call", "tool_response")

    @classmethod
    def parse_calls(cls, text: str, offered: Mapping[str, ToolSchema]) -> list[Call]:
        return [cls.parse_body(body, is_closed, offered) for body, is_closed in call_bodies(text)]

    @staticmethod
    def parse_body(body: str, is_closed: bool, offered: Mapping[str, ToolSchema]) -> Call:
        """Parse one block. Whole JSON whose closing tag is missing is a call, as vLLM's parser has it too."""
        if not is_closed:
            try:
                read_json(body)
            except ValueError:
                return Call(body.strip(), "unclosed_call", UNCLOSED_CALL, UNKNOWN)
        return read_call(body, offered, "arguments", A_CALL)

    def _with_calls(self, text: str, message: dict[str, Any]) -> str:
        asked = self._template([QUESTION], generation=False)
        alone, behind = (
            self._template([QUESTION, {**message, "content": said}], generation=False).removeprefix(asked)
            for said in ("", text)
        )
        opening = alone.index("<tool_call>")
        calls = alone[opening : alone.rindex(self.tokenizer.eos_token)]
        before = behind.rpartition(calls)[0]
        space = before[len(before.rstrip()) :]  # one line break of Qwen3's template, two of Qwen3.5's
        if text:
            return text.rstrip() + space + calls
        # Bielik's template writes a line break between its header and a call without a text: so does the model
        header = self._template([QUESTION], generation=True).removeprefix(asked)
        lead = alone[len(header) : opening] if alone.startswith(header) else ""
        return ("" if lead.strip() else lead.removeprefix(self._before_answer)) + calls


class HermesRules(FormatRules):
    """Besides what `FormatRules` says: every block is closed, holds an object with a name and arguments, and was
    answered; no tag of results is from the model's own pen."""

    # One lazy span over all results of a turn: a pattern that repeated per result could part them in ever more ways.
    results = re.compile(
        r"(?<=</tool_call>)\s*+(?:user|tool)?\s*+<tool_response>\n.*?\n</tool_response>\s*assistant\n", re.DOTALL
    )

    def graded_text(self, segments: Segments) -> str:
        return BLOCKS.sub("", last_turn(segments))

    def turn_error(self, text: str, has_result: bool, tools: Sequence[str]) -> str:
        outside, bodies = BLOCKS.sub("", text), call_bodies(text)
        thoughts = [match[0] for match in BLOCKS.finditer(text) if match[1] is None]
        if has_unpaired_think(outside, thoughts):
            return "unpaired_think"
        if re.search("</?tool_response>", outside):
            return "model_wrote_result"
        if "</tool_call>" in outside:
            return "unopened_call"
        if not all(is_closed for _, is_closed in bodies):
            return "unclosed_call"
        if any(self.name_of(body) is None for body, _ in bodies):
            return "malformed_call"
        return "call_without_result" if bodies and not has_result else ""

    def answered_calls(self, segments: Segments, tools: Sequence[str] = ()) -> set[str]:
        answered = set()
        for (text, by_model), (results, _) in pairwise(segments):
            if by_model:
                for (body, _), result in zip(call_bodies(text), _RESULT.findall(results), strict=False):
                    if (name := self.name_of(body)) and not _ERROR.match(result):
                        answered.add(name)
        return answered

    @staticmethod
    def name_of(body: str) -> str | None:
        """Return the name of the tool that a well-formed block calls; None for any other."""
        return name_of_call(body, "arguments")


def names_in(text: str) -> list[str]:
    """Return the names of the calls in blocks of a text; "unknown" for a malformed one."""
    names = []
    for body, _ in call_bodies(text):
        try:
            names.append(str(json.loads(body)["name"]))
        except (ValueError, KeyError, TypeError):
            names.append("unknown")
    return names


def parse_row(row: dict, names_of: Callable[[str], list[str]] = names_in) -> Conversation:
    """Parse an SFT conversation of any style, whose calls stay what they are: fields, or text in blocks. Raises BadRow.

    A row may bring its own functions in `tools` (OpenAI's form or bare, as a list or as its JSON); else those of
    data.tools are listed, unless the system message lists some itself. `names_of` returns the names of the calls in a
    text.
    """
    messages: list[dict[str, Any]] = []
    names, ids = [], []  # of the newest calls
    for role, group in groupby(parse_turns(row, _turn), key=lambda message: message["role"]):
        turns = list(group)
        found = [message.pop("ids", []) for message in turns]
        if role == "assistant":
            calls = turns[-1].get("tool_calls")
            names = [call["name"] for call in calls] if calls else names_of(turns[-1]["content"])
            ids = found[-1]
        elif role == "tool":
            turns = _in_order(turns, [one for [one] in found], names, ids)
        messages += turns
    tools = row.get("tools")
    return Conversation(messages, _functions(row.get("functions") if tools is None else tools))


def _in_order(
    results: list[dict[str, Any]], given: list[str | None], names: list[str], ids: list[str | None]
) -> list[dict[str, Any]]:
    """Return the results of a turn's calls, with their names, in the order of the calls, as those of a rollout are.

    `given` are the ids of calls that the results name, `names` and `ids` those of the calls. Raises BadRow where there
    is not one result for each call.
    """
    if len(results) != len(names):
        raise BadRow(f"{len(names)} calls have {len(results)} results; each call has one")
    for key, found, wanted in (
        ("tool_call_id", given, ids),
        ("name", [result.get("name") for result in results], names),
    ):
        if None in found or None in wanted or "unknown" in wanted or len({*wanted}) < len(wanted) or not wanted:
            continue
        if sorted(found) != sorted(wanted):
            raise BadRow(f"{key} of the results is {found}, but the calls have {wanted}; each call has one result")
        results = [results[found.index(one)] for one in wanted]
        break
    for name, result in zip(names, results, strict=True):
        result.setdefault("name", name)
    return results


def _turn(message: dict[str, Any]) -> list[dict[str, Any]]:
    if calls := message.get("tool_calls"):
        ids = [str(call["id"]) if call.get("id") else None for call in calls if isinstance(call, dict)]
        return [{**message, "tool_calls": [whole_call(call) for call in calls], "ids": ids}]
    if message["role"] != "tool":
        return [message]
    call_id = message.pop("tool_call_id", None)
    ids = [str(call_id) if call_id else None]
    return [{**message, "ids": ids, "content": text} for text in _results(message["content"])]


def _results(text: str) -> list[str]:
    """Return the results of a message that has them in <tool_response> blocks, else its text alone."""
    if not (text.strip().startswith(RESPONSE) and text.strip().endswith(END)):
        return [text]
    return [part.partition(END)[0].strip("\n") for part in text.split(RESPONSE)[1:]]


def _functions(tools: object) -> list[dict] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            return None  # names, as questions have them
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        return None
    if not all(isinstance(tool.get("function", tool).get("name"), str) for tool in tools):
        raise BadRow("an entry of tools has no name")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


FORM = Form(HermesCodec, HermesRules(), parse_row)
