r"""Calls as JSON in <tool_call> blocks, one or more to a turn: the form of Hermes, Qwen2.5 and Qwen3.

    <think> ... </think>
    <tool_call>
    {"name": "search", "arguments": {"query": "Paris"}}
    </tool_call>

A turn ends with the model's end token. A turn without a block is the final answer. After a turn with calls the chat
template writes the results and the start of the next turn: see template_codec.py.
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
from arpo.protocol.messages import BadRow, Conversation, json_of, parse_call_object, parse_turns
from arpo.protocol.schema import ToolSchema, read_json
from arpo.protocol.template_codec import QUESTION, TemplateCodec

A_CALL = '{"name": the name of a tool, "arguments": {...}}'
UNCLOSED_CALL = f"Error: the call is cut off. Write {A_CALL} and close the tool_call tag."

BLOCKS = re.compile(r"<think>.*?(?:</think>|\Z)|<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
"""A thought, or a call with groups 1 (its content) and 2 (the closing tag)."""
RESPONSE = "<tool_response>"
END = "</tool_response>"
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_ERROR = re.compile(r'\s*(?:\{"name": "[^"]*", "content": ")?Error')  # some templates write results as JSON too


def call_bodies(text: str) -> list[tuple[str, bool]]:
    """Return (content, is closed) of each <tool_call> block of a turn. Blocks within thoughts do not count.

    >>> call_bodies("<think>a <tool_call></think><tool_call>{}</tool_call><tool_call>{")
    [('{}', True), ('{', False)]
    """
    return [(match[1], bool(match[2])) for match in BLOCKS.finditer(text) if match[1] is not None]


class HermesCodec(TemplateCodec):
    """Codec for chat templates that list tools and write calls as JSON in <tool_call> blocks."""

    format = "hermes"
    call_form = "calls as <tool_call> JSON </tool_call>"
    tools_mark = "<tools>"
    reserved = ("think", "tool_call", "tool_response")

    @classmethod
    def parse_calls(cls, text: str, offered: Mapping[str, ToolSchema]) -> list[Call]:
        return [cls.parse_body(body, is_closed, offered) for body, is_closed in call_bodies(text)]

    @staticmethod
    def parse_body(body: str, is_closed: bool, offered: Mapping[str, ToolSchema]) -> Call:
        """Parse one block. Complete JSON without a closing tag is a call, as for vLLM's parser."""
        if not is_closed:
            try:
                read_json(body)
            except ValueError:
                return Call(body.strip(), "unclosed_call", UNCLOSED_CALL, UNKNOWN)
        return read_call(body, offered, "arguments", A_CALL)

    def _with_calls(self, text: str, message: dict[str, Any]) -> str:
        asked = self._template([QUESTION], generation=False)
        without_text = self._template([QUESTION, {**message, "content": ""}], generation=False).removeprefix(asked)
        start = without_text.index("<tool_call>")
        calls = without_text[start : without_text.rindex(self.tokenizer.eos_token)]
        if text:
            with_text = self._template([QUESTION, {**message, "content": text}], generation=False).removeprefix(asked)
            before, _, _ = with_text.rpartition(calls)
            space = before[len(before.rstrip()) :]  # Qwen3's template writes one line break, Qwen3.5's two
            return text.rstrip() + space + calls
        # Bielik's template writes a line break between its header and a call without a text. So the model writes it.
        header = self._template([QUESTION], generation=True).removeprefix(asked)
        lead = without_text[len(header) : start] if without_text.startswith(header) else ""
        if lead.strip():
            return calls
        return lead.removeprefix(self._before_answer) + calls


class HermesRules(FormatRules):
    """Rules of calls in JSON.

    Every block is closed, contains an object with a name and arguments, and has a result. The model writes no tag of
    results. `FormatRules` has the other rules.
    """

    # One lazy span over all results of a turn. With a repetition per result, backtracking would take exponential time.
    results = re.compile(
        r"(?<=</tool_call>)\s*+(?:user|tool)?\s*+<tool_response>\n.*?\n</tool_response>\s*assistant\n", re.DOTALL
    )

    def graded_text(self, segments: Segments) -> str:
        return BLOCKS.sub("", last_turn(segments))

    def turn_error(self, text: str, has_result: bool, tools: Sequence[str]) -> str:
        outside = BLOCKS.sub("", text)
        bodies = call_bodies(text)
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
                    name = self.name_of(body)
                    if name and not _ERROR.match(result):
                        answered.add(name)
        return answered

    @staticmethod
    def name_of(body: str) -> str | None:
        """Return the name of the called tool, or None if the block is malformed."""
        return name_of_call(body, "arguments")


def names_in(text: str) -> list[str]:
    """Return the names of the calls in a text's blocks; "unknown" for a malformed call."""
    names = []
    for body, _ in call_bodies(text):
        try:
            names.append(str(json.loads(body)["name"]))
        except (ValueError, KeyError, TypeError):
            names.append(UNKNOWN)
    return names


