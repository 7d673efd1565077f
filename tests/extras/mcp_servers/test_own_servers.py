"""MCP servers with state: a process or an HTTP session for each trajectory, also of the older protocol."""

import random
import threading
from dataclasses import replace
from http.server import ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.fakes import ScriptedEngine
from helpers.mcp_tools import Running, config, entry
from helpers.old_mcp_server import TOOL, OldServer
from helpers.processes import is_running
from helpers.scripted_rollout import ANSWER, LONG, TOKENIZER, prompt

from arpo.errors import UserError
from arpo.options import BranchingConfig
from arpo.protocol import TagsCodec
from arpo.sampling.sampler import rollout
from arpo.tools import take_counts, tool_schemas
from arpo.tools.base import ToolContext, ToolResult

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="the package mcp is not installed")
CFG = replace(LONG, group_size=4)
RANDOM = BranchingConfig(selector="random", base=0.7, num_initial_rollouts=2, entropy_tokens=4)


def call(running: Running, turn: int, tag: str, argument: str = "{}", *, trajectory: str = "0") -> ToolResult:
    running.runner.start(f"{trajectory} {turn}", tag, argument, ToolContext("p", trajectory, turn))
    [(_, result)] = running.runner.collect(block=True)
    return result


def pids(log: Path) -> set[int]:
    """Those of all servers that were started."""
    return {int(line.split()[0]) for line in log.read_text().splitlines()}


def wandering(prompt_id: str, path: str, turn: int) -> str:
    """Notes, and counts of them, in random order."""
    kind = random.Random(f"{prompt_id}|{path}|{turn}").choice(["note", "note", "count"]) if turn < 4 else "end"
    argument = f"{turn}@{path}" if kind == "note" else "{}"
    return ANSWER if kind == "end" else f"<think>t</think><{kind}>{argument}</{kind}>"


def texts_alone(calls: list) -> list[str]:
    """Return what a fresh server answers to these calls."""
    notes, texts = [], []
    for one in calls:
        notes.append(one.argument if one.tag == "note" else str(len(notes)))
        texts.append(" ".join(notes) if one.tag == "note" else notes[-1])
    return texts


def test_each_trajectory_has_its_own_server_and_a_branch_one_in_the_state_of_its_parent(tmp_path):
    log = tmp_path / "log"
    server = entry("--tools", "note,count", "--log", str(log), max_sessions=3)
    prompts = [prompt(f"p{i}", tools=("note", "count")) for i in range(2)]
    with Running(server) as running:
        codec, engine = TagsCodec(TOKENIZER, tools=("note", "count")), ScriptedEngine(TOKENIZER, wandering)
        groups = rollout(prompts, engine, running.runner, codec, CFG, RANDOM, seed=0)
    trajectories = [t for group in groups for t in group.trajectories]
    for t in trajectories:
        calls = [c for c in t.tool_calls if c.executed]
        assert [c.result for c in calls] == texts_alone(calls) and len(calls) == 4, t.trajectory_id
    assert len([t for t in trajectories if t.parent_id]) >= 2
    assert sum(c.replayed for t in trajectories for c in t.own_tool_calls) >= 2
    assert len(pids(log)) == 1 + sum(any(c.executed for c in t.own_tool_calls) for t in trajectories)  # 1: the listing
    assert not any(map(is_running, pids(log)))


def test_what_a_dead_server_knew_is_told_to_the_next_one(tmp_path):
    marker = str(tmp_path / "marker")
    with Running(entry("--tools", "note,die_once,die", max_sessions=2)) as running:
        assert [call(running, turn, "note", text).text for turn, text in enumerate("ab")] == ["a", "a b"]
        assert call(running, 0, "note", "c", trajectory="1").text == "c"
        revived = call(running, 2, "die_once", marker)
        assert revived.text.startswith("alive as ") and revived.replayed == 2 and not revived.replay_mismatches
        assert call(running, 3, "note", "d").text == "a b d"
        assert call(running, 1, "note", "e", trajectory="1").text == "c e"
        assert take_counts(running.tools) == {"mcp_restarts": 1}
        lost = call(running, 4, "die")
        assert lost.infra_error and not lost.ok
        assert call(running, 2, "note", "f", trajectory="1").text == "c e f"


