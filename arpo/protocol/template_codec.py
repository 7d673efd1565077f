"""The codec for forms written by the chat template: prompts, calls and results look as in the model's own training.

Sampled tokens are never changed. Between the end token of a turn with calls and the first token of the next turn the
template writes the results. This text depends only on the results, not on the turn. It is rendered in a short
conversation with placeholder calls, and encoded separately. This is exact, since the text begins after a special token.
So a template cannot rewrite earlier turns (Qwen3's drops empty thoughts, and thoughts before the newest question).
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
from arpo.protocol.turn_format import one_line
from arpo.trajectory import ToolCall

MARK = "here the call ends"
"""Argument of the last placeholder call."""
QUESTION = {"role": "user", "content": "question"}


class TemplateCodec(Codec):
    """Codec for chat templates with a list of tools, and with turns for calls and results.

    Raises UserError for other templates, and for a template with another form of calls. (Codec raises more of them.)
    """

    call_form: str
    """The form of the template's calls, for error messages."""
    tools_mark: str
    """Mark in a file's system message: the message lists the tools itself."""
    forms: ClassVar[list[type[TemplateCodec]]] = []
    """All subclasses."""

    def __init_subclass__(cls) -> None:
        TemplateCodec.forms.append(cls)

    def __init__(self, tokenizer, *, tools: Sequence[ToolSchema], enable_thinking: bool = False):
        self.schemas = {schema.name: schema for schema in tools}
        super().__init__(tokenizer, tools=tuple(self.schemas), enable_thinking=enable_thinking)

    @property
    def turn_ends(self) -> tuple[str, ...]:
        """Special tokens at the end of a turn. The template's text for the next turn follows."""
        return (self.tokenizer.eos_token,)

    @property
    def origin(self) -> dict[str, Any]:
        return {"protocol": self.format, "functions": self._functions(None)}

    def _count_min_result_tokens(self) -> int:
        self._probe_tools()
        after = self._after_calls([UNKNOWN], [TRUNCATION_MARK])
        return len(self._encode_rendered(after, self.tokenizer.eos_token))

    def _probe_tools(self) -> None:
        """Raise UserError for a chat template that this codec cannot use."""
        name = self.tokenizer.name_or_path
        fix = "set protocol.format=tags, or the form that the model was trained for"
        tool = text_schema(UNKNOWN, "", "argument", "")
        tools = [tool.as_function()]
        try:
            prompt = self._template([QUESTION], generation=True, tools=tools)
            asked = self._template([QUESTION], generation=False, tools=tools)
            without_tools = self._template([QUESTION], generation=True)
            called = self._template(_conversation([UNKNOWN], [MARK]), generation=True, tools=tools)
        except Exception as error:  # a template is a program and may raise anything
            reason = one_line(error)
            raise UserError(f"{name}: the chat template has no turns for calls and results ({reason}); {fix}") from None
        if prompt == without_tools:
            raise UserError(
                f"{name}: the chat template ignores tools, which protocol.format={self.format} needs; {fix}"
            )
        # A prompt that opens a thought, or holds an empty one, is no start of the conversation with a call.
        head = prompt if called.startswith(prompt) else asked
        turn = called.removeprefix(head).partition(self.tokenizer.eos_token)[0]
        call = Call(MARK, tag=UNKNOWN)
        fitting = [form for form in self.forms if form.parse_calls(turn, {UNKNOWN: tool}) == [call]]
        if type(self) not in fitting:
            if fitting:
                fix = f"it writes {fitting[0].call_form}: set protocol.format={fitting[0].format}"
            raise UserError(f"{name}: the chat template does not write {self.call_form}; {fix}")
        if MARK not in self._after_calls([UNKNOWN], [MARK]):
            raise UserError(f"{name}: the chat template leaves out the results of tools; {fix}")

    @staticmethod
    @abstractmethod
    def parse_calls(text: str, offered: Mapping[str, ToolSchema]) -> list[Call]:
        """Return the calls of a turn in order. A malformed call has its error. offered: name -> tool."""

    @abstractmethod
    def _with_calls(self, text: str, message: dict[str, Any]) -> str:
        """Return the text of a message, followed by the calls as the template writes calls."""

    def _functions(self, offered: Sequence[str] | None) -> list[dict] | None:
        """Return the `tools` argument of the chat template: the schemas of the offered tools, in the order of loading.

        None for no tools. offered: names, None = all.
        """
        schemas = [schema for name, schema in self.schemas.items() if offered is None or name in offered]
        return [schema.as_function() for schema in schemas] or None

    def render_prompt(self, messages: list[dict[str, str]], tools: Sequence[str] | None = None) -> list[int]:
        error = self._system_error(messages)
        if error:
            raise UserError(error)
        return super().render_prompt(messages, tools)

    def _system_error(self, messages: list[dict[str, Any]]) -> str:
        """Return an error if a system message asks for calls in tags (as in the published files); "" = no error."""
        system_prompt = messages[0]["content"] if messages[0]["role"] == "system" else ""
        tag = tag_pattern(self.tools).search(system_prompt)
        if tag is None:
            return ""
        return (
            f"a prompt's system message speaks of {tag[0]}, but protocol.format={self.format} has no tags; "
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
        return self.parse_calls(self._opened + self.decode(token_ids), {name: self.schemas[name] for name in offered})

    def encode_results(
        self, calls: Sequence[ToolCall], max_tokens: int, *, last_token: int
    ) -> tuple[list[str], list[int]] | None:
        names = [call.tag for call in calls]
        texts = [escape_tags(self._shortened(call.result, max_tokens), self.reserved) for call in calls]
        # Sampling also stops at other end tokens (Qwen's <|endoftext|>). Then the turn's own end token is missing.
        has_ended = last_token in self.tokenizer.convert_tokens_to_ids(list(self.turn_ends))
        end = [] if has_ended else [self.tokenizer.eos_token_id]

        def rendered(texts: list[str]) -> list[int]:
            return end + self._encode_rendered(self._after_calls(names, texts), self.tokenizer.eos_token)

        token_ids = rendered(texts)
        if len(token_ids) <= max_tokens:
            return texts, token_ids
        bodies = [self.encode(text) for text in texts]
        num_mark_tokens = len(self.encode(TRUNCATION_MARK))
        room = max_tokens - len(rendered([""] * len(texts)))
        keep = longest_share([len(body) for body in bodies], room) - num_mark_tokens
        # Decoding a part and encoding it again may give a few tokens more. Then the results are cut further.
        while keep >= 0:
            cut = []
            num_cut = 0
            for text, body in zip(texts, bodies, strict=True):
                if len(body) > keep + num_mark_tokens:
                    text = self.decode(body[:keep]).rstrip("�") + TRUNCATION_MARK
                    num_cut += 1
                cut.append(text)
            token_ids = rendered(cut)
            if len(token_ids) <= max_tokens:
                return cut, token_ids
            keep -= ceil((len(token_ids) - max_tokens) / max(num_cut, 1))
        return None

    def _after_calls(self, names: Sequence[str], results: Sequence[str]) -> str:
        """Return the template's text after the end token of a turn that called these tools."""
        text = self._template(_conversation(names, results), generation=True, tools=self._functions(None))
        return text.partition(MARK)[2].partition(self.tokenizer.eos_token)[2]

    # -- conversations of SFT

    def _prepare_for_template(
        self, messages: list[dict[str, Any]], functions: list[dict] | list[str] | None
    ) -> tuple[list[dict[str, Any]], list[dict] | None]:
        """Convert messages and functions of a file to the template's form.

        If the file has no functions, the loaded tools are listed. Functions that the system message lists itself are
        not listed again.
        """
        error = self._system_error(messages)
        if error:
            raise ValueError(error)
        if functions is None or all(isinstance(function, str) for function in functions):
            unknown = [name for name in functions or () if name not in self.schemas]
            if unknown:
                has = f"the row offers the tool {unknown[0]!r}, and data.tools has {', '.join(self.schemas)}"
                raise ValueError(f"{has}; add it there, or take it out of the row")
            names = [] if functions is None else functions
            functions = self._functions(functions)
        else:
            names = [tool["function"]["name"] for tool in functions]
        # Hermes's own files have the functions in both places.
        system_prompt = messages[0]["content"] if messages[0]["role"] == "system" else ""
        if self.tools_mark in system_prompt and all(name in system_prompt for name in names):
            functions = None
        return [self._in_template_form(message) for message in messages], functions

    def _add_response(self, row: Rendered, response: list[dict[str, Any]], mask_results: bool, before: str) -> str:
        added = ""
        for role, messages_of_role in groupby(response, key=itemgetter("role")):
            if role == "assistant":
                message = next(messages_of_role)
                tail = "" if message.get("tool_calls") else self._behind_answer
                text = self._before_answer + self._assistant_text(message) + tail
                token_ids = [*self.encode(text, before + added), self.tokenizer.eos_token_id]
                self._add(row, token_ids, is_trained=message.get("trained", True))
                added += self._mark_special(text) + self.tokenizer.eos_token
            else:
                results = list(messages_of_role)
                names = [message.get("name") or UNKNOWN for message in results]
                after = self._after_calls(names, [message["content"] for message in results])
                is_trained = not mask_results and all(message.get("trained", True) for message in results)
                self._add(row, self._encode_rendered(after, before + added), is_trained=is_trained)
                added += after
        return added

    def _in_template_form(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["role"] == "tool":
            return {"name": UNKNOWN, **message, "content": escape_tags(message["content"], self.reserved)}
        if message.get("tool_calls"):
            calls = [{"type": "function", "function": call} for call in message["tool_calls"]]
            return {**message, "tool_calls": calls}
        return message


def longest_share(sizes: Sequence[int], room: int) -> int:
    """Return the largest limit per size so that all sizes fit into a common room. Small sizes leave room to others.

    >>> longest_share([100, 10, 300], room=210)
    100
    """
    for num_left, size in zip(range(len(sizes), 0, -1), sorted(sizes), strict=True):
        if size * num_left > room:
            return room // num_left
        room -= size
    return max(sizes)


def _conversation(names: Sequence[str], results: Sequence[str]) -> list[dict[str, Any]]:
    """Return a question, a placeholder call of each tool, and the results. The last call has the argument MARK."""
    calls = []
    turns = []
    for index, (name, result) in enumerate(zip(names, results, strict=True)):
        call_id = f"call{index:05d}"
        argument = MARK if index == len(names) - 1 else ""
        function = {"name": name, "arguments": {"argument": argument}}
        calls.append({"id": call_id, "type": "function", "function": function})
        turns.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": result})
    return [QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}, *turns]
