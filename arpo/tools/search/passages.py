"""Formats the passages of a search as text for the model."""

from __future__ import annotations

from arpo.tools.cache.rows import NO_RESULTS

MAX_PASSAGE_CHARS = 1000
"""Longest passage or snippet shown to the model."""


def format_passages(passages: list[str], max_passage_chars: int) -> str:
    """Return "Page 1: a\\nPage 2: b" for ["a", "b"]; longer passages are cut, see `shorten`."""
    if not passages:
        return NO_RESULTS
    return "\n".join(f"Page {i}: {shorten(text, max_passage_chars)}" for i, text in enumerate(passages, 1))


def shorten(text: str, max_chars: int) -> str:
    """Return at most `max_chars` characters. A cut text ends in an ellipsis."""
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"
