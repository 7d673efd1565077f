"""How tools that run code or call servers record their results, and answer from them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace

from arpo.errors import UserError
from arpo.tools.cache.store import open_cache
from arpo.tools.interface import ToolResult

PYTHON, MCP = "python", "mcp"
"""Backends of what was recorded."""
NOT_RECORDED = "Error: there is no recorded result of this call."


class Recorder:
    """The record of one tool or server: whole results, errors and limits included, but for failures of ours."""

    def __init__(self, place: str, mode: str, backend: str, *, setting: str):
        """Opens the cache at `place`, as `mode` wants it; `setting` is the config field that names it.

        Raises UserError for a cache that cannot be used, and for a replay without one.
        """
        self.backend, self.mode = backend, mode
        self.replays = mode in ("replay", "replay_strict")
        if self.replays and not place:
            raise UserError(f"{setting} is empty, and mode {mode} reads it; set it to a recorded one")
        uses_cache = place and mode != "live"
        self.cache = open_cache(place, read_only=self.replays, setting=setting) if uses_cache else None

    async def answer(self, key: bytes, query: str, run: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
        """Return the result recorded under `key`, else what `run` returns, and record it; `query` is its name there.

        Raises UserError when `replay_strict` misses, or a replay's cache breaks: the run cannot go on.
        """
        if self.cache is None:
            return await run()
        if recorded := await asyncio.to_thread(self.get, key, query):
            return replace(_result(recorded), cached=True)
        if self.mode == "replay_strict":
            miss = f"no recorded result of {query[:80]!r}"
            raise UserError(f"{self.cache.path}: {miss}; record it, or set mode replay")
        if self.replays:
            return ToolResult(NOT_RECORDED, ok=False, error_kind="not_recorded")
        result = await run()
        if result.infra_error:
            return result
        # Another rank may have been first, with another result where the code is random. A replay will show that one,
        # so this run has to show it too.
        text = json.dumps({"text": result.text, "ok": result.ok, "error_kind": result.error_kind})
        recorded = await asyncio.to_thread(self.put, key, query, text)
        return replace(_result(recorded), seconds=result.seconds) if recorded else result

    def get(self, key: bytes, query: str) -> str | None:
        """Return what is recorded. Raises UserError where a replay's cache breaks."""
        return self.cache.get(key, query)

    def put(self, key: bytes, query: str, text: str) -> str | None:
        """Record a text unless there is one. Return what is recorded; None where the cache cannot be used."""
        self.cache.put(key, self.backend, query, text)
        return self.get(key, query)

    def close(self) -> None:
        if self.cache:
            self.cache.close()


def _result(recorded: str) -> ToolResult:
    return ToolResult(**json.loads(recorded))
