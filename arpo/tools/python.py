"""The <python> tool: the model's code in a jail, its output or its error as text for the model to read."""

from __future__ import annotations

import asyncio
import math
import re
from concurrent.futures import ThreadPoolExecutor

from arpo.errors import UserError
from arpo.protocol.prompts import About
from arpo.tools.base import ToolResult
from arpo.tools.node_slots import NodeSlots
from arpo.tools.options import PythonConfig
from arpo.tools.sandbox.client import GRACE_S, Sandbox
from arpo.tools.sandbox.host_process import SandboxUnavailable, Tier
from arpo.tools.sandbox.interpreter import Interpreter, named_interpreter
from arpo.tools.sandbox.limits import CallLimits
from arpo.tools.sandbox.wire import MAX_CODE_BYTES, Reply

FENCED = re.compile(r"\A\s*```[ \t]*\w*[ \t]*\n(.*?)\n?[ \t]*```\s*\Z", re.DOTALL)
NO_OUTPUT = "(no output)"
CUT = "\n... [output truncated] ...\n"
MAX_OUTPUT_CHARS = 8192  # of a result; what is over is cut, with a mark
LEAST = {"wall_s": 2, "memory_mib": 128, "max_concurrent": 1}
"""Below these the host cannot even prove that its jail holds, or the model reads nothing."""


class PythonTool:
    """Runs code as a notebook cell without memory: what it prints, and the value of a last bare expression.

    Two calls share nothing; the same code gives the same text (hash seed, `random` and NumPy are seeded, TZ is UTC).
    """

    tag = "python"
    about = About(
        "a Python interpreter",
        "to run code, write <python> code </python> and print what you need",
        "<python> print(6 * 7) </python> <result> 42 </result>",
    )

    def __init__(self, cfg: PythonConfig, *, tier: Tier | None = None, grace_s: float = GRACE_S):
        """Starts the host. Raises UserError where this machine allows no isolation (or not `tier`, for tests), and for
        limits and interpreters that cannot be used."""
        check_limits(cfg)
        self.cfg = cfg
        self.interpreter = interpreter_of(cfg)
        self._slots = NodeSlots("python", cfg.max_concurrent_per_node) if cfg.max_concurrent_per_node else None
        limits = CallLimits(
            wall_s=cfg.wall_s,
            cpu_s=cfg.cpu_s,
            memory_bytes=cfg.memory_mib << 20,
        )
        try:
            self.sandbox = Sandbox(
                limits, interpreter=self.interpreter, tier=tier, allow_unsafe=cfg.allow_unsafe, grace_s=grace_s
            )
        except SandboxUnavailable as error:
            raise UserError(
                f"tools.python: no isolation for model-written code on this machine ({error}); allow user namespaces "
                "or Landlock, drop python from tools.names, or accept the risk with tools.python.allow_unsafe"
            ) from error
        # Own threads: one per call that runs, the others wait before their clock starts. asyncio's default pool is
        # shared with everybody and has few.
        self._threads = ThreadPoolExecutor(cfg.max_concurrent, thread_name_prefix="arpo-python")

    async def run(self, argument: str) -> ToolResult:
        """Run one call. Never raises for what the code does; `infra_error` where the sandbox itself failed."""
        code = strip_fences(argument)
        refusal = refuse(code)
        if refusal:
            return refusal
        reply = await asyncio.get_running_loop().run_in_executor(self._threads, self._run, code)
        return self._result(reply)

    def _run(self, code: str) -> Reply:
        """Waits for a place on this machine, in a thread of ours; that counts against no limit of the call."""
        if self._slots is None:
            return self.sandbox.run(code)
        with self._slots.take():
            return self.sandbox.run(code)

    async def aclose(self) -> None:
        """End the host; calls that still run end with infra_error."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self.sandbox.close()
        if self._slots:
            self._slots.close()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _result(self, reply: Reply) -> ToolResult:
        if reply.status == "sandbox_error":
            text = "Error: the Python interpreter is unavailable."
            return ToolResult(text, ok=False, error_kind=reply.status, infra_error=True)
        output = reply.stdout.strip("\n").rstrip()
        if reply.status == "ok":
            text = output or NO_OUTPUT
            return ToolResult(shorten(text, MAX_OUTPUT_CHARS), ok=True, seconds=reply.wall_s)
        reason = self._reason(reply)
        # The reason comes first in the budget: it is short, except for a message that the code made long.
        reason = shorten(reason, MAX_OUTPUT_CHARS)
        room = MAX_OUTPUT_CHARS - len(reason) - 1
        text = f"{shorten(output, room)}\n{reason}" if output and room > len(CUT) else reason
        return ToolResult(text, ok=False, seconds=reply.wall_s, error_kind=reply.status)

    def _reason(self, reply: Reply) -> str:
        """Why it failed, in words that depend on nothing but the code and the limits."""
        fixed = {
            "timeout": f"TimeoutError: execution exceeded {self.cfg.wall_s:g} seconds",
            "cpu_limit": f"TimeoutError: execution exceeded {self.cfg.cpu_s:g} seconds of CPU time",
            "memory_limit": f"MemoryError: more than {self.cfg.memory_mib} MiB of memory",
            "output_limit": "OSError: too much output",
            "disk_limit": "OSError: too many or too large files",
            "file_limit": "OSError: a file became too large",
            "process_limit": f"OSError: more than {CallLimits.max_processes} processes or threads",
            "killed": "The process was killed",
        }
        if reply.status in fixed:
            return fixed[reply.status]
        if reply.status == "signal":
            return f"The process died of signal {-(reply.exit_code or 0)}"
        return reply.stderr.strip("\n").rstrip() or f"The process exited with code {reply.exit_code}"


def check_limits(cfg: PythonConfig) -> None:
    """Raises UserError for a limit with which nothing could run."""
    for name, least in LEAST.items():
        if not least <= getattr(cfg, name) < math.inf:
            raise UserError(f"tools.python.{name} must be finite and at least {least}, not {getattr(cfg, name):g}")
    if cfg.max_concurrent_per_node < 0:
        raise UserError("tools.python.max_concurrent_per_node must not be negative; 0 = no such limit")


def interpreter_of(cfg: PythonConfig) -> Interpreter | None:
    """The interpreter that the config names; None for this one. Raises UserError for one that cannot be used."""
    if not cfg.interpreter:
        return None
    try:
        return named_interpreter(cfg.interpreter)
    except ValueError as error:
        raise UserError(f"tools.python.interpreter: {cfg.interpreter} {error}") from None


def refuse(code: str) -> ToolResult | None:
    """The answer to what no interpreter would take; None for code that may run."""
    try:
        too_long = len(code.encode()) > MAX_CODE_BYTES
    except UnicodeEncodeError:  # a lone surrogate
        too_long, code = False, "\0"
    if too_long:
        return ToolResult("SyntaxError: the code is too long", ok=False, error_kind="code_too_long")
    if "\0" in code:
        text = "SyntaxError: the code contains a character that no source may have"
        return ToolResult(text, ok=False, error_kind="bad_code")
    return None


def shorten(text: str, max_chars: int) -> str:
    """At most `max_chars`, the mark included; what is cut is the middle: results and errors stand at the end."""
    if len(text) <= max_chars:
        return text
    keep = max(max_chars - len(CUT), 0)
    tail = keep // 2
    return (text[: keep - tail] + CUT + text[len(text) - tail :])[:max_chars]


def strip_fences(argument: str) -> str:
    """The code between Markdown fences, if all of the argument is one fenced block; else the argument."""
    match = FENCED.match(argument)
    return match.group(1) if match else argument.strip("\n")
