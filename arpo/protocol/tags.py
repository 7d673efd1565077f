r"""Calls in tags, with the results inside the assistant's one turn: the papers' form.

    <think> ... </think><search> Paris </search> <result>
    found passages
    </result><think> ... </think><answer> ... \boxed{Paris} ... </answer>

A turn ends when the model closes a tool's tag or emits EOS. The result is appended as ` <result>\n{text}\n</result>`
(one leading space). Result text is data: our own tags in it are escaped.
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
from arpo.protocol.messages import BadRow, json_of, parse_turns, whole_call
from arpo.trajectory import ToolCall

PAPER_TOOLS = ("search", "python")
"""Tags of the tools of the published runs; the default wherever tools are not named."""

UNOPENED_TAG = "Error: </{tag}> has no <{tag}> before it in this turn. Write <{tag}> ... </{tag}>."
EMPTY_CALL = "Error: the <{tag}> call is empty. Write what to run between <{tag}> and </{tag}>."
_RESULT = re.compile(r"\s*<result>.*?</result>", re.DOTALL)
_ENDS_IN_CALL = re.compile(r"</(?!(?:think|answer|result)>)[^\s<>/]+>\s*\Z")


def reserved_tags(tools: Sequence[str]) -> tuple[str, ...]:
    """Return all tags of the protocol. ("search",) -> ("think", "search", "result", "answer")"""
    return ("think", *tools, "result", "answer")


def parse_call(turn_text: str, tag: str) -> Call:
    """Parse the call that ends a turn: the text between the last <tag> of this turn and its closing tag.

    Only the turn's own text is searched, never the prompt or an earlier result (UPSTREAM B14).

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
    """Make the protocol's tags in a result plain text, so that a web page cannot answer or call for the model.

    >>> escape_result("see <answer>4</answer>")
    'see &lt;answer&gt;4&lt;/answer&gt;'
    """
    return escape_tags(text, reserved_tags(tools))


def render_result(text: str) -> str:
    """Return the text that is appended to the response after a call."""
    return f" <result>\n{text}\n</result>"


def merge_tool_messages(messages: list[dict[str, Any]], tools: Sequence[str] = PAPER_TOOLS) -> list[dict[str, Any]]:
    """Join assistant / tool / assistant ... into one assistant turn with <result> spans, as the rollout writes it.

    `untrained` of a turn are the (start, end) in its text of messages that were not to be trained on.
    """
    merged: list[dict[str, Any]] = []
    for last, message in pairwise([{"role": ""}, *messages]):
        text, continues = message["content"], message["role"] == "assistant" and last["role"] == "tool"
        if message["role"] == "tool":
            text, continues = render_result(escape_result(text, tools)), True
        turn = merged.pop() if continues else {"role": message["role"], "content": ""}
        start, end = len(turn["content"]), len(turn["content"] + text)
        if message.get("trained") is False:
            turn = {**turn, "untrained": [*turn.get("untrained", []), (start, end)]}
        merged.append({**turn, "content": turn["content"] + text})
    return merged


class TagsCodec(Codec):
    """Codec of calls in tags, with every chat template."""

    format = "tags"

    def __init__(self, tokenizer, *, tools: Sequence[str] = PAPER_TOOLS, enable_thinking: bool = False):
        """`tools` are the tags of the loaded tools, which are escaped in results."""
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
        rendered = self.encode_result(calls[0].result, max_tokens, calls[0].tag)
        return rendered and ([rendered[0]], rendered[1])

    def encode_result(self, text: str, max_tokens: int, tag: str = "") -> tuple[str, list[int]] | None:
        """Escape, render and tokenise a result of the tool `tag` within `max_tokens`; return (text as the model reads
        it, token ids).

        Returns None for a result that is too long where not even the truncation mark fits.
        """
        text, call_end = escape_result(self._readable(text, max_tokens), self.tools), f"</{tag}>"
        token_ids = self.encode(render_result(text), call_end)
        if len(token_ids) <= max_tokens:
            return text, token_ids
        if max_tokens < self._min_result_tokens:
            return None
        body = self.encode(text)
        keep = max_tokens - self._min_result_tokens
        while True:  # cutting tokens and encoding again may give a few tokens more: then cut a little deeper
            cut = self.decode(body[:keep]).rstrip("�") + TRUNCATION_MARK
            token_ids = self.encode(render_result(cut), call_end)
            if len(token_ids) <= max_tokens:
                return cut, token_ids
            keep -= len(token_ids) - max_tokens

    # -- conversations of SFT

    def _as_the_template_takes_it(
        self, messages: list[dict[str, Any]], functions: list[dict] | None
    ) -> tuple[list[dict[str, Any]], None]:
        return merge_tool_messages(messages, self.tools), None

    def _add_run(self, row: Rendered, run: list[dict[str, Any]], mask_results: bool, before: str) -> str:
        """Add one turn, of which the spans of <result> are results."""
        text = self._said(run[0])
        # _said may take text off both ends, the <think> of the prompt at the start
        whole = run[0]["content"].rstrip() if self._trims else run[0]["content"]
        shift = len(whole) - len(text)
        untrained = [(start - shift, end - shift) for start, end in run[0].get("untrained", ())]
        results = [span.span() for span in _RESULT.finditer(text)]
        # In a rollout no end token follows a call or a result: it would teach the model to say nothing there.
        end = len(text.rstrip())
        if text[:end].endswith(self.stop_strings(self.tools)) or any(stop == end for _, stop in results):
            untrained.append((end, len(text)))
        cuts = {0, len(text), *(min(max(at, 0), len(text)) for span in results + untrained for at in span)}
        for start, end in pairwise(sorted(cuts)):
            is_result, is_left_out = (any(a <= start < b for a, b in spans) for spans in (results, untrained))
            lead = self._before_answer if start == 0 else ""
            tail = self._behind_answer if end == len(text) else ""
            token_ids = self.encode(lead + text[start:end] + tail, before + text[:start])
            self._add(row, token_ids, not is_left_out and not (is_result and mask_results))
        ends_untrained = any(end >= len(text) for _, end in untrained)
        self._add(row, [self.tokenizer.eos_token_id], not ends_untrained)
        return self._before_answer + self._marked(text) + self._behind_answer + self.tokenizer.eos_token


