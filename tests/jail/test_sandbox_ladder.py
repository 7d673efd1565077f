"""The ladder: which tier the <python> tool takes where a machine allows less, what it says then, and where it refuses.

Containers are imitated: a seccomp filter forbids what their profiles forbid, `unshare` makes namespaces like theirs.
"""

import asyncio
import json
import logging
import os
import subprocess
import sys

import pytest
from helpers.edits import ROOT
from helpers.python_tools import HANG_S, skip_where_the_kernel_refuses, start

from arpo.errors import UserError
from arpo.jail.syscall_table import ADMINISTRATION, numbers

FORBIDDEN = numbers(ADMINISTRATION, os.uname().machine)
LANDLOCK_CREATE_RULESET = 444
CONTAINED = """
import errno, json, logging, struct, sys
from arpo.config.tools import PythonConfig
from arpo.errors import UserError
from arpo.jail import seccomp
from arpo.tools.python import PythonTool

logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout, level=logging.INFO)
program = [(0x20, 0, 0, 0)]
for number in json.loads(sys.argv[1]):
    program += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | errno.EPERM)]
program.append((0x06, 0, 0, 0x7FFF0000))
if len(program) > 2:
    seccomp.install(b"".join(struct.pack("HBBI", *line) for line in program))
try:
    tool = PythonTool(PythonConfig(allow_unsafe=sys.argv[2] == "unsafe"))
    print("RUNS", tool.sandbox.tier, tool.sandbox.run("6 * 7").stdout.strip())
    reply = tool.sandbox.run("import os\\nif os.fork(): os.wait(); print('has children')")
    print(reply.stdout.strip() or reply.stderr.strip())
    tool.sandbox.close()
except UserError as error:
    print("REFUSED", error)
"""


def start_in_container(*forbidden: int, unsafe: bool = False, within: tuple[str, ...] = ()) -> str:
    """Return what the tool says where those system calls are forbidden, or below the command `within`."""
    arguments = [json.dumps(forbidden), "unsafe" if unsafe else "safe"]
    command = [*within, sys.executable, "-c", CONTAINED, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=True).stdout


@pytest.mark.parametrize("call", ["unshare", "mount", "mount_setattr"])
def test_where_namespaces_cannot_be_had_or_filled_landlock_takes_over_and_says_so(call):
    """unshare: Docker's default profile; mount: Ubuntu 24.04 restricts what a user namespace may; mount_setattr: a
    kernel before 5.12."""
    start(tier="landlock").sandbox.close()
    said = start_in_container(FORBIDDEN[call])
    assert "RUNS landlock 42" in said and "Operation not permitted" in said.splitlines()[-1]
    assert said.count("WARNING") == 1 and "without namespaces (namespaces: " in said
    assert "not held: which files exist, their sizes and times; locks" in said


def test_without_any_isolation_the_tool_refuses_to_start_and_names_the_reasons():
    said = start_in_container(FORBIDDEN["unshare"], LANDLOCK_CREATE_RULESET)
    assert said.startswith("REFUSED tools.python") and said.count("\n") == 1
    assert "unshare: Operation not permitted; landlock: " in said and "allow_unsafe" in said


def test_allow_unsafe_runs_without_isolation_and_warns():
    said = start_in_container(FORBIDDEN["unshare"], LANDLOCK_CREATE_RULESET, unsafe=True)
    assert "RUNS none 42" in said
    assert said.count("WARNING") == 1 and "NO isolation" in said


def test_inside_a_user_namespace_of_a_container_nothing_is_lost():
    start(tier="namespaces").sandbox.close()
    said = start_in_container(within=("unshare", "--user", "--map-root-user"))
    assert "RUNS namespaces 42\nhas children" in said and "WARNING" not in said


def test_where_proc_is_masked_as_in_a_container_there_are_no_child_processes():
    start(tier="namespaces").sandbox.close()
    masked = 'mount -t tmpfs none /proc/sys && exec "$@"'
    within = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", masked, "sh")
    said = start_in_container(within=within)
    assert "RUNS namespaces 42" in said and "Operation not permitted" in said.splitlines()[-1]
    assert said.count("WARNING") == 1 and "without /proc, code may not start processes" in said


def test_these_tests_skip_for_what_the_kernel_refuses_and_for_nothing_else():
    for failure, ends in (
        ("unshare: Operation not permitted", pytest.skip.Exception),
        ("the jail failed its self-test: read of the trainer", UserError),
        ("the host did not start within 120 s", UserError),
    ):
        with pytest.raises(ends, match=failure):
            skip_where_the_kernel_refuses(UserError(f"tools.python: no isolation (namespaces: {failure})"))


def test_a_start_is_announced_in_one_line(caplog):
    with caplog.at_level(logging.INFO, logger="arpo"):
        asyncio.run(start().aclose())
    assert len(caplog.records) == 1 and "sandboxed by" in caplog.text
    assert "exact limits: " in caplog.text and "polled: " in caplog.text and "not held: " in caplog.text
