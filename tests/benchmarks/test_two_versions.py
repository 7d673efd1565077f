"""A benchmark on two versions of the code, in a repository of its own."""

import subprocess

import pytest

from benchmarks.shared.two_versions import ROOT, rounds_of_both

SCRIPT = f"""
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "arpo"), {str(ROOT)!r}]
from answer import ANSWER
from benchmarks.shared.two_versions import serve_rounds

print("a line of a library")
serve_rounds(lambda: {{"answer": ANSWER, "arguments": len(sys.argv)}})
"""


@pytest.fixture
def repository(tmp_path):
    """A repository whose last commit says 1; the files of today say 2."""
    (tmp_path / "arpo").mkdir()
    (tmp_path / "benchmarks").mkdir()
    answer = tmp_path / "arpo" / "answer.py"
    answer.write_text("ANSWER = 1\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "arpo"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *command], check=True)
    answer.write_text("ANSWER = 2\n")
    (tmp_path / "benchmarks" / "count.py").write_text(SCRIPT)
    return tmp_path


def test_todays_benchmark_measures_todays_code_and_that_of_the_ref(repository):
    here, there = rounds_of_both("benchmarks/count.py", ["--quick"], "HEAD", 3, root=repository)
    assert here == [{"answer": 2, "arguments": 2}] * 3
    assert there == [{"answer": 1, "arguments": 2}] * 3


def test_an_unknown_ref_or_a_version_that_fails_ends_the_comparison_in_one_line(repository):
    with pytest.raises(SystemExit, match=r"--against nowhere: .*nowhere"):
        rounds_of_both("benchmarks/count.py", [], "nowhere", 1, root=repository)
    (repository / "arpo" / "answer.py").write_text("")
    with pytest.raises(SystemExit, match="the version here ended with exit status 1"):
        rounds_of_both("benchmarks/count.py", [], "HEAD", 1, root=repository)
