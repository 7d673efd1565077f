"""Tools of real MCP servers, over stdio and over HTTP: schemas, results, errors, keys."""

import asyncio
import subprocess
import sys
from importlib.util import find_spec

import pytest
from helpers.mcp_tools import SERVER, Running, config, entry
from helpers.processes import WAIT_S, free_port

from arpo.errors import UserError
from arpo.tools import make_tools, tool_schemas
from arpo.tools.base import ToolResult
from extras.tools.mcp.tool import text_of

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="the package mcp is not installed")


@pytest.fixture(scope="module", params=["stdio_server", "http_server"])
def running(request):
    with Running(request.getfixturevalue(request.param), price_per_call=("add=0.5",)) as running:
        yield running


def test_each_tool_of_a_server_is_a_tool_with_its_schema(running):
    assert {"add", "say", "paint", "refuse", "wait"} < set(running.tools)
    schema = running.tools["paint"].schema
    assert schema.description == "Paint a picture." and schema.required == ["colour"]
    assert schema.properties["colour"] == {"enum": ["red", "green"], "type": "string"}  # without a title


def test_results_and_errors_come_back_as_text(running):
    assert running.call("add", a=1, b=2) == ToolResult("3", ok=True, seconds=pytest.approx(0, abs=WAIT_S), cost=0.5)
    assert running.call("say", argument="<b> ü\n").text == "<b> ü\n"  # one text argument: the call is that text
    painted = running.call("paint", colour="red", size=2)
    assert painted.ok and painted.text == "red 2.0\n[image, image/png, 6 bytes]"
    assert running.call("say", argument=" ").text == " "
    refused = running.call("refuse", argument="never")
    assert refused.text.endswith("no: never") and refused.error_kind == "tool_error" and not refused.infra_error


def test_structured_content_is_shown_where_there_is_no_text():
    """agno PR #8695: such results reached the model empty. Here, those with an empty text."""
    from mcp.types import CallToolResult, TextContent

    shown = [
        text_of(
            CallToolResult(content=[TextContent(type="text", text=text) for text in texts], structured_content={"n": 1})
        )
        for texts in ([], [""], ["one", ""])
    ]
    assert shown == ['{"n": 1}', '{"n": 1}', "one"]


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ('{"a": 1}', 'add needs the argument "b"'),
        ('{"a": 1, "b": "2"}', '"b" of add must be an integer'),
        ('{"a": 1, "b": 2, "c": 3}', 'add has no argument "c"'),
        ("1 + 2", "is no JSON"),
    ],
)
def test_wrong_arguments_do_not_reach_the_server(running, argument, told):
    result = running.call("add", argument=argument)
    assert told in result.text and (result.ok, result.error_kind, result.infra_error) == (False, "bad_arguments", False)


def test_calls_run_at_the_same_time(running):
    for number in range(20):
        running.start("add", a=number, b=0)
        running.start("wait", seconds=0.01)
    assert sorted(int(r.text) for r in running.all() if r.text != "waited") == list(range(20))


def test_a_key_reaches_the_server_and_nothing_else(running, request):
    """Over stdio as a variable; the HTTP server would not have answered without its header."""
    is_http = "http_server" in request.node.name
    name, value = ("MCP_TEST_TOKEN", "open-sesame") if is_http else ("MCP_TEST_SECRET", "swordfish")
    shown = running.call("say", argument=f"a {value} is")
    assert shown.text == f"a ${name} is"  # the server has shown it, and we have hidden it
    if not is_http:
        assert running.call("show_env", argument="MCP_TEST_KEY").text == "$MCP_TEST_SECRET"
        assert running.call("show_env", argument="MCP_TEST_SECRET").text == "(unset)"


# ---- before a model is loaded


def refused(*entries: dict, names: tuple[str, ...] = ()) -> str:
    with pytest.raises(UserError) as error:
        tool_schemas(config(*entries, names=names))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_server_that_cannot_be_used_is_told_in_one_line(http_server):
    assert "there is no program 'nosuchprogram'; install it" in refused({"command": "nosuchprogram"})
    told = refused({"command": "/bin/sh", "args": ["-c", "echo the licence has expired >&2"]})
    assert "cannot be used" in told and "it said: the licence has expired; correct the command" in told
    assert "no answer within 0.5 s" in refused({"command": "/bin/sleep", "args": ["100"], "start_s": 0.5})
    url = f"http://127.0.0.1:{free_port()}/mcp"
    assert refused({"url": url}).startswith(f"MCP server {url} cannot be used: ")
    assert "HTTP 401" in refused({"url": http_server["url"]})
    assert "HTTP 404" in refused(http_server | {"url": http_server["url"] + "x"})
    missing = http_server | {"headers": {"Authorization": "Bearer $MCP_NOT_SET"}}
    assert "needs MCP_NOT_SET in the environment" in refused(missing)


def test_two_tools_of_one_name_are_refused_and_a_prefix_helps():
    one, other = entry("--tools", "add,say"), entry("--tools", "say,paint")
    told = refused(one, other)
    assert "has a tool 'say', and so is one of" in told and "prefix" in told
    named = tool_schemas(config(one, other | {"prefix": "b_"}, names=("python",)))
    assert list(named) == ["python", "add", "say", "b_say", "b_paint"]
    assert list(tool_schemas(config(one, other | {"tools": ["paint"]}))) == ["add", "say", "paint"]
    assert "has no tool 'said'; it has say, paint" in refused(other | {"tools": ["said"]})
    taken = "has the tag {!r}, which is taken or no name; rename it"
    assert taken.format("python") in refused(entry("--tools", "python"), names=("python",))
    assert taken.format("answer") in refused(entry("--tools", "answer"))
    assert "lists no tools" in refused(entry("--tools", "none"))


def test_the_listing_needs_no_torch():
    code = "import sys; from arpo.tools import tool_schemas; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=SERVER.parents[2])


def test_closing_twice_and_without_a_call_is_fine(stdio_server):
    tools = make_tools(config(stdio_server))
    for _ in range(2):
        for tool in tools.values():
            asyncio.run(tool.aclose())


def test_without_the_package_the_run_ends_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)  # as where it is not installed
    assert refused(entry("--tools", "absent")).endswith("pip install -e '.[mcp]'")
