"""The host process of the <python> tool: what it inherits, how it is replaced, what it leaves, where it refuses."""

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import venv
from pathlib import Path

import pytest
from helpers.edits import ROOT
from helpers.python_tools import HANG_S, SMALL, TIERS, jail_of, processes_of, run, start, started, text_of, wait_until

from arpo.jail.host import NUM_SPARES
from arpo.jail.host_process import HostProcess
from arpo.jail.limits import BUSY_NICE, NICE, CallLimits
from arpo.jail.selftest import leaks_of
from arpo.jail.wire import Reply
from arpo.tools.base import ToolResult

UNHURRIED = dataclasses.replace(SMALL, wall_s=60.0)
"""For calls that wait, or compete with other work that fills the machine."""


@pytest.fixture
def own_tool():
    """A tool whose host may be killed."""
    with started(grace_s=HANG_S) as tool:
        yield tool


def test_nothing_of_the_trainers_environment_is_visible_and_its_files_are_not_inherited(monkeypatch, tmp_path):
    monkeypatch.setenv("ARPO_CANARY", "do-not-show-this")
    with open(tmp_path / "weights", "w") as file:
        os.set_inheritable(file.fileno(), True)
        with started() as tool:
            seen = text_of(tool, "import os\nsorted(os.environ)")
            host = [Path(f"/proc/{pid}/environ").read_bytes() for pid in jail_of(tool)]
            links = [os.readlink(link) for pid in jail_of(tool) for link in Path(f"/proc/{pid}/fd").iterdir()]
    assert "ARPO_CANARY" not in seen and "PYTHONHASHSEED" in seen
    assert not any(b"do-not-show-this" in environment for environment in host)
    assert links and not any("weights" in link for link in links)


def test_a_worker_that_cannot_be_confined_is_our_fault():
    host = HostProcess("none", dataclasses.replace(CallLimits(), max_open_files=-5))
    reply = host.call("1", 20.0, 10.0)
    host.kill()
    host.remove_files()
    assert reply.status == "sandbox_error" and "ValueError" in reply.stderr


def test_the_self_test_sees_through_a_host_without_a_jail(monkeypatch):
    monkeypatch.setenv("ARPO_CANARY", "1")
    host = HostProcess("none", CallLimits())
    try:
        leaks = leaks_of(lambda probe: host.call(probe, 20.0, 10.0))
    finally:
        host.kill()
        host.remove_files()
    assert "read of the trainer is possible" in leaks
    assert "network of the trainer is possible" in leaks
    assert "a file of the trainer was changed" in leaks


def until(end_s: float, then: str = "42") -> str:
    """Code that ends at that time, also where it is run again: a killed host takes a moment to die."""
    return f"import time\nwhile time.time() < {end_s}: time.sleep(0.05)\n{then}"


def test_a_stuck_host_is_replaced(own_tool):
    own_tool.sandbox.grace_s = 8.0
    jail_of(own_tool)  # waits for the self-test's supervisor to be gone
    for pid in processes_of(own_tool.sandbox.host.pid):
        os.kill(pid, signal.SIGSTOP)
    assert [result.text for result in run(own_tool, "1", "2")] == ["1", "2"]
    assert own_tool.sandbox.num_restarts == 1


