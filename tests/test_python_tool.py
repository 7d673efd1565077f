"""The <python> tool: what the model reads, the limits, and the life of the host process."""

import asyncio
import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import venv
from pathlib import Path

import pytest

from arpo.config import UserError
from arpo.options import PythonConfig
from arpo.tools.base import ToolResult
from arpo.tools.python import CUT, PythonTool
from arpo.tools.sandbox.host_process import HostProcess
from arpo.tools.sandbox.limits import CallLimits
from arpo.tools.sandbox.selftest import Canaries
from arpo.tools.sandbox.syscall_table import ADMINISTRATION, numbers

HANG_S = 60.0
TIERS = ["namespaces", "landlock"]
SMALL = PythonConfig(wall_s=3.0, cpu_s=1.0, memory_mib=256, max_output_chars=200, max_concurrent=4)
REPO = Path(__file__).resolve().parents[1]


def start(cfg: PythonConfig = SMALL, tier: str | None = None, **kwargs) -> PythonTool:
    try:
        return PythonTool(cfg, tier=tier, **kwargs)
    except UserError as error:
        pytest.skip(f"this machine cannot carry it: {error}")


def run(tool: PythonTool, *codes: str) -> list[ToolResult]:
    async def gather() -> list[ToolResult]:
        return await asyncio.wait_for(asyncio.gather(*(tool.run(code) for code in codes)), HANG_S)

    return asyncio.run(gather())


def text_of(tool: PythonTool, code: str) -> str:
    return run(tool, code)[0].text


@pytest.fixture(scope="module", params=TIERS)
def tool(request):
    tool = start(tier=request.param)
    yield tool
    asyncio.run(tool.aclose())


@pytest.fixture
def own_tool():
    """A tool whose host may be killed."""
    tool = start(grace_s=2.0)
    yield tool
    asyncio.run(tool.aclose())