def parse_row(row: dict, names_of: Callable[[str], list[str]] = names_in) -> Conversation:
    """Parse an SFT conversation of any style. Calls stay in fields, or in blocks of text. Raises BadRow.

    A row may have functions in `tools` (in OpenAI's form or bare; the list or its entries may be JSON), or the names of
    loaded tools. Otherwise the functions of data.tools are listed, unless the system message lists tools itself.
    names_of: returns the names of the calls in a text.
    """
    messages: list[dict[str, Any]] = []
    call_names: list[str] = []  # of the newest turn with calls
    call_ids: list[str | None] = []
    for role, group in groupby(parse_turns(row, _with_ids), key=lambda message: message["role"]):
        turns = list(group)
        ids_of_turns = [message.pop("ids", []) for message in turns]
        if role == "assistant":
            calls = turns[-1].get("tool_calls")
            call_names = [call["name"] for call in calls] if calls else names_of(turns[-1]["content"])
            call_ids = ids_of_turns[-1]
        elif role == "tool":
            result_ids = [result_id for [result_id] in ids_of_turns]
            turns = _in_call_order(turns, result_ids=result_ids, call_ids=call_ids, call_names=call_names)
        messages += turns
    listed = (row[name] for name in ("tools", "functions", "tool_defs") if row.get(name) is not None)
    return Conversation(messages, _functions(next(listed, None)))


def _in_call_order(
    results: list[dict[str, Any]],
    *,
    result_ids: list[str | None],
    call_ids: list[str | None],
    call_names: list[str],
) -> list[dict[str, Any]]:
    """Return the results of a turn's calls, with names, in the order of the calls (as in a rollout).

    result_ids: the call id in each result. Results without ids are ordered by name. If names are missing or not unique,
    the order stays. Raises BadRow unless each call has one result.
    """
    if len(results) != len(call_names):
        raise BadRow(f"{len(call_names)} calls have {len(results)} results; each call has one")
    result_names = [result.get("name") for result in results]
    for key, of_results, of_calls in (
        ("tool_call_id", result_ids, call_ids),
        ("name", result_names, call_names),
    ):
        is_complete = of_calls and None not in of_results and None not in of_calls and UNKNOWN not in of_calls
        if not is_complete or len({*of_calls}) < len(of_calls):
            continue
        if sorted(of_results) != sorted(of_calls):
            raise BadRow(
                f"{key} of the results is {of_results}, but the calls have {of_calls}; each call has one result"
            )
        results = [results[of_results.index(value)] for value in of_calls]
        break
    for name, result in zip(call_names, results, strict=True):
        result.setdefault("name", name)
    return results


def _with_ids(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Split a message of results into one message per result, and parse the calls of an assistant's message.

    Both get `ids`, the ids of their calls. Other messages stay unchanged.
    """
    calls = message.get("tool_calls")
    if calls:
        ids = [str(call["id"]) if call.get("id") else None for call in calls if isinstance(call, dict)]
        return [{**message, "tool_calls": [parse_call_object(call) for call in calls], "ids": ids}]
    if message["role"] != "tool":
        return [message]
    call_id = message.pop("tool_call_id", None)
    ids = [str(call_id) if call_id else None]
    return [{**message, "ids": ids, "content": text} for text in _results(message["content"])]


def _results(text: str) -> list[str]:
    """Return the results in the <tool_response> blocks of a message. A text without blocks is one result."""
    if not (text.strip().startswith(RESPONSE) and text.strip().endswith(END)):
        return [text]
    return [block.partition(END)[0].strip("\n") for block in text.split(RESPONSE)[1:]]


def _functions(tools: object) -> list[dict] | list[str] | None:
    """Return a row's functions in OpenAI's form, or the names of loaded tools. Raises BadRow for anything else."""
    if isinstance(tools, str):
        is_json = tools.lstrip().startswith(("[", "{"))
        names = [name.strip() for name in tools.split(",") if name.strip()]
        tools = json_of(tools, "tools are") if is_json else names
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise BadRow(f"tools must be a list of functions, or of names of loaded tools, not {type(tools).__name__}")
    if all(isinstance(tool, str) and not tool.lstrip().startswith("{") for tool in tools):
        return tools
    tools = [json_of(tool, "an entry of tools is") if isinstance(tool, str) else tool for tool in tools]
    functions = [tool.get("function", tool) if isinstance(tool, dict) else tool for tool in tools]
    if not all(isinstance(function, dict) and isinstance(function.get("name"), str) for function in functions):
        raise BadRow("an entry of tools has no name")
    for function in functions:
        for field in ("input_schema", "inputSchema"):  # of Anthropic, and of MCP
            if field in function:
                raise BadRow(f"the tool {function['name']!r} has {field!r}; call it 'parameters', as OpenAI does")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


FORM = Form(HermesCodec, HermesRules(), parse_row)
