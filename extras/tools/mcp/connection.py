"""The connection to one MCP server. The first call opens it. A call after a break opens it again.

anyio requires the same task to open and to close a client. So each connection has an owner task: the task opens the
client, lists the tools, waits for the order to close, and closes the client. Calls run in the tasks of their callers.
All tasks belong to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from arpo.errors import UserError, innermost
from extras.tools.mcp.config import McpServer

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult, Tool

logger = logging.getLogger(__name__)

GUARD = Path(__file__).with_name("guard.py")
CLOSE_S = 15.0
"""Longest time for a server to end. The client closes the server's input, then sends SIGTERM, then SIGKILL."""
GRACE_S = 1.0
"""Extra time for the client to report an overdue call before we report the timeout."""
PROBE_S = 5.0
"""Longest time for a live server to list its tools, or to close a session."""
STDERR_BYTES = 2000
MAX_SAID_CHARS = 300
"""Bytes kept from the end of a server's standard error, and the characters of the last line shown in messages."""
HTTP_FAILED = "Server returned an error response"
"""The client's message for an HTTP error without a JSON-RPC error."""
SESSION_LOST = "Session terminated"
"""The client's message if an HTTP server has forgotten our session."""


MAX_LOG_LINES = 20
"""Most lines of each logger of the client: the client may log a line for each line of garbage it reads."""
_num_lines: Counter[str] = Counter()


def _few_and_short(record: logging.LogRecord) -> bool:
    record.exc_info = None  # the traceback shows the server's output, perhaps with a key in it
    _num_lines[record.name] += 1
    return _num_lines[record.name] <= MAX_LOG_LINES


for name in ("stdio", "streamable_http", "session"):
    logging.getLogger(f"mcp.client.{name}").addFilter(_few_and_short)


class ConnectionLost(ConnectionError):
    """The server could not be reached, or went away. The message gives the reason, without secrets."""


class Connection:
    """The connection to one server, through a client. A broken client is replaced by a new client."""

    def __init__(self, server: McpServer):
        self.server = server
        self.num_restarts = 0
        """Number of times a broken connection was opened again."""
        self._owner: OpenClient | None = None
        self._is_closed = False

    @property
    def has_broken(self) -> bool:
        """True if the connection was open and has ended."""
        return self._owner is not None and self._owner.was_open and self._owner.has_ended

    def last_words(self) -> str:
        """Return why the newest client ended, in one line; "" before the first client."""
        return self._owner.last_words() if self._owner else ""

    async def opened(self) -> OpenClient:
        """Return an open client. Open a new client if the last has broken. Raises ConnectionLost."""
        if self._is_closed:
            raise ConnectionLost("it is closed")
        former = self._owner
        if former is None or former.has_ended:
            if self.has_broken:
                self.num_restarts += 1
                logger.warning("MCP server %s: %s; starting it again", self.server.label, self.last_words())
            self._owner = OpenClient(self.server, former)
        owner = self._owner
        await owner.opened()
        return owner

    async def aclose(self) -> None:
        """Close the connection, and end the server's processes. Safe to call twice."""
        self._is_closed = True
        if self._owner is not None:
            await self._owner.close()


