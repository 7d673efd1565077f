"""What is on record of the code and the files that a run was started with."""

import subprocess

from arpo.config import contents
from arpo.config.contents import contents_of, keep_code, provenance
from arpo.start.load import load_config
from evaluate import EvalConfig


def test_the_code_is_the_commit_of_a_checkout_and_says_whether_files_were_changed(tmp_path, monkeypatch):
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        done = subprocess.run(["git", "-C", tmp_path, *who, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    monkeypatch.setattr(contents, "ROOT", tmp_path)
    assert not provenance()["code"].startswith("commit")  # an installed package: no checkout, so its version
    (tmp_path / "file").write_text("1")
    git("init", "-q")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    commit = git("rev-parse", "--short", "HEAD")
    assert provenance()["code"] == f"commit {commit}"
    (tmp_path / "file").write_text("2")
    assert provenance()["code"] == f"commit {commit}-dirty"

    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tool.py").write_text(f"def {folder}(): ...\n")
    names = [f"{tmp_path}/{place}" for place in ("a/tool.py:a", "b/tool.py:b")]
    cfg, code = load_config(EvalConfig, ["--eval.files", "q.jsonl", "--tools.names", *names]), tmp_path / "code"
    keep_code(code, cfg)
    assert "+2" in (code / "changes.diff").read_text()
    copies = {path.name: path.read_text() for path in code.glob("*.py")}
    assert copies == {"tools.names-tool.py": "def a(): ...\n", "tools.names-2-tool.py": "def b(): ...\n"}
    git("commit", "-q", "-a", "-m", "second")
    keep_code(code, cfg)
    assert not (code / "changes.diff").exists()

    monkeypatch.setenv("PATH", str(tmp_path))  # where git is not installed
    assert not provenance()["code"].startswith("commit")


def test_a_long_text_is_no_file(tmp_path):
    (tmp_path / "q.jsonl").write_text("{}")
    flags = ["--eval.files", str(tmp_path / "q.jsonl"), "--eval.system_prompt", "Answer briefly. " * 400]
    assert contents_of(load_config(EvalConfig, flags)).keys() == {"eval.files"}
