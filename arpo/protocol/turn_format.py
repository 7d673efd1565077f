"""How a chat template writes an assistant's turn, as measured on a short dialogue."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from arpo.errors import UserError

THINK = "<think>"


class TurnFormat(NamedTuple):
    """The parts of an assistant's turn: generation prompt, lead, message, tail, EOS, after_eos."""

    after_eos: str
    """Text that the template writes after the EOS of the turn."""
    trims: bool
    """True if the template strips blanks from both ends of the message."""
    opened: str
    """End of the generation prompt, from a <think> that it opens and does not close (QwQ, R1 distills); or ""."""
    lead: str
    """Blanks between the generation prompt and the message. The model writes them (GLM-4, Llama-2)."""
    tail: str
    """Blanks between the message and EOS. The model writes them (Llama-2)."""


def probe_turn_format(tokenizer, render: Callable[..., str]) -> TurnFormat:
    """Return how the chat template writes a turn. Raises UserError if prompts or masks cannot be exact.

    render(messages, generation=bool) applies the template, with or without a generation prompt.
    """
    name = tokenizer.name_or_path
    eos = tokenizer.eos_token
    blank = "  "
    answer = "an answer"
    question = {"role": "user", "content": "question"}
    try:
        asked = render([question], generation=False)
        prompt = render([question], generation=True)
        dialogue = render([question, {"role": "assistant", "content": blank + answer + blank}], generation=False)
    except Exception as error:  # a template is a program and may raise anything
        raise UserError(
            f"{name}: the chat template cannot render a question and its answer ({one_line(error)}); take that of "
            "the model's publisher, or, of several, the one that is not for tools"
        ) from None
    before, is_there, after = dialogue.rpartition(answer)
    if not is_there:
        raise UserError(f"{name}: the chat template leaves out what the assistant says; repair chat_template.jinja")
    trims = not (before.endswith(blank) and after.startswith(blank))
    before = before.removesuffix(blank)
    after = after.removeprefix(blank)
    lead = _blanks_before_message(tokenizer, asked=asked, prompt=prompt, before=before)
    tail = after[: len(after) - len(after.lstrip())]
    after = after.removeprefix(tail)
    if not eos or not after.startswith(eos):
        raise UserError(
            f"{name}: the chat template ends an assistant turn with {after.strip()!r}, but the tokenizer's "
            f"eos_token is {eos!r}, where sampling stops; take the instruct model, or make the former eos_token "
            "in tokenizer_config.json and the eos_token_id in generation_config.json"
        )
    _, think, rest = prompt.removeprefix(asked).rpartition(THINK)
    opened = think + rest if think and "</think>" not in rest else ""
    return TurnFormat(after_eos=after[len(eos) :], trims=trims, opened=opened, lead=lead, tail=tail)


def _blanks_before_message(tokenizer, *, asked: str, prompt: str, before: str) -> str:
    """Return the blanks that the template writes between its generation prompt and the assistant's message.

    asked, prompt: a question without and with the generation prompt. before: all text before the answer. A thought that
    the prompt opens, or writes empty, does not count. Raises UserError if there is more than blanks in between: neither
    prompt nor model would write this text.
    """
    name = tokenizer.name_or_path
    start = len(asked) if prompt.startswith(asked) and before.startswith(asked) else 0
    prompt_head = prompt[start:].partition(THINK)[0]
    turn_head = before[start:].partition(THINK)[0]
    lead = turn_head.removeprefix(prompt_head)
    # Some templates write the generation prompt always. Then `prompt` and `asked` are the same text.
    ends_in_question = prompt.rstrip().endswith(("question", tokenizer.eos_token or "question"))
    has_generation_prompt = prompt != asked or not ends_in_question
    if has_generation_prompt and turn_head.startswith(prompt_head) and not lead.strip():
        return lead
    if prompt == asked:
        raise UserError(
            f"{name}: the chat template has no generation prompt: nothing tells the model that its turn begins; "
            "end the template with {% if add_generation_prompt %} ... {% endif %}"
        )
    raise UserError(
        f"{name}: the chat template begins an assistant's turn with {turn_head!r}, and its generation prompt with "
        f"{prompt_head!r}: rows could not have what lies between; make both the same in chat_template.jinja"
    )


def one_line(error: Exception) -> str:
    """Return an exception as a line of at most 200 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
