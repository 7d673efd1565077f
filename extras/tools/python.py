"""<python> with a cache of results, and with a limit shared by all ranks and runs on a machine.

    --tools.names search extras/tools/python.py:RecordedPython
    --tools.options '{"extras/tools/python.py:RecordedPython": {"cache": "data/python.sqlite", "wall_s": 20}}'

With a cache, later runs read the recorded results, timeouts included. Only failures of the sandbox itself are not
recorded. The key has the code, the limits and the interpreter's version, but not the installed packages.
"""

from __future__ import annotations

import platform
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from arpo.config.facts import AtLeast
from arpo.config.tools import PythonConfig
from arpo.jail.client import GRACE_S
from arpo.jail.host_process import Tier
from arpo.jail.limits import CallLimits
from arpo.jail.wire import Reply
from arpo.tools.base import ToolResult
from arpo.tools.cache.rows import cache_key
from arpo.tools.python import MAX_OUTPUT_CHARS, PythonTool, refuse, strip_fences
from extras.tools.node_slots import NodeSlots
from extras.tools.recorder import PYTHON, Recorder


@dataclass(frozen=True)
class RecordedPythonConfig(PythonConfig):
    """The <python> tool with a record."""

    cache: str = ""
    """Cache of code -> result, as in tools.search.cache; empty = run every call. Do not use a cache for code with a
    different result each time."""
    mode: Literal["live", "record", "replay", "replay_strict"] = "record"
    """Use of the cache, as in tools.search.mode. A replay runs no code, and needs no sandbox."""
    max_concurrent_per_node: Annotated[int, AtLeast(0)] = 0
    """Most calls running on a machine at the same time, over all ranks and runs of this user; 0 = no limit."""


class RecordedPython(PythonTool):
    """Answers recorded calls from the cache, and runs the rest."""

    setting = "tools.options: python"

    def __init__(self, cfg: RecordedPythonConfig, *, tier: Tier | None = None, grace_s: float = GRACE_S):
        """Open the cache, if the config names a cache. Start the host, unless the config replays.

        Raises UserError as PythonTool, for an unusable cache, and for a replay without a cache.
        """
        self.recorder = Recorder(cfg.cache, cfg.mode, PYTHON, setting=f"{self.setting}.cache")
        self.sandbox = self._slots = None
        super().__init__(cfg, tier=tier, grace_s=grace_s)
        self._params = {
            "wall_s": cfg.wall_s,
            "cpu_s": cfg.cpu_s,
            "memory_mib": cfg.memory_mib,
            "max_processes": CallLimits.max_processes,
            "max_output_chars": MAX_OUTPUT_CHARS,
            "version": self.interpreter.version if self.interpreter else platform.python_version(),
        }

    def start(self, tier: Tier | None, grace_s: float) -> None:
        if not self.recorder.replays:
            super().start(tier, grace_s)
            if self.cfg.max_concurrent_per_node:
                self._slots = NodeSlots("python", self.cfg.max_concurrent_per_node)

    async def run(self, argument: str) -> ToolResult:
        """Answer one call from the cache, or run the code, as PythonTool does.

        Raises UserError if a call is missing in `replay_strict`, or if a replay's cache breaks: the run cannot go on.
        """
        code = strip_fences(argument)
        if refusal := refuse(code):
            return refusal
        query = f"<python>{code}</python>"  # no search in the same cache has this form
        return await self.recorder.answer(cache_key(PYTHON, self._params, code), query, partial(self._run, code))

    async def _run(self, code: str) -> ToolResult:
        return self._result(await self._on_thread(self._run_in_turn, code))

    def _run_in_turn(self, code: str) -> Reply:
        """Wait for a free slot on this machine, then run the code. The wait counts against no limit of the call."""
        with self._slots.take() if self._slots else nullcontext():
            return self.sandbox.run(code)

    async def aclose(self) -> None:
        if self.sandbox:
            await super().aclose()
        self.recorder.close()

    def _close(self) -> None:
        if self._slots:
            self._slots.close()
        super()._close()
