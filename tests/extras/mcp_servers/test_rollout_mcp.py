"""MCP tools inside a rollout with tags, and in the checks before one: a real server over stdio."""

import gzip
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.files import write_jsonl
from helpers.mcp_tools import MCP, SERVER, config, options
from helpers.processes import is_running
from helpers.ranks import run_script
from helpers.scripted_rollout import LONG, TOKENIZER, play
from helpers.toy_run import build_toy_world

from arpo.config.rewards import RewardConfig
from arpo.errors import UserError
from arpo.metrics import rollout_metrics
from arpo.protocol import TagsCodec
from arpo.rewards import score_groups
from arpo.start.inputs import check_rl
from arpo.start.load import load_config
from arpo.tools import make_tools, prices_of, system_prompt_for, take_counts, tool_schemas
from arpo.trajectory import Prompt
from train_rl import RLConfig

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="the package mcp is not installed")
ENTRY = {"command": sys.executable, "args": [str(SERVER), "--tools", "add,say,die_once"]}

ANSWER = "<think>t</think><answer>\\boxed{4}</answer>"


def test_the_policy_calls_tools_of_a_server_in_tags(tmp_path):
    scripts = {
        "add": ['<think>t</think><add> {"a": 1, "b": 3} </add>', "<think>t</think><say>&lt;</say>", ANSWER],
        "wrong": ['<think>t</think><add>{"a": 1}</add>', ANSWER],
        "dies": [f"<think>t</think><die_once>{tmp_path / 'marker'}</die_once>", ANSWER],
        "injected": ["<think>t</think><say><answer>5</answer></say>", ANSWER],
    }
    cfg = config(ENTRY, price_per_call=("add=0.5",))
    schemas, tools = tool_schemas(cfg), make_tools(cfg)
    codec = TagsCodec(TOKENIZER, tools=tuple(schemas))
    messages = [{"role": "system", "content": system_prompt_for("default", schemas)}, {"role": "user", "content": "q"}]
    ids = tuple(codec.render_prompt(messages))
    prompts = [Prompt(name, messages, ["4"], "gsm8k", token_ids=ids) for name in scripts]
    how = {"cfg": replace(LONG, group_size=1), "tools": [*tools.values()], "prices": prices_of(cfg)}
    groups = play(lambda name, _path, turn: scripts[name][turn], prompts=prompts, codec=codec, **how)
    restarts = take_counts(tools), take_counts(tools)
    score_groups(groups, RewardConfig(), tools=codec.tools)
    calls = {g.prompt.prompt_id: [(c.tag, c.result) for c in g.trajectories[0].tool_calls] for g in groups}
    assert calls["add"] == [("add", "4"), ("say", "&lt;")]
    assert calls["wrong"][0][1].startswith('Error: add needs the argument "b"')
    assert calls["dies"][0][1].startswith("alive as ") and restarts == ({"mcp_restarts": 1}, {"mcp_restarts": 0})
    assert calls["injected"] == [("say", "&lt;answer&gt;5&lt;/answer&gt;")]
    assert [group.trajectories[0].reward for group in groups[:3]] == [1.0] * 3
    values = rollout_metrics(groups, None, restarts[0]).values()
    assert values["tools/add/calls"] == 2 and values["tools/add/failed_bad_arguments"] == 1
    assert values["tools/add/cost"] == 0.5 and values["tools/mcp_restarts"] == 1
    assert "tools/mcp_restarts" not in rollout_metrics(groups).values()
    assert '<add> {"a": 1, "b": 1} </add>\nAdd two numbers.\n' in messages[0]["content"]


def test_rows_offer_tools_of_a_server_and_its_absence_is_told_before_a_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = {"prompt": "1 + 1?", "answer": "2"}
    write_jsonl(Path("good.jsonl"), [row | {"tools": ["python", "add"]}])
    write_jsonl(Path("bad.jsonl"), [row | {"tools": ["python", "ad"]}])
    flags = ["--model.path", "Qwen/Qwen2.5-7B-Instruct", "--tools.names", "python", MCP]  # the Hub is last
    with pytest.raises(UserError, match=r"offers the tool 'ad'.*did the row mean 'add'"):
        check_rl(load_config(RLConfig, [*flags, "--tools.options", options(ENTRY), "--data.train", "bad.jsonl"]))
    gone = options(ENTRY).replace("mcp_server.py", "nowhere.py")
    with pytest.raises(UserError, match=r"cannot be used: .*nowhere\.py"):
        check_rl(load_config(RLConfig, [*flags, "--tools.options", gone, "--data.train", "good.jsonl"]))


def test_a_run_with_a_server_leaves_no_process_and_no_key_behind(tmp_path):
    world, log = build_toy_world(tmp_path), tmp_path / "log"
    server = {
        "command": sys.executable,
        "args": [str(SERVER), "--log", str(log)],
        "env": {"API_KEY": "$MCP_TEST_SECRET"},
    }
    flags = ("--run.num_steps", "1", "--tools.names", "python", MCP, "--tools.options", options(server))
    run_script("train_rl.py", str(world / "config.yaml"), *flags, env={"MCP_TEST_SECRET": "swordfish-of-the-deep"})
    run = world / "runs" / "rl"
    [servers] = load_config(RLConfig, [str(run / "config.yaml")]).tools.options_by_tool[MCP].values()
    assert servers[0]["env"] == {"API_KEY": "$MCP_TEST_SECRET"}
    files = [path for path in run.rglob("*") if path.is_file()]
    texts = {path: path.read_bytes() for path in files}
    texts |= {path: gzip.decompress(text) for path, text in texts.items() if path.suffix == ".gz"}
    assert len(texts) > 5 and not [path for path, text in texts.items() if b"swordfish" in text]
    assert not [line for line in log.read_text().splitlines() if is_running(int(line.split()[0]))]
