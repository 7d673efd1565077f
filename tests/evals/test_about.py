"""What a report says of its run besides scores."""

import json
import re
import subprocess

import pytest

from arpo.config import contents
from arpo.config.contents import NOT_RECORDED, code_version
from arpo.errors import UserError
from arpo.evals.about import (
    left_out,
    read_sessions,
    record_session,
    settings_rows,
)

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


def test_settings_are_told_as_they_are_with_the_sessions_and_the_judge(tmp_path, monkeypatch):
    for code in ("commit 1", "commit 1", "commit 2"):
        monkeypatch.setattr(contents, "code_version", lambda code=code: code)
        record_session(tmp_path, 2048, {})
    rows = dict(settings_rows(SETTINGS, read_sessions(tmp_path), "Judge-72B"))
    assert list(rows)[:3] == ["model", "date", "code"] and list(rows)[-1] == "judge"
    assert rows["model"] == SETTINGS["model"] and rows["judge"] == "Judge-72B"
    assert rows["code"] == "commit 1, then commit 2"
    minute = r"\d{4}-\d\d-\d\d \d\d:\d\d UTC"
    assert re.fullmatch(rf"{minute} to {minute} \(3 starts\)", rows["date"])
    assert (rows["rollout.temperature"], rows["rollout.top_p"], rows["num_samples"], rows["seed"]) == (
        "0.6",
        "0.95",
        "5",
        "7",
    )
    assert rows["max_prompt_tokens"] == "2048" and rows["rollout.max_response_tokens"] == "8192"
    assert rows["rollout.max_tool_calls"] == "15" and rows["rollout.max_calls_per_tool"] == "python=5, search=10"
    assert rows["tools.names"] == "python, search" and rows["tools.search.corpus"] == "c.jsonl"
    assert rows["enable_thinking"] == "False" and "tools.search.url" not in rows  # which is not set


def test_options_of_own_tools_and_missing_tools_and_judges_are_said():
    options = [{"my.py:A": {"args": ["-y", "a"]}}, {"my.py:B": {"url": "http://h"}}]
    rows = dict(settings_rows(SETTINGS | {"tools": {"names": [], "options": options}}, [], ""))
    assert rows["tools.options"] == "{'my.py:A': {'args': ['-y', 'a']}}, {'my.py:B': {'url': 'http://h'}}"
    assert rows["tools.names"] == rows["judge"] == "none"


def test_what_is_not_known_is_not_made_up():
    """A folder whose sessions.jsonl is gone."""
    rows = dict(settings_rows(SETTINGS, [], ""))
    assert rows["date"] == rows["code"] == NOT_RECORDED and "max_prompt_tokens" not in rows


def test_the_last_session_that_asked_a_set_says_how_many_of_its_questions_were_left_out(tmp_path):
    record_session(tmp_path, 2048, {"gaia": 3, "hle": 1})
    record_session(tmp_path, 2048, {"gaia": 0})
    assert left_out(read_sessions(tmp_path)) == {"gaia": 0, "hle": 1}
    assert [session.overlong for session in read_sessions(tmp_path)] == [{"gaia": 3, "hle": 1}, {"gaia": 0}]


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"date": "x"}', '{"date": "", "code": "", "max_prompt_tokens": 1, "overlong": {}, "x": 1}']
)
def test_a_damaged_file_of_sessions_is_named(tmp_path, line):
    (tmp_path / "sessions.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=r"sessions\.jsonl: cannot be read .*; delete the file"):
        read_sessions(tmp_path)


def test_the_code_is_the_commit_of_a_checkout_and_says_whether_files_were_changed(tmp_path, monkeypatch):
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        done = subprocess.run(["git", "-C", tmp_path, *who, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    monkeypatch.setattr(contents, "ROOT", tmp_path)
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


def test_sessions_are_plain_lines(tmp_path):
    record_session(tmp_path, 2048, {"gaia": 3})
    [line] = (tmp_path / "sessions.jsonl").read_text().splitlines()
    assert json.loads(line).keys() == {"date", "code", "max_prompt_tokens", "overlong", "versions", "command"}
