"""The two kinds of MCP server, each with a key."""

import os
import subprocess
import sys

import pytest
from helpers.mcp_tools import SERVER, entry, listens, wait_for
from helpers.processes import free_port


@pytest.fixture(scope="module")
def http_server():
    """The entry of a server over HTTP that wants a token."""
    port = free_port()
    process = subprocess.Popen([sys.executable, SERVER, "--port", str(port), "--token", "open-sesame"])
    os.environ["MCP_TEST_TOKEN"] = "open-sesame"
    try:
        wait_for(lambda: listens(f"http://127.0.0.1:{port}/mcp"))
        yield {"url": f"http://127.0.0.1:{port}/mcp", "headers": {"Authorization": "Bearer $MCP_TEST_TOKEN"}}
    finally:
        process.kill()
        process.wait()
        del os.environ["MCP_TEST_TOKEN"]


@pytest.fixture(scope="module")
def stdio_server() -> dict:
    os.environ["MCP_TEST_SECRET"] = "swordfish"
    return entry(env={"MCP_TEST_KEY": "$MCP_TEST_SECRET"})