class TagsRules(FormatRules):
    r"""Think tags present and paired, exactly one answer block with a balanced \boxed{}, every call closed and followed
    by its result, and no result tag from the model's own pen. A tag of no loaded tool is plain text."""

    def derive_segments(self, response_text: str, tools: Sequence[str] = PAPER_TOOLS) -> Segments:
        r"""Segment a response that is known only as text: a result directly after a closed call is the tool's.

        >>> TagsRules().derive_segments("<search>q</search> <result>\nr\n</result><think>t</think>")
        [('<search>q</search>', True), (' <result>\nr\n</result>', False), ('<think>t</think>', True)]
        """
        segments: Segments = []
        position = 0
        for call in tag_pattern(tuple(tools)).finditer(response_text):
            result = _RESULT.match(response_text, call.end()) if call[1] and call.start() >= position else None
            if result:
                segments += [(response_text[position : call.end()], True), (result[0], False)]
                position = result.end()
        return [*segments, (response_text[position:], True)] if position < len(response_text) else segments

    def graded_text(self, segments: Segments) -> str:
        return model_text(segments)  # evaluations count an answer outside of its block too

    def extract_answer(self, segments: Segments) -> tuple[str | None, str]:
        text = model_text(segments)
        if "<answer>" not in text:
            return None, "missing_answer"
        if text.count("<answer>") > 1 or text.count("</answer>") > 1:
            return None, "several_answers"
        block, closing, _ = text.partition("<answer>")[2].partition("</answer>")
        return boxed_answer(block, no_box="missing_box") if closing else (None, "unclosed_answer")

    def format_error(self, segments: Segments, tools: Sequence[str] = PAPER_TOOLS) -> str:
        _, error = self.extract_answer(segments)
        return error or _think_error(model_text(segments)) or super().format_error(segments, tools)

    def turn_error(self, text: str, has_result: bool, tools: Sequence[str]) -> str:
        if "<result>" in text or "</result>" in text:
            return "model_wrote_result"
        tags = [(match[1] == "/", match[2]) for match in tag_pattern(tuple(tools)).finditer(text)]
        if not tags:
            return ""
        if tags[0][0]:
            return "unopened_call"
        if tags[1:2] != [(True, tags[0][1])]:
            return "unclosed_call"
        return "" if len(tags) == 2 and has_result else "call_without_result"  # a turn ends at its first call

    def answered_calls(self, segments: Segments, tools: Sequence[str] = PAPER_TOOLS) -> set[str]:
        answered = set()
        for (text, by_model), (result, result_by_model) in pairwise(segments):
            closing = [match[2] for match in tag_pattern(tuple(tools)).finditer(text) if match[1]]
            has_failed = result.strip().removeprefix("<result>").lstrip().startswith("Error")
            if by_model and not result_by_model and closing and not has_failed:
                answered.add(closing[-1])
        return answered


def _think_error(text: str) -> str:
    tags = re.findall(r"</?think>", text)
    if not tags:
        return "missing_think"
    return "" if tags == ["<think>", "</think>"] * (len(tags) // 2) else "unpaired_think"


def parse_row(row: dict) -> list[dict[str, Any]]:
    """Parse an SFT conversation of either style. Raises BadRow.

    Function calls written as JSON, in fields or in <tool_call> blocks of the text, become tags. So may whole
    trajectories stand inside one assistant turn. A `tools` field is ignored: the system prompt says what the tools are.
    """
    messages = parse_turns(row, lambda message: [_turn(message)])
    for previous, message in pairwise(messages):
        if message["role"] == "tool" and not _ENDS_IN_CALL.search(previous["content"] * (previous["role"] != "tool")):
            raise BadRow("a tool result must follow its call, and each call has one: <search> ... </search>")
    return messages


def _turn(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its calls as text: <search> query </search>."""
    calls, text = message.get("tool_calls", []), message["content"]
    if len(calls) > 1:
        raise BadRow("one message has several tool_calls, but in the text protocol a turn ends with its first call")
    if message["role"] == "assistant" and "<tool_call>" in text:
        text = _with_tag(text)
    kept = {"trained": False} if "trained" in message else {}
    return {"role": message["role"], "content": text + "".join(map(_tag_of_call, calls)), **kept}


def _with_tag(text: str) -> str:
    """'<tool_call>{"name": "search", "arguments": {"query": "Paris"}}</tool_call>' -> '<search> Paris </search>'."""
    before, _, rest = text.partition("<tool_call>")
    body, closed, after = rest.partition("</tool_call>")
    if not closed or after.strip():
        raise BadRow("a <tool_call> must end its message: in the text protocol a turn ends with its first call")
    return before + _tag_of_call(json_of(body, "the text of a <tool_call> is"))


def _tag_of_call(call: object) -> str:
    """{"name": "search", "arguments": {"query": "Paris"}} -> "<search> Paris </search>"."""
    name, arguments = whole_call(call).values()
    values = list(arguments.values())
    if len(values) != 1 or not isinstance(values[0], str):
        raise BadRow(f"the call of {name!r} must have one argument, a text: all that a tag can hold")
    return f"<{name}> {values[0]} </{name}>"


FORM = Form(TagsCodec, TagsRules(), parse_row, template_lists_tools=False)
