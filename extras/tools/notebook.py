"""The <notebook> tool: Python in the jail of <python>. Variables, functions and imports stay from call to call.

A trajectory's notebook is a process in the jail, waiting for the next cell. A branch's notebook is a fork of the
process, made at the result where the branch begins. Files are not part of the state: each cell begins in an empty
folder. Threads and processes are not part of the state either: a cell's processes end with the cell, and a notebook
with threads, or with an open or mapped file, is not forked but replayed. A cell over a limit ends the notebook, and the
next cell begins a new notebook.

With a cache, the key of a cell's result contains all earlier cells of the notebook (ToolContext.history), not the
cell's code alone. A recorded cell runs only when a later cell has no recorded result.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from arpo.errors import UserError, require
from arpo.jail.client import GRACE_S
from arpo.jail.host_process import Tier
from arpo.jail.limits import CallLimits
from arpo.jail.wire import Reply
from arpo.protocol.prompts import About
from arpo.protocol.schema import text_schema
from arpo.tools.cache.rows import cache_key
from arpo.tools.interface import ToolContext, ToolResult
from arpo.tools.python import MAX_OUTPUT_CHARS, refuse, shorten, strip_fences
from extras.tools.notebook_jail.client import SessionClient, open_session
from extras.tools.python import RecordedPython, RecordedPythonConfig
from extras.tools.recorder import PYTHON
from extras.tools.session_tool import CannotFork, SessionLost, SessionTool


@dataclass(frozen=True)
class NotebookConfig(RecordedPythonConfig):
    """The <notebook> tool: Python with variables kept from call to call. The limits of <python> hold for each call."""

    session_cpu_s: float = 60.0
    """Most CPU seconds of all calls of a notebook together. Then the notebook ends, as at any limit, and the next call
    begins a new notebook."""
    max_sessions: int = 256
    """Most notebooks of a rank at a time, copies for branches included; 0 = no limit. Further trajectories wait. Each
    notebook is a process, and may keep memory_mib."""
    total_mib: int = 16384
    """Most memory kept by all notebooks of a rank between calls, in MiB. Memory shared by two notebooks counts twice.
    Above this limit the largest notebook's process ends; the trajectory's next call replays the cells."""
    cgroup: Literal["none"] = "none"
    """Always "none": a cgroup lasts for one call, but a notebook's process stays. So the limits are polled."""

    def __post_init__(self) -> None:
        require(self.max_sessions >= 0, f"max_sessions={self.max_sessions} must be at least 0")
        require(self.total_mib >= 1, f"total_mib={self.total_mib} must be at least 1")


@dataclass
class Notebook:
    """A trajectory's session."""

    first_cell: str = ""
    """Code run first in each process of the notebook."""
    process: SessionClient | None = None
    """None until the first cell without a result in the cache."""
    cells: list[str] = field(default_factory=list)
    """Cells answered from the cache. They must run before the next cell."""
    is_closed: bool = False
    kept_bytes: int = 0
    """Memory of the process, without the memory shared by all, in bytes; 0 while a cell runs."""


