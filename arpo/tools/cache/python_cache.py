"""Record and replay of the <python> tool, in a cache like that of the search tool.

What a call gave when it was recorded is what every later run reads, timeouts included: only a failure of the sandbox
itself is not kept. The key is the code, the limits and the interpreter's version; installed packages are not in it.
"""

from __future__ import annotations

import asyncio
import json
import platform

from arpo.errors import UserError
from arpo.tools.base import ToolResult
from arpo.tools.cache.cache import PYTHON, open_cache
from arpo.tools.cache.store import cache_key
from arpo.tools.options import PythonConfig
from arpo.tools.python import MAX_OUTPUT_CHARS, PythonTool, interpreter_of, refuse, strip_fences
from arpo.tools.sandbox.limits import CallLimits

NOT_RECORDED = "Error: there is no recorded result of this code."
_KEPT = ("text", "ok", "error_kind")


class CachedPython:
    """The python tool with the cache of its config, if it names one: asked first, and in a replay nothing else is."""

    tag, about = PythonTool.tag, PythonTool.about

    def __init__(self, cfg: PythonConfig):
        """Raises UserError for a replay of nothing, for a cache that cannot be used, and as `PythonTool`."""
        self.cfg = cfg
        self.replays = cfg.mode in ("replay", "replay_strict")
        if self.replays and not cfg.cache:
            raise UserError(f"tools.python.cache is empty, and mode {cfg.mode} reads it; set it to a recorded one")
        is_live = not cfg.cache or cfg.mode == "live"
        self.cache = None if is_live else open_cache(cfg.cache, read_only=self.replays, setting="tools.python.cache")
        self.tool = None if self.replays else PythonTool(cfg)
        interpreter = interpreter_of(cfg) if self.tool is None else self.tool.interpreter
        self._params = {
            "wall_s": cfg.wall_s,
            "cpu_s": cfg.cpu_s,
            "memory_mib": cfg.memory_mib,
            "max_processes": CallLimits.max_processes,
            "max_output_chars": MAX_OUTPUT_CHARS,
            "version": interpreter.version if interpreter else platform.python_version(),
        }

    async def run(self, argument: str) -> ToolResult:
        """Raises UserError when `replay_strict` misses, or a replay's cache breaks: the run cannot go on."""
        if self.cache is None:
            return await self.tool.run(argument)
        code = strip_fences(argument)
        refusal = refuse(code)
        if refusal:
            return refusal
        recorded = await asyncio.to_thread(self._recorded, code)
        if recorded is not None:
            return ToolResult(**recorded, cached=True)
        if self.tool is None:
            if self.cfg.mode == "replay_strict":
                raise UserError(
                    f"{self.cache.path}: no recorded result of {code[:80]!r}; record it, or set mode replay"
                )
            return ToolResult(NOT_RECORDED, ok=False, error_kind="not_recorded")
        result = await self.tool.run(argument)
        if result.infra_error:
            return result
        await asyncio.to_thread(self._record, code, result)
        # Another rank may have been first, with another result where the code is random. A replay will show that one,
        # so this run has to show it too.
        recorded = await asyncio.to_thread(self._recorded, code)
        return ToolResult(**recorded, seconds=result.seconds) if recorded else result

    def _recorded(self, code: str) -> dict | None:
        text = self.cache.get(cache_key(PYTHON, self._params, code), _label(code))
        return None if text is None else json.loads(text)

    def _record(self, code: str, result: ToolResult) -> None:
        text = json.dumps({name: getattr(result, name) for name in _KEPT})
        self.cache.put(cache_key(PYTHON, self._params, code), PYTHON, _label(code), text)

    async def aclose(self) -> None:
        """End the host, if there is one. Safe to call twice."""
        if self.tool is not None:
            await self.tool.aclose()
        if self.cache is not None:
            self.cache.close()


def _label(code: str) -> str:
    """Return what stands for the query in the cache; no search looks like this, should both tools share a cache."""
    return f"<python>{code}</python>"
