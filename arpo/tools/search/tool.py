"""The <search> tool: query hygiene, the cache, the backend. A new backend is a class and a line in BACKENDS."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from arpo.config.tools import SearchConfig
from arpo.errors import UserError
from arpo.protocol.prompts import About
from arpo.protocol.schema import text_schema
from arpo.tools.cache.rows import cache_key, clean_query
from arpo.tools.cache.store import open_cache
from arpo.tools.http.policy import BreakerOpen
from arpo.tools.interface import Tool, ToolResult
from arpo.tools.search.bm25 import FORMAT, Bm25Index
from arpo.tools.search.browse import ReadingBackend
from arpo.tools.search.passages import MAX_PASSAGE_CHARS, format_passages
from arpo.tools.search.web import SERVICES, WITHOUT, HttpBackend, check_settings

logger = logging.getLogger(__name__)

EMPTY_QUERY = "Error: the search query is empty. Write what to look for between <search> and </search>."
UNAVAILABLE = "Error: search is unavailable."
NOT_RECORDED = "Error: there is no recorded result for this query. Try other words."


class Backend(Protocol):
    """Answers clean queries. Raises TimeoutError or OSError if the service is down, never because of the query."""

    params: dict[str, object]
    """All settings with an effect on the answer. They are part of the cache key."""

    async def search(self, query: str) -> str:
        """Return the text for the model; NO_RESULTS for a query without hits."""

    async def aclose(self) -> None: ...


class LocalBackend:
    """BM25 over the user's own corpus."""

    def __init__(self, cfg: SearchConfig):
        """Build a missing index; this may take long. Raises UserError for an unusable corpus."""
        self.top_k = cfg.num_passages
        self.deadline_s = cfg.deadline_s
        self.index = Bm25Index(cfg.corpus)
        self.params = {
            "corpus_sha256": self.index.corpus_sha256,
            "top_k": cfg.num_passages,
            "max_passage_chars": MAX_PASSAGE_CHARS,
            "index": f"tantivy {FORMAT}",  # answers of another kind of index are not reused
        }

    async def search(self, query: str) -> str:
        async with asyncio.timeout(self.deadline_s):
            passages = await asyncio.to_thread(self.index.search, query, self.top_k)
        return format_passages(passages, MAX_PASSAGE_CHARS)

    async def aclose(self) -> None:
        """Nothing to release."""


BACKENDS: dict[str, Callable[[SearchConfig], Backend]] = {"local": LocalBackend} | dict.fromkeys(SERVICES, HttpBackend)
"""Class of each backend, by name. `replay` has no class: it only reads the cache."""


def check_search(cfg: SearchConfig) -> None:
    """Raise UserError for invalid settings, before any file is opened or any service asked."""
    if cfg.mode == "live" and cfg.backend == "replay":
        raise UserError("tools.search.mode live ignores the cache; backend replay has nothing else; set mode replay")
    if cfg.replays and not cfg.cache:
        setting = "backend replay" if cfg.backend == "replay" else f"mode {cfg.mode}"
        fix = "a recorded .sqlite cache, or set tools.search.backend local and tools.search.corpus FILE.jsonl"
        raise UserError(f"tools.search.cache is empty, and {setting} reads it; set it to {fix}, or {WITHOUT}")
    if cfg.backend in SERVICES:
        check_settings(cfg)
    if cfg.backend == "local" and not Path(cfg.corpus).is_file():
        problem = f"{cfg.corpus}: no such file" if cfg.corpus else "is empty, and backend local searches it"
        raise UserError(f"tools.search.corpus {problem}; set it to a .jsonl file, or {WITHOUT}")


class SearchTool(Tool):
    """Answers <search>query</search> with "Page 1: ...". Identical queries at the same time are asked once."""

    tag = "search"
    about = About(
        "a search tool",
        "to search, write <search> query </search>",
        "<search> query </search> <result> found passages </result>",
    )
    schema = text_schema("search", "Search, and show the passages found.", "query", "What to look for.")

    def __init__(self, cfg: SearchConfig):
        """Raises UserError for an invalid config, and for an unusable cache or corpus."""
        check_search(cfg)
        self.cfg = cfg
        self.cache = open_cache(cfg.cache, read_only=cfg.replays) if cfg.cache and cfg.mode != "live" else None
        self.backend = BACKENDS[cfg.backend](cfg) if cfg.backend != "replay" else None
        if cfg.read_pages and self.backend:
            self.backend = ReadingBackend(self.backend, cfg, self.cache)
        self._in_flight: dict[str, asyncio.Task[ToolResult]] = {}

    async def run(self, argument: str) -> ToolResult:
        """Answer a query. Raises UserError, to end the run, if `replay_strict` misses or a replay's cache breaks."""
        query = clean_query(argument)
        if not query:
            return ToolResult(EMPTY_QUERY, ok=False, error_kind="empty_query")
        joins = query in self._in_flight
        if not joins:
            task = self._in_flight[query] = asyncio.create_task(self._answer(query))
            task.add_done_callback(lambda _: self._in_flight.pop(query))
        result = await asyncio.shield(self._in_flight[query])
        # A joined call sent no request. So it counts as cached and costs nothing.
        return replace(result, cached=True) if joins and result.ok else result

    async def _answer(self, query: str) -> ToolResult:
        if self.cache:
            read = partial(self.cache.get, self._key(query)) if self.backend else self.cache.get_any
            recorded = await asyncio.to_thread(read, query)
            if recorded is not None:
                return ToolResult(recorded, ok=True, cached=True)
        if self.cfg.replays:
            if self.cfg.mode == "replay_strict":
                raise UserError(f"{self.cfg.cache}: no recorded result for {query!r}; record it, or set mode replay")
            return ToolResult(NOT_RECORDED, ok=False, error_kind="not_recorded")
        try:
            text = await self.backend.search(query)
        except TimeoutError:
            message = f"Error: search gave no answer within {self.cfg.deadline_s:g} s."
            return ToolResult(message, ok=False, error_kind="timeout", infra_error=True)
        except OSError as error:
            if not isinstance(error, BreakerOpen):  # the log had one line when the breaker opened
                logger.warning("search failed: %s", error)
            return ToolResult(UNAVAILABLE, ok=False, error_kind="unavailable", infra_error=True)
        if self.cache:
            await asyncio.to_thread(self.cache.put, self._key(query), self.cfg.backend, query, text)
        return ToolResult(text, ok=True)

    def _key(self, query: str) -> bytes:
        return cache_key(self.cfg.backend, self.backend.params, query)

    async def aclose(self) -> None:
        """Wait for running calls, then close everything. Safe to call twice."""
        await asyncio.gather(*self._in_flight.values(), return_exceptions=True)
        if self.backend:
            await self.backend.aclose()
        if self.cache:
            self.cache.close()
