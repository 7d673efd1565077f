"""How the model reads what a search found."""

from __future__ import annotations

from arpo.tools.cache.store import NO_RESULTS

MAX_PASSAGE_CHARS = 1000
"""What the model reads of a passage or snippet, at most."""


def format_passages(passages: list[str], max_passage_chars: int) -> str:
    """["a", "b"] -> "Page 1: a\\nPage 2: b"; longer passages end in an ellipsis."""
    if not passages:
        return NO_RESULTS
    return "\n".join(f"Page {i}: {shorten(text, max_passage_chars)}" for i, text in enumerate(passages, 1))


def shorten(text: str, max_chars: int) -> str:
    """A longer text ends in an ellipsis."""
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"
