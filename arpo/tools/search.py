"""The <search> tool: query hygiene, then the backend. A new backend is a class and a line in BACKENDS."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import unicodedata
from collections.abc import Callable
from typing import Protocol

from arpo.config import UserError
from arpo.options import SearchConfig
from arpo.tools.base import ToolResult
from arpo.tools.bm25 import Bm25Index

logger = logging.getLogger(__name__)

MAX_QUERY_CHARS = 512
DEADLINE_S = 30.0
NO_RESULTS = "No search results found."
EMPTY_QUERY = "Error: the search query is empty. Write what to look for between <search> and </search>."
UNAVAILABLE = "Error: search is unavailable."


def clean_query(argument: str) -> str:
    """One line of at most MAX_QUERY_CHARS, without control characters; and without double quotes, as upstream sends it.

    >>> clean_query(' height of\\n"Silver\\x00 Otter" ')
    'height of Silver Otter'
    """
    spaced = "".join(" " if unicodedata.category(c) in ("Cc", "Cs") else c for c in argument.replace('"', ""))
    return " ".join(spaced.split())[:MAX_QUERY_CHARS].rstrip()


def format_passages(passages: list[str], max_passage_chars: int) -> str:
    """["a", "b"] -> "Page 1: a\\nPage 2: b"; longer passages end in an ellipsis."""
    if not passages:
        return NO_RESULTS
    cut = [p if len(p) <= max_passage_chars else p[: max_passage_chars - 1] + "…" for p in passages]
    return "\n".join(f"Page {i}: {text}" for i, text in enumerate(cut, 1))


class Backend(Protocol):
    """Answers clean queries. TimeoutError, OSError and sqlite3.Error mean that it is down, whatever the query was."""

    async def search(self, query: str) -> str:
        """The text for the model; NO_RESULTS where nothing matches."""
        ...

    async def aclose(self) -> None: ...


class LocalBackend:
    """BM25 over the user's own corpus."""

    def __init__(self, cfg: SearchConfig):
        if not cfg.corpus:
            raise UserError("tools.search.corpus is empty, and backend local searches it; set it to a .jsonl file")
        for name in ("top_k", "max_passage_chars"):
            if getattr(cfg, name) < 1:
                raise UserError(f"tools.search.{name} must be at least 1, not {getattr(cfg, name)}")
        self.cfg = cfg
        self.index = Bm25Index(cfg.corpus)

    async def search(self, query: str) -> str:
        passages = await asyncio.to_thread(self.index.search, query, self.cfg.top_k, deadline_s=DEADLINE_S)
        return format_passages(passages, self.cfg.max_passage_chars)

    async def aclose(self) -> None:
        self.index.close()


BACKENDS: dict[str, Callable[[SearchConfig], Backend]] = {"local": LocalBackend}


class SearchTool:
    """<search>query</search> -> "Page 1: ...". Identical queries that overlap in time are asked once."""

    tag = "search"

    def __init__(self, cfg: SearchConfig):
        """Raises UserError for a config that cannot work. Builds the local index if need be, which may take a while."""
        if cfg.backend not in BACKENDS:
            raise UserError(f"tools.search.backend: {cfg.backend!r} is not there yet; use {', '.join(BACKENDS)}")
        self.backend = BACKENDS[cfg.backend](cfg)
        self._in_flight: dict[str, asyncio.Task[ToolResult]] = {}

    async def run(self, argument: str) -> ToolResult:
        query = clean_query(argument)
        if not query:
            return ToolResult(EMPTY_QUERY, ok=False, error_kind="empty_query")
        if query not in self._in_flight:
            task = self._in_flight[query] = asyncio.create_task(self._answer(query))
            task.add_done_callback(lambda _: self._in_flight.pop(query))
        return await asyncio.shield(self._in_flight[query])

    async def _answer(self, query: str) -> ToolResult:
        try:
            return ToolResult(await self.backend.search(query), ok=True)
        except TimeoutError:
            text = f"Error: no answer within {DEADLINE_S:g} s. Try a shorter query."
            return ToolResult(text, ok=False, error_kind="timeout", infra_error=True)
        except (OSError, sqlite3.Error) as error:
            logger.warning("search failed: %s", error)
            return ToolResult(UNAVAILABLE, ok=False, error_kind="unavailable", infra_error=True)

    async def aclose(self) -> None:
        await asyncio.gather(*self._in_flight.values(), return_exceptions=True)
        await self.backend.aclose()
