"""The <python> tool. Runs the model's code in a jail, and returns output or error as text for the model."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from arpo.config.facts import out_of_range
from arpo.config.tools import PythonConfig
from arpo.errors import UserError
from arpo.jail.cgroup import find_parent
from arpo.jail.client import GRACE_S, Sandbox
from arpo.jail.host_process import SandboxUnavailable, Tier
from arpo.jail.interpreter import named_interpreter
from arpo.jail.limits import CallLimits
from arpo.jail.wire import FILE_MARK, MAX_CODE_BYTES, Reply
from arpo.protocol.calls import dedented
from arpo.protocol.prompts import About
from arpo.protocol.schema import text_schema
from arpo.tools.interface import Tool, ToolResult

FENCED = re.compile(r"\A\s*```[ \t]*\w*[ \t]*\n(.*?)\n?[ \t]*```\s*\Z", re.DOTALL)
CUT = "\n... [output truncated] ...\n"
PLOTS = re.compile("matplotlib|plot|pylab|seaborn")
LIST_FONTS = """
import base64, os, zlib
import matplotlib
from matplotlib.font_manager import FontManager
path = os.path.join(matplotlib.get_cachedir(), f"fontlist-v{FontManager.__version__}.json")
with open(path, "rb") as file:
    print(os.path.relpath(path, os.environ["HOME"]), base64.b64encode(zlib.compress(file.read())).decode())
"""
"""Prints the name and the content of matplotlib's file with the list of fonts."""
STDERR = "\n[stderr]\n"
OVERWRITTEN = re.compile(r"[^\n]*\r(?!\n)")
"""Matches the overwritten states of a progress bar, all but the last."""
MAX_STDERR_CHARS = 1000
"""Limit on the stderr (warnings, log lines) shown for a successful call."""
MAX_OUTPUT_CHARS = 8192
"""Longest result. A longer result is cut, and a mark shows the cut."""


