"""The two kinds of MCP server, each with a key."""

import os

import pytest
from helpers.mcp_tools import entry, served
from helpers.processes import free_port


@pytest.fixture(scope="module")
def http_server():
    """The entry of a server over HTTP that wants a token."""
    port = free_port()
    with pytest.MonkeyPatch.context() as patch, served(port, "--token", "open-sesame"):
        patch.setenv("MCP_TEST_TOKEN", "open-sesame")
        yield {"url": f"http://127.0.0.1:{port}/mcp", "headers": {"Authorization": "Bearer $MCP_TEST_TOKEN"}}


@pytest.fixture(scope="module")
def stdio_server() -> dict:
    os.environ["MCP_TEST_SECRET"] = "swordfish"
    return entry(env={"MCP_TEST_KEY": "$MCP_TEST_SECRET"})
