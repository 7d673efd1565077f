r"""Calls in tags, with the results inside a single assistant turn: the form of the papers.

    <think> ... </think><search> Paris </search> <result>
    found passages
    </result><think> ... </think><answer> ... \boxed{Paris} ... </answer>

A turn ends when the model closes a tool's tag or emits EOS. The result is appended as ` <result>\n{text}\n</result>`
(one leading space). Result text is data: the protocol's tags in it are escaped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from arpo.protocol.calls import TRUNCATION_MARK, Call, dedented, escape_tags, tag_pattern
from arpo.protocol.codec import Codec, Rendered
from arpo.protocol.form import Form
from arpo.protocol.format_rules import FormatRules, Segments, boxed_answer, model_text
from arpo.protocol.messages import BadRow, json_of, parse_call_object, parse_turns
from arpo.trajectory import ToolCall

PAPER_TOOLS = ("search", "python")
"""Tags of the published runs' tools. The default if no tools are named."""

UNOPENED_TAG = "Error: </{tag}> has no <{tag}> before it in this turn. Write <{tag}> ... </{tag}>."
EMPTY_CALL = "Error: the <{tag}> call is empty. Write what to run between <{tag}> and </{tag}>."
_RESULT = re.compile(r"\s*<result>.*?</result>", re.DOTALL)
_ENDS_IN_CALL = re.compile(r"</(?!(?:think|answer|result)>)[^\s<>/]+>\s*\Z")


def reserved_tags(tools: Sequence[str]) -> tuple[str, ...]:
    """Return the names of all tags of the protocol. ("search",) -> ("think", "search", "result", "answer")"""
    return ("think", *tools, "result", "answer")


def parse_call(turn_text: str, tag: str) -> Call:
    """Parse the call at the end of a turn: the text between the last <tag> of this turn and its closing tag.

    turn_text: only this turn, never the prompt or an earlier result (UPSTREAM B14).

    >>> parse_call("<think>look</think><search> Paris </search>", "search").argument
    'Paris'
    """
    head = turn_text[: turn_text.rfind(f"</{tag}>")]
    opened = head.rfind(f"<{tag}>")
    if opened < 0 or head.find(f"</{tag}>", opened) >= 0:
        return Call("", "unopened_tag", UNOPENED_TAG.format(tag=tag), tag)
    argument = dedented(head[opened + len(tag) + 2 :]).strip()
    return Call(argument, tag=tag) if argument else Call("", "empty_call", EMPTY_CALL.format(tag=tag), tag)


def escape_result(text: str, tools: Sequence[str] = PAPER_TOOLS) -> str:
    """Escape the protocol's tags in a result, so that a web page cannot answer or call a tool for the model.

    >>> escape_result("see <answer>4</answer>")
    'see &lt;answer&gt;4&lt;/answer&gt;'
    """
    return escape_tags(text, reserved_tags(tools))


def render_result(text: str) -> str:
    """Return the text appended to the response after a call."""
    return f" <result>\n{text}\n</result>"


def merge_tool_messages(messages: list[dict[str, Any]], tools: Sequence[str] = PAPER_TOOLS) -> list[dict[str, Any]]:
    """Join assistant / tool / assistant ... into one assistant turn with <result> spans, as in a rollout.

    If a message has trained=False, its (start, end) in the joined text is added to the turn's `untrained`.
    """
    merged: list[dict[str, Any]] = []
    for previous, message in pairwise([{"role": ""}, *messages]):
        is_result = message["role"] == "tool"
        text = render_result(escape_result(message["content"], tools)) if is_result else message["content"]
        continues = is_result or (message["role"] == "assistant" and previous["role"] == "tool")
        turn = merged.pop() if continues else {"role": message["role"], "content": ""}
        joined = turn["content"] + text
        if message.get("trained") is False:
            span = (len(turn["content"]), len(joined))
            turn = {**turn, "untrained": [*turn.get("untrained", []), span]}
        merged.append({**turn, "content": joined})
    return merged


