"""Tools of the real MCP server of mcp_server.py, on a runner's loop."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.processes import wait_for

from arpo.config.tools import ToolsConfig
from arpo.tools import make_tools, prices_of, take_counts
from arpo.tools.base import ToolResult, ToolRunner

MCP = f"{Path(__file__).resolve().parents[2]}/extras/tools/mcp/servers.py:McpServers"
SERVER = Path(__file__).resolve().with_name("mcp_server.py")


def entry(*args: str, **settings) -> dict:
    return {"command": sys.executable, "args": [str(SERVER), *args]} | settings


def config(*entries: dict, names: tuple[str, ...] = (), **settings) -> ToolsConfig:
    return ToolsConfig(names=(*names, MCP), options=(options(*entries),), **settings)


def options(*entries: object) -> str:
    """An entry of tools.options, as on the command line."""
    return json.dumps({MCP: {"servers": entries}})


class Running:
    """The tools of a config, on a runner's loop."""

    def __init__(self, *entries: dict, **settings):
        cfg = config(*entries, **settings)
        self.tools = make_tools(cfg)
        self.runner = ToolRunner(self.tools, prices_of(cfg))

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_) -> None:
        self.runner.close()

    def start(self, tag: str, **arguments) -> None:
        argument = arguments.pop("argument", None) or json.dumps(arguments)
        self.runner.start(f"{tag} {argument} {time.monotonic_ns()}", tag, argument)

    def all(self) -> list[ToolResult]:
        results = []
        while self.runner.num_pending:
            results += [result for _, result in self.runner.collect(block=True)]
        return results

    def call(self, tag: str, **arguments) -> ToolResult:
        self.start(tag, **arguments)
        [result] = self.all()
        return result

    def restarts(self) -> int:
        """Times that servers were started again since this was last asked."""
        return take_counts(self.tools)["mcp_restarts"]


@contextmanager
def served(port: int, *args: object) -> Iterator[subprocess.Popen]:
    """The server over HTTP, once it listens. It ends with the test, however that ends."""
    process = subprocess.Popen([sys.executable, SERVER, "--port", str(port), *map(str, args)])
    try:
        wait_for(lambda: listens(f"http://127.0.0.1:{port}/mcp"))
        yield process
    finally:
        process.kill()
        process.wait()


def listens(url: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2].partition("/")[0]))) == 0
