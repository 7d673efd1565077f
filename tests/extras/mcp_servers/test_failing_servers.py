"""MCP servers that die, hang, are busy, forget, or speak an older protocol; and what a run leaves of them."""

import json
import logging
import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from itertools import accumulate

import pytest
from helpers.mcp_tools import SERVER, Running, entry, served
from helpers.processes import free_port, is_running, wait_for

from arpo.errors import UserError
from extras.tools.mcp import connection
from extras.tools.mcp.config import parse_server
from extras.tools.mcp.connection import GUARD
from extras.tools.mcp.tool import mcp_schemas

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="the package mcp is not installed")
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}


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


def test_a_slow_call_is_told_so_and_a_server_that_hangs_is_started_again(monkeypatch):
    monkeypatch.setattr("extras.tools.mcp.connection.PROBE_S", 5.0)  # on a busy machine a live server may be slow
    with Running(entry(deadline_s=3, max_tries=2)) as running:
        slow = running.call("wait", seconds=1000)
        assert slow.text == "Error: wait gave no answer within 3 s." and slow.error_kind == "timeout"
        assert not slow.infra_error and running.restarts() == 0
        hung = running.call("hang")
        assert (hung.error_kind, hung.infra_error) == ("unavailable", True)
        assert running.call("add", a=1, b=1).text == "2" and running.restarts() == 1


def test_no_more_calls_than_the_limit_are_under_way(tmp_path):
    log = tmp_path / "log"
    with Running(entry("--log", str(log), max_concurrent=2)) as running:
        for _ in range(7):
            running.start("wait", seconds=0.05)
        assert [result.ok for result in running.all()] == [True] * 7
    steps = [1 if line.endswith("wait") else -1 for line in log.read_text().splitlines() if "wait" in line]
    assert len(steps) == 14 and max(accumulate(steps)) <= 2


@pytest.mark.parametrize("ending", ["closed", "killed"])
def test_the_servers_processes_are_gone_when_the_tools_are_closed_or_the_trainer_is_killed(tmp_path, ending):
    log = tmp_path / "log"
    code = f"""
import sys
from helpers.mcp_tools import Running, entry
with Running(entry("--log", {str(log)!r})) as running:
    print(running.call("children").text, flush=True)
    running.start("hang")
    sys.stdin.readline()
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SERVER.parents[2]), str(SERVER.parents[1])])}
    with subprocess.Popen([sys.executable, "-c", code], **PIPES, env=environment) as trainer:
        try:
            child = int(trainer.stdout.readline())
            wait_for(lambda: "hang" in log.read_text())
            if ending == "closed":
                assert trainer.communicate("end\n") == ("", None) and trainer.returncode == 0
        finally:
            trainer.kill()
    servers = {int(line.split()[0]) for line in log.read_text().splitlines()}
    wait_for(lambda: not any(map(is_running, {*servers, child})))


@pytest.mark.parametrize("ending", ["ends", "hangs", "trainer"])
def test_a_daemon_of_a_server_ends_with_it(tmp_path, ending):
    """Also where the server must be killed, or the trainer is."""
    note = tmp_path / "daemon"
    daemon = f"(setsid sleep 600 & echo $! > {note})"  # a session of its own, and nobody's child
    program = ["/bin/sh", "-c", f"{daemon}; {'sleep 600' if ending == 'hangs' else 'cat'}"]
    code = f"""
import os, signal, subprocess, sys
guard = [sys.executable, "-I", {str(GUARD)!r}, str(os.getpid()), *{program!r}]
child = subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True)
sys.stdin.readline()
child.stdin.close()
if {ending == "hangs"}:
    os.killpg(child.pid, signal.SIGKILL)
