"""The tools of MCP servers. They work like built-in tools: checked arguments, a cache, results and errors as text."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import random
import time
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from arpo.errors import UserError
from arpo.protocol.calls import TRUNCATION_MARK
from arpo.protocol.schema import ToolSchema, argument_of, arguments_of
from arpo.tools.cache.rows import cache_key
from arpo.tools.http.policy import HttpPolicy
from arpo.tools.interface import Tool, ToolContext, ToolResult
from extras.tools.mcp.config import McpServer
from extras.tools.mcp.connection import Connection, ConnectionLost, program_of
from extras.tools.recorder import MCP, Recorder
from extras.tools.session_tool import SessionLost, SessionTool

if TYPE_CHECKING:
    from mcp.types import CallToolResult, Tool

logger = logging.getLogger(__name__)

UNAVAILABLE = "Error: the {tag} tool is unavailable."
MAX_RESULT_CHARS = 100_000
"""Longest text of a result, in characters. rollout.max_result_tokens then cuts the text for the model."""
LISTING = "<tools>"
"""Query of the cache row with the list of the server's tools."""


class McpTool(Tool):
    """One tool of a server. All tools of a server share the connection, the limit of calls and the cache.

    With the server's `max_sessions` it is an McpSessionTool.
    """

    def __init__(self, schema: ToolSchema, name: str, service: Service):
        """`name` is the server's name of the tool. The schema's name has the prefix."""
        self.tag, self.schema = schema.name, schema
        self._name, self.service = name, service

    async def run(self, argument: str) -> ToolResult:
        return await self._answer(argument)

    async def _answer(self, argument: str, own: Connection | None = None) -> ToolResult:
        """Answer a call from the cache, or ask the server. Faulty calls and errors of the server become text.

        The result has `infra_error` if the server could not be reached, or went away. Raises UserError if a call is
        missing in `replay_strict`, or if the cache of a replay breaks.
        """
        arguments = arguments_of(self.schema, argument)
        if isinstance(arguments, str):
            return ToolResult(arguments, ok=False, error_kind="bad_arguments")
        query = f"<{self._name}>{argument_of(self.schema, arguments)}</{self._name}>"
        ask = partial(self.service.call, self.tag, self._name, arguments, own=own)
        return await self.service.recorder.answer(key_of(self.service.server, query), query, ask)

    def take_counts(self) -> dict[str, int]:
        return {"mcp_restarts": self.service.take_restarts()}

    async def aclose(self) -> None:
        """Close the server's connection and cache. Safe to call twice, so every tool of the server may call it."""
        await self.service.aclose()


class McpSessionTool(McpTool, SessionTool):
    """A tool of a server with state. Each trajectory has a separate process, or a separate connection over HTTP.

    The server's tools share the trajectory's session. A session cannot be copied, so branches replay the calls.
    """

    def __init__(self, schema: ToolSchema, name: str, service: Service, session_name: str):
        super().__init__(schema, name, service)
        self.session_name, self.max_sessions = session_name, service.server.max_sessions
        self.may_branch = service.server.max_tries > 1  # a branch replays the calls of its parent

    async def open(self, context: ToolContext) -> Connection:
        """Return a connection. The first call opens it."""
        return Connection(self.service.server)

    async def run(self, argument: str, context: ToolContext, session: Connection) -> ToolResult:
        """Answer a call. Raises SessionLost if the server has gone, because the trajectory's state is lost too."""
        return await self._answer(argument, session)

    async def close(self, session: Connection) -> None:
        await session.aclose()


