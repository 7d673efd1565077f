"""Time of a tool call through an MCP server, over stdio and over HTTP, against the direct call of the same function.

    python benchmarks/mcp_overhead.py [--quick]

All three are tools behind our ToolRunner, as in a rollout: the function as a FunctionTool, and as the tool of a server
in a separate process on this machine. Their calls take turns, so that other work on the machine slows all alike. The
ratio is direct / stdio: 0.1 means that a call through a server takes ten times as long. Compare the overhead in
milliseconds with the seconds of decoding between two calls of a trajectory.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arpo.config.tools import ToolsConfig
from arpo.tools import make_tools
from arpo.tools.base import Tool, ToolRunner
from arpo.tools.function import FunctionTool

MCP = "extras/tools/mcp/servers.py:McpServers"
ARGUMENT = "the quick brown fox " * 10
CONCURRENCY = 32


def count(text: str) -> int:
    """Count the words of a text."""
    return len(text.split())


def serve(port: int) -> None:
    """Be the server: over stdio, or on a port."""
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("benchmark", log_level="ERROR")
    server.tool()(count)
    if port:
        server.run("streamable-http", port=port)
    else:
        server.run()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if time.monotonic() > deadline:
            sys.exit("the HTTP server has not started within 60 s")
        time.sleep(0.05)


def seconds_of(runner: ToolRunner, tag: str, num_calls: int) -> float:
    """Start `num_calls` calls at once, and return the seconds until all have their (right) answers."""
    started = time.perf_counter()
    for i in range(num_calls):
        runner.start(str(i), tag, ARGUMENT)
    results = []
    while runner.num_pending:
        results += [result for _, result in runner.collect(block=True)]
    elapsed = time.perf_counter() - started
    assert [result.text for result in results] == ["40"] * num_calls, results
    return elapsed


def measure(tools: dict[str, Tool], repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return by tool the median milliseconds of a single call, and the calls per second with CONCURRENCY at once."""
    runner = ToolRunner(tools)
    try:
        # the first call starts the server
        for tag in tools:
            seconds_of(runner, tag, 1)
        alone = {tag: [] for tag in tools}
        together = {tag: [] for tag in tools}
        for _ in range(repeats):
            for tag in tools:
                alone[tag].append(1e3 * seconds_of(runner, tag, 1))
        for _ in range(max(repeats // 20, 3)):
            for tag in tools:
                together[tag].append(CONCURRENCY / seconds_of(runner, tag, CONCURRENCY))
    finally:
        runner.close()
    return ({tag: statistics.median(values) for tag, values in times.items()} for times in (alone, together))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer calls, under a minute")
    parser.add_argument("--serve", type=int, default=-1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve >= 0:
        serve(args.serve)
        return
    port = free_port()
    own = [str(Path(__file__).resolve()), "--serve"]
    with subprocess.Popen([sys.executable, *own, str(port)]) as http_server:
        try:
            wait_for_port(port)
            limit = {"max_concurrent": CONCURRENCY}
            servers = (
                {"command": sys.executable, "args": [*own, "0"], "prefix": "stdio_"} | limit,
                {"url": f"http://127.0.0.1:{port}/mcp", "prefix": "http_"} | limit,
            )
            tools = {"direct": FunctionTool(count)}
            tools |= make_tools(ToolsConfig(names=(MCP,), options=(json.dumps({MCP: {"servers": servers}}),)))
            alone, together = measure(tools, repeats=100 if args.quick else 1000)
        finally:
            http_server.kill()
    for tag in tools:
        print(f"{tag:12} median {alone[tag]:7.3f} ms alone; {CONCURRENCY} at once: {together[tag]:7.0f} calls/s")
    result = {
        "name": "mcp_overhead",
        "ratio": alone["direct"] / alone["stdio_count"],
        "ours": alone["stdio_count"],
        "baseline": alone["direct"],
        "unit": "ms",
        "http": alone["http_count"],
        "http_ratio": alone["direct"] / alone["http_count"],
        "stdio_per_s": together["stdio_count"],
        "http_per_s": together["http_count"],
        "direct_per_s": together["direct"],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
