"""What a form of calls is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from arpo.protocol.codec import Codec
from arpo.protocol.format_rules import FormatRules
from arpo.protocol.messages import Conversation


@dataclass(frozen=True)
class Form:
    """One value of protocol.format: all that depends on how a model writes its calls."""

    codec: type[Codec]
    """Turns the form's text into tokens and back; made of (tokenizer, tools=, enable_thinking=)."""
    rules: FormatRules
    """What is well-formed, where the answer stands, and which runs of a bare text are results."""
    parse_row: Callable[[dict], list[dict[str, str]] | Conversation]
    """Row of an SFT file -> the conversation that the codec renders. Raises BadRow."""
    template_lists_tools: bool = True
    """Whether the chat template presents the tools. Then the codec takes their schemas; else it takes their names, and
    it is our system prompt that speaks of them."""
