"""A server of the older protocol, over HTTP with sessions, that forgets them, as one that was deployed anew does."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from typing import ClassVar

import pytest

from arpo.tools import make_tools
from arpo.tools.base import ToolRunner
from arpo.tools.options import ToolsConfig

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="the package mcp is not installed")
TOOL = {"name": "old", "inputSchema": {"type": "object", "properties": {}}}
INFO = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "x", "version": "1"}}


class OldServer(BaseHTTPRequestHandler):
    """Answers JSON-RPC; all but `initialize` needs the id of a session that is known."""

    sessions: ClassVar[set[str]] = set()
    num_sessions: ClassVar[int] = 0

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        method, session = asked["method"], self.headers.get("Mcp-Session-Id", "")
        if method == "initialize":
            OldServer.num_sessions += 1
            session = f"s{OldServer.num_sessions}"
            self.sessions.add(session)
        elif session not in self.sessions:
            self.send_error(404 if session else 400)
            return
        content = [{"type": "text", "text": f"in {session}"}]
        results = {"initialize": INFO, "tools/list": {"tools": [TOOL]}, "tools/call": {"content": content}}
        body = json.dumps({"jsonrpc": "2.0", "id": asked.get("id"), "result": results.get(method, {})}).encode()
        self.send_response(200 if "id" in asked else 202)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body) * ("id" in asked)))
        self.send_header("Mcp-Session-Id", session)
        self.end_headers()
        self.wfile.write(body * ("id" in asked))

    def do_GET(self):
        self.send_error(405)  # it sends nothing of its own accord

    def do_DELETE(self):
        if self.headers["Mcp-Session-Id"] not in self.sessions:
            time.sleep(3600)
        self.send_error(405)

    def log_message(self, *_):
        """The test's output is not its log."""


@pytest.mark.slow
def test_a_session_that_the_server_has_forgotten_is_opened_again(caplog):
    """Also where the server does not answer when the old one is closed, for which nobody waits long."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), OldServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/mcp"
    tools = make_tools(ToolsConfig(names=(), mcp=(json.dumps({"url": url}),)))
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
        assert tools["old"].service.take_restarts() == 1
    finally:
        runner.close()
        server.shutdown()
    assert "cannot be ended" not in caplog.text