class Service:
    """Connection, cache and limit of calls, shared by the tools of one server. For one event loop."""

    policy = HttpPolicy(backoff_cap_s=5.0)

    def __init__(self, server: McpServer, recorder: Recorder):
        self.server, self.recorder = server, recorder
        self.connection: Connection | None = None
        self._slots = asyncio.Semaphore(server.max_concurrent)
        self._num_lost = self._num_told = 0
        self._rng = random.Random()

    async def call(
        self, tag: str, name: str, arguments: dict[str, Any], *, own: Connection | None = None
    ) -> ToolResult:
        """Call the server. If the connection breaks, try again within the deadline.

        `own` is a trajectory's connection. Raises SessionLost if this connection has broken and a new session may be
        made.
        """
        from mcp import MCPError

        async with self._slots:
            if own is None and self.connection is None:
                self.connection = Connection(self.server)
            connection = own or self.connection
            left_s = self.server.deadline_s
            num_tries = 0
            while True:
                if own and own.has_broken:
                    self._num_lost += 1
                    if self.server.max_tries > 1:
                        raise SessionLost(f"{self.server.label}: {own.last_words()}")
                    return self._unavailable(tag)
                num_tries += 1
                started = math.inf
                try:
                    client = await connection.opened()
                    started = time.monotonic()
                    return self._result(await client.call(name, arguments, left_s))
                except TimeoutError:
                    text = f"Error: {tag} gave no answer within {self.server.deadline_s:g} s."
                    return ToolResult(text, ok=False, error_kind="timeout")
                except MCPError as error:
                    text = f"Error: {tag}: {self.server.redacted(' '.join(error.message.split()))}"
                    return ToolResult(text[:MAX_RESULT_CHARS], ok=False, error_kind="refused")
                except (RuntimeError, ValueError) as error:  # the client's errors for an invalid answer
                    reason = self.server.redacted(" ".join(str(error).split()))[:300]
                    logger.warning("MCP server %s: the answer of %s is none: %s", self.server.label, name, reason)
                    text = UNAVAILABLE.format(tag=tag)
                    return ToolResult(text, ok=False, error_kind="bad_answer", infra_error=True)
                except ConnectionLost:
                    pause_s = self.policy.backoff_s(num_tries, self._rng)
                    left_s -= max(time.monotonic() - started, 0.0) + pause_s
                    if num_tries == self.server.max_tries or left_s <= 0:
                        return self._unavailable(tag)
                await asyncio.sleep(pause_s)

    def _unavailable(self, tag: str) -> ToolResult:
        return ToolResult(UNAVAILABLE.format(tag=tag), ok=False, error_kind="unavailable", infra_error=True)

    def _result(self, answer: CallToolResult) -> ToolResult:
        text = self.server.redacted(text_of(answer))
        if len(text) > MAX_RESULT_CHARS:
            text = text[:MAX_RESULT_CHARS] + TRUNCATION_MARK
        return ToolResult(text, ok=not answer.is_error, error_kind="tool_error" if answer.is_error else None)

    def take_restarts(self) -> int:
        """Return the number of restarts of the server since the last call of this method by any of the tools."""
        number = self._num_lost + (self.connection.num_restarts if self.connection else 0)
        self._num_told, new = number, number - self._num_told
        return new

    async def aclose(self) -> None:
        if self.connection is not None:
            await self.connection.aclose()
        self.recorder.close()


def mcp_tools(server: McpServer) -> dict[str, McpTool]:
    """Return a server's tools, by tag. Raises UserError if the server cannot be reached or the cache cannot be used."""
    schemas = mcp_schemas(server)
    service = Service(server, recorder_of(server))
    make = partial(McpSessionTool, session_name=" ".join(schemas)) if server.max_sessions else McpTool
    return {tag: make(schema, tag.removeprefix(server.prefix), service) for tag, schema in schemas.items()}


@cache
def mcp_schemas(server: McpServer) -> dict[str, ToolSchema]:
    """Return the schemas of a server's tools, by tag. Each process asks the server once; a replay reads the cache.

    Raises UserError for an invalid url, for a server out of reach or without tools, and for a tool of the config
    missing in the server's list.
    """
    if server.url:
        from arpo.tools.http.client import check_url  # imports aiohttp: not at the top, so that `--help` is fast

        check_url(server.url, "url of an MCP server")
    listed = _recorded_listing(server) if server.replays else _live_listing(server)
    schemas = [ToolSchema(server.prefix + one["name"], one["description"], one["parameters"]) for one in listed]
    found = {schema.name: schema for schema in schemas}
    if len(found) < len(schemas):
        twice = next(one.name for number, one in enumerate(schemas) if one.name in [s.name for s in schemas[:number]])
        raise UserError(f"MCP server {server.label} lists the tool {twice!r} twice; have it list each once")
    wanted = [server.prefix + name for name in server.tools] or list(found)
    for name in wanted:
        if name not in found:
            there = ", ".join(one["name"] for one in listed)
            raise UserError(
                f"MCP server {server.label} has no tool {name.removeprefix(server.prefix)!r}; it has {there}"
            )
    if not wanted:
        raise UserError(f"MCP server {server.label} lists no tools; correct its settings, or drop it")
    return {name: found[name] for name in wanted}