def test_a_host_that_cannot_be_had_again_is_our_fault_and_not_the_models(own_tool, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    pids = processes_of(own_tool.sandbox.host.pid)
    os.kill(own_tool.sandbox.host.pid, signal.SIGKILL)
    assert wait_until(lambda: not any(processes_of(pid) for pid in pids))  # until then a spare may answer
    [result] = run(own_tool, "1")
    assert (result.ok, result.infra_error, result.error_kind) == (False, True, "sandbox_error")


@pytest.mark.parametrize("tier", TIERS)
def test_closing_leaves_nothing(tier):
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    tool = start(tier=tier)

    async def close_in_mid_call() -> ToolResult:
        call = asyncio.create_task(tool.run("import time; time.sleep(60)"))
        await asyncio.sleep(0.3)
        await tool.aclose()
        return await call

    pids = processes_of(tool.sandbox.host.pid)
    assert pids
    assert asyncio.run(close_in_mid_call()).infra_error
    assert wait_until(lambda: not any(processes_of(pid) for pid in pids))
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert threading.active_count() <= threads


DIG = """
import os, time
for _ in range(1200):
    os.mkdir("d")
    os.chdir("d")
"""


@pytest.mark.parametrize("tier", TIERS)
def test_a_killed_host_is_replaced_once_and_its_calls_repeated_also_beside_deeply_nested_folders(tier):
    tool = start(UNHURRIED, tier=tier, grace_s=HANG_S)  # what a kill breaks off is noticed at once
    first = tool.sandbox.host.base
    killer = threading.Timer(0.6, lambda: os.kill(tool.sandbox.host.pid, signal.SIGKILL))
    killer.start()
    end_s = time.time() + 6
    dug, *results = run(tool, DIG + until(end_s), *[until(end_s)] * 11)
    killer.join()
    assert [result.text for result in results] == ["42"] * 11 and not dug.infra_error
    second = tool.sandbox.host.base
    run(tool, DIG)
    asyncio.run(tool.aclose())
    assert tool.sandbox.num_restarts == 1
    assert not any(folder and os.path.exists(folder) for folder in (first, second))


TRAINER = """
import asyncio, sys
from arpo.config.tools import PythonConfig
from arpo.tools.python import PythonTool

FORKS = "import os, time\\nwhile True:\\n    try: os.fork()\\n    except OSError: time.sleep(0.01)"

async def main():
    tool = PythonTool(PythonConfig(), tier=sys.argv[1])
    calls = [asyncio.create_task(tool.run(FORKS)) for _ in range(3)]
    await asyncio.sleep(0.5)
    print(tool.sandbox.host.pid, tool.sandbox.host.base, flush=True)
    await asyncio.gather(*calls)

asyncio.run(main())
"""


@pytest.mark.parametrize("tier", TIERS)
def test_nothing_outlives_a_killed_trainer(tier):
    start(tier=tier).sandbox.close()  # skips where the tier is not to be had
    command = [sys.executable, "-c", TRAINER, tier]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as trainer:
        host_pid, folder = trainer.stdout.readline().split()
        # more than the host, its launcher, and a supervisor and a worker per spare: the calls run
        calls_run = wait_until(lambda: len(processes_of(int(host_pid))) > 2 + 2 * NUM_SPARES)
        pids = processes_of(int(host_pid))
        trainer.kill()
    assert calls_run
    assert wait_until(lambda: not any(processes_of(pid) for pid in pids))
    assert wait_until(lambda: not os.path.exists(folder))


def test_a_call_whose_files_are_another_users_ends_with_its_host():
    """The supervisor counts them as that user, and the kernel then forgets with whom it is to die."""
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if os.geteuid() != 0 or python is None:
        pytest.skip("only root gives calls to another user, for whom this needs an interpreter")
    tool = start(dataclasses.replace(UNHURRIED, interpreter=python), "landlock")
    host, end_s = tool.sandbox.host.pid, time.time() + 40
    caller = threading.Thread(target=lambda: text_of(tool, until(end_s)))
    caller.start()
    assert wait_until(lambda: len(processes_of(host)) > 1 + 2 * NUM_SPARES)
    time.sleep(1)  # files are counted every 20 ms
    pids = processes_of(host)
    tool.sandbox.close()
    assert wait_until(lambda: not any(processes_of(pid) for pid in pids)) and time.time() < end_s - 10
    caller.join()


def test_the_host_outlives_the_thread_that_started_it():
    tools = []
    thread = threading.Thread(target=lambda: tools.append(start()))
    thread.start()
    thread.join()
    [result] = run(tools[0], "1")
    asyncio.run(tools[0].aclose())
    assert result.text == "1" and tools[0].sandbox.num_restarts == 0


def test_an_interpreter_below_tmp_stays_visible_under_the_private_tmp():
    script = """
    import sys
    sys.path.insert(0, sys.argv[1])
    from arpo.jail.client import Sandbox
    from arpo.jail.limits import CallLimits
    sandbox = Sandbox(CallLimits())
    print(sandbox.run("import os, sys; print(os.path.exists(sys.executable), open('new', 'w').write('x'))").stdout)
    sandbox.close()
    """
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        venv.create(folder, symlinks=True)
        command = [f"{folder}/bin/python", "-c", textwrap.dedent(script), str(ROOT)]
        said = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=True).stdout
    assert said.split() == ["True", "1"]


@pytest.mark.parametrize("tier", TIERS)
def test_a_caller_that_is_gone_before_its_call_began_leaves_nothing(tier):
    with started(tier=tier) as tool:
        host = tool.sandbox.host
        for _ in range(2 * NUM_SPARES):
            ours, theirs = socket.socketpair()
            with ours, theirs:
                socket.send_fds(host._control, [b"call"], [theirs.fileno()])
        assert text_of(tool, "1") == "1"
        jail_of(tool)  # waits until there are spares and nothing else
        folder = tool.sandbox.host.base
        assert folder is None or wait_until(lambda: len(os.listdir(folder)) == NUM_SPARES)
        assert tool.sandbox.num_restarts == 0