class TagsCodec(Codec):
    """Codec for calls in tags. Works with every chat template."""

    format = "tags"

    def __init__(self, tokenizer, *, tools: Sequence[str] = PAPER_TOOLS, enable_thinking: bool = False):
        """tools: tags of the loaded tools. They are escaped in results."""
        super().__init__(tokenizer, tools=tools, enable_thinking=enable_thinking)

    @property
    def reserved(self) -> tuple[str, ...]:
        return reserved_tags(self.tools)

    def _count_min_result_tokens(self) -> int:
        return max(len(self.encode(render_result(TRUNCATION_MARK), f"</{tag}>")) for tag in ("", *self.tools))

    def answer_text(self, answer: str) -> str:
        return self._with_thought(rf"<answer> \boxed{{{answer}}} </answer>")

    # -- a turn's calls and their results

    def stop_strings(self, offered: Sequence[str]) -> tuple[str, ...]:
        return tuple(f"</{tag}>" for tag in offered)

    def calls(
        self, token_ids: Sequence[int], finish: str, stop_string: str | None, offered: Sequence[str]
    ) -> list[Call]:
        return [parse_call(self.decode(token_ids), stop_string.strip("</>"))] if finish == "stop" else []

    def encode_results(
        self, calls: Sequence[ToolCall], max_tokens: int, *, last_token: int
    ) -> tuple[list[str], list[int]] | None:
        [call] = calls
        encoded = self.encode_result(call.result, max_tokens, call.tag)
        return encoded and ([encoded[0]], encoded[1])

    def encode_result(self, text: str, max_tokens: int, tag: str = "") -> tuple[str, list[int]] | None:
        """Escape, render and encode a result of the tool `tag`.

        Returns (text as the model reads it, at most max_tokens token ids). Returns None if the result is too long and
        not even the truncation mark fits.
        """
        text = escape_result(self._shortened(text, max_tokens), self.tools)
        call_end = f"</{tag}>"
        token_ids = self.encode(render_result(text), call_end)
        if len(token_ids) <= max_tokens:
            return text, token_ids
        if max_tokens < self._min_result_tokens:
            return None
        body = self.encode(text)
        keep = max_tokens - self._min_result_tokens
        # Decoding a part and encoding it again may give a few tokens more. Then the text is cut further.
        while True:
            cut = self.decode(body[:keep]).rstrip("�") + TRUNCATION_MARK
            token_ids = self.encode(render_result(cut), call_end)
            if len(token_ids) <= max_tokens:
                return cut, token_ids
            keep -= len(token_ids) - max_tokens

    # -- conversations of SFT

    def _prepare_for_template(
        self, messages: list[dict[str, Any]], functions: list[dict] | list[str] | None
    ) -> tuple[list[dict[str, Any]], None]:
        return merge_tool_messages(messages, self.tools), None

    def _add_response(self, row: Rendered, response: list[dict[str, Any]], mask_results: bool, before: str) -> str:
        """Add a merged turn. Its <result> spans are results."""
        [message] = response
        text = self._assistant_text(message)
        # _assistant_text may strip both ends, and a <think> at the start. The spans move with the start.
        unstripped = message["content"].rstrip() if self._trims else message["content"]
        shift = len(unstripped) - len(text)
        untrained = [(start - shift, end - shift) for start, end in message.get("untrained", ())]
        results = [match.span() for match in _RESULT.finditer(text)]
        # In a rollout no end token follows a call or a result. Trained on it, the model would stop there.
        end = len(text.rstrip())
        if text[:end].endswith(self.stop_strings(self.tools)) or any(stop == end for _, stop in results):
            untrained.append((end, len(text)))
        borders = [position for span in results + untrained for position in span]
        cuts = {0, len(text), *(min(max(position, 0), len(text)) for position in borders)}
        for start, end in pairwise(sorted(cuts)):
            is_result = any(first <= start < last for first, last in results)
            is_untrained = any(first <= start < last for first, last in untrained)
            lead = self._before_answer if start == 0 else ""
            tail = self._behind_answer if end == len(text) else ""
            token_ids = self.encode(lead + text[start:end] + tail, before + text[:start])
            self._add(row, token_ids, is_trained=not is_untrained and not (is_result and mask_results))
        ends_untrained = any(end >= len(text) for _, end in untrained)
        self._add(row, [self.tokenizer.eos_token_id], is_trained=not ends_untrained)
        return self._before_answer + self._mark_special(text) + self._behind_answer + self.tokenizer.eos_token


