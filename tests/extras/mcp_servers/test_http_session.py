"""A server of the older protocol, over HTTP with sessions, that forgets them, as one that was deployed anew does."""

import threading
from http.server import ThreadingHTTPServer
from importlib.util import find_spec

import pytest
from helpers.mcp_tools import config
from helpers.old_mcp_server import TOOL, OldServer

from arpo.errors import UserError
from arpo.tools import make_tools, take_counts, tool_schemas
from arpo.tools.base import ToolRunner

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="the package mcp is not installed")


@pytest.fixture
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), OldServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/mcp"
    server.shutdown()


def test_tools_that_run_only_as_tasks_are_not_offered(url, monkeypatch, caplog):
    """As server-everything's simulate-research-query, of which every call failed."""
    kinds = {"old": None, "free": "optional", "slow": "required"}
    listed = [{**TOOL, "name": name} | ({"execution": {"taskSupport": kind}} if kind else {})
              for name, kind in kinds.items()]  # fmt: skip
    monkeypatch.setattr(OldServer, "tools", listed)
    assert list(tool_schemas(config({"url": url}))) == ["old", "free"]
    assert "slow run only as tasks, and are left out" in caplog.text
    with pytest.raises(UserError, match="its tool 'slow' runs only as a task"):
        tool_schemas(config({"url": url, "tools": ["slow"]}))


def test_a_session_that_the_server_has_forgotten_is_opened_again(url, caplog):
    """Also where the server does not answer when the old one is closed, for which nobody waits long."""
    first = OldServer.num_sessions
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
        named = [f"in s{first + number}" for number in (2, 3, 3)]
        assert texts == named  # the first session was for the list of tools
        assert take_counts(tools) == {"mcp_restarts": 1}
    finally:
        runner.close()
    assert "cannot be ended" not in caplog.text
