"""Text to tokens and back, for one tokenizer and its chat template; the same in SFT, RL and evaluation.

What depends on the form of calls is in the files of the forms, and in template_codec.py.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from itertools import groupby
from typing import Any, Literal, NamedTuple

from arpo.config.returned import whole_text
from arpo.errors import UserError
from arpo.protocol.calls import Call
from arpo.protocol.token_texts import TokenTexts
from arpo.trajectory import ToolCall

# Some templates write the date of the day; then a row of today would not be a row of tomorrow. This is Llama-3.1's own.
DATE = datetime(2024, 7, 26)
DATA = "\U0010ffff"
"""Stands before and behind each special token that a message's text contains, while the template renders it. Unicode
keeps this character out of text."""
THINK = "<think>"
ANCHORS = ("\n", "a", ".")
"""Texts behind which another is no beginning; it may share a token with one of them, not with all."""
CONTEXT_CHARS = 64
"""End of the text before, at least one special token long, that decides how the next text is tokenised."""
MIN_RESULT_CHARS, CHARS_PER_TOKEN, MIN_RESULT_TOKENS = 4096, 16, 64
"""A result's first part that is tokenised to see whether it is too long: characters at least, and per token that fits;
tokens that it must have beyond twice those that fit, so that the cut is far from its end."""
REWRITES = (
    "the chat template rewrites earlier turns (Qwen3's drops their thinking), so that one row cannot train them all; "
    "set data.train_turns=last"
)


class Rendered(NamedTuple):
    """A conversation as tokens."""

    token_ids: list[int]
    loss_mask: list[int]
    """1 on what the policy must produce; as long as token_ids."""


class Probed(NamedTuple):
    """How a chat template writes an assistant's turn."""

    after_eos: str
    """What it writes behind the EOS of the turn."""
    trims: bool
    """Whether it takes blanks off both ends of the message."""
    opened: str
    """The end of its generation prompt from a <think> on that it opens and does not close (QwQ, R1 distills); or ""."""
    lead: str
    """Blanks between the generation prompt and the message, which the model writes (GLM-4, Llama-2)."""
    tail: str
    """Blanks between the message and EOS, which the model writes (Llama-2)."""