class TagsRules(FormatRules):
    r"""Rules of calls in tags.

    Think tags are present and paired. There is exactly one answer block, with a balanced \boxed{}. Every call is closed
    and followed by its result. The model writes no result tag. A tag of a tool that is not loaded is plain text.
    """

    def derive_segments(self, response_text: str, tools: Sequence[str] = PAPER_TOOLS) -> Segments:
        r"""Split a response into segments by its text alone. A result directly after a closed call is the tool's.

        >>> TagsRules().derive_segments("<search>q</search> <result>\nr\n</result><think>t</think>")
        [('<search>q</search>', True), (' <result>\nr\n</result>', False), ('<think>t</think>', True)]
        """
        segments: Segments = []
        position = 0
        for tag in tag_pattern(tuple(tools)).finditer(response_text):
            is_closing = tag[1] == "/"
            result = _RESULT.match(response_text, tag.end()) if is_closing and tag.start() >= position else None
            if result:
                segments += [(response_text[position : tag.end()], True), (result[0], False)]
                position = result.end()
        if position < len(response_text):
            segments.append((response_text[position:], True))
        return segments

    def graded_text(self, segments: Segments) -> str:
        # All text, since evaluations count an answer outside of the answer block too.
        return model_text(segments)

    def extract_answer(self, segments: Segments) -> tuple[str | None, str]:
        text = model_text(segments)
        if "<answer>" not in text:
            return None, "missing_answer"
        if text.count("<answer>") > 1 or text.count("</answer>") > 1:
            return None, "several_answers"
        _, _, after = text.partition("<answer>")
        block, closing_tag, _ = after.partition("</answer>")
        return boxed_answer(block, no_box="missing_box") if closing_tag else (None, "unclosed_answer")

    def format_error(self, segments: Segments, tools: Sequence[str] = PAPER_TOOLS) -> str:
        _, error = self.extract_answer(segments)
        return error or _think_error(model_text(segments)) or super().format_error(segments, tools)

    def turn_error(self, text: str, has_result: bool, tools: Sequence[str]) -> str:
        if "<result>" in text or "</result>" in text:
            return "model_wrote_result"
        tags = [match[0] for match in tag_pattern(tuple(tools)).finditer(text)]
        if not tags:
            return ""
        if tags[0].startswith("</"):
            return "unopened_call"
        if tags[1:2] != [tags[0].replace("<", "</", 1)]:
            return "unclosed_call"
        # A turn ends at its first call, so more tags mean that this call was not executed.
        return "" if len(tags) == 2 and has_result else "call_without_result"

    def answered_calls(self, segments: Segments, tools: Sequence[str] = PAPER_TOOLS) -> set[str]:
        answered = set()
        for (text, by_model), (result, result_by_model) in pairwise(segments):
            closed_names = [tag[2] for tag in tag_pattern(tuple(tools)).finditer(text) if tag[1]]
            has_failed = result.strip().removeprefix("<result>").lstrip().startswith("Error")
            if by_model and not result_by_model and closed_names and not has_failed:
                answered.add(closed_names[-1])
        return answered


def _think_error(text: str) -> str:
    tags = re.findall(r"</?think>", text)
    if not tags:
        return "missing_think"
    return "" if tags == ["<think>", "</think>"] * (len(tags) // 2) else "unpaired_think"


def parse_row(row: dict) -> list[dict[str, Any]]:
    """Parse an SFT conversation of any style. Raises BadRow.

    Calls in JSON (in fields, or in <tool_call> blocks of the text) become tags. An assistant message may also contain a
    full trajectory. A `tools` field is ignored, since the system prompt describes the tools.
    """
    messages = parse_turns(row, lambda message: [_with_tags(message)])
    for previous, message in pairwise(messages):
        if message["role"] == "tool" and (previous["role"] == "tool" or not _ENDS_IN_CALL.search(previous["content"])):
            raise BadRow("a tool result must follow its call, and each call has one: <search> ... </search>")
    return messages


def _with_tags(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its call as text: <search> query </search>."""
    calls = message.get("tool_calls", [])
    text = message["content"]
    if len(calls) > 1:
        raise BadRow("one message has several tool_calls, but in the text protocol a turn ends with its first call")
    if message["role"] == "assistant" and "<tool_call>" in text:
        text = _block_to_tag(text)
    text += "".join(map(_call_to_tag, calls))
    untrained = {"trained": False} if "trained" in message else {}
    return {"role": message["role"], "content": text, **untrained}


def _block_to_tag(text: str) -> str:
    """'<tool_call>{"name": "search", "arguments": {"query": "Paris"}}</tool_call>' -> '<search> Paris </search>'."""
    before, _, rest = text.partition("<tool_call>")
    body, closing_tag, after = rest.partition("</tool_call>")
    if not closing_tag or after.strip():
        raise BadRow("a <tool_call> must end its message: in the text protocol a turn ends with its first call")
    return before + _call_to_tag(json_of(body, "the text of a <tool_call> is"))


def _call_to_tag(call: object) -> str:
    """{"name": "search", "arguments": {"query": "Paris"}} -> "<search> Paris </search>"."""
    call = parse_call_object(call)
    name = call["name"]
    values = list(call["arguments"].values())
    if len(values) != 1 or not isinstance(values[0], str):
        raise BadRow(f"the call of {name!r} must have one argument, a text: all that a tag can hold")
    return f"<{name}> {values[0]} </{name}>"


FORM = Form(TagsCodec, TagsRules(), parse_row, template_lists_tools=False)
