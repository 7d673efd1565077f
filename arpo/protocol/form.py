"""The parts of a form of calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from arpo.protocol.codec import Codec
from arpo.protocol.format_rules import FormatRules
from arpo.protocol.messages import Conversation


@dataclass(frozen=True)
class Form:
    """One value of protocol.format: everything that depends on the way a model writes calls."""

    codec: type[Codec]
    """Turns the form's text into tokens and back. Constructed with (tokenizer, tools=, enable_thinking=)."""
    rules: FormatRules
    """Decides if a response is well-formed, where its answer is, and which parts of a bare text are results."""
    parse_row: Callable[[dict], list[dict[str, str]] | Conversation]
    """Row of an SFT file -> conversation for the codec. Raises BadRow."""
    template_lists_tools: bool = True
    """True = the chat template lists the tools, and the codec takes their schemas. False = our system prompt lists
    them, and the codec takes their names."""