def test_where_no_call_may_be_made_twice_a_dead_server_ends_its_trajectory_and_none_branches():
    with Running(entry("--tools", "note,die", max_sessions=2, max_tries=1)) as running:
        assert call(running, 0, "note", "a").text == "a"
        lost = call(running, 1, "die")
        assert (lost.error_kind, lost.infra_error) == ("unavailable", True)
        assert running.runner.sessions.refusal(["note"]) == "note"


def test_wrong_arguments_are_told_before_a_server_is_started(tmp_path):
    log = tmp_path / "log"
    with Running(entry("--tools", "add", "--log", str(log), max_sessions=2)) as running:
        wrong = call(running, 0, "add", '{"a": 1}')
        assert 'needs the argument "b"' in wrong.text and wrong.error_kind == "bad_arguments"
        assert len(pids(log)) == 1


def test_a_server_that_cannot_be_started_again_is_a_failure_of_ours(tmp_path):
    program = tmp_path / "mcp-server"
    start = entry("--tools", "note")
    program.write_text("#!/bin/sh\nexec " + " ".join([start["command"], *start["args"]]) + "\n")
    program.chmod(0o755)
    with Running({"command": str(program), "max_sessions": 2, "max_tries": 2}) as running:
        program.write_text("#!/bin/sh\nexit 1\n")
        lost = call(running, 0, "note", "a")
        assert (lost.error_kind, lost.infra_error) == ("unavailable", True)


@pytest.fixture
def old_server():
    """The address of a server of the older protocol, over HTTP with sessions."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), OldServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/mcp"
    server.shutdown()


def test_a_trajectory_has_a_session_of_an_http_server_and_a_new_one_where_that_is_forgotten(old_server):
    with Running({"url": old_server, "max_sessions": 4}) as running:
        first, other = (call(running, 0, "old", trajectory=name).text for name in "01")
        assert first != other and call(running, 1, "old").text == first
        OldServer.sessions.discard(first.removeprefix("in "))
        anew = call(running, 2, "old")
        assert anew.text not in (first, other) and anew.replayed == 2
        assert call(running, 1, "old", trajectory="1").text == other


def test_a_session_of_all_that_an_http_server_has_forgotten_is_opened_again(old_server, caplog):
    """As one that was deployed anew does. Also where it does not answer when the old session is closed, for which
    nobody waits long."""
    before = OldServer.num_sessions
    with Running({"url": old_server}) as running:
        texts = [call(running, 0, "old").text]
        OldServer.sessions.clear()
        texts += [call(running, turn, "old").text for turn in (1, 2)]
        assert texts == [f"in s{before + number}" for number in (2, 3, 3)]  # the first was for the list of tools
        assert take_counts(running.tools) == {"mcp_restarts": 1}
    assert "cannot be ended" not in caplog.text


def test_tools_that_run_only_as_tasks_are_not_offered(old_server, monkeypatch, caplog):
    """As server-everything's simulate-research-query, of which every call failed."""
    tasks = {"free": {"taskSupport": "optional"}, "slow": {"taskSupport": "required"}}
    listed = [TOOL, *({**TOOL, "name": name, "execution": support} for name, support in tasks.items())]
    monkeypatch.setattr(OldServer, "tools", listed)
    assert list(tool_schemas(config({"url": old_server}))) == ["old", "free"]
    assert "slow run only as tasks, and are left out" in caplog.text
    with pytest.raises(UserError, match="its tool 'slow' runs only as a task"):
        tool_schemas(config({"url": old_server, "tools": ["slow"]}))
