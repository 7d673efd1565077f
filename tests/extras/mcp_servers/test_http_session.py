"""A server of the older protocol, over HTTP with sessions, that forgets them, as one that was deployed anew does."""

import threading
from http.server import ThreadingHTTPServer
from importlib.util import find_spec

import pytest
from helpers.mcp_tools import config
from helpers.old_mcp_server import OldServer

from arpo.tools import make_tools, take_counts
from arpo.tools.base import ToolRunner

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="the package mcp is not installed")


@pytest.mark.slow
def test_a_session_that_the_server_has_forgotten_is_opened_again(caplog):
    """Also where the server does not answer when the old one is closed, for which nobody waits long."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), OldServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/mcp"
    tools = make_tools(config({"url": url}))
    runner = ToolRunner(tools)
    try:
        texts = []
        for call in ("1", "2", "3"):
            runner.start(call, "old", "{}")
            [(_, result)] = runner.collect(block=True)
            assert result.ok, result
            texts.append(result.text)
            if call == "1":
                OldServer.sessions.clear()
        assert texts == ["in s2", "in s3", "in s3"]  # the first session was for the list of tools
        assert take_counts(tools) == {"mcp_restarts": 1}
    finally:
        runner.close()
        server.shutdown()
    assert "cannot be ended" not in caplog.text