class NotebookTool(RecordedPython, SessionTool):
    """Runs cells in the trajectory's notebook; see the module. Without a session, `run(code)` uses a new notebook."""

    tag = "notebook"
    ended = "The notebook has ended; the next call begins a new one, without the variables."
    setting = "tools.options: notebook"
    about = About(
        "a Python notebook",
        "to run code, write <notebook> code </notebook> and print what you need; variables and functions stay, files "
        "do not",
        "<notebook> x = 6 * 7\nprint(x) </notebook> <result> 42 </result>",
    )
    schema = text_schema(
        "notebook", "Run Python code, and show what it prints. Variables and functions stay, files do not.", "code",
        "The code. Print what you need.",
    )  # fmt: skip

    def __init__(self, cfg: NotebookConfig, *, tier: Tier | None = None, grace_s: float = GRACE_S):
        """Raises as RecordedPython, and UserError for a session_cpu_s below the limit of one call."""
        if cfg.session_cpu_s < cfg.cpu_s:
            least = f"at least half of wall_s, which one call may compute: {cfg.cpu_s:g}"
            raise UserError(f"{self.setting}.session_cpu_s={cfg.session_cpu_s:g} must be {least}")
        super().__init__(cfg, tier=tier, grace_s=grace_s)
        self.max_sessions = cfg.max_sessions
        self._params["session_cpu_s"] = cfg.session_cpu_s
        self._open: dict[int, Notebook] = {}

    def limits(self, cfg: NotebookConfig) -> CallLimits:
        sessions = str(Path(__file__).with_name("notebook_jail").resolve())
        return replace(super().limits(cfg), sessions=sessions, session_cpu_s=cfg.session_cpu_s)

    def _reason(self, reply: Reply) -> str:
        if reply.status == "cpu_limit":
            both = f"{self.cfg.cpu_s:g} seconds of CPU time, or {self.cfg.session_cpu_s:g} in all calls of the notebook"
            return f"TimeoutError: execution exceeded {both}"
        return super()._reason(reply)

    async def open(self, context: ToolContext) -> Notebook:
        return self._noted(Notebook())

    def _noted(self, session: Notebook) -> Notebook:
        self._open[id(session)] = session
        return session

    async def run(
        self, argument: str, context: ToolContext | None = None, session: Notebook | None = None
    ) -> ToolResult:
        """Answer a cell. Raises SessionLost if the notebook's process is gone through no fault of the code."""
        if session is None:
            session = Notebook()
            try:
                return await self.run(argument, context, session)
            finally:
                await self.close(session)
        code = strip_fences(argument)
        history = context.history if context else ""
        if refusal := refuse(code):
            return refusal
        key = cache_key(PYTHON, self._params | {"history": history}, code)
        ask = partial(self._run_in, session, code)
        result = await self.recorder.answer(key, f"<notebook {history}>{code}</notebook>", ask)
        if result.cached:
            session.cells.append(code)
        return result

    async def _run_in(self, session: Notebook, code: str) -> ToolResult:
        reply = await self._on_thread(self._run_cell, session, code)
        result = self._result(reply)
        if reply.is_open or result.infra_error:
            return result
        return replace(result, text=shorten(f"{result.text}\n{self.ended}", MAX_OUTPUT_CHARS))

    def _run_cell(self, session: Notebook, code: str) -> Reply:
        """Run the cells answered from the cache so far, then the code."""
        with self._slots.take() if self._slots else nullcontext():
            begin = [session.first_cell] if session.first_cell and session.process is None else []
            for cell in [*begin, *session.cells, code]:
                if session.is_closed:
                    raise SessionLost
                if session.process is None:
                    process = open_session(self.sandbox)
                    if isinstance(process, Reply):
                        return process
                    session.process = process
                    if session.is_closed:  # meanwhile
                        process.close()
                session.kept_bytes = 0
                try:
                    reply = session.process.run(self.with_font_list(cell))
                except (OSError, EOFError, ValueError) as error:
                    raise SessionLost(f"{type(error).__name__}: {error}") from None
                has_not_begun = cell in begin and reply.status != "ok"
                if has_not_begun or not reply.is_open:
                    session.process.close()
                    session.process = None
                if has_not_begun:  # the next cell would lack the names of this one
                    return reply
            session.cells.clear()
            session.kept_bytes = reply.memory_bytes
            self._make_room()
            return reply

    def _make_room(self) -> None:
        """End the processes of notebooks, the largest first, until the rest together keep at most total_mib."""
        while True:
            notebooks = list(self._open.values())
            if sum(one.kept_bytes for one in notebooks) <= self.cfg.total_mib << 20:
                return
            largest = max(notebooks, key=lambda one: one.kept_bytes)
            largest.kept_bytes = 0
            if process := largest.process:
                process.close()  # the notebook's next call raises SessionLost

    async def fork(self, session: Notebook, context: ToolContext) -> Notebook:
        process = None
        if session.process:
            try:
                process = await self._on_thread(session.process.fork)
            except (OSError, EOFError, ValueError):
                process = None
            if process is None:
                raise CannotFork("threads, open files or processes cannot be copied")
        return self._noted(replace(session, process=process, cells=list(session.cells)))

    async def close(self, session: Notebook) -> None:
        session.is_closed = True
        self._open.pop(id(session), None)
        if session.process:
            session.process.close()