class OpenClient:
    """One client and its owner task, from the opening to the end."""

    def __init__(self, server: McpServer, former: OpenClient | None):
        """Start the task. The task first waits for the end of the `former` client, as two servers would write to the
        same files.
        """
        import anyio

        self.server = server
        self.client: Client | None = None
        self.tools: list[Tool] = []
        self.was_open = False
        self._error = ""
        self._stderr = _Tail()
        self._statuses: list[int] = []
        self._closing = asyncio.Event()
        self._scope = anyio.CancelScope()
        self._is_open: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._own(former), name=f"mcp {server.label}")

    @property
    def has_ended(self) -> bool:
        return self._closing.is_set()

    async def opened(self) -> None:
        """Wait until the client is open and the tools are listed. Raises ConnectionLost."""
        await asyncio.shield(self._is_open)

    async def call(self, name: str, arguments: dict[str, object], timeout_s: float) -> CallToolResult:
        """Call a tool once.

        Raises ConnectionLost if the call may not have reached the server, or if the answer was lost on the way back;
        TimeoutError if the server is alive but has not answered; MCPError if the server refuses the call.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        try:
            async with asyncio.timeout(timeout_s + GRACE_S):
                return await self.client.call_tool(name, arguments, read_timeout_seconds=timeout_s)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED or error.message == SESSION_LOST:
                raise await self._lost("it closed the connection") from None
            if error.message == HTTP_FAILED:
                raise ConnectionLost(self.http_status() or "it answers with an HTTP error") from None
            if error.code != REQUEST_TIMEOUT:
                raise
        except TimeoutError:  # the server has not even read the request
            pass
        except (OSError, *_stream_errors()) as error:
            raise await self._lost(_reason(error)) from None
        if await self._is_alive():
            raise TimeoutError
        raise await self._lost("it hangs")

    async def _lost(self, what: str) -> ConnectionLost:
        """Close a broken connection, and return the error to raise.

        `what` is the reason seen by the call. Once the owner task has ended, the task may give a better reason.
        """
        self._end()
        await asyncio.wait([self._task], timeout=CLOSE_S)
        self._error = self._error or what
        return ConnectionLost(self.last_words())

    async def close(self) -> None:
        """End the task and the server's processes."""
        self._end()
        done, _ = await asyncio.wait([self._task], timeout=CLOSE_S)
        if not done:
            logger.warning("MCP server %s: it cannot be ended", self.server.label)

    def _end(self) -> None:
        self._closing.set()
        if not self._is_open.done():
            self._scope.cancel()  # the task is not yet waiting for the event

    async def _is_alive(self) -> bool:
        """Return whether the server still answers a request."""
        from mcp import MCPError

        try:
            async with asyncio.timeout(PROBE_S):
                await self.client.list_tools()
        except (MCPError, OSError, TimeoutError, *_stream_errors()):
            return False
        return True

    def last_words(self) -> str:
        """Return why the connection ended, and the server's last line on standard error, as one line."""
        said = self.server.redacted(self._stderr.last_line())[-MAX_SAID_CHARS:]  # hide before the cut: half a key stays
        why = self.server.redacted(self._error or "it closed the connection")
        return f"{why}; it said: {said}" if said else why

    def http_status(self) -> str:
        return f"HTTP {self._statuses[-1]}" if self._statuses else ""

    async def _own(self, former: OpenClient | None) -> None:
        import anyio

        if former is not None:
            await asyncio.wait([former._task])
        start_s = self.server.start_s
        timer = asyncio.get_running_loop().call_later(start_s, self._give_up, f"no answer within {start_s:g} s")
        with self._scope:
            try:
                async with self._client() as self.client:
                    self.tools = await _listed(self.client)
                    timer.cancel()
                    self.was_open = True
                    self._is_open.set_result(None)
                    await self._closing.wait()
                    self._scope.deadline = anyio.current_time() + PROBE_S  # the last request may get no answer
            except Exception as error:  # mostly an ExceptionGroup: any error here is a broken connection
                self._error = self._error or _reason(error)
        timer.cancel()
        self._closing.set()
        if not self._is_open.done():
            if any(status >= 400 for status in self._statuses):
                self._error = self.http_status()
            self._is_open.set_exception(ConnectionLost(self.last_words()))
            self._is_open.exception()  # read the error, as perhaps no caller waits for it

    def _give_up(self, reason: str) -> None:
        self._error = reason
        self._end()

    @contextlib.asynccontextmanager
    async def _client(self) -> AsyncIterator[Client]:
        import httpx2
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client

        server = self.server
        async with contextlib.AsyncExitStack() as stack:
            if server.url:

                async def note(response: httpx2.Response) -> None:
                    self._statuses[:] = [response.status_code]

                timeout = httpx2.Timeout(server.start_s, read=2 * server.deadline_s)
                options = {"headers": server.resolved(server.headers), "event_hooks": {"response": [note]}}
                http = await stack.enter_async_context(httpx2.AsyncClient(timeout=timeout, **options))
                transport = streamable_http_client(server.filled(server.url), http_client=http)
            else:
                command = [str(GUARD), str(os.getpid()), program_of(server), *map(server.filled, server.args)]
                parameters = StdioServerParameters(
                    command=sys.executable, args=["-I", *command], env=server.resolved(server.env)
                )
                transport = stdio_client(parameters, errlog=await stack.enter_async_context(self._stderr.opened()))
            yield await stack.enter_async_context(Client(transport, cache=None))


class _Tail(asyncio.Protocol):
    """Reads a server's standard error, and keeps the end."""

    def __init__(self) -> None:
        self._end = b""

    def data_received(self, data: bytes) -> None:
        self._end = (self._end + data)[-STDERR_BYTES:]

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[object]:
        """Yield a file for the server to write to."""
        reading, writing = os.pipe()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self, os.fdopen(reading, "rb"))
        try:
            with os.fdopen(writing, "w") as file:
                yield file
        finally:
            transport.close()

    def last_line(self) -> str:
        lines = self._end.decode("utf-8", "replace").strip().splitlines()
        return " ".join(lines[-1].split()) if lines else ""


async def _listed(client: Client) -> list[Tool]:
    """Return all tools of a server, page by page."""
    tools: list[Tool] = []
    cursor: str | None = None  # None for the first page, and again after the last
    seen: set[str | None] = set()
    while cursor not in seen:  # a faulty server may repeat a cursor forever
        seen.add(cursor)
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
    return tools


def _reason(error: BaseException) -> str:
    """Return the innermost cause of an error in one line."""
    error = innermost(error)
    return " ".join(str(error).split()) or type(error).__name__


def _stream_errors() -> tuple[type[Exception], ...]:
    import anyio

    return anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream


def program_of(server: McpServer) -> str:
    """Return the path of a server's program. Raises UserError if the program is not found."""
    path = shutil.which(server.command, path=server.resolved(server.env).get("PATH"))
    if path is None:
        raise UserError(f"MCP server: there is no program {server.command!r}; install it, or correct the command")
    return path
