"""Conversations to tokens and back, for a tokenizer with its chat template. SFT, RL and evaluation use the same codec.

text_codec.py encodes plain text. Each form of calls has a separate file (tags.py, hermes.py, ...); template_codec.py
is for forms that the chat template writes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal, NamedTuple

from arpo.config.returned import whole_text
from arpo.errors import UserError
from arpo.protocol.calls import Call
from arpo.protocol.text_codec import ESCAPE_MARK, TextCodec
from arpo.protocol.token_texts import TokenTexts, runs_of
from arpo.protocol.turn_format import THINK, one_line, probe_turn_format
from arpo.trajectory import ToolCall

# Some templates write today's date, so the same row would have other tokens tomorrow. This is Llama-3.1's own date.
DATE = datetime(2024, 7, 26)


class Rendered(NamedTuple):
    """A conversation as tokens."""

    token_ids: list[int]
    loss_mask: list[int]
    """1 = the policy must produce this token. As long as token_ids."""


class Codec(TextCodec, ABC):
    """Turns conversations into tokens and back. Sampled tokens are never encoded again, only text from elsewhere is.

    Raises UserError for a chat template that makes exact prompts or masks impossible: no template, no generation
    prompt, or assistant turns that do not end with the tokenizer's EOS.
    """

    format: str
    """Value of protocol.format."""

    def __init__(self, tokenizer, *, tools: Sequence[str], enable_thinking: bool = False):
        """tools: names of the loaded tools."""
        if not tokenizer.chat_template:
            name = tokenizer.name_or_path
            raise UserError(f"{name}: the tokenizer has no chat template; add chat_template.jinja to it")
        self.tools = tuple(tools)
        self.enable_thinking = enable_thinking
        super().__init__(tokenizer, tags={f"<{slash}{tag}>" for tag in self.reserved for slash in ("", "/")})
        turn = probe_turn_format(tokenizer, self._template)
        self._after_eos = turn.after_eos
        self._trims = turn.trims
        self._opened = turn.opened
        self._before_answer = turn.lead
        self._behind_answer = turn.tail
        self._texts = TokenTexts(tokenizer, self.decode, self._encode_after("", "a", is_data=True))
        self.vocab_size = len(tokenizer)
        self._min_result_tokens = self._count_min_result_tokens()

    @property
    @abstractmethod
    def reserved(self) -> tuple[str, ...]:
        """Names of the tags with a meaning in this form."""

    @property
    def origin(self) -> dict[str, Any]:
        """Everything besides tokenizer, thinking and names of tools that decides the tokens, in plain types."""
        return {}

    @abstractmethod
    def _count_min_result_tokens(self) -> int:
        """Return the number of tokens of a result that was cut to nothing but the truncation mark."""

    def check_result_room(self, max_result_tokens: int) -> None:
        """Raise UserError if not even a result cut to nothing fits."""
        if max_result_tokens < self._min_result_tokens:
            raise UserError(
                f"rollout.max_result_tokens={max_result_tokens} is below the {self._min_result_tokens} tokens of an "
                "empty result with the mark that it was cut: longer results would end their trajectories; raise it"
            )

    # -- prompts

    def render_prompt(self, messages: list[dict[str, str]], tools: Sequence[str] | None = None) -> list[int]:
        """Encode chat messages up to the start of the response.

        tools: the tools that the prompt offers, None = all. (With tags only the system prompt speaks of them.) Raises
        UserError if the template refuses the messages.
        """
        try:
            text = self._template(messages, generation=True, tools=self._functions(tools))
        except Exception as error:  # a template is a program, and may forbid a system message
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(
                f"the chat template refuses a prompt of the roles {roles} ({one_line(error)}); where it forbids the "
                "system message, set data.system_prompt=none (evaluate.py: eval.system_prompt)"
            ) from None
        return self._encode_rendered(text)

    def _template(self, messages: list[dict[str, Any]], *, generation: bool, tools: list[dict] | None = None) -> str:
        """Return the text that the chat template renders. Special tokens in the messages are marked as data."""
        return self.tokenizer.apply_chat_template(
            self._mark_special_in(messages),
            tools=self._mark_special_in(tools),
            tokenize=False,
            add_generation_prompt=generation,
            enable_thinking=self.enable_thinking,
            date_string=DATE.strftime("%d %b %Y"),
            strftime_now=DATE.strftime,
        )

    def _functions(self, offered: Sequence[str] | None) -> list[dict] | None:
        """Return the `tools` argument of the chat template: the schemas of the offered tools. The form `tags` passes
        None."""
        return None

    def opened_thought(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Return the <think> that the generation prompt opened at the end of these tokens, and its number of tokens.

        Returns ("", 0) if there is none. Raises UserError if it shares a token with the text before it.
        """
        ids = self.tokenizer.encode(self._opened, add_special_tokens=False)
        if not ids or not self.decode(token_ids[-len(ids) - 1 :]).endswith(self._opened):
            return "", 0
        if list(token_ids[-len(ids) :]) != ids:
            name = self.tokenizer.name_or_path
            raise UserError(f"{name}: {self._opened!r} shares a token with what is before; set rollout.context=append")
        return self._opened, len(ids)

    @abstractmethod
    def answer_text(self, answer: str) -> str:
        """Return a short well-formed response without calls, as the model would write it."""

    def _with_thought(self, text: str) -> str:
        return f"{THINK if not self._opened else ''} It is known. </think>{text}"

    # -- a turn's calls and their results

    @abstractmethod
    def stop_strings(self, offered: Sequence[str]) -> tuple[str, ...]:
        """Return the texts that end a turn if these tools are offered. (An end token ends a turn, too.)"""

    @abstractmethod
    def calls(
        self, token_ids: Sequence[int], finish: str, stop_string: str | None, offered: Sequence[str]
    ) -> list[Call]:
        """Return the calls at the end of a finished turn. An answer, or a turn without room to end, has none.

        finish, stop_string: from the engine's last chunk.
        """

    @abstractmethod
    def encode_results(
        self, calls: Sequence[ToolCall], max_tokens: int, *, last_token: int
    ) -> tuple[list[str], list[int]] | None:
        """Escape, render and encode the results of a turn's calls, up to the start of the model's next turn.

        last_token: the last sampled token. Returns (results as the model reads them, at most max_tokens token ids).
        Returns None if the results are too long and not even the truncation mark fits.
        """

    def _shortened(self, result: str, max_tokens: int) -> str:
        """Return a result without halves of characters, or a start of it that is still too long for `max_tokens`.

        Encoding megabytes would take seconds, and the engine would wait.
        """
        text = whole_text(result)
        # Characters to encode. A part with far more than max_tokens tokens is too long, whatever follows it.
        size = max(4096, 16 * max_tokens)
        while size < len(text) and len(self.encode(text[:size])) < 2 * max_tokens + 64:
            size *= 4
        return text[:size]

    # -- the text of a response

    def segments(
        self, token_ids: Sequence[int], loss_mask: Sequence[int], cuts: Sequence[int] = ()
    ) -> list[tuple[str, bool]]:
        """Return the response as (text, written by the model) runs. A run also ends at each cut.

        If the generation prompt opens a <think>, the first run begins with it, since the model continues it. So does
        each run of the model that follows another run of the model.
        """
        segments: list[tuple[str, bool]] = []
        for run, by_model in runs_of(token_ids, loss_mask, cuts):
            follows_prompt = not segments or (by_model and segments[-1][1])
            text = self.decode(run)
            segments.append((self._opened + text if follows_prompt else text, by_model))
        return segments

    def token_chars(
        self,
        token_ids: Sequence[int],
        loss_mask: Sequence[int],
        segments: list[tuple[str, bool]],
        cuts: Sequence[int] = (),
    ) -> list[int]:
        """Return the number of characters that each token adds to its segment (from `segments`).

        A character of several tokens belongs to the last of them. Returns [] if the texts of the single tokens do not
        add up to the text (for a decoder that looks at more than one token).
        """
        counts: list[int] = []
        for (run, _), (text, _) in zip(runs_of(token_ids, loss_mask, cuts), segments, strict=True):
            pieces = self._texts.pieces(run)
            joined = "".join(pieces)
            if joined != text and self._opened + joined != text:
                return []
            counts += map(len, pieces)
        return counts

    # -- conversations of SFT

    def render_conversation(
        self,
        messages: list[dict[str, Any]],
        *,
        mask_results: bool = True,
        train_turns: Literal["all", "last"] = "all",
        functions: list[dict] | list[str] | None = None,
    ) -> Rendered:
        """Encode an SFT conversation. The mask is 1 on the assistant's texts, calls and end tokens.

        The tokens are the same as in a rollout with the same texts. The template renders only prompts, as in
        `render_prompt`. The assistant's texts do not go through the template (Qwen3's would drop every <think> block of
        a trajectory except the first). Each result is encoded separately from the text around it.

        messages: an assistant's message may have `tool_calls`, [{"name", "arguments"}, ...]. Messages of the role
            `tool` follow in the order of the calls.
        mask_results: False trains on results too, as the released code does.
        train_turns: "last" trains only on the last assistant turn.
        functions: the template's `tools=`, if it lists the tools, or the names of loaded tools; None = all of these.

        If the generation prompt opens a <think>, the <think> at the start of the assistant's text is left out. Raises
        ValueError if this <think> is missing, and if the template rewrites earlier turns: then one row cannot hold all
        turns.
        """
        messages, functions = self._prepare_for_template(messages, functions)
        starts = [i for i, m in enumerate(messages) if m["role"] == "assistant" and messages[i - 1]["role"] != "tool"]
        row = Rendered([], [])
        done = ""
        for start in starts if train_turns == "all" else starts[-1:]:
            prompt = self._template(messages[:start], generation=True, tools=functions)
            if not prompt.startswith(done):
                raise ValueError(
                    "the chat template rewrites earlier turns (Qwen3's drops their thinking), so that one row cannot "
                    "train them all; set data.train_turns=last"
                )
            self._add(row, self._encode_rendered(prompt[len(done) :], done), is_trained=False)
            done = prompt + self._add_response(row, _response_at(messages, start), mask_results, prompt)
        self._add(row, self._encode_after(done, self._after_eos, is_data=False), is_trained=False)
        return row

    @abstractmethod
    def _prepare_for_template(
        self, messages: list[dict[str, Any]], functions: list[dict] | list[str] | None
    ) -> tuple[list[dict[str, Any]], list[dict] | None]:
        """Convert messages and functions of a file to the template's form."""

    @abstractmethod
    def _add_response(self, row: Rendered, response: list[dict[str, Any]], mask_results: bool, before: str) -> str:
        """Add the assistant's turns up to the answer, and the results between them. `before` is the text so far. Return
        the added text."""

    def _assistant_text(self, message: dict[str, Any]) -> str:
        """Return the assistant's text as the file has it, without the <think> that the prompt has opened."""
        text = message["content"].strip() if self._trims else message["content"]
        end = self.tokenizer.eos_token
        if text.rstrip().endswith(end):  # as plain characters, which the model would learn to write
            raise ValueError(f"an assistant's text ends with {end!r}, which ends every turn anyway; remove it")
        if message.get("tool_calls"):
            text = self._with_calls(text, message).replace(ESCAPE_MARK, "")
        if not self._opened:
            return text
        text = text.lstrip()
        if not text.startswith(THINK):
            raise ValueError(
                "the chat template opens <think> for the assistant, whose message does not begin with it; give it a "
                "<think> ... </think> at the start, or take a template that does not open one"
            )
        return text.removeprefix(self._opened if text.startswith(self._opened) else THINK)

    def _with_calls(self, text: str, message: dict[str, Any]) -> str:
        """Return the text of a message, followed by the calls in its `tool_calls`. With tags there are none."""
        return text

    @staticmethod
    def _add(row: Rendered, token_ids: list[int], *, is_trained: bool) -> None:
        row.token_ids.extend(token_ids)
        row.loss_mask.extend([int(is_trained)] * len(token_ids))


def _response_at(messages: list[dict[str, Any]], start: int) -> list[dict[str, Any]]:
    """Return the assistant's message at `start`, and its results and further turns up to the answer."""
    end = start + 1
    roles = [message["role"] for message in messages]
    while roles[end : end + 1] == ["tool"] or roles[end - 1 : end + 1] == ["tool", "assistant"]:
        end += 1
    return messages[start:end]
