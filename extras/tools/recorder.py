"""Record the results of tools that run code or call servers, and answer calls from the record."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace

from arpo.errors import UserError
from arpo.tools.cache.store import open_cache
from arpo.tools.interface import ToolResult

PYTHON = "python"
MCP = "mcp"
"""Names of the backends in the record."""
NOT_RECORDED = "Error: there is no recorded result of this call."


class Recorder:
    """The record of one tool or server: complete results, with errors and limits, but no infrastructure errors.

    A call that was over its deadline at a server (MCP) is not recorded: another time it may be answered.
    """

    def __init__(self, place: str, mode: str, backend: str, *, setting: str):
        """Open the cache at `place` for `mode`. `setting`: the config field with the place, for error messages.

        Raises UserError if the cache cannot be used, or if a replay has none.
        """
        self.backend = backend
        self.mode = mode
        self.replays = mode in ("replay", "replay_strict")
        if self.replays and not place:
            raise UserError(f"{setting} is empty, and mode {mode} reads it; set it to a recorded one")
        uses_cache = place and mode != "live"
        self.cache = open_cache(place, read_only=self.replays, setting=setting) if uses_cache else None

    async def answer(self, key: bytes, query: str, run: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
        """Return the result recorded under `key`; without one, run the call and record its result (named `query`).

        Raises UserError if `replay_strict` finds no result, or if a replay's cache breaks: the run cannot continue.
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
        if result.infra_error or (self.backend == MCP and result.error_kind == "timeout"):
            return result
        # Another rank may have recorded a different result first, if the code is random. A replay will return that one,
        # so this run must return it too.
        text = json.dumps({"text": result.text, "ok": result.ok, "error_kind": result.error_kind})
        recorded = await asyncio.to_thread(self.put, key, query, text)
        return replace(_result(recorded), seconds=result.seconds) if recorded else result

    def get(self, key: bytes, query: str) -> str | None:
        """Return the recorded text. Raises UserError if a replay's cache breaks."""
        return self.cache.get(key, query)

    def put(self, key: bytes, query: str, text: str) -> str | None:
        """Record a text, unless one is recorded. Return the recorded text; None if the cache cannot be used."""
        self.cache.put(key, self.backend, query, text)
        return self.get(key, query)

    def close(self) -> None:
        if self.cache:
            self.cache.close()


def _result(recorded: str) -> ToolResult:
    return ToolResult(**json.loads(recorded))