class PythonTool(Tool):
    """Runs code like a notebook cell without memory. Shows the output, and the value of a bare last expression.

    Two calls share nothing. The same code gives the same text: hash seed, `random` and NumPy are seeded, TZ is UTC.
    """

    tag = "python"
    setting = "tools.python"
    about = About(
        "a Python interpreter",
        "to run code, write <python> code </python> and print what you need",
        "<python> print(6 * 7) </python> <result> 42 </result>",
    )
    schema = text_schema(
        "python", "Run Python code, and show what it prints.", "code", "The code. Print what you need."
    )

    def __init__(self, cfg: PythonConfig, *, tier: Tier | None = None, grace_s: float = GRACE_S):
        """Start the host. Raises UserError if isolation is impossible here, and for unusable limits or interpreters.

        `tier`: the only tier to try, for tests.
        """
        self.cfg = cfg
        try:
            self.interpreter = named_interpreter(cfg.interpreter) if cfg.interpreter else None
        except ValueError as error:
            raise UserError(f"{self.setting}.interpreter: {cfg.interpreter} {error}") from None
        self.start(tier, grace_s)

    def start(self, tier: Tier | None, grace_s: float) -> None:
        """Start the host, and the threads waiting for its calls. Raises UserError as the constructor does."""
        cfg = self.cfg
        if wrong := out_of_range(cfg):
            raise UserError(f"{self.setting}.{wrong}")
        try:
            if cfg.cgroup not in ("auto", "none"):
                find_parent(cfg.cgroup)
        except ValueError as error:
            raise UserError(f"{self.setting}.cgroup: {error}; see docs/tools.md, or set auto") from None
        try:
            self.sandbox = Sandbox(
                self.limits(cfg),
                interpreter=self.interpreter,
                tier=tier,
                allow_unsafe=cfg.allow_unsafe,
                grace_s=grace_s,
                cgroup=cfg.cgroup,
            )
        except SandboxUnavailable as error:
            raise UserError(
                f"{self.setting}: no isolation for model-written code on this machine ({error}); allow user "
                f"namespaces or Landlock, drop {self.tag} from tools.names, or accept the risk with "
                f"{self.setting}.allow_unsafe"
            ) from error
        # A separate pool with one thread per running call. Further calls wait before their clock starts. asyncio's
        # default pool has few threads, and all other code shares them.
        self._threads = ThreadPoolExecutor(cfg.max_concurrent, thread_name_prefix="arpo-python")
        self._fonts: Future[Reply] | None = None

    def limits(self, cfg: PythonConfig) -> CallLimits:
        return CallLimits(wall_s=cfg.wall_s, cpu_s=cfg.cpu_s, memory_bytes=cfg.memory_mib << 20)

    async def run(self, argument: str) -> ToolResult:
        """Run one call. Never raises for an error of the code. `infra_error` = the sandbox itself failed."""
        code = strip_fences(argument)
        return refuse(code) or await self._run(code)

    async def _run(self, code: str) -> ToolResult:
        return self._result(await self._on_thread(self.sandbox.run, self.with_font_list(code)))

    def with_font_list(self, code: str) -> str:
        """Put matplotlib's list of fonts before code with plots. Return other code unchanged."""
        return self._font_list() + code if PLOTS.search(code) and len(code) < MAX_CODE_BYTES // 2 else code

    def _font_list(self) -> str:
        """Return a first line of code with matplotlib's list of fonts, or "" while the list is not ready.

        A call starts without files. Without the list each call would search for fonts: half a second of CPU time.
        """
        if self._fonts is None or (self._fonts.done() and self._fonts.result().status not in ("ok", "error")):
            self._fonts = self._threads.submit(self.sandbox.run, LIST_FONTS)  # meanwhile calls run without it
        is_listed = self._fonts.done() and self._fonts.result().status == "ok"
        return f"{FILE_MARK}{self._fonts.result().stdout.strip()}\n" if is_listed else ""

    async def _on_thread(self, action: Callable, *arguments: object) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, action, *arguments)

    async def aclose(self) -> None:
        """End the host. Running calls end with infra_error. Safe to call twice."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self.sandbox.close()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _result(self, reply: Reply) -> ToolResult:
        if reply.status == "sandbox_error":
            text = "Error: the Python interpreter is unavailable."
            return ToolResult(text, ok=False, error_kind=reply.status, infra_error=True)
        output = reply.stdout.strip("\n").rstrip()
        if reply.status == "ok":
            room = min(MAX_STDERR_CHARS, MAX_OUTPUT_CHARS // 2)
            warnings = shorten(OVERWRITTEN.sub("", reply.stderr).strip("\n").rstrip(), room)
            behind = f"{STDERR}{warnings}" if warnings else ""
            text = shorten(output, MAX_OUTPUT_CHARS - len(behind)) + behind
            return ToolResult(text.lstrip("\n") or "(no output)", ok=True, seconds=reply.wall_s)
        # The reason gets its room first. It is short, unless the code raised a long message.
        reason = shorten(self._reason(reply), MAX_OUTPUT_CHARS)
        room = MAX_OUTPUT_CHARS - len(reason) - 1
        text = f"{shorten(output, room)}\n{reason}" if output and room > len(CUT) else reason
        return ToolResult(text, ok=False, seconds=reply.wall_s, error_kind=reply.status)

    def _reason(self, reply: Reply) -> str:
        """Return the reason of a failure. The words depend only on the code and the limits."""
        reasons = {
            "timeout": f"TimeoutError: execution exceeded {self.cfg.wall_s:g} seconds",
            "cpu_limit": f"TimeoutError: execution exceeded {self.cfg.cpu_s:g} seconds of CPU time",
            "memory_limit": f"MemoryError: more than {self.cfg.memory_mib} MiB of memory",
            "output_limit": "OSError: too much output",
            "disk_limit": "OSError: too many or too large files",
            "file_limit": "OSError: a file became too large",
            "process_limit": f"OSError: more than {CallLimits.max_processes} processes or threads",
            "killed": "The process was killed",
            "signal": f"The process died of signal {-(reply.exit_code or 0)}",
        }
        message = reply.stderr.strip("\n").rstrip() or f"The process exited with code {reply.exit_code}"
        return reasons.get(reply.status, message)


def refuse(code: str) -> ToolResult | None:
    """Return the error for code no interpreter accepts; None for all other code."""
    try:
        encoded = code.encode()
    except UnicodeEncodeError:  # a lone surrogate
        encoded = b"\0"
    if len(encoded) > MAX_CODE_BYTES:
        return ToolResult("SyntaxError: the code is too long", ok=False, error_kind="code_too_long")
    if b"\0" in encoded:
        text = "SyntaxError: the code contains a character that no source may have"
        return ToolResult(text, ok=False, error_kind="bad_code")
    return None


def shorten(text: str, max_chars: int) -> str:
    """Return at most `max_chars`, including the mark. The middle is cut out: results and errors are at the end."""
    if len(text) <= max_chars:
        return text
    keep = max(max_chars - len(CUT), 0)
    tail = keep // 2
    return (text[: keep - tail] + CUT + text[len(text) - tail :])[:max_chars]


def strip_fences(argument: str) -> str:
    """Return the code inside Markdown fences if the argument is one fenced block. If not, return the argument.

    Common indentation is removed.
    """
    match = FENCED.match(argument)
    return dedented(match.group(1) if match else argument.strip("\n"))
