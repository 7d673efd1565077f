"""A child process reads what strangers wrote: whatever that does to it, the parent goes on."""

import os
import threading
from pathlib import Path

import pytest

from arpo.jail.child import MAX_ANSWER_BYTES, Child, ChildDied

PROGRAM = """
import os, time

def prepare():
    print("printed while it starts")

def answer(request):
    print("printed beside an answer")
    if request == "hang":
        time.sleep(600)
    if request == "compute":
        while True:
            pass
    if request == "take all memory":
        return len(bytes(4 << 30))
    if request == "take over":
        os.write(3, b"[" * 100_000 + b"\\n")
    if request == "end":
        os._exit(0)
    if request == "keys":
        return sorted(os.environ)
    return request * 2
"""


@pytest.fixture
def child(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    child = Child(tmp_path / "program.py", memory_bytes=1 << 30, cpu_s=1.0, wall_s=300.0)
    yield child
    child.close()


@pytest.mark.parametrize(
    ("request_", "cause"),
    [
        ("hang", "^10 s$"),
        ("compute", "^1 s of CPU time$"),
        ("take all memory", "1 GiB of memory, or the parser crashed"),
        ("end", "or the parser crashed"),
        ("x" * MAX_ANSWER_BYTES, "an answer that no parser gives"),
        ("take over", "an answer that no parser gives"),
    ],
    ids=["hang", "compute", "memory", "end", "an answer without end", "an answer that no parser reads"],
)
def test_a_text_that_breaks_the_child_is_named_and_the_next_one_is_read_by_another(child, request_, cause):
    if request_ == "hang":
        child.wall_s = 10.0
    assert child.ask("ab") == "abab"
    first = child._process
    with pytest.raises(ChildDied, match=cause):
        child.ask(request_)
    assert first.returncode is not None
    assert child.ask("cd") == "cdcd"


def test_a_child_has_no_keys(child, monkeypatch):
    monkeypatch.setenv("SERPER_API_KEY", "sk-secret")
    assert set(child.ask("keys")) <= {"LANG", "LC_CTYPE", "OMP_NUM_THREADS", "PATH"}


def test_a_fork_has_a_child_of_its_own(child):
    child.ask("ab")
    pid = os.fork()
    if pid == 0:
        os._exit(0 if child._process is None and child.ask("cd") == "cdcd" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert child.ask("ef") == "efef"


def test_closing_ends_a_request_that_is_running(child):
    child.ask("ab")
    closing = threading.Timer(0.3, child.close)
    closing.start()
    with pytest.raises(ChildDied):
        child.ask("hang")
    closing.join()
    assert child._process is None


def test_a_program_that_cannot_start_is_an_error_of_ours(tmp_path, capfd):
    (tmp_path / "program.py").write_text("import no_such_module")
    child = Child(Path(tmp_path / "program.py"), memory_bytes=1 << 30, wall_s=10.0)
    with pytest.raises(RuntimeError, match=r"program\.py did not start \(exit code 1\)"):
        child.ask("ab")
    assert "no_such_module" in capfd.readouterr().err