def processes_of(host_pid: int) -> list[int]:
    """The host and all processes below it."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it ended since it was listed
            continue
        if fields[0] != "Z":
            parents[int(path.parent.name)] = int(fields[1])
    found = [host_pid] if host_pid in parents else []
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def jail_of(tool: PythonTool) -> list[int]:
    """The processes of a host without calls: in tier A its launcher too."""
    expected = 2 if tool.sandbox.tier == "namespaces" else 1
    assert wait_until(lambda: len(processes_of(tool.sandbox.host_pid)) == expected)
    return processes_of(tool.sandbox.host_pid)


def wait_until(condition) -> bool:
    deadline = time.monotonic() + HANG_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print(1 + 1)", "2"),
        ("x = 3\nx ** 2", "9"),
        ("'a' + 'b'", "'ab'"),
        ("print(1)\nNone", "1"),
        ("x = 3", "(no output)"),
        ("", "(no output)"),
        ("```python\nprint(5)\n```", "5"),
        ("\n```\n5\n```\n", "5"),
        ("def f():\n    return 7\n\nf()  # a comment", "7"),
        ("import sympy\nx = sympy.Symbol('x')\nsympy.integrate(2 * x, x)", "x**2"),
        ("import numpy as np\nnp.arange(3).sum().item()", "3"),
        ("print('  indented')", "  indented"),
        ("print(__name__)", "__main__"),
    ],
)
def test_output_reads_as_in_a_notebook(code, text, tool):
    [result] = run(tool, code)
    assert (result.text, result.ok, result.error_kind) == (text, True, None)


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero", "error"),
        ("print('before')\nraise ValueError('two\\nlines')", "before\nValueError: two\nlines", "error"),
        ("x = (1", "  File \"<string>\", line 1\n    x = (1\n        ^\nSyntaxError: '(' was never closed", "error"),
        ("import sys; sys.exit(3)", "The process exited with code 3", "error"),
        ("import sys; sys.exit('no data')", "no data", "error"),
        ("import os; os.abort()", "The process died of signal 6", "signal"),
        ("import time; time.sleep(60)", "TimeoutError: execution exceeded 3 seconds", "timeout"),
        ("x = bytearray(1 << 30)", "MemoryError", "error"),
        ("while True: print('x' * 1000)", None, "output_limit"),
        ("a\0b", "SyntaxError: the code contains a character that no source may have", "bad_code"),
        ("print('\ud800')", "SyntaxError: the code contains a character that no source may have", "bad_code"),
        ("#" * (2 << 20), "SyntaxError: the code is too long", "code_too_long"),
    ],
)
def test_failures_become_text_the_model_can_read(code, text, kind, tool):
    [result] = run(tool, code)
    assert (result.ok, result.error_kind, result.infra_error) == (False, kind, False)
    assert text is None or result.text == text


def test_a_busy_loop_ends_at_a_limit_and_says_which(tool):
    [result] = run(tool, "while True: pass")
    limits = {"cpu_limit": "1 seconds of CPU time", "timeout": "3 seconds"}  # the second where the machine is busy
    assert result.text == f"TimeoutError: execution exceeded {limits[result.error_kind]}"


def test_long_output_keeps_both_ends_and_a_mark(tool):
    [result] = run(tool, "print('a' * 300)\nprint('b' * 300)\n'end'")
    assert len(result.text) == SMALL.max_output_chars
    assert result.text.startswith("aaa") and CUT in result.text and result.text.endswith("'end'")


def test_an_error_survives_long_output(tool):
    [result] = run(tool, "print('a' * 5000)\n1 / 0")
    assert len(result.text) <= SMALL.max_output_chars
    assert result.text.startswith("aaa") and result.text.endswith("ZeroDivisionError: division by zero")


def test_calls_share_no_state(tool):
    run(tool, "import builtins, os, sys\nbuiltins.left = 1\nsys.modules['left'] = 1\nopen('left', 'w').close()")
    look = "import builtins, os, sys\nhasattr(builtins, 'left'), 'left' in sys.modules, os.listdir()"
    assert text_of(tool, look) == "(False, False, [])"


def test_the_same_code_gives_the_same_bytes(tool):
    code = """
    import os, random, time
    import numpy as np
    print({"a", "b", "c", "d"}, random.random(), np.random.rand(), time.tzname, hash("x"), os.getcwd() != "")
    """
    code = textwrap.dedent(code)
    assert len({result.text for result in run(tool, code, code, code)}) == 1


def test_nothing_of_the_trainers_environment_is_visible(monkeypatch):
    monkeypatch.setenv("ARPO_CANARY", "do-not-show-this")
    tool = start()
    try:
        seen = text_of(tool, "import os\nsorted(os.environ)")
        host = [Path(f"/proc/{pid}/environ").read_bytes() for pid in jail_of(tool)]
    finally:
        asyncio.run(tool.aclose())
    assert "ARPO_CANARY" not in seen and "PYTHONHASHSEED" in seen
    assert not any(b"do-not-show-this" in environment for environment in host)


def test_the_host_inherits_no_files_of_the_trainer(tmp_path):
    with open(tmp_path / "weights", "w") as file:
        os.set_inheritable(file.fileno(), True)
        tool = start()
        links = [os.readlink(link) for pid in jail_of(tool) for link in Path(f"/proc/{pid}/fd").iterdir()]
        asyncio.run(tool.aclose())
    assert links and not any("weights" in link for link in links)


def test_a_worker_that_cannot_be_confined_is_our_fault():
    host = HostProcess("none", dataclasses.replace(CallLimits(), max_open_files=-5))
    reply = host.call("1", 20.0, 10.0)
    host.kill()
    assert reply.status == "sandbox_error" and "ValueError" in reply.stderr


def test_the_self_test_sees_through_a_host_without_a_jail(monkeypatch):
    monkeypatch.setenv("ARPO_CANARY", "1")
    host = HostProcess("none", CallLimits())
    try:
        with Canaries() as canaries:
            leaks = canaries.leaks(host.call(canaries.probe, 20.0, 10.0))
    finally:
        host.kill()
    assert "read of the trainer is possible" in leaks
    assert "network of the trainer is possible" in leaks
    assert "a file of the trainer was changed" in leaks


def test_waiting_for_a_free_place_does_not_count_as_run_time():
    tool = start(dataclasses.replace(SMALL, wall_s=2.5, max_concurrent=1))
    results = run(tool, *["import time; time.sleep(0.7)"] * 5)  # the last one waits 2.8 s
    asyncio.run(tool.aclose())
    assert all(result.ok for result in results)


def test_many_calls_at_once_are_all_answered(tool):
    results = run(tool, *[f"import time; time.sleep(0.05); {i}" for i in range(40)])
    assert [result.text for result in results] == [str(i) for i in range(40)]


def test_hostile_neighbours_leave_no_processes_and_no_descriptors(tool):
    run(tool, "1")
    descriptors, processes = len(os.listdir("/proc/self/fd")), len(processes_of(tool.sandbox.host_pid))
    hostile = ["1", "1 / 0", "import os; os._exit(3)", "import os; os.abort()", "import os; os.fork()", "[0] * 10**9"]
    run(tool, *hostile * 10)
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert wait_until(lambda: len(processes_of(tool.sandbox.host_pid)) <= processes)
    assert tool.sandbox.num_restarts == 0


@pytest.mark.parametrize("tier", TIERS)
def test_a_killed_host_is_replaced_once_and_its_calls_repeated(tier):
    tool = start(tier=tier)
    killer = threading.Timer(0.4, lambda: os.kill(tool.sandbox.host_pid, signal.SIGKILL))
    killer.start()
    results = run(tool, *["import time; time.sleep(0.3); 42"] * 12)
    killer.join()
    restarts = tool.sandbox.num_restarts
    asyncio.run(tool.aclose())
    assert [result.text for result in results] == ["42"] * 12
    assert restarts == 1


def test_a_stuck_host_is_replaced(own_tool):
    for pid in processes_of(own_tool.sandbox.host_pid):
        os.kill(pid, signal.SIGSTOP)
    assert [result.text for result in run(own_tool, "1", "2")] == ["1", "2"]
    assert own_tool.sandbox.num_restarts == 1


def test_a_host_that_cannot_be_had_again_is_our_fault_and_not_the_models(own_tool, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    os.kill(own_tool.sandbox.host_pid, signal.SIGKILL)
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

    pids = processes_of(tool.sandbox.host_pid)
    assert pids
    assert asyncio.run(close_in_mid_call()).infra_error
    assert wait_until(lambda: not any(processes_of(pid) for pid in pids))
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert threading.active_count() <= threads


TRAINER = """
import asyncio, sys
from arpo.options import PythonConfig
from arpo.tools.python import PythonTool

