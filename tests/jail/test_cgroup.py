"""A cgroup for each call: found, or refused with a reason, anywhere; its limits where this machine has one."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.edits import ROOT
from helpers.python_tools import HANG_S, burning_children, processes_of, wait_until
from sandbox_attacks.excess import MEMORY_OF_MANY_PROCESSES

from arpo.config.tools import PythonConfig
from arpo.errors import UserError
from arpo.jail import cgroup
from arpo.jail.client import Sandbox
from arpo.jail.host import NUM_SPARES
from arpo.jail.host_process import SandboxUnavailable
from arpo.jail.limits import CallLimits
from arpo.tools.python import PythonTool

ROOMY = CallLimits(wall_s=120.0, cpu_s=100.0, memory_bytes=256 << 20)
"""Time for a slow machine: these calls are to end by another limit."""
SOCKET_BUFFERS = """
import os, socket, time
def fill():
    pairs = [socket.socketpair() for _ in range(50)]
    for end in (end for pair in pairs for end in pair):
        end.setblocking(False)
        try:
            while True:
                end.send(b"x" * 65536)
        except BlockingIOError:
            pass
    time.sleep(100)
for _ in range(30):
    if os.fork() == 0:
        fill()
time.sleep(100)
"""
MANY_PROCESSES = """
import os, time
num_processes = 1
while True:
    try:
        if os.fork() == 0:
            time.sleep(100)
    except OSError:
        break
    num_processes += 1
print(num_processes)
"""
MEMORY_AND_FILES = """
import os
block = b"x" * (100 << 20)
for i in range(3):
    with open(f"file{i}", "wb") as file:
        file.write(bytes(20 << 20))
for _ in range(4):
    if os.fork() == 0:
        os._exit(len(block) % 2)
    os.wait()
