"""Tools of real MCP servers, over stdio and over HTTP: results, errors, deaths, deadlines, caches, and what is left."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path

import pytest
from helpers.processes import free_port, is_running

from arpo.errors import UserError
from arpo.tools import make_tools, tool_schemas
from arpo.tools.base import ToolResult, ToolRunner
from arpo.tools.mcp.tool import McpTool, mcp_schemas
from arpo.tools.options import ToolsConfig

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="the package mcp is not installed")
SERVER = Path(__file__).resolve().parents[2] / "helpers" / "mcp_server.py"
WAIT_S = 120


def entry(*args: str, **settings) -> dict:
    return {"command": sys.executable, "args": [str(SERVER), *args]} | settings


def config(*entries: dict, names: tuple[str, ...] = (), **settings) -> ToolsConfig:
    return ToolsConfig(names=names, mcp=tuple(map(json.dumps, entries)), **settings)


class Running:
    """The tools of a config, on a runner's loop."""

    def __init__(self, *entries: dict, **settings):
        self.tools = make_tools(config(*entries, **settings))
        self.runner = ToolRunner(self.tools)

    def __enter__(self):
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
        return next(tool for tool in self.tools.values() if isinstance(tool, McpTool)).service.take_restarts()


def wait_for(condition) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture(scope="module")
def http_server():
    """A server over HTTP that wants a token."""
    port = free_port()
    process = subprocess.Popen([sys.executable, SERVER, "--port", str(port), "--token", "open-sesame"])
    os.environ["MCP_TEST_TOKEN"] = "open-sesame"
    try:
        wait_for(lambda: _listens(f"http://127.0.0.1:{port}/mcp"))
        yield {"url": f"http://127.0.0.1:{port}/mcp", "headers": {"Authorization": "Bearer $MCP_TEST_TOKEN"}}
    finally:
        process.kill()
        process.wait()
        del os.environ["MCP_TEST_TOKEN"]


@pytest.fixture(scope="module")
def stdio_server() -> dict:
    os.environ["MCP_TEST_SECRET"] = "swordfish"
    return entry(env={"MCP_TEST_KEY": "$MCP_TEST_SECRET"})


@pytest.fixture(scope="module", params=["stdio_server", pytest.param("http_server", marks=pytest.mark.slow)])
def running(request):
    with Running(request.getfixturevalue(request.param), price_per_call=("add=0.5",)) as running:
        yield running


def _listens(url: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2].partition("/")[0]))) == 0


def test_each_tool_of_a_server_is_a_tool_with_its_schema(running):
    assert {"add", "say", "paint", "refuse", "wait"} < set(running.tools)
    schema = running.tools["paint"].schema
    assert schema.description == "Paint a picture." and schema.required == ["colour"]
    assert schema.properties["colour"] == {"enum": ["red", "green"], "type": "string"}  # without a title


def test_results_come_back_as_text(running):
    assert running.call("add", a=1, b=2) == ToolResult("3", ok=True, seconds=pytest.approx(0, abs=WAIT_S), cost=0.5)
    assert running.call("say", argument="<b> ü\n").text == "<b> ü\n"  # one text argument: the call is that text
    painted = running.call("paint", colour="red", size=2)
    assert painted.ok and painted.text == "red 2.0\n[image, image/png, 6 bytes]"
    assert running.call("say", argument=" ").text == " "


def test_errors_are_read_by_the_model(running):
    assert running.call("refuse", argument="never").text.endswith("no: never")
    assert running.call("refuse", argument="never").error_kind == "tool_error"
    assert not running.call("refuse", argument="never").infra_error


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


# ---- each with servers of its own


@pytest.mark.slow
def test_a_server_that_dies_in_mid_call_is_started_again_and_asked_again(tmp_path):
    log = tmp_path / "log"
    with Running(entry("--log", str(log))) as running:
        running.call("add", a=1, b=1)
        for _ in range(4):  # all of them lose their connection with the one that dies
            running.start("wait", seconds=1)
        running.start("die_once", argument=str(tmp_path / "marker"))
        results = running.all()
        assert [result.ok for result in results] == [True] * 5 and running.restarts() == 1
        assert running.restarts() == 0
    starts = [line for line in log.read_text().splitlines() if line.endswith("start")]
    assert len(starts) == 3  # for the list of tools, for the run, and again


@pytest.mark.slow
def test_a_call_that_kills_every_server_is_given_up_as_a_failure_of_ours(tmp_path):
    log = tmp_path / "log"
    with Running(entry("--log", str(log), max_tries=2)) as running:
        result = running.call("die")
        assert (result.ok, result.error_kind, result.infra_error) == (False, "unavailable", True)
        assert result.text == "Error: the die tool is unavailable."
        assert log.read_text().count("die") == 2
        assert running.call("add", a=1, b=1).text == "2" and running.restarts() == 2
    with Running(entry("--log", str(log), max_tries=1)) as running:
        assert running.call("die").infra_error
    assert log.read_text().count("die") == 3


