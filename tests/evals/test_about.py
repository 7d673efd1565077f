"""What a report says of its run besides scores."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from arpo.errors import UserError
from arpo.evals import about
from arpo.evals.about import NOT_RECORDED, code_version, model_name, read_about, read_sessions, record_session

SETTINGS = {
    "model": "models/Qwen sha256:0123456789abcdef",
    "enable_thinking": False,
    "seed": 7,
    "num_samples": 5,
    "system_prompt": "keep",
    "rollout": {
        "temperature": 0.6, "top_p": 0.95, "max_response_tokens": 8192, "max_tool_calls": 15,
        "max_calls_per_tool": ["python=5", "search=10"], "max_result_tokens": 1024,
    },
    "tools": {
        "names": ["python", "search"], "python": {}, "search": {"backend": "local", "corpus": "c.jsonl", "url": ""},
    },
}  # fmt: skip


def test_settings_are_those_of_the_records_and_of_the_config_and_the_sessions(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"eval": {"max_prompt_tokens": 2048}}))
    for code in ("commit 1", "commit 1", "commit 2"):
        monkeypatch.setattr(about, "code_version", lambda code=code: code)
        record_session(tmp_path, {})
    said = read_about(tmp_path, SETTINGS, "Judge-72B")
    rows = dict(said.settings)
    assert said.title == "models/Qwen" and rows["model"] == SETTINGS["model"] and rows["judge"] == "Judge-72B"
    assert rows["code"] == "commit 1, then commit 2"
    minute = r"\d{4}-\d\d-\d\d \d\d:\d\d UTC"
    assert re.fullmatch(rf"{minute} to {minute} \(3 starts\)", rows["date"])
    assert (rows["temperature"], rows["top-p"], rows["samples per question"], rows["seed"]) == ("0.6", "0.95", "5", "7")
    assert rows["longest prompt"] == "2,048 tokens" and rows["longest response"] == "8,192 tokens"
    assert rows["most tool calls"] == "15, python=5, search=10" and rows["thinking switch"] == "False"
    assert rows["tools"] == "python, search" and rows["tool search"] == "backend local, corpus c.jsonl"
    assert NOT_RECORDED not in rows.values()


def test_mcp_servers_are_said_with_what_decides_of_them(tmp_path):
    servers = [
        {"command": "npx", "args": ["-y", "a"], "prefix": "", "tools": []},
        {"url": "http://h/mcp", "tools": ["x"]},
    ]
    limits = SETTINGS["rollout"] | {"max_calls_per_tool": ["python=5", "x=3"]}
    with_servers = SETTINGS | {"tools": SETTINGS["tools"] | {"mcp": servers}, "rollout": limits}
    rows = dict(read_about(tmp_path, with_servers, "").settings)
    assert rows["MCP server 1"] == "command npx, args ['-y', 'a']"
    assert rows["MCP server 2"] == "url http://h/mcp, tools ['x']" and rows["most tool calls"] == "15, python=5, x=3"


def test_what_an_older_run_did_not_write_down_is_not_made_up(tmp_path):
    """A run from before there were sessions, in a folder whose config.yaml is gone."""
    old = {"model": "server", "seed": 0, "num_samples": 1, "rollout": {"temperature": 0.6}}
    said = read_about(tmp_path, old, "")
    rows = dict(said.settings)
    assert said.title == f"a server's model ({NOT_RECORDED})" and said.overlong == {} and said.links == ()
    unknown = [name for name, value in rows.items() if value == NOT_RECORDED]
    assert unknown == ["date", "code", "top-p", "longest prompt", "longest response", "most tool calls",
                       "longest tool result", "system prompt", "thinking switch", "tools"]  # fmt: skip
    assert rows["judge"] == "none" and rows["seed"] == "0"


@pytest.mark.parametrize(
    ("model", "title"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
        ("/runs/a b/hf sha256:0123", "/runs/a b/hf"),
        ("server my-model (/models/Qwen)", "my-model"),
        ("server my-model", "my-model"),
    ],
)
def test_the_title_is_the_name_of_the_model(model, title):
    assert model_name({"model": model}) == title


def test_the_last_session_that_asked_a_set_says_how_many_of_its_questions_were_left_out(tmp_path):
    record_session(tmp_path, {"gaia": 3, "hle": 1})
    record_session(tmp_path, {"gaia": 0})
    assert read_about(tmp_path, SETTINGS, "").overlong == {"gaia": 0, "hle": 1}
    assert [session.overlong for session in read_sessions(tmp_path)] == [{"gaia": 3, "hle": 1}, {"gaia": 0}]


@pytest.mark.parametrize("line", ["{", "[]", '{"date": "x"}', '{"date": "", "code": "", "overlong": {}, "x": 1}'])
def test_a_damaged_file_of_sessions_is_named(tmp_path, line):
    (tmp_path / "sessions.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=r"sessions\.jsonl: cannot be read .*; delete the file"):
        read_sessions(tmp_path)


def test_the_code_is_the_commit_of_a_checkout_and_says_whether_files_were_changed(tmp_path, monkeypatch):
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        done = subprocess.run(["git", "-C", tmp_path, *who, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    monkeypatch.setattr(about, "ROOT", tmp_path)
    assert not code_version().startswith("commit")  # an installed package: no checkout, so its version
    (tmp_path / "file").write_text("1")
    git("init", "-q")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    commit = git("rev-parse", "--short", "HEAD")
    assert code_version() == f"commit {commit}"
    (tmp_path / "file").write_text("2")
    assert code_version() == f"commit {commit}-dirty"
    monkeypatch.setenv("PATH", str(tmp_path))  # where git is not installed
    assert not code_version().startswith("commit")


def test_links_lead_to_the_viewers_that_are_there_the_runs_and_that_of_the_models_training(tmp_path):
    training, run = tmp_path / "runs" / "my arpo", tmp_path / "runs" / "eval"
    (training / "checkpoints" / "step_000002" / "hf").mkdir(parents=True)
    (training / "hf").symlink_to(Path("checkpoints/step_000002/hf"))
    run.mkdir()
    settings = SETTINGS | {"model": f"{training / 'hf'} sha256:12"}
    assert read_about(run, settings, "").links == ()
    (training / "viewer.html").write_text("")
    assert read_about(run, settings, "").links == (
        ("branch trees of the model's training", "../my%20arpo/viewer.html"),
    )
    (run / "viewer.html").write_text("")
    assert [words for words, _ in read_about(run, settings, "").links] == [
        "branch trees of this run",
        "branch trees of the model's training",
    ]
    inside = training / "eval"  # as an ablation has it: one page, named once
    inside.mkdir()
    assert read_about(inside, settings, "").links == (("branch trees of the model's training", "../viewer.html"),)


def test_sessions_are_plain_lines(tmp_path):
    record_session(tmp_path, {"gaia": 3})
    [line] = (tmp_path / "sessions.jsonl").read_text().splitlines()
    assert json.loads(line).keys() == {"date", "code", "overlong"}
