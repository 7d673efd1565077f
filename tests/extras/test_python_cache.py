"""Record and replay of <python>; and of whole rollouts with both real tools."""

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest
from helpers.python_tools import SMALL, run, start, started
from helpers.scripted_rollout import play, prompt

from arpo.config.tools import SearchConfig, ToolsConfig
from arpo.errors import UserError
from arpo.options import BranchingConfig, RolloutConfig
from arpo.tools import make_tools
from arpo.tools.base import ToolResult
from arpo.trajectory import Group
from extras.cache.__main__ import main
from extras.tools.python import RecordedPython, RecordedPythonConfig
from extras.tools.recorder import NOT_RECORDED

NAME = f"{Path(__file__).resolve().parents[2]}/extras/tools/python.py:RecordedPython"
RANDOM = "import os\nos.urandom(8).hex()"


@pytest.fixture
def cfg(tmp_path) -> RecordedPythonConfig:
    start(SMALL).sandbox.close()  # skips where there is no sandbox
    return RecordedPythonConfig(**vars(SMALL) | {"wall_s": 20.0, "cache": str(tmp_path / "python.sqlite")})


def ask(cfg: RecordedPythonConfig, *codes: str) -> list[ToolResult]:
    with started(cfg, kind=RecordedPython) as tool:
        return run(tool, *codes)


def seen(results: list[ToolResult]) -> list[tuple]:
    return [(r.text, r.ok, r.error_kind) for r in results]


def test_a_replay_shows_what_was_recorded_errors_and_limits_included(cfg):
    codes = [
        RANDOM,
        "1 / 0",
        "print('a' * 9999)",
        "import sys; sys.exit(3)",
        "while True: print('x' * 999)",
        "a\0b",
        "```\n5\n```",
    ]
    recorded = ask(cfg, *codes)
    assert [r.error_kind for r in recorded] == [None, "error", None, "error", "output_limit", "bad_code", None]
    for mode in ("record", "replay", "replay_strict"):
        replayed = ask(dataclasses.replace(cfg, mode=mode), *codes)
        assert seen(replayed) == seen(recorded)
        assert [r.cached for r in replayed] == [r.error_kind != "bad_code" for r in recorded]
    assert ask(dataclasses.replace(cfg, mode="replay"), "5")[0].cached  # as the fenced one


def test_a_replay_runs_nothing_and_a_miss_is_an_error_or_the_end(cfg):
    ask(cfg, "1")
    replay = RecordedPython(dataclasses.replace(cfg, mode="replay"))
    assert replay.sandbox is None
    assert seen(run(replay, "1", "2")) == [("1", True, None), (NOT_RECORDED, False, "not_recorded")]
    with pytest.raises(UserError, match=r"python\.sqlite: no recorded result of '<python>2</python>'"):
        ask(dataclasses.replace(cfg, mode="replay_strict"), "2")


def test_what_a_recording_run_shows_is_what_its_replay_will_show(cfg):
    """Two calls at once, of code that never gives the same result: the first that is recorded counts for both."""
    first, second = ask(cfg, RANDOM, RANDOM)
    assert first.text == second.text
    assert ask(dataclasses.replace(cfg, mode="replay"), RANDOM)[0].text == first.text


def test_live_and_no_cache_run_every_call(cfg):
    for each in (dataclasses.replace(cfg, mode="live"), dataclasses.replace(cfg, cache="")):
        one, two = ask(each, RANDOM, RANDOM)
        assert one.ok and one.text != two.text and not (one.cached or two.cached)
    assert not Path(cfg.cache).exists()


def test_other_limits_or_another_interpreter_are_another_question(cfg, monkeypatch):
    ask(cfg, "1")
    replay = dataclasses.replace(cfg, mode="replay")
    assert ask(dataclasses.replace(replay, max_concurrent=2), "1")[0].ok
    assert not ask(dataclasses.replace(replay, memory_mib=512), "1")[0].ok
    monkeypatch.setattr("platform.python_version", lambda: "3.99.0")
    assert not ask(replay, "1")[0].ok