@pytest.mark.slow
def test_a_slow_call_is_told_so_and_a_server_that_hangs_is_started_again(tmp_path):
    with Running(entry(deadline_s=2, max_tries=2)) as running:
        slow = running.call("wait", seconds=1000)
        assert slow.text == "Error: wait gave no answer within 2 s." and slow.error_kind == "timeout"
        assert not slow.infra_error and running.restarts() == 0
        hung = running.call("hang")
        assert (hung.error_kind, hung.infra_error) == ("unavailable", True)
        assert running.call("add", a=1, b=1).text == "2" and running.restarts() == 1


@pytest.mark.slow
def test_no_more_calls_than_the_limit_are_under_way(tmp_path):
    log = tmp_path / "log"
    with Running(entry("--log", str(log), max_concurrent=2)) as running:
        for _ in range(7):
            running.start("wait", seconds=0.05)
        assert [result.ok for result in running.all()] == [True] * 7
    steps = [1 if line.endswith("wait") else -1 for line in log.read_text().splitlines() if "wait" in line]
    assert len(steps) == 14 and max(accumulate(steps)) <= 2


@pytest.mark.slow
def test_the_servers_processes_are_gone_when_the_tools_are_closed(tmp_path):
    log = tmp_path / "log"
    with Running(entry("--log", str(log))) as running:
        child = int(running.call("children").text)
        running.start("hang")
        wait_for(lambda: "hang" in log.read_text())
    servers = {int(line.split()[0]) for line in log.read_text().splitlines()}
    wait_for(lambda: not any(map(is_running, {*servers, child})))


@pytest.mark.slow
def test_the_servers_processes_are_gone_when_the_trainer_is_killed(tmp_path):
    log = tmp_path / "log"
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_mcp import *
running = Running(entry("--log", {str(log)!r}))
print(running.call("children").text, flush=True)
running.start("hang")
running.all()
"""
    paths = [str(SERVER.parents[2]), str(SERVER.parents[1])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as trainer:
        child = int(trainer.stdout.readline())
        wait_for(lambda: "hang" in log.read_text())
        trainer.send_signal(signal.SIGKILL)
    servers = {int(line.split()[0]) for line in log.read_text().splitlines()}
    wait_for(lambda: not any(map(is_running, {*servers, child})))


@pytest.mark.slow
def test_what_is_recorded_is_replayed_without_the_server(tmp_path, caplog):
    cache, log = str(tmp_path / "cache.sqlite"), tmp_path / "log"
    one = entry("--log", str(log), "--tools", "add,refuse,die", cache=cache, prefix="x_", max_tries=1)
    with Running(one) as running:
        live = [running.call("x_add", b=2, a=1), running.call("x_refuse", argument="q"), running.call("x_die")]
        again = running.call("x_add", a=1, b=2)  # in another order
        assert [r.cached for r in (*live, again)] == [False, False, False, True] and again.text == "3"
    num_lines = len(log.read_text().splitlines())
    mcp_schemas.cache_clear()
    with Running(one | {"mode": "replay"}) as running:
        replayed = [running.call("x_add", a=1, b=2), running.call("x_refuse", argument="q")]
        assert [(r.text, r.ok, r.error_kind) for r in replayed] == [(r.text, r.ok, r.error_kind) for r in live[:2]]
        assert all(result.cached for result in replayed)
        assert running.call("x_die").error_kind == "not_recorded"  # a failure of ours is no answer
    with Running(one | {"mode": "replay_strict"}) as running, pytest.raises(UserError, match=r"no recorded.*<die>"):
        running.call("x_die")
    assert len(log.read_text().splitlines()) == num_lines
    caplog.clear()
    mcp_schemas(config(one | {"args": [*one["args"], "--busy", ""]}).servers[0])  # another server has its own records
    assert caplog.text == ""
    mcp_schemas(config(one | {"env": {"MCP_TEST_TOOLS": "add"}}).servers[0])
    assert "its tools are not those that" in caplog.text
    strict = config(one).replayed()
    assert json.loads(strict.mcp[0]) == one | {"mode": "replay_strict"}


@pytest.mark.slow
def test_an_http_server_that_comes_back_is_found_again(tmp_path):
    port = free_port()
    command = [sys.executable, SERVER, "--port", str(port)]
    with subprocess.Popen(command) as process:
        url = f"http://127.0.0.1:{port}/mcp"
        wait_for(lambda: _listens(url))
        with Running({"url": url, "deadline_s": 30, "max_tries": 2}) as running:
            assert running.call("add", a=1, b=1).text == "2"
            process.kill()
            process.wait()
            assert running.call("add", a=1, b=1).infra_error
            with subprocess.Popen(command) as another:
                wait_for(lambda: _listens(url))
                assert running.call("add", a=1, b=2).text == "3" and running.restarts() >= 1
                another.kill()


@pytest.mark.slow
def test_an_http_server_that_is_busy_is_asked_again_over_the_same_connection(tmp_path, monkeypatch):
    monkeypatch.setenv("MCP_TEST_TOKEN", "open-sesame")
    port, busy = free_port(), tmp_path / "busy"
    with subprocess.Popen([sys.executable, SERVER, "--port", str(port), "--token", "open-sesame", "--busy", busy]) as p:
        one = {"url": f"http://127.0.0.1:{port}/mcp", "headers": {"Authorization": "Bearer $MCP_TEST_TOKEN"}}
        wait_for(lambda: _listens(one["url"]))
        with Running(one) as running:
            assert running.call("add", a=1, b=1).text == "2"
            busy.write_text("2")
            assert running.call("add", a=1, b=2).text == "3" and busy.read_text() == "0"
            busy.write_text("3")
            assert running.call("add", a=1, b=2).infra_error and busy.read_text() == "0"
            assert running.call("add", a=1, b=3).text == "4" and running.restarts() == 0
        p.kill()


LEGACY = """
import asyncio, json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    answer = {"jsonrpc": "2.0", "id": asked["id"]}
    tool = {"name": "old", "inputSchema": {"type": "object", "title": "T", "properties": {}}}
    info = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "x", "version": "1"}}
    refusal = {"code": -32602, "message": "not today,\\nnor tomorrow"}
    wrong = tool | {"name": "wrong", "outputSchema": {"type": "object", "required": ["x"]}}
    found = {"initialize": info, "tools/list": {"tools": [tool, wrong]}}.get(asked["method"])
    if asked["method"] == "tools/call" and asked["params"]["name"] == "wrong":
        answer["result"] = {"content": [{"type": "text", "text": "no x"}]}
    elif asked["method"] == "tools/call":
        answer["error"] = refusal
    elif found is None:
        answer["error"] = {"code": -32601, "message": "no such method"}
    else:
        answer["result"] = found
    print(json.dumps(answer), flush=True)
