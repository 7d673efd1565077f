"""A parser that a page or an answer has taken over reaches nothing (the sandbox's tests attack the same walls)."""

import json
import subprocess
import sys

import pytest
from helpers.edits import ROOT

from arpo.jail import landlock

TAKEN_OVER = """
import json, os, signal, socket, sys
sys.path.append(sys.argv[1])
from jail.parser_jail import confine_parser
holds = confine_parser()
attempts = {
    "another file": lambda: open(sys.argv[2]).read(),
    "a new file": lambda: open(sys.argv[2] + ".new", "w"),
    "the network": lambda: socket.create_connection(("127.0.0.1", 9), 1),
    "a child": os.fork,
    "a signal": lambda: os.kill(os.getppid(), 0),
    "the trainer's keys": lambda: open(f"/proc/{os.getppid()}/environ", "rb").read(),
    "the trainer's memory": lambda: open(f"/proc/{os.getppid()}/mem", "rb"),
}
reached = []
for name, attempt in attempts.items():
    try:
        attempt()
        reached.append(name)
    except OSError:
        pass
import sympy
print(json.dumps({"holds": holds, "reached": reached, "works": str(sympy.simplify("x + x"))}))
"""


def landlock_is_there() -> bool:
    try:
        return landlock.newest_abi() > 0
    except OSError:
        return False


def test_a_parser_that_is_taken_over_reaches_nothing(tmp_path):
    (tmp_path / "secret").write_text("sk-secret")
    command = [sys.executable, "-c", TAKEN_OVER, str(ROOT / "arpo"), str(tmp_path / "secret")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    said = json.loads(done.stdout)
    assert said["works"] == "2*x" and "seccomp" in said["holds"]
    if not landlock_is_there():
        pytest.skip("this kernel, or the container, has no Landlock: files are not hidden")
    assert said == {"holds": ["landlock", "seccomp"], "reached": [], "works": "2*x"}
    assert not (tmp_path / "secret.new").exists()
