"""Extracts the text of a fetched page, and selects the passage for a query."""

from __future__ import annotations

import asyncio
import base64
import re
from collections import Counter
from pathlib import Path

from arpo.jail.child import Child, ChildDied

MEMORY_BYTES = 2 << 30
"""Limit of the child that parses pages."""
_TOKEN = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]|\w+")  # a word; a character in Chinese etc.


def best_passage(text: str, needle: str, max_chars: int) -> str:
    """Return the passage of at most `max_chars` with the most different words of `needle`, closest together.

    >>> best_passage("Foxes run. Otters swim in rivers. Owls fly by night.", "do otters swim?", 28)
    '… run. Otters swim in …'
    """
    if len(text) <= max_chars:
        return text
    wanted = {word.casefold() for word in _TOKEN.findall(needle)}
    hits = [(m.start(), m.end(), word) for m in _TOKEN.finditer(text) if (word := m.group().casefold()) in wanted]
    window_chars = max(1, max_chars - 4)  # two ellipses
    best, first, last = (1, -window_chars - 1), 0, 0  # (different words, -width); from, to
    inside: Counter[str] = Counter()
    left = 0
    for _, end, word in hits:
        inside[word] += 1
        while left < len(hits) and (end - hits[left][0] > window_chars or inside[hits[left][2]] > 1):
            inside[hits[left][2]] -= 1
            left += 1
        if left < len(hits) and (score := (sum(map(bool, inside.values())), hits[left][0] - end)) > best:
            best, first, last = score, hits[left][0], end
    start = min(max(0, (first + last - window_chars) // 2), len(text) - window_chars)
    return _cut(text, start, start + window_chars)


def _cut(text: str, start: int, stop: int) -> str:
    """Return text[start:stop] without cut words at the ends. An ellipsis marks omitted text."""
    part = text[start:stop]
    if start > 0 and (broken := re.match(r"\S{0,40}\s+", part)):
        part = part[broken.end() :]
    if stop < len(text) and (broken := re.search(r"\s+\S{0,40}$", part)):
        part = part[: broken.start()]
    return f"{'… ' if start > 0 else ''}{part}{' …' if stop < len(text) else ''}"


class ExtractionError(OSError):
    """The page has no text, or parsing exceeded the limits."""


class Extractor:
    """Reads pages in a child process, one at a time. For one event loop."""

    def __init__(self, *, limit_s: float = 10.0):
        """`limit_s` is the longest time of one extraction."""
        self._turn = asyncio.Lock()
        self._child = Child(Path(__file__).with_name("page_parser.py"), memory_bytes=MEMORY_BYTES, wall_s=limit_s)

    async def text(self, page: bytes, kind: str, charset: str = "") -> str:
        """Return the main text of a page. `kind`: html, pdf or plain. `charset`: from the page's HTTP header.

        Raises ExtractionError.
        """
        request = [base64.b64encode(page).decode(), kind, charset]
        async with self._turn:
            try:
                text = await asyncio.to_thread(self._child.ask, request)
            except (ChildDied, RuntimeError) as error:
                raise ExtractionError(f"no text within the limits ({error})") from None
        if not isinstance(text, str) or not text.strip():  # a hostile page may take over the child and return any value
            raise ExtractionError("no text in it")
        return text

    async def aclose(self) -> None:
        """End the child. Safe to call twice."""
        await asyncio.to_thread(self._child.close)