child.wait()
"""
    with subprocess.Popen([sys.executable, "-c", code], **PIPES) as trainer:
        wait_for(lambda: note.exists() and note.read_text().endswith("\n"))
        daemon = int(note.read_text())
        assert is_running(daemon)
        if ending == "trainer":
            trainer.kill()
        else:
            trainer.stdin.write("end\n")
            trainer.stdin.flush()
        wait_for(lambda: not is_running(daemon))
        trainer.kill()


def test_a_servers_garbage_is_a_few_lines_of_the_log(caplog, monkeypatch):
    monkeypatch.setattr(connection, "_num_lines", Counter())
    logger = logging.getLogger("mcp.client.stdio")
    for number in range(1000):
        logger.error("Failed to parse JSONRPC message %d", number)
    assert len(caplog.records) == connection.MAX_LOG_LINES


def test_what_is_recorded_is_replayed_without_the_server(tmp_path, caplog, monkeypatch):
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
    other = one | {"args": [*one["args"], "--busy", ""]}
    mcp_schemas(parse_server(json.dumps(other), "servers[0]"))  # another server has its own records
    assert caplog.text == ""
    monkeypatch.setenv("MCP_TEST_TOOLS", "add")
    mcp_schemas(parse_server(json.dumps(one | {"env": {"MCP_TEST_TOOLS": "$MCP_TEST_TOOLS"}}), "servers[0]"))
    assert "its tools are not those that" in caplog.text


def test_a_call_over_its_deadline_is_not_recorded(tmp_path, monkeypatch):
    """fastmcp #4395: a failure that would have passed was answered from the cache from then on."""
    monkeypatch.setattr("extras.tools.mcp.connection.PROBE_S", 60.0)  # on a busy machine a live server may be slow
    log = tmp_path / "log"
    with Running(entry("--log", str(log), cache=str(tmp_path / "cache.sqlite"), deadline_s=1)) as running:
        results = [running.call("wait", seconds=1000) for _ in range(2)]
    assert [(result.error_kind, result.cached) for result in results] == [("timeout", False)] * 2
    assert log.read_text().count("wait") == 2


def test_an_http_server_that_comes_back_is_found_again(tmp_path):
    port = free_port()
    one = {"url": f"http://127.0.0.1:{port}/mcp", "deadline_s": 30, "max_tries": 2}
    with served(port) as process, Running(one) as running:
        assert running.call("add", a=1, b=1).text == "2"
        process.kill()
        process.wait()
        assert running.call("add", a=1, b=1).infra_error
        with served(port):
            assert running.call("add", a=1, b=2).text == "3" and running.restarts() >= 1


def test_an_http_server_that_is_busy_is_asked_again_over_the_same_connection(tmp_path, monkeypatch):
    monkeypatch.setenv("MCP_TEST_TOKEN", "open-sesame")
    port, busy = free_port(), tmp_path / "busy"
    one = {"url": f"http://127.0.0.1:{port}/mcp", "headers": {"Authorization": "Bearer $MCP_TEST_TOKEN"}}
    with served(port, "--token", "open-sesame", "--busy", busy), Running(one) as running:
        assert running.call("add", a=1, b=1).text == "2"
        busy.write_text("2")
        assert running.call("add", a=1, b=2).text == "3" and busy.read_text() == "0"
        busy.write_text("3")
        assert running.call("add", a=1, b=2).infra_error and busy.read_text() == "0"
        assert running.call("add", a=1, b=3).text == "4" and running.restarts() == 0


def test_a_key_in_what_a_server_says_last_is_hidden_also_where_that_is_cut(monkeypatch):
    monkeypatch.setenv("MCP_TEST_KEY", key := "swordfish" * 5)
    for num_before, num_after in ((280, 0), (280, 280), (0, connection.STDERR_BYTES - 30)):
        code = f"import os, sys; sys.exit('x' * {num_before} + os.environ['MY_KEY'] + 'y' * {num_after})"
        with pytest.raises(UserError, match="it said: ") as error:
            Running({"command": sys.executable, "args": ["-c", code], "env": {"MY_KEY": "$MCP_TEST_KEY"}})
        assert key[:9] not in str(error.value).partition("it said: ")[2] and len(str(error.value)) < 900


LEGACY = """
import asyncio, json, os, sys
print("my key is", os.environ["MY_KEY"], flush=True)
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


def test_a_server_of_the_older_protocol_is_spoken_to_and_its_refusal_is_read(monkeypatch, caplog):
    monkeypatch.setenv("MCP_TEST_SECRET", "swordfish")
    with Running({"command": sys.executable, "args": ["-c", LEGACY], "env": {"MY_KEY": "$MCP_TEST_SECRET"}}) as running:
        assert running.tools["old"].schema.parameters == {"type": "object", "properties": {}}
        result = running.call("old", argument="{}")
        assert result.text == "Error: old: not today, nor tomorrow"
        assert (result.ok, result.error_kind, result.infra_error) == (False, "refused", False)
        result = running.call("wrong", argument="{}")  # it breaks its own promise: not the model's mistake
        assert (result.ok, result.error_kind, result.infra_error) == (False, "bad_answer", True)
    assert "Failed to parse" in caplog.text and "swordfish" not in caplog.text  # what it says in the wrong place