class Codec(ABC):
    """Turns text into tokens and back. What the model sampled is never re-tokenised; only our own text is.

    Special tokens that a question, a tool result or an assistant message of SFT contains are plain characters, so that
    none of these can end a turn. But a tag of the protocol that the tokenizer declares special stays the one token that
    its model was trained on, and `decode` keeps it.

    Raises UserError for a chat template with which prompts or masks cannot be exact: none at all, no generation
    prompt, assistant turns that do not end with the tokenizer's EOS.
    """

    format: str
    """Value of protocol.format."""

    def __init__(self, tokenizer, *, tools: Sequence[str], enable_thinking: bool = False):
        """`tools` are the names of the loaded tools."""
        name = tokenizer.name_or_path
        if not tokenizer.chat_template:
            raise UserError(f"{name}: the tokenizer has no chat template; add chat_template.jinja to it")
        self.tokenizer = tokenizer
        self.tools = tuple(tools)
        self.enable_thinking = enable_thinking
        tags = {f"<{slash}{tag}>" for tag in self.reserved for slash in ("", "/")}
        special = {
            token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self._tag_ids = {text: token_id for text, token_id in special.items() if text in tags}
        self._tag = _pattern(self._tag_ids)
        self._control = _pattern(special.keys() - tags)
        self._control_ids = frozenset(special[text] for text in special.keys() - tags)
        # SentencePiece's kind writes a blank before a text: right where a text begins, wrong inside of one.
        whole, dot, word = (tokenizer.encode(text, add_special_tokens=False) for text in (".The", ".", "The"))
        takes_blanks = any(token.rstrip for token in tokenizer.added_tokens_decoder.values())
        self._marks_beginnings = takes_blanks or whole != dot + word
        self._after_eos, self._trims, self._opened, self._before_answer, self._behind_answer = self._probe_template()
        self._texts = TokenTexts(tokenizer, self.decode, self._encode_data("a"))
        self.vocab_size = len(tokenizer)
        self._min_result_tokens = self._count_min_result_tokens()

    def opened(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Return the <think> that a generation prompt has opened at the end of these tokens, and how many it takes.

        ("", 0) where there is none. Raises UserError where it shares a token with the text before it.
        """
        ids = self.tokenizer.encode(self._opened, add_special_tokens=False)
        if not ids or not self.decode(token_ids[-len(ids) - 1 :]).endswith(self._opened):
            return "", 0
        if list(token_ids[-len(ids) :]) != ids:
            name = self.tokenizer.name_or_path
            raise UserError(f"{name}: {self._opened!r} shares a token with what is before; set rollout.context=append")
        return self._opened, len(ids)

    @property
    @abstractmethod
    def reserved(self) -> tuple[str, ...]:
        """Names of the tags that have a meaning in this form."""

    @property
    def origin(self) -> dict[str, Any]:
        """Return all that tokens depend on besides tokenizer, thinking and names of tools, in plain types."""
        return {}

    @abstractmethod
    def _count_min_result_tokens(self) -> int:
        """Return the tokens of an empty result with the mark that it was cut."""

    def encode(self, text: str, before: str = ANCHORS[0]) -> list[int]:
        """Tokenise text that is data: without BOS, and with special tokens in it as plain characters, except tags.

        `before` is the text, or its end, behind which it stands: SentencePiece's kind tells beginnings from the rest.
        """
        token_ids, position = [], 0
        for tag in self._tag.finditer(text):
            token_ids += [*self._encode_data(text[position : tag.start()], before), self._tag_ids[tag[0]]]
            position, before = tag.end(), tag[0]
        return token_ids + self._encode_data(text[position:], before)

    def _encode_data(self, text: str, before: str = "") -> list[int]:
        return self._encode_behind(text, before, is_data=True)

    def _encode_behind(self, text: str, before: str, *, is_data: bool) -> list[int]:
        """Tokenise text as it is tokenised behind `before`, whose special tokens are tokens; those of data are not."""
        encode = partial(self.tokenizer.encode, add_special_tokens=False, split_special_tokens=is_data)
        if not (self._marks_beginnings and before and text):
            return encode(text)
        # The real context says whether a text begins here: it may end in a token that takes the next blanks (Phi-3).
        contexts = [(anchor, encode) for anchor in ANCHORS]
        if not (is_data and self._control.search(text)):
            whole = partial(self.tokenizer.encode, add_special_tokens=False)
            contexts.insert(0, (before.replace(DATA, "")[-CONTEXT_CHARS:], whole))
        for context, encode_both in contexts:
            head, both = encode_both(context), encode_both(context + text)
            if both[: len(head)] == head:  # else a token goes over the border
                return both[len(head) :]
        return encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens other than tags."""
        shown = [token for token in token_ids if token not in self._control_ids]
        return self.tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def check_result_room(self, max_result_tokens: int) -> None:
        """Raise UserError where not even a result that was cut to nothing fits."""
        if max_result_tokens < self._min_result_tokens:
            raise UserError(
                f"rollout.max_result_tokens={max_result_tokens} is below the {self._min_result_tokens} tokens of an "
                "empty result with the mark that it was cut: longer results would end their trajectories; raise it"
            )

    def _marked(self, text: str) -> str:
        return self._control.sub(rf"{DATA}\g<0>{DATA}", text.replace(DATA, ""))

    def _all_marked(self, value: Any) -> Any:
        """Return messages or schemas whose texts, at every depth, are `_marked`."""
        if isinstance(value, str):
            return self._marked(value)
        if isinstance(value, list):
            return [self._all_marked(one) for one in value]
        return {name: self._all_marked(one) for name, one in value.items()} if isinstance(value, dict) else value

    def _encode_rendered(self, text: str, before: str = "") -> list[int]:
        """Tokenise what the template rendered behind `before`: special tokens are the template's, except those marked
        as data."""
        token_ids = []
        for number, piece in enumerate(text.split(DATA)):
            is_data = number % 2
            token_ids += self.encode(piece, before) if is_data else self._encode_behind(piece, before, is_data=False)
            before += piece
        return token_ids

    def _template(self, messages: list[dict[str, Any]], *, generation: bool, tools: list[dict] | None = None) -> str:
        return self.tokenizer.apply_chat_template(
            self._all_marked(messages),
            tools=self._all_marked(tools),
            tokenize=False,
            add_generation_prompt=generation,
            enable_thinking=self.enable_thinking,
            date_string=DATE.strftime("%d %b %Y"),
            strftime_now=DATE.strftime,
        )

    def _probe_template(self) -> Probed:
        """Return how the template writes a turn. Raises UserError where prompts or masks cannot be exact."""
        name, eos = self.tokenizer.name_or_path, self.tokenizer.eos_token
        question, mark = [{"role": "user", "content": "question"}], "  an answer  "
        try:
            asked, prompt = (self._template(question, generation=generation) for generation in (False, True))
            dialogue = self._template([*question, {"role": "assistant", "content": mark}], generation=False)
        except Exception as error:  # a template is a program of its own
            raise UserError(
                f"{name}: the chat template cannot render a question and its answer ({_reason(error)}); take that of "
                "the model's publisher, or, of several, the one that is not for tools"
            ) from None
        before, found, closing = dialogue.rpartition(mark.strip())
        if not found:
            raise UserError(f"{name}: the chat template leaves out what the assistant says; repair chat_template.jinja")
        blank = mark[: len(mark) - len(mark.lstrip())]
        trims = not (before.endswith(blank) and closing.startswith(blank))
        before, closing = before.removesuffix(blank), closing.removeprefix(blank)
        lead = self._lead(asked, prompt, before)
        tail = closing[: len(closing) - len(closing.lstrip())]
        closing = closing.removeprefix(tail)
        if not eos or not closing.startswith(eos):
            raise UserError(
                f"{name}: the chat template ends an assistant turn with {closing.strip()!r}, but the tokenizer's "
                f"eos_token is {eos!r}, where sampling stops; take the instruct model, or make the former eos_token "
                "in tokenizer_config.json and the eos_token_id in generation_config.json"
            )
        _, think, rest = prompt.removeprefix(asked).rpartition(THINK)
        opened = think + rest if think and "</think>" not in rest else ""
        return Probed(closing[len(eos) :], trims=trims, opened=opened, lead=lead, tail=tail)

    def _lead(self, asked: str, prompt: str, before: str) -> str:
        """Return the blanks that the template writes between its generation prompt and what the assistant says.

        asked, prompt: a question without and with it; before: what stands before the answer. A thought that the prompt
        opens, or closes empty, is no difference. Raises UserError for more than blanks: no row would have that.
        """
        name = self.tokenizer.name_or_path
        start = len(asked) if prompt.startswith(asked) and before.startswith(asked) else 0
        begun, told = (text[start:].partition(THINK)[0] for text in (prompt, before))
        lead = told.removeprefix(begun)
        begins = prompt != asked or not prompt.rstrip().endswith(("question", self.tokenizer.eos_token or "question"))
        if begins and told.startswith(begun) and not lead.strip():
            return lead
        if prompt == asked:
            raise UserError(
                f"{name}: the chat template has no generation prompt: nothing tells the model that its turn begins; "
                "end the template with {% if add_generation_prompt %} ... {% endif %}"
            )
        raise UserError(
            f"{name}: the chat template begins an assistant's turn with {told!r}, and its generation prompt with "
            f"{begun!r}: rows could not have what lies between; make both the same in chat_template.jinja"
        )

    def render_prompt(self, messages: list[dict[str, str]], tools: Sequence[str] | None = None) -> list[int]:
        """Tokenise chat messages up to where the response begins. `tools` are those that the prompt offers, None = all;
        with tags it is the system prompt that speaks of them. Raises UserError where the template refuses them."""
        try:
            text = self._template(messages, generation=True, tools=self._functions(tools))
        except Exception as error:  # a template is a program of its own, and may forbid a system message
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(
                f"the chat template refuses a prompt of the roles {roles} ({_reason(error)}); where it forbids the "
                "system message, set data.system_prompt=none (evaluate.py: eval.system_prompt)"
            ) from None
        return self._encode_rendered(text)

    def _functions(self, offered: Sequence[str] | None) -> list[dict] | None:
        """Return `tools=` of the template; with tags it has none."""
        return None

    @abstractmethod
    def answer_text(self, answer: str) -> str:
        """Return a short well-formed response without calls, as the model would write it."""

    def _with_thought(self, text: str) -> str:
        return f"{THINK if not self._opened else ''} It is known. </think>{text}"

    # -- a turn's calls and their results

    @abstractmethod
    def stop_strings(self, offered: Sequence[str]) -> tuple[str, ...]:
        """Return the texts, besides end tokens, that end a turn where these tools are offered."""

    @abstractmethod
    def calls(
        self, token_ids: Sequence[int], finish: str, stop_string: str | None, offered: Sequence[str]
    ) -> list[Call]:
        """Return the calls that a finished turn ends in; none where it is the answer, or was cut off.

        `finish` and `stop_string` are those of the engine's last chunk.
        """

    @abstractmethod
    def encode_results(
        self, calls: Sequence[ToolCall], max_tokens: int, *, last_token: int
    ) -> tuple[list[str], list[int]] | None:
        """Escape, render and tokenise the results of a turn's calls within `max_tokens`, up to where the model goes on.

        `last_token` is the last one that the model sampled. Returns (results as the model reads them, token ids); None
        where results are too long and there is not even room for the mark that they were cut.
        """

    def _readable(self, result: str, max_tokens: int) -> str:
        """Return a result in whole characters, or a beginning of it that is still too long for `max_tokens`: to
        tokenise megabytes would take seconds, in which the engine stands still."""
        text, size = whole_text(result), max(MIN_RESULT_CHARS, CHARS_PER_TOKEN * max_tokens)
        while size < len(text) and len(self.encode(text[:size])) < 2 * max_tokens + MIN_RESULT_TOKENS:
            size *= 4
        return text[:size]

    def segments(
        self, token_ids: Sequence[int], loss_mask: Sequence[int], cuts: Sequence[int] = ()
    ) -> list[tuple[str, bool]]:
        """Return the response as (text, written by the model) runs, which end at each of the cuts too.

        Where the generation prompt ends in an open <think>, the first run begins with it, and each that follows another
        of the model's: the model continues it.
        """
        segments: list[tuple[str, bool]] = []
        for run, by_model in runs_of(token_ids, loss_mask, cuts):
            begins = not segments or (by_model and segments[-1][1])
            segments.append((self._opened * begins + self.decode(run), by_model))
        return segments

    def token_chars(
        self,
        token_ids: Sequence[int],
        loss_mask: Sequence[int],
        segments: list[tuple[str, bool]],
        cuts: Sequence[int] = (),
    ) -> list[int]:
        """Return how many characters of its segment's text each token adds. `segments` are those of `segments`.

        A character of several tokens belongs to the last of them. Returns [] where the tokens' own texts, one after the
        other, are not the text (a decoder that looks further than one token).
        """
        counts: list[int] = []
        for (run, _), (text, _) in zip(runs_of(token_ids, loss_mask, cuts), segments, strict=True):
            pieces = self._texts.pieces(run)
            own_text = "".join(pieces)
            if own_text != text and self._opened + own_text != text:
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
        functions: list[dict] | None = None,
    ) -> Rendered:
        """Tokenise an SFT conversation; the mask is 1 on what the assistant says, its calls and its end tokens.

        From a question to its answer a row is what a rollout would have made of the same texts. The template renders
        what the model is asked, exactly as `render_prompt` does in a rollout; what the assistant says is never put
        through it (Qwen3's would drop every <think> block of a trajectory but the first) and stands as the file has
        it, each result tokenised apart from the text around it, as in a rollout.

        An assistant's message may have `tool_calls`, [{"name", "arguments"}, ...]; messages of the role `tool` follow
        it in the order of the calls. `functions` is the template's `tools=` where it lists the tools.
        `mask_results=False` trains on results too, as the released code does; `train_turns="last"` trains only on the
        last assistant turn.
        Where the generation prompt opens a <think>, the one with which the assistant's text begins is left out of it.
        Raises ValueError where the template rewrites earlier turns, so that one row cannot hold them all, and where it
        opens a <think> that the assistant's text does not have.
        """
        messages, functions = self._as_the_template_takes_it(messages, functions)
        asked = [i for i, m in enumerate(messages) if m["role"] == "assistant" and messages[i - 1]["role"] != "tool"]
        row, done = Rendered([], []), ""
        for start in asked if train_turns == "all" else asked[-1:]:
            prompt = self._template(messages[:start], generation=True, tools=functions)
            if not prompt.startswith(done):
                raise ValueError(REWRITES)
            self._add(row, self._encode_rendered(prompt[len(done) :], done), False)
            done = prompt + self._add_run(row, _run(messages, start), mask_results, prompt)
        self._add(row, self._encode_behind(self._after_eos, done, is_data=False), False)
        return row

    @abstractmethod
    def _as_the_template_takes_it(
        self, messages: list[dict[str, Any]], functions: list[dict] | None
    ) -> tuple[list[dict[str, Any]], list[dict] | None]:
        """Return messages and functions of a file as the template takes them."""

    @abstractmethod
    def _add_run(self, row: Rendered, run: list[dict[str, Any]], mask_results: bool, before: str) -> str:
        """Add the assistant's turns up to its answer, and the results between them, behind the text `before`. Returns
        what was written."""

    def _said(self, message: dict[str, Any]) -> str:
        """Return what the assistant says, as the file has it, without the <think> that the prompt has opened."""
        text = message["content"].strip() if self._trims else message["content"]
        text = self._with_calls(text, message).replace(DATA, "") if message.get("tool_calls") else text
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
        """Return the text of a message and, behind it, the calls that it has in a field; with tags it has none."""
        return text

    @staticmethod
    def _add(row: Rendered, token_ids: list[int], trained: bool) -> None:
        row.token_ids.extend(token_ids)
        row.loss_mask.extend([int(trained)] * len(token_ids))


def runs_of(
    token_ids: Sequence[int], loss_mask: Sequence[int], cuts: Sequence[int]
) -> Iterator[tuple[list[int], bool]]:
    """Yield (tokens, mask) of the runs of a mask, which end at each of the cuts too.

    [5, 6, 7], [1, 1, 1], [2] -> ([5, 6], True), ([7], True)
    """
    numbered = enumerate(zip(token_ids, loss_mask, strict=True))
    for (mask, _), run in groupby(numbered, key=lambda entry: (bool(entry[1][1]), bisect_right(cuts, entry[0]))):
        yield [token for _, (token, _) in run], mask


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of any of these texts, longer ones first; no texts = no match."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def _run(messages: list[dict[str, Any]], start: int) -> list[dict[str, Any]]:
    """Return an assistant's message and what follows it up to its answer: results, and its turns after results."""
    end = start + 1
    roles = [message["role"] for message in messages]
    while roles[end : end + 1] == ["tool"] or roles[end - 1 : end + 1] == ["tool", "assistant"]:
        end += 1
    return messages[start:end]