def test_a_failure_of_the_sandbox_is_not_kept(cfg):
    tool = RecordedPython(cfg)
    tool.sandbox.close()
    [result] = run(tool, "1")
    assert result.infra_error and not list(tool.recorder.cache.rows())
    asyncio.run(tool.aclose())


def test_a_replay_of_nothing_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"tools\.options: python\.cache is empty, and mode replay reads it"):
        RecordedPython(RecordedPythonConfig(mode="replay"))
    with pytest.raises(UserError, match=r"no such cache; set tools\.options: python\.cache to a recorded one"):
        RecordedPython(RecordedPythonConfig(mode="replay", cache=str(tmp_path / "nowhere.sqlite")))


ROLLOUT = RolloutConfig(group_size=4, max_response_tokens=900, max_result_tokens=200, answer_reserve_tokens=60)
BRANCHING = BranchingConfig(num_initial_rollouts=2, entropy_tokens=5)


def script(prompt_id: str, path: str, turn: int) -> tuple[str, float]:
    """Random numbers, the clock, errors and searches; entropies that rise after the first result."""
    topic = {"p0": "otter", "p1": "fox", "p2": "nothing like it"}[prompt_id]
    turns = [
        (f"<python>import os, time\nprint('{path}', os.urandom(4).hex(), time.time())</python>", 1.0),
        (f"<search>{topic} {len(path)}</search>", 3.0),
        ("<python>undefined_name</python>", 1.5),
        ("<think>t</think><answer>\\boxed{1}</answer>", 1.0),
    ]
    return turns[turn]


def tools_of(python: RecordedPythonConfig, search: SearchConfig) -> ToolsConfig:
    options = (json.dumps({NAME: vars(python)}),)
    return ToolsConfig(names=(NAME, "search"), options=options, search=search)


def batch(cfg: ToolsConfig) -> list[Group]:
    prompts = [prompt(f"p{i}") for i in range(3)]
    return play(script, cfg=ROLLOUT, branching=BRANCHING, tools=[*make_tools(cfg).values()], prompts=prompts, seed=3)


def everything_of(groups: list[Group]) -> list[dict]:
    """All that a trajectory dump holds, but for how long the calls took (and whether they were asked or replayed)."""
    dumps = [t.to_dict() for group in groups for t in group.trajectories]
    for dump in dumps:
        for turn in dump["turns"]:
            for call in turn["tool_calls"]:
                del call["seconds"], call["cached"]
    return dumps


def test_two_replays_of_a_batch_give_the_trajectories_that_were_recorded(cfg, tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"contents": f"the {x} is {len(x)} m long"}) + "\n" for x in ("otter", "fox")))
    search = SearchConfig(backend="local", corpus=str(corpus), cache=cfg.cache)  # one cache for both tools
    recorded = batch(tools_of(cfg, search))
    calls = [c for group in recorded for t in group.trajectories for c in t.tool_calls]
    assert {c.error_kind for c in calls if c.tag == "python"} == {None, "error"} and any(c.ok for c in calls)
    assert any(t.parent_id for group in recorded for t in group.trajectories)
    corpus.write_text("")  # a replay asks nobody
    strict = SearchConfig(backend="replay", cache=cfg.cache, mode="replay_strict")
    replay = tools_of(dataclasses.replace(cfg, mode="replay_strict"), strict)
    first, second = batch(replay), batch(replay)
    assert everything_of(first) == everything_of(second) == everything_of(recorded)
    assert all(c.cached for group in first for t in group.trajectories for c in t.tool_calls if c.executed)
    assert everything_of(batch(tools_of(dataclasses.replace(cfg, cache=""), strict))) != (everything_of(recorded))


def test_recorded_code_is_not_exported_as_searches(cfg, tmp_path, capsys):
    ask(cfg, "1", "2")
    main(["stats", cfg.cache])
    assert capsys.readouterr().out.splitlines()[:2] == ["entries     2", "  python    2"]
    main(["export", cfg.cache, str(tmp_path / "out.json")])
    assert json.loads((tmp_path / "out.json").read_text()) == {}