async def main():
    tool = PythonTool(PythonConfig(), tier=sys.argv[1])
    calls = [asyncio.create_task(tool.run("import time\\nwhile True: time.sleep(1)")) for _ in range(3)]
    await asyncio.sleep(0.5)
    print(tool.sandbox.host_pid, tool.sandbox.folder, flush=True)
    await asyncio.gather(*calls)

asyncio.run(main())
"""


@pytest.mark.parametrize("tier", TIERS)
def test_nothing_outlives_a_killed_trainer(tier):
    start(tier=tier).sandbox.close()  # skips where the tier is not to be had
    command = [sys.executable, "-c", TRAINER, tier]
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True) as trainer:
        host_pid, folder = trainer.stdout.readline().split()
        pids = processes_of(int(host_pid))
        trainer.kill()
    assert len(pids) >= 7  # the host, and a supervisor and a worker per call
    assert wait_until(lambda: not any(processes_of(pid) for pid in pids))
    assert wait_until(lambda: not os.path.exists(folder))


def test_the_host_outlives_the_thread_that_started_it():
    tools = []
    thread = threading.Thread(target=lambda: tools.append(start()))
    thread.start()
    thread.join()
    [result] = run(tools[0], "1")
    asyncio.run(tools[0].aclose())
    assert result.text == "1" and tools[0].sandbox.num_restarts == 0


FORBIDDEN = """
import ctypes, json, logging, struct, sys
from arpo.options import PythonConfig
from arpo.config import UserError
from arpo.tools.sandbox import seccomp
from arpo.tools.python import PythonTool

logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)
program = [(0x20, 0, 0, 0)]
for number in json.loads(sys.argv[1]):
    program += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | 1)]
program.append((0x06, 0, 0, 0x7FFF0000))
seccomp.install(b"".join(struct.pack("HBBI", *line) for line in program))
try:
    tool = PythonTool(PythonConfig(allow_unsafe=sys.argv[2] == "unsafe"))
    print("RUNS", tool.sandbox.tier, tool.sandbox.run("6 * 7").stdout)
    tool.sandbox.close()
except UserError as error:
    print("REFUSED", error)
"""
LANDLOCK_CREATE_RULESET = 444


def start_where_forbidden(*calls: int, unsafe: bool = False) -> str:
    """What the tool says in a container that forbids those system calls."""
    command = [sys.executable, "-c", FORBIDDEN, json.dumps(calls), "unsafe" if unsafe else "safe"]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=HANG_S, check=True).stdout


@pytest.fixture(scope="module")
def unshare_number() -> int:
    return numbers(ADMINISTRATION, os.uname().machine)["unshare"]


def test_without_namespaces_landlock_takes_over_and_says_so(unshare_number):
    start(tier="landlock").sandbox.close()
    said = start_where_forbidden(unshare_number)
    assert "RUNS landlock 42" in said
    assert said.count("WARNING") == 1 and "namespaces: " in said


def test_without_any_isolation_the_tool_refuses_to_start_and_names_the_reasons(unshare_number):
    said = start_where_forbidden(unshare_number, LANDLOCK_CREATE_RULESET)
    assert said.startswith("REFUSED tools.python") and said.count("\n") == 1
    assert "unshare: Operation not permitted; landlock: " in said and "allow_unsafe" in said


def test_allow_unsafe_runs_without_isolation_and_warns(unshare_number):
    said = start_where_forbidden(unshare_number, LANDLOCK_CREATE_RULESET, unsafe=True)
    assert "RUNS none 42" in said
    assert said.count("WARNING") == 1 and "NO isolation" in said


def test_a_start_is_announced_in_one_line(caplog):
    with caplog.at_level(logging.INFO, logger="arpo"):
        asyncio.run(start().aclose())
    assert len(caplog.records) == 1 and "sandboxed by" in caplog.text


def test_an_interpreter_below_tmp_stays_visible_under_the_private_tmp():
    script = """
    import sys
    sys.path.insert(0, sys.argv[1])
    from arpo.tools.sandbox.client import Sandbox
    from arpo.tools.sandbox.limits import CallLimits
    sandbox = Sandbox(CallLimits())
    print(sandbox.run("import os, sys; print(os.path.exists(sys.executable), open('new', 'w').write('x'))").stdout)
    sandbox.close()
    """
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        venv.create(folder, symlinks=True)
        command = [f"{folder}/bin/python", "-c", textwrap.dedent(script), str(REPO)]
        said = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=True).stdout
    assert said.split() == ["True", "1"]