"""


@pytest.mark.slow
def test_a_server_of_the_older_protocol_is_spoken_to_and_its_refusal_is_read():
    with Running({"command": sys.executable, "args": ["-c", LEGACY]}) as running:
        assert running.tools["old"].schema.parameters == {"type": "object", "properties": {}}
        result = running.call("old", argument="{}")
        assert result.text == "Error: old: not today, nor tomorrow"
        assert (result.ok, result.error_kind, result.infra_error) == (False, "refused", False)
        result = running.call("wrong", argument="{}")  # it breaks its own promise: not the model's mistake
        assert (result.ok, result.error_kind, result.infra_error) == (False, "bad_answer", True)


# ---- before a model is loaded


def refused(*entries: dict, names: tuple[str, ...] = ()) -> str:
    with pytest.raises(UserError) as error:
        tool_schemas(config(*entries, names=names))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_server_that_cannot_be_started_or_reached_is_told_in_one_line():
    assert "there is no program 'nosuchprogram'; install it" in refused({"command": "nosuchprogram"})
    told = refused({"command": "/bin/sh", "args": ["-c", "echo the licence has expired >&2"]})
    assert "cannot be used" in told and "it said: the licence has expired; correct the command" in told
    url = f"http://127.0.0.1:{free_port()}/mcp"
    assert refused({"url": url}).startswith(f"tools.mcp: {url} cannot be used: ")


@pytest.mark.slow
def test_a_server_that_does_not_let_us_in_is_told_in_one_line(http_server):
    told = refused({"command": "/bin/sleep", "args": ["100"], "start_s": 0.5})
    assert "no answer within 0.5 s" in told
    assert "HTTP 401" in refused({"url": http_server["url"]})
    assert "HTTP 404" in refused(http_server | {"url": http_server["url"] + "x"})
    missing = http_server | {"headers": {"Authorization": "Bearer $MCP_NOT_SET"}}
    assert "needs MCP_NOT_SET in the environment" in refused(missing)


@pytest.mark.slow
def test_two_tools_of_one_name_are_refused_and_a_prefix_helps():
    one, other = entry("--tools", "add,say"), entry("--tools", "say,paint")
    told = refused(one, other)
    assert "has a tool 'say', and so is one of" in told and "prefix" in told
    named = tool_schemas(config(one, other | {"prefix": "b_"}, names=("python",)))
    assert list(named) == ["python", "add", "say", "b_say", "b_paint"]
    assert list(tool_schemas(config(one, other | {"tools": ["paint"]}))) == ["add", "say", "paint"]
    assert "has no tool 'said'; it has say, paint" in refused(other | {"tools": ["said"]})
    assert "has a tool 'python', and so is a tool of ours called" in refused(entry("--tools", "python"))
    assert "has a tool 'answer', and so is a tag of the protocol called" in refused(entry("--tools", "answer"))
    assert "lists no tools" in refused(entry("--tools", "none"))


def test_the_listing_needs_no_torch():
    code = "import sys; from arpo.tools import tool_schemas; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=SERVER.parents[2])


def test_closing_twice_and_without_a_call_is_fine(stdio_server):
    tools = make_tools(config(stdio_server))
    for _ in range(2):
        for tool in tools.values():
            asyncio.run(tool.aclose())