print("fine")
"""
START_AND_WAIT = """
import sys, time
from arpo.jail.client import Sandbox
from arpo.jail.limits import CallLimits
sandbox = Sandbox(CallLimits(), cgroup=sys.argv[1])
print("started", flush=True)
time.sleep(600)
"""


@pytest.fixture
def parent() -> str:
    """A cgroup for hosts. Skips where this machine has none."""
    try:
        return cgroup.find_parent("auto")
    except ValueError as error:
        pytest.skip(f"no cgroup to be had here: {error}")


@pytest.fixture(params=["namespaces", "landlock"])
def sandbox(request, parent):
    try:
        sandbox = Sandbox(ROOMY, tier=request.param, cgroup=parent)
    except SandboxUnavailable as error:
        pytest.skip(f"this machine cannot carry it: {error}")
    yield sandbox
    sandbox.close()


ONLY_NAMESPACES = pytest.mark.parametrize("sandbox", ["namespaces"], indirect=True)
"""The other tier has one process per call."""


def hosts_below(parent: str) -> set[str]:
    return {name for name in os.listdir(parent) if name.startswith(cgroup.PREFIX)}


def spares_of(host: Path) -> list[Path]:
    """The cgroups of a host without calls, once there is a worker in each of them, and nothing in others."""

    def inhabited() -> list[Path]:
        found = []
        for call in host.glob("call-*"):
            with contextlib.suppress(OSError):  # it was removed since it was listed
                found += [call] if (call / "cgroup.procs").read_text() else []
        return found

    assert wait_until(lambda: len(inhabited()) == NUM_SPARES == len(list(host.glob("call-*"))))
    return inhabited()


# ---- anywhere


def test_the_own_cgroup_is_the_line_of_version_2_and_refused_where_it_is_gone_or_out_of_sight():
    assert cgroup.own_path("9:memory:/x\n0::/user.slice/run:7.scope\n") == "/user.slice/run:7.scope"
    for text in ("4:memory:/x\n", "0::/../other\n", "0::/gone (deleted)\n"):
        with pytest.raises(ValueError, match="cgroup"):
            cgroup.own_path(text)


@pytest.mark.parametrize(
    ("own", "mount", "found"),
    [
        ("/a/b", "/ /sys/fs/cgroup", ("/sys/fs/cgroup", "/sys/fs/cgroup/a/b")),
        ("/", "/ /sys/fs/cgroup/unified", ("/sys/fs/cgroup/unified", "/sys/fs/cgroup/unified")),
        ("/a/b/c", "/a/b /cg", ("/cg", "/cg/c")),
        ("/a/b", "/a/b /cg", ("/cg", "/cg")),
        ("/a b", r"/ /my\040cg", ("/my cg", "/my cg/a b")),
    ],
)
def test_its_folder_is_below_the_mount_that_shows_it(own, mount, found):
    other = "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw\n"
    assert cgroup.locate(own, f"{other}41 31 0:38 {mount} rw,relatime shared:4 - cgroup2 cgroup2 rw\n") == found


def test_a_mount_that_shows_another_part_of_the_tree_is_none():
    with pytest.raises(ValueError, match="mounted"):
        cgroup.locate("/ab", "41 31 0:38 /a /cg rw - cgroup2 cgroup2 rw\n")


def test_a_field_is_found_by_its_whole_name():
    text = "oom 0\noom_kill 3\nusage_usec 12\n"
    assert [cgroup.field(text, name) for name in ("oom", "oom_kill", "usage", "usage_usec")] == [0, 3, 0, 12]


def test_a_named_folder_that_is_no_cgroup_ends_the_run_with_one_line(tmp_path):
    with pytest.raises(UserError, match=f"tools.python.cgroup: {tmp_path} is no cgroup") as caught:
        PythonTool(PythonConfig(cgroup=str(tmp_path)))
    assert "\n" not in str(caught.value)


def test_a_start_says_whether_calls_have_cgroups_and_if_not_why(caplog):
    for setting in ("auto", "none"):
        caplog.clear()
        with caplog.at_level("INFO", logger="arpo"):
            sandbox = Sandbox(ROOMY, cgroup=setting, allow_unsafe=True)
        with contextlib.closing(sandbox):
            said = "; no cgroup: " in caplog.text
            assert said == bool(sandbox.no_cgroup) and sandbox.no_cgroup in caplog.text
            assert said or ("by cgroup" in caplog.text or not sandbox.host.has_proc)
            assert sandbox.run("6 * 7").stdout == "42\n"
    assert sandbox.no_cgroup == "switched off"


# ---- where there is one


def test_each_call_is_in_a_cgroup_of_its_own_that_it_cannot_reach(sandbox, parent):
    [host] = [name for name in hosts_below(parent) if f"-{os.getpid()}-" in name]
    assert Path(parent, host, "host", "cgroup.procs").read_text()
    for call in spares_of(Path(parent, host)):
        assert (call / "memory.oom.group").read_text() == "1\n" and (call / "pids.max").read_text() == "32\n"
    assert sandbox.run("import os\nopen('/sys/fs/cgroup/cgroup.procs')").status == "error"
    probe = "import os\nfor fd in range(3, 256):\n  try:\n    os.fstat(fd); print(fd)\n  except OSError: pass"
    assert sandbox.run(probe).stdout == ""


@ONLY_NAMESPACES
@pytest.mark.parametrize("code", [MEMORY_OF_MANY_PROCESSES, SOCKET_BUFFERS], ids=["blocks", "buffers of sockets"])
def test_memory_of_all_processes_together_is_limited(sandbox, code):
    assert sandbox.run(code).status == "memory_limit"


@ONLY_NAMESPACES
def test_the_kernel_itself_ends_what_outgrows_the_limit_between_two_polls(sandbox, parent):
    [host] = [name for name in hosts_below(parent) if f"-{os.getpid()}-" in name]
    for call in spares_of(Path(parent, host)):  # the polled limit stays where it was
        (call / "memory.max").write_text(str(64 << 20))
    assert sandbox.run(MEMORY_OF_MANY_PROCESSES).status == "memory_limit"


def test_cpu_time_counts_in_bursts_shorter_than_a_poll_that_nobody_waits_for(parent):
    with contextlib.closing(Sandbox(dataclasses.replace(ROOMY, cpu_s=6.0), cgroup=parent)) as sandbox:
        if sandbox.tier != "namespaces":
            pytest.skip("one process per call")
        assert sandbox.run(burning_children(1000, cpu_s=0.03)).status == "cpu_limit"


@ONLY_NAMESPACES
def test_processes_are_limited(sandbox):
    reply = sandbox.run(MANY_PROCESSES)
    assert reply.status == "ok" and int(reply.stdout) <= ROOMY.max_processes


def test_shared_memory_counts_once_and_files_have_room_beside_it(sandbox):
    code = MEMORY_AND_FILES if sandbox.tier == "namespaces" else MEMORY_AND_FILES.replace("range(4)", "range(0)")
    reply = sandbox.run(code)
    assert (reply.status, reply.stdout) == ("ok", "fine\n"), reply


def test_calls_and_hosts_leave_no_cgroup(parent):
    sandbox = Sandbox(ROOMY, cgroup=parent)
    [host] = [name for name in hosts_below(parent) if f"-{os.getpid()}-" in name]
    for _ in range(20):
        assert sandbox.run("6 * 7").stdout == "42\n"
    assert wait_until(lambda: len(list(Path(parent, host).glob("call-*"))) == NUM_SPARES)
    pids = processes_of(sandbox.host.pid)
    os.kill(sandbox.host.pid, signal.SIGKILL)
    assert wait_until(lambda: not any(processes_of(pid) for pid in pids))  # until then a spare may answer
    assert sandbox.run("6 * 7").stdout == "42\n" and sandbox.num_restarts == 1
    assert wait_until(lambda: host not in hosts_below(parent))
    sandbox.close()
    assert not [name for name in hosts_below(parent) if f"-{os.getpid()}-" in name]


def test_a_start_removes_the_cgroups_of_the_dead_and_of_nobody_else(parent):
    command = [sys.executable, "-c", START_AND_WAIT, parent]
    with contextlib.closing(Sandbox(ROOMY, cgroup=parent)) as living:
        before = hosts_below(parent)
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as trainer:
            assert trainer.stdout.readline() == "started\n"
            [its] = [name for name in hosts_below(parent) if f"-{trainer.pid}-" in name]
            trainer.kill()
            trainer.wait(HANG_S)
        events = Path(parent, its, "cgroup.events")
        assert wait_until(lambda: not events.exists() or "populated 0" in events.read_text())
        Sandbox(ROOMY, cgroup=parent).close()
        assert its not in hosts_below(parent) and before <= hosts_below(parent)
        assert living.run("6 * 7").stdout == "42\n"