def _live_listing(server: McpServer) -> list[dict[str, Any]]:
    """Return the tools of a running server. With a cache, record the list for later replays."""
    try:
        from mcp import Client  # noqa: F401
    except ImportError as error:
        raise UserError(f"MCP servers need the package mcp ({error}); pip install -e '.[mcp]'") from None
    server.secrets()
    if server.command:
        program_of(server)

    async def ask() -> list[Tool]:
        async with contextlib.aclosing(Connection(server)) as connection:
            return (await connection.opened()).tools

    try:
        tools = asyncio.run(ask())
    except ConnectionLost as error:
        fix = "correct the url, or start the server" if server.url else "correct the command, its args or env"
        raise UserError(f"MCP server {server.label} cannot be used: {error}; {fix}") from None
    as_tasks = [t.name for t in tools if t.execution and t.execution.task_support == "required"]
    if wrong := [name for name in server.tools if name in as_tasks]:
        raise UserError(f"MCP server {server.label}: its tool {wrong[0]!r} runs only as a task, which is not offered")
    if as_tasks:
        logger.warning("MCP server %s: %s run only as tasks, and are left out", server.label, ", ".join(as_tasks))
    listing = [
        {"name": t.name, "description": t.description or t.title or "", "parameters": without_titles(t.input_schema)}
        for t in tools
        if t.name not in as_tasks
    ]
    if server.cache and server.mode == "record":
        with contextlib.closing(recorder_of(server)) as recorder:
            recorded = recorder.put(key_of(server, LISTING), LISTING, json.dumps(listing))
        if recorded and json.loads(recorded) != listing:
            changed = "its tools are not those that %s was recorded with, which a replay offers; take a new cache"
            logger.warning(f"MCP server %s: {changed} for them", server.label, server.cache)
    return listing


def _recorded_listing(server: McpServer) -> list[dict[str, Any]]:
    with contextlib.closing(recorder_of(server)) as recorder:
        listing = recorder.get(key_of(server, LISTING), LISTING)
    if listing is None:
        raise UserError(f"{server.cache}: holds no calls of {server.label} to replay; record them first")
    return json.loads(listing)


def recorder_of(server: McpServer) -> Recorder:
    """Return the recorder of a server's answers. Raises UserError for an unusable cache."""
    return Recorder(server.cache, server.mode, MCP, setting=f"the cache of MCP server {server.label}")


def key_of(server: McpServer, query: str) -> bytes:
    """Return the cache key of a query to a server."""
    return cache_key(MCP, server.identity, query)


def without_titles(schema: Any) -> Any:
    """Remove the titles from a schema. Some servers add titles: they repeat the names, and cost the model tokens."""
    if isinstance(schema, list):
        return [without_titles(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    as_it_is = ("default", "const", "enum", "examples")
    kept = {key: value for key, value in schema.items() if key != "title" or not isinstance(value, str)}
    return {key: value if key in as_it_is else without_titles(value) for key, value in kept.items()}


def text_of(answer: CallToolResult) -> str:
    """Return a result as text. Join the texts and describe other content. Structured content counts only alone."""
    parts = [part for block in answer.content if (part := _described(block))]
    if not parts and answer.structured_content is not None:
        parts = [json.dumps(answer.structured_content, ensure_ascii=False)]
    text = "\n".join(parts) or "(no output)"
    return text.encode("utf-8", "replace").decode()


def _described(block: Any) -> str:
    if block.type == "text":
        return block.text
    if block.type in ("image", "audio"):
        return f"[{block.type}, {block.mime_type}, {len(block.data) * 3 // 4} bytes]"
    if block.type == "resource_link":
        return f"[resource {block.name}: {block.uri}]"
    resource = getattr(block, "resource", None)
    if text := getattr(resource, "text", None):
        return text
    return f"[{block.type} {getattr(resource, 'uri', '')}]"
