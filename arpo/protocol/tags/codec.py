"""The codec of calls in tags: a response is one assistant turn, with the results inside it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from arpo.protocol.calls import TRUNCATION_MARK, Call
from arpo.protocol.codec import Codec, Rendered
from arpo.protocol.tags.text import (
    PAPER_TOOLS,
    escape_result,
    merge_tool_messages,
    parse_call,
    render_result,
    reserved_tags,
)
from arpo.trajectory import ToolCall

_RESULT_SPAN = re.compile(r"\s*<result>.*?</result>", re.DOTALL)


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
        return len(self.encode(render_result(TRUNCATION_MARK)))

    def render_prompt(self, messages: list[dict[str, str]], tools: Sequence[str] | None = None) -> list[int]:
        return self._encode_rendered(self._template(messages, generation=True))

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
        rendered = self.encode_result(calls[0].result, max_tokens)
        return rendered and ([rendered[0]], rendered[1])

    def encode_result(self, text: str, max_tokens: int) -> tuple[str, list[int]] | None:
        """Escape, render and tokenise a result within `max_tokens`; return (text as the model reads it, token ids).

        Returns None for a result that is too long where not even the truncation mark fits.
        """
        text = escape_result(text, self.tools)
        token_ids = self.encode(render_result(text))
        if len(token_ids) <= max_tokens:
            return text, token_ids
        if max_tokens < self._min_result_tokens:
            return None
        body = self.encode(text)
        keep = max_tokens - self._min_result_tokens
        while True:  # cutting tokens and encoding again may give a few tokens more: then cut a little deeper
            cut = self.decode(body[:keep]).rstrip("�") + TRUNCATION_MARK
            token_ids = self.encode(render_result(cut))
            if len(token_ids) <= max_tokens:
                return cut, token_ids
            keep -= len(token_ids) - max_tokens

    # -- conversations of SFT

    def _as_the_template_takes_it(
        self, messages: list[dict[str, str]], functions: list[dict] | None
    ) -> tuple[list[dict[str, str]], None]:
        return merge_tool_messages(messages, self.tools), None

    def _add_run(self, row: Rendered, run: list[dict[str, str]], mask_results: bool) -> str:
        """Add one turn, of which the spans of <result> are results."""
        text, position = self._said(run[0]), 0
        for span in _RESULT_SPAN.finditer(text):
            self._add(row, self.encode(text[position : span.start()]), True)
            row.turn_ends.append(len(row.token_ids))
            self._add(row, self.encode(span.group()), not mask_results)
            position = span.end()
        self._add(row, [*self.encode(text[position:]), self.tokenizer.eos_token_id], True)
        row.turn_ends.append(len(row.token_ids))
        return self._marked(text) + self.tokenizer.eos_token
