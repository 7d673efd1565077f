"""The codec of forms that the chat template writes: prompts, results and conversations as the model knows them.

Token in, token out: what the model sampled stays as it is. What the template writes between the end token of a turn
with calls and the first token of the next depends on the results alone, not on the turn. It is taken from a short
conversation with calls that stand for the sampled ones, and encoded by itself, which is exact because it begins behind
a special token. So a template that shows earlier turns otherwise than they were sampled (Qwen3's drops empty thoughts,
and thoughts before the newest question) is never given the chance.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import groupby
from math import ceil
from operator import itemgetter
from typing import Any, ClassVar

from arpo.errors import UserError
from arpo.protocol.calls import TRUNCATION_MARK, UNKNOWN, Call, escape_tags, tag_pattern
from arpo.protocol.codec import Codec, Rendered
from arpo.protocol.schema import ToolSchema, text_schema
from arpo.trajectory import ToolCall

MARK = "here the call ends"
"""Argument of the last of the calls that stand for sampled ones."""
QUESTION = {"role": "user", "content": "question"}


class TemplateCodec(Codec):
    """Codec for models whose chat template lists tools, and has turns for calls and results.

    Raises UserError, besides that of Codec, for a template that has not, or has calls of another form.
    """

    call_form: str
    """The form in which the template must write calls, for messages."""
    tools_mark: str
    """What a system message of a file contains that lists tools itself."""
    forms: ClassVar[list[type[TemplateCodec]]] = []
    """The codecs of this kind."""

    def __init_subclass__(cls) -> None:
        TemplateCodec.forms.append(cls)

    def __init__(self, tokenizer, *, tools: Sequence[ToolSchema], enable_thinking: bool = False):
        self.schemas = {schema.name: schema for schema in tools}
        super().__init__(tokenizer, tools=tuple(self.schemas), enable_thinking=enable_thinking)

    @property
    def turn_ends(self) -> tuple[str, ...]:
        """Special tokens that end a turn and stand before what the template writes behind it."""
        return (self.tokenizer.eos_token,)

    @property
    def origin(self) -> dict[str, Any]:
        return {"protocol": self.format, "functions": self._functions(None)}

    def _count_min_result_tokens(self) -> int:
        self._probe_tools()
        after = self._after_calls([UNKNOWN], [TRUNCATION_MARK])
        return len(self._encode_rendered(after, self.tokenizer.eos_token))

    def _probe_tools(self) -> None:
        """Raise UserError for a chat template that does not do what this codec is for."""
        name, fix = self.tokenizer.name_or_path, "set protocol.format=tags, or the form that the model was trained for"
        tool = text_schema(UNKNOWN, "", "argument", "")
        try:
            tools = [tool.as_function()]
            shown, asked = (self._template([QUESTION], generation=g, tools=tools) for g in (True, False))
            without = self._template([QUESTION], generation=True)
            called = self._template(_conversation([UNKNOWN], [MARK]), generation=True, tools=tools)
        except Exception as error:  # a template is a program of its own
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise UserError(f"{name}: the chat template has no turns for calls and results ({reason}); {fix}") from None
        if shown == without:
            raise UserError(
                f"{name}: the chat template ignores tools, which protocol.format={self.format} needs; {fix}"
            )
        begun = shown if called.startswith(shown) else asked  # the prompt may open a thought, or hold an empty one
        turn = called.removeprefix(begun).partition(self.tokenizer.eos_token)[0]
        right = [form for form in self.forms if form.parse_calls(turn, {UNKNOWN: tool}) == [Call(MARK, tag=UNKNOWN)]]
        if type(self) not in right:  # what the model will write like this
            fix = f"it writes {right[0].call_form}: set protocol.format={right[0].format}" if right else fix
            raise UserError(f"{name}: the chat template does not write {self.call_form}; {fix}")
        if MARK not in self._after_calls([UNKNOWN], [MARK]):
            raise UserError(f"{name}: the chat template leaves out the results of tools; {fix}")

    @staticmethod
    @abstractmethod
    def parse_calls(text: str, offered: Mapping[str, ToolSchema]) -> list[Call]:
        """Return the calls of a turn in order, malformed ones with what is wrong. `offered` are the tools, by name."""

    @abstractmethod
    def _with_calls(self, text: str, message: dict[str, Any]) -> str:
        """Return the text of a message and, behind it, its calls as the template writes them."""

    def _functions(self, offered: Sequence[str] | None) -> list[dict] | None:
        """Return `tools=` of the template, in the order in which the tools are loaded; None for no tools."""
        return [s.as_function() for n, s in self.schemas.items() if offered is None or n in offered] or None

    def render_prompt(self, messages: list[dict[str, str]], tools: Sequence[str] | None = None) -> list[int]:
        if error := self._system_error(messages):
            raise UserError(error)
        return super().render_prompt(messages, tools)

    def _system_error(self, messages: list[dict[str, Any]]) -> str:
        """Return the error of a system message that asks for calls in tags, as those of the published files do."""
        called = tag_pattern(self.tools).search(messages[0]["content"] * (messages[0]["role"] == "system"))
        return called and (
            f"a prompt's system message speaks of {called[0]}, but protocol.format={self.format} has no tags; "
            "set data.system_prompt=default (evaluate.py: eval.system_prompt), or protocol.format=tags"
        )

    def answer_text(self, answer: str) -> str:
        text = rf"The answer is \boxed{{{answer}}}."
        return self._with_thought(text) if self._opened else text

    # -- a turn's calls and their results

    def stop_strings(self, offered: Sequence[str]) -> tuple[str, ...]:
        return ()

    def calls(
        self, token_ids: Sequence[int], finish: str, stop_string: str | None, offered: Sequence[str]
    ) -> list[Call]:
        if finish != "eos":
            return []
        return self.parse_calls(self._opened + self.decode(token_ids), {n: self.schemas[n] for n in offered})

    def encode_results(
        self, calls: Sequence[ToolCall], max_tokens: int, *, last_token: int
    ) -> tuple[list[str], list[int]] | None:
        names = [call.tag for call in calls]
        texts = [escape_tags(self._readable(call.result, max_tokens), self.reserved) for call in calls]
        # Sampling also stops at other end tokens (Qwen's <|endoftext|>); then the turn's own end is yet to be written.
        has_ended = last_token in self.tokenizer.convert_tokens_to_ids(list(self.turn_ends))
        end = [] if has_ended else [self.tokenizer.eos_token_id]

        def rendered(texts: list[str]) -> list[int]:
            return end + self._encode_rendered(self._after_calls(names, texts), self.tokenizer.eos_token)

        token_ids = rendered(texts)
        if len(token_ids) <= max_tokens:
            return texts, token_ids
        bodies, num_mark_tokens = [self.encode(text) for text in texts], len(self.encode(TRUNCATION_MARK))
        room = max_tokens - len(rendered([""] * len(texts)))
        keep = longest_share([len(body) for body in bodies], room) - num_mark_tokens
        while keep >= 0:
            is_cut = [len(body) > keep + num_mark_tokens for body in bodies]
            cut = [
                self.decode(body[:keep]).rstrip("�") + TRUNCATION_MARK if long else text
                for text, body, long in zip(texts, bodies, is_cut, strict=True)
            ]
            token_ids = rendered(cut)
            if len(token_ids) <= max_tokens:
                return cut, token_ids
            keep -= ceil((len(token_ids) - max_tokens) / max(sum(is_cut), 1))
        return None

    def _after_calls(self, names: Sequence[str], results: Sequence[str]) -> str:
        """Return what the template writes behind the end token of a turn that called these tools."""
        text = self._template(_conversation(names, results), generation=True, tools=self._functions(None))
        return text.partition(MARK)[2].partition(self.tokenizer.eos_token)[2]

    # -- conversations of SFT

    def _as_the_template_takes_it(
        self, messages: list[dict[str, Any]], functions: list[dict] | None
    ) -> tuple[list[dict[str, Any]], list[dict] | None]:
        """Without functions of the file the loaded tools are listed, unless the system message lists some itself."""
        if error := self._system_error(messages):
            raise ValueError(error)
        lists_tools = messages[0]["role"] == "system" and self.tools_mark in messages[0]["content"]
        functions = self._functions(None) if functions is None and not lists_tools else functions or None
        return [self._with_entries(message) for message in messages], functions

    def _add_run(self, row: Rendered, run: list[dict[str, Any]], mask_results: bool, before: str) -> str:
        written = ""
        for role, group in groupby(run, key=itemgetter("role")):
            if role == "assistant":
                message = next(group)
                tail = "" if message.get("tool_calls") else self._behind_answer
                text = self._before_answer + self._said(message) + tail
                is_trained = message.get("trained", True)
                self._add(row, [*self.encode(text, before + written), self.tokenizer.eos_token_id], is_trained)
                written += self._marked(text) + self.tokenizer.eos_token
            else:
                results = list(group)
                names = [message.get("name") or UNKNOWN for message in results]
                after = self._after_calls(names, [message["content"] for message in results])
                is_trained = not mask_results and all(message.get("trained", True) for message in results)
                self._add(row, self._encode_rendered(after, before + written), is_trained)
                written += after
        return written

    def _with_entries(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["role"] == "tool":
            return {"name": UNKNOWN, **message, "content": escape_tags(message["content"], self.reserved)}
        if message.get("tool_calls"):
            calls = [{"type": "function", "function": call} for call in message["tool_calls"]]
            return {**message, "tool_calls": calls}
        return message


def longest_share(sizes: Sequence[int], room: int) -> int:
    """Return how much each may have of a common room, where what small ones leave is for the others.

    >>> longest_share([100, 10, 300], room=210)
    100
    """
    for num_left, size in zip(range(len(sizes), 0, -1), sorted(sizes), strict=True):
        if size * num_left > room:
            return room // num_left
        room -= size
    return max(sizes)


def _conversation(names: Sequence[str], results: Sequence[str]) -> list[dict[str, Any]]:
    """Return a question, calls of these tools, the last of which holds MARK, and their results."""
    ids = [f"call{i:05d}" for i in range(len(names))]
    functions = [{"name": name, "arguments": {"argument": ""}} for name in names]
    functions[-1]["arguments"] = {"argument": MARK}
    calls = [{"id": i, "type": "function", "function": f} for i, f in zip(ids, functions, strict=True)]
    turns = [
        {"role": "tool", "tool_call_id": i, "name": name, "content": result}
        for i, name, result in zip(ids, names, results, strict=True)
    ]
    return [QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}, *turns]
