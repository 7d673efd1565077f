"""The connection to one MCP server: opened when it is needed, opened again when it has broken.

anyio wants a client closed by the task that opened it, so each connection is owned by a task of its own, which opens
the client, lists the tools, waits until it is told to close, and closes it. Calls run in the tasks of their callers.
Everything is for one event loop.
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

from arpo.errors import UserError
from extras.tools.mcp.config import McpServer

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult, Tool

logger = logging.getLogger(__name__)

GUARD = Path(__file__).with_name("guard.py")
CLOSE_S = 15.0
"""Longest time that a server may take to end: its client closes its input, then terminates, then kills it."""
GRACE_S = 1.0
"""Time that the client has to notice that a call is overdue, before we do."""
PROBE_S = 5.0
"""Longest time in which a server that is alive lists its tools, or says goodbye."""
STDERR_BYTES, MAX_SAID_CHARS = 2000, 300
"""Bytes kept of the last that a server wrote to its standard error, and characters of its end that are shown."""
HTTP_FAILED = "Server returned an error response"
"""Message with which the client stands in for an HTTP error that has no JSON-RPC error in it."""
SESSION_LOST = "Session terminated"
"""The same for an HTTP server that does not know our session any more."""


MAX_LOG_LINES = 20
"""Most lines of each logger of the client, which may say one for each line of garbage that it reads."""
_num_lines: Counter[str] = Counter()


def _few_and_short(record: logging.LogRecord) -> bool:
    record.exc_info = None  # it shows what a server wrote, maybe a key of it
    _num_lines[record.name] += 1
    return _num_lines[record.name] <= MAX_LOG_LINES


for name in ("stdio", "streamable_http", "session"):
    logging.getLogger(f"mcp.client.{name}").addFilter(_few_and_short)


class ConnectionLost(ConnectionError):
    """The server could not be reached, or went away. The message says how, without anything secret."""


class Connection:
    """One server: its client, and the task that owns it."""

    def __init__(self, server: McpServer):
        self.server = server
        self.num_restarts = 0
        """Times that the connection was opened again because it had broken."""
        self._owner: OpenClient | None = None
        self._is_closed = False

    @property
    def has_broken(self) -> bool:
        """True where it was open, and is so no longer."""
        return self._owner is not None and self._owner.was_open and self._owner.has_ended

    def last_words(self) -> str:
        """Return why the newest client ended, in one line; "" before there was one."""
        return self._owner.last_words() if self._owner else ""

    async def opened(self) -> OpenClient:
        """Return a client that is open, a new one where the last has broken. Raises ConnectionLost."""
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
    """One client, and the task that owns it from its opening to its end."""

    def __init__(self, server: McpServer, former: OpenClient | None):
        """Starts the task, which waits for the end of the `former` first: two would write to the same files."""
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
        """Return when the client is open and the tools are listed. Raises ConnectionLost."""
        await asyncio.shield(self._is_open)

    async def call(self, name: str, arguments: dict[str, object], timeout_s: float) -> CallToolResult:
        """Call a tool once.

        Raises ConnectionLost where the call may not have reached the server, or its answer us; TimeoutError where the
        server is there but has not answered; and MCPError where it refuses the call.
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
        except TimeoutError:  # the server does not even take the request
            pass
        except (OSError, *_stream_errors()) as error:
            raise await self._lost(_reason(error)) from None
        if await self._is_alive():
            raise TimeoutError
        raise await self._lost("it hangs")

    async def _lost(self, what: str) -> ConnectionLost:
        """Close a connection that has broken. Return the error that says so.

        `what` broke it, as far as a call can see. The owner's task may know better, once it has ended.
        """
        self._end()
        await asyncio.wait([self._task], timeout=CLOSE_S)
        self._error = self._error or what
        return ConnectionLost(self.last_words())

    async def close(self) -> None:
        """End the task, and with it the server's processes."""
        self._end()
        done, _ = await asyncio.wait([self._task], timeout=CLOSE_S)
        if not done:
            logger.warning("MCP server %s: it cannot be ended", self.server.label)

    def _end(self) -> None:
        self._closing.set()
        if not self._is_open.done():
            self._scope.cancel()  # the task does not wait for the event yet

    async def _is_alive(self) -> bool:
        """Return whether the server still answers anything."""
        from mcp import MCPError

        try:
            async with asyncio.timeout(PROBE_S):
                await self.client.list_tools()
        except (MCPError, OSError, TimeoutError, *_stream_errors()):
            return False
        return True

    def last_words(self) -> str:
        """Return why the connection ended, and what the server wrote last to its standard error, in one line."""
        said = self.server.redacted(self._stderr.last_line())[-MAX_SAID_CHARS:]  # a key that is cut is not found
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
                    self._scope.deadline = anyio.current_time() + PROBE_S  # a goodbye over HTTP may find no listener
            except Exception as error:  # an ExceptionGroup, mostly: whatever broke the connection is no bug of ours
                self._error = self._error or _reason(error)
        timer.cancel()
        self._closing.set()
        if not self._is_open.done():
            if any(status >= 400 for status in self._statuses):
                self._error = self.http_status()
            self._is_open.set_exception(ConnectionLost(self.last_words()))
            self._is_open.exception()  # nobody may be waiting any more

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
    """Reads what a server writes to its standard error, and keeps the end of it."""

    def __init__(self) -> None:
        self._end = b""

    def data_received(self, data: bytes) -> None:
        self._end = (self._end + data)[-STDERR_BYTES:]

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[object]:
        """Yield a file to write to."""
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
    cursor: str | None = None  # also the last page's: then it is one of those seen
    seen: set[str | None] = set()
    while cursor not in seen:  # a server may send us round in a circle
        seen.add(cursor)
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
    return tools


def _reason(error: BaseException) -> str:
    """Return the innermost cause of an error in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(str(error).split()) or type(error).__name__


def _stream_errors() -> tuple[type[Exception], ...]:
    import anyio

    return anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream


def program_of(server: McpServer) -> str:
    """Return the path of a server's program. Raises UserError where there is none."""
    path = shutil.which(server.command, path=server.resolved(server.env).get("PATH"))
    if path is None:
        raise UserError(f"MCP server: there is no program {server.command!r}; install it, or correct the command")
    return path
