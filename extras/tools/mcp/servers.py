"""The tools of MCP servers, as one set: tools.names has extras/tools/mcp/servers.py:McpServers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from arpo.errors import UserError
from arpo.protocol.schema import ToolSchema
from extras.tools.mcp.config import McpServer, parse_servers
from extras.tools.mcp.tool import McpTool, mcp_schemas, mcp_tools


@dataclass(frozen=True)
class McpConfig:
    """The tools of MCP servers."""

    servers: tuple[str, ...] = ()
    """Servers of the Model Context Protocol (MCP). A server is a mapping with command, args and env, or with url and
    headers; extras/tools/README.md has the other keys. Keys of services stand in the environment, here as $NAME."""

    def __post_init__(self) -> None:
        if not self.servers:
            raise ValueError('servers is empty; give it an entry like {"command": ...} or {"url": ...}')
        parse_servers(self.servers)


class McpServers:
    """All tools of the configured servers. Each process asks each server once for the list of tools."""

    def __init__(self, cfg: McpConfig):
        self.cfg = cfg

    def schemas(self) -> dict[str, ToolSchema]:
        """Return the schemas of the tools. Raises UserError for an unusable server, and for two tools of one name."""
        return {name: schema for _, schemas in self._listed() for name, schema in schemas.items()}

    def tools(self) -> dict[str, McpTool]:
        return {name: tool for server, _ in self._listed() for name, tool in mcp_tools(server).items()}

    def _listed(self) -> Iterator[tuple[McpServer, dict[str, ToolSchema]]]:
        origin: dict[str, str] = {}
        for server in parse_servers(self.cfg.servers):
            schemas = mcp_schemas(server)
            for name in schemas:
                if name in origin:
                    raise UserError(
                        f"MCP server {server.label} has a tool {name!r}, and so is one of {origin[name]} called; "
                        'set another prefix for it, like "prefix": "web_", or leave the tool out with tools'
                    )
                origin[name] = server.label
            yield server, schemas
