"""An MCP server of the older protocol, over HTTP with sessions. `OldServer.sessions` are those that it knows."""

import json
import time
from http.server import BaseHTTPRequestHandler
from typing import ClassVar

TOOL = {"name": "old", "inputSchema": {"type": "object", "properties": {}}}
INFO = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "x", "version": "1"}}


class OldServer(BaseHTTPRequestHandler):
    """Answers JSON-RPC; all but `initialize` needs the id of a session that is known."""

    sessions: ClassVar[set[str]] = set()
    num_sessions: ClassVar[int] = 0
    tools: ClassVar[list[dict]] = [TOOL]

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
        results = {"initialize": INFO, "tools/list": {"tools": self.tools}, "tools/call": {"content": content}}
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