HOSTILE = [
    "while True: pass",
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "while True: print('x' * 1000)",
    "for i in range(10**6): open(str(i), 'w').write('x' * 10000)",
    "import os\nos.kill(-1, 9)\nos.kill(os.getppid(), 9)",
]


@pytest.mark.parametrize("tier", TIERS)
def test_good_calls_beside_hostile_ones_are_answered_as_if_alone(tier):
    async def side_by_side(tool) -> tuple[list[ToolResult], list[ToolResult]]:
        hostile = [asyncio.create_task(tool.run(code)) for code in HOSTILE * 2]
        good = [await tool.run(f"import numpy\nprint(numpy.arange({n}).sum())") for n in range(10)]
        return good, await asyncio.gather(*hostile)

    with started(dataclasses.replace(SMALL, max_concurrent=len(HOSTILE) + 1), tier) as tool:
        good, hostile = asyncio.run(side_by_side(tool))
        assert tool.sandbox.num_restarts == 0
    assert [(result.text, result.ok) for result in good] == [(str(n * (n - 1) // 2), True) for n in range(10)]
    assert not any(result.infra_error for result in hostile)


SPIN = """
import os, threading, time
def priority():
    return os.getpriority(os.PRIO_PROCESS, 0)
def spin():
    ends = time.process_time() + 20
    while time.process_time() < ends and priority() == before:
        pass
    print(f"{priority() - before} ", end="")  # in one piece: two threads print
before = priority()
thread = threading.Thread(target=spin)
thread.start()
spin()
thread.join()
"""


@pytest.mark.parametrize("tier", TIERS)
def test_all_threads_of_a_call_that_computes_long_let_others_go_first(tier):
    with started(UNHURRIED, tier) as tool:
        steps_back = [int(word) for word in text_of(tool, SPIN).split()]
        short = text_of(tool, "import os, time\ntime.sleep(0.2)\nprint(os.getpriority(os.PRIO_PROCESS, 0))")
    assert steps_back == [BUSY_NICE - NICE] * 2
    assert int(short) == os.getpriority(os.PRIO_PROCESS, 0) + NICE


@pytest.mark.parametrize("tier", TIERS)
def test_a_call_that_computes_long_goes_back_where_sessions_share_the_processor(tier):
    if not Path("/proc/self/autogroup").exists():
        pytest.skip("this kernel groups no processes by session")
    ours = Path("/proc/self/autogroup").read_text()

    def niceness(tool) -> set[str]:
        found = set()
        for pid in processes_of(tool.sandbox.host.pid):
            with contextlib.suppress(OSError):  # it ended since it was listed
                found.add(Path(f"/proc/{pid}/autogroup").read_text().split()[-1])
        return found

    with started(UNHURRIED, tier) as tool:
        burner = threading.Thread(target=lambda: run(tool, "import time\nwhile time.process_time() < 1.5: pass"))
        burner.start()
        went_back = wait_until(lambda: str(BUSY_NICE) in niceness(tool) or not burner.is_alive())
        is_busy = burner.is_alive()
        burner.join()
        assert text_of(tool, "1") == "1"
    assert went_back and is_busy
    assert Path("/proc/self/autogroup").read_text() == ours


def test_a_thread_that_is_further_back_already_does_not_spare_the_others():
    with started(UNHURRIED, "namespaces") as tool:  # landlock's seccomp rules let no call change its priority
        step_back = text_of(tool, SPIN.replace("\nspin()", f"\nos.nice({BUSY_NICE})"))
    assert int(step_back) == BUSY_NICE - NICE


def test_a_host_whose_processes_die_slowly_costs_no_call(own_tool):
    # What a killed PID 1 leaves dies one by one, and a busy machine takes its time
    lost = own_tool.sandbox.host

    def action(host) -> Reply:
        if host is lost:
            raise EOFError("a supervisor that is being killed")
        return host.call("print(6 * 7)", UNHURRIED.wall_s, HANG_S)

    killer = threading.Timer(0.7, lambda: os.kill(lost.pid, signal.SIGKILL))
    killer.start()
    reply = own_tool.sandbox.attempt(action)
    killer.join()
    assert reply.status == "ok" and reply.stdout == "42\n"
