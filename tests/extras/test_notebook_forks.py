"""Forks of a notebook in a real jail: what they have, what forbids one, and what siblings can do to each other."""

import asyncio
from dataclasses import replace

import pytest
from helpers.notebooks import CONTEXT, answers_to, cells, talk, texts

from arpo.tools.base import ToolContext, ToolResult, ToolRunner
from extras.tools.notebook import Notebook
from extras.tools.session_tool import CannotFork


def test_a_fork_has_the_state_and_shares_none_of_what_follows(forking):
    async def story(one: Notebook) -> list:
        await forking.run("import random, numpy as np\nx = [1]\nrandom.seed(7)\nnp.random.seed(7)", CONTEXT, one)
        two = await forking.fork(one, CONTEXT)
        three = await forking.fork(two, CONTEXT)  # of a fork
        draw = "x.append(len(x) + 1)\n(x, random.random(), float(np.random.rand()))"
        found = [await answers_to(forking, s, draw, draw) for s in (one, two, three)]
        await forking.close(two)
        found.append(await answers_to(forking, three, "x"))
        await forking.close(three)
        return [*found, await answers_to(forking, one, "x")]

    first, second, third, *after = talk(forking, story)
    assert first == second == third and "[1, 2, 3]" in first[1]
    assert after == [["[1, 2, 3]"], ["[1, 2, 3]"]]


def test_siblings_run_at_the_same_time_and_see_nothing_of_each_other(forking):
    async def story(one: Notebook) -> list[list[str]]:
        await forking.run("import os, time", CONTEXT, one)
        others = [await forking.fork(one, CONTEXT) for _ in range(4)]
        probe = "open('own_{}', 'w').write('x')\ntime.sleep(0.05)\nsorted(n for n in os.listdir('.') if 'own_' in n)"
        asked = (answers_to(forking, s, probe.format(n), "1") for n, s in enumerate([one, *others]))
        found = await asyncio.gather(*asked)
        for other in others:
            await forking.close(other)
        return found

    assert talk(forking, story) == [[f"['own_{n}']", "1"] for n in range(5)]


@pytest.mark.parametrize("code", [
    "import threading, time\nthreading.Thread(target=time.sleep, args=(3600,), daemon=True).start()",
    "f = open('f', 'w')",
    "import mmap\nf = open('f', 'wb+')\nf.write(b'x' * 4096)\nf.flush()\nm = mmap.mmap(f.fileno(), 4096)\nf.close()",
    "import signal\nsignal.setitimer(signal.ITIMER_REAL, 3600)",
    "import signal\nsignal.setitimer(signal.ITIMER_PROF, 3600)",
    "import os\nos.close(0)\nassert os.open('f', os.O_RDWR | os.O_CREAT) == 0",
    "import subprocess, sys\np = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)",
    # timer_create(2), fork(2): a child has none of its parent's timers and pending signals
    "import ctypes\nlibc, timer = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p()\n"
    "assert libc.timer_create(1, None, ctypes.byref(timer)) == 0\n"
    "assert libc.timer_settime(timer, 0, (ctypes.c_long * 4)(0, 0, 3600, 0), None) == 0",
    "import os, signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [10])\nos.kill(os.getpid(), 10)",
    "import signal, threading\nsignal.pthread_sigmask(signal.SIG_BLOCK, [40])\n"
    "signal.pthread_kill(threading.get_ident(), 40)",
], ids=["thread", "open file", "mapped file", "timer", "CPU timer", "file as stdin", "child", "POSIX timer", "signal",
        "thread's signal"])  # fmt: skip
def test_what_a_fork_would_not_have_forbids_it(forking, code):
    async def story(session: Notebook) -> str:
        await forking.run(f"x = 1\n{code}", CONTEXT, session)
        with pytest.raises(CannotFork):
            await forking.fork(session, CONTEXT)
        return (await forking.run("x", CONTEXT, session)).text

    assert talk(forking, story) == "1"


def test_a_session_reads_nothing_of_a_sibling_and_writes_nothing_into_its_output(forking):
    look = """
found = []
for pid in {name for name in os.listdir("/proc") if name.isdigit()} - {"1", str(os.getpid())}:
    for name in ("mem", "maps", "environ", "fd/0", "fd/1", "fd/3"):
        try:
            os.close(os.open(f"/proc/{pid}/{name}", os.O_WRONLY if name == "fd/1" else os.O_RDONLY))
            found.append(name)
        except PermissionError:
            found.append(None)
found
"""

    async def story(one: Notebook) -> list[str]:
        await forking.run("import os\nsecret = 4711", CONTEXT, one)
        two = await forking.fork(one, CONTEXT)
        three = await forking.fork(two, CONTEXT)
        found = [await answers_to(forking, session, look, "secret") for session in (two, one, three)]
        await forking.close(two)
        await forking.close(three)
        return found

    assert talk(forking, story) == [[str([None] * 12), "4711"]] * 3


def test_a_worker_that_passes_itself_off_as_its_own_copy_is_given_none(forking):
    forge = """
import os, sys
frame = sys._getframe()
while "_fork" not in frame.f_globals:
    frame = frame.f_back
hide = frame.f_globals["_hide"]
def forged(channel):
    hide(False)
    channel.sendall(b"f")
    _, fds, _, _ = __import__("socket").recv_fds(channel, 1, 3)
    os.write(fds[2], b"R")
    channel.sendall(b"f")
frame.f_globals["_fork"] = forged
x = 1
"""

    async def story(session: Notebook) -> str:
        await forking.run(forge, CONTEXT, session)
        with pytest.raises(CannotFork):
            await forking.fork(session, CONTEXT)
        return (await forking.run("x", CONTEXT, session)).text

    assert talk(forking, story) == "1"


def test_what_a_cells_last_processes_print_is_not_in_the_next_cells_result(forking):
    leave = "import os\nfor _ in range(3):\n    if os.fork() == 0:\n        while True: os.write(1, b'junk')"
    assert texts(forking, *[leave, "print('mine')"] * 10)[1::2] == ["mine"] * 10


EACH_OTHER = "for pid in [int(n) for n in os.listdir('/proc') if n.isdigit() and int(n) not in (1, os.getpid())]:\n    "
HOLD = "import time\nkept = []\ndef hold(*_):\n    kept.append(bytearray(64 << 20))\n    while True: pass\n"


@pytest.mark.parametrize(("before", "attack"), [
    ("", "os.kill(-1, signal.SIGKILL)"),
    (HOLD + "signal.signal(10, hold)", EACH_OTHER + "os.kill(pid, 10); os.kill(pid, signal.SIGCONT)"),
    (
        HOLD + "signal.signal(14, hold)",
        EACH_OTHER + "os.kill(pid, 14)\n" + EACH_OTHER + "os.kill(pid, signal.SIGCONT)\ntime.sleep(1)",
    ),
    ("", EACH_OTHER + "os.kill(pid, signal.SIGCONT)"),
    ("", EACH_OTHER + "os.kill(pid, signal.SIGSTOP)"),
    (
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(34, 64))",
        EACH_OTHER + "[os.kill(pid, 34 + bit) for bit in b'\\x08\\x01']",
    ),
    ("signal.pthread_sigmask(signal.SIG_BLOCK, [50])", "import ctypes\n" + EACH_OTHER
     + "assert ctypes.CDLL(None).syscall({'x86_64': 234, 'aarch64': 131}[os.uname().machine], pid, pid, 50) == 0"),
], ids=["killed", "woken", "woken for long", "continued", "stopped again", "told", "its thread told"])  # fmt: skip
def test_code_that_touches_its_siblings_costs_them_a_replay_and_no_result(forking, before, attack):
    runner = ToolRunner({"notebook": forking})
    parent, child = ToolContext("p", "0", 0), ToolContext("p", "0.0", 1)

    def call(code: str, context: ToolContext) -> ToolResult:
        runner.start("a", "notebook", code, context)
        [(_, result)] = runner.collect(block=True)
        return result

    try:
        call(f"import os, signal\nx = 5\n{before}", parent)
        runner.sessions.mark(parent.owner, 1)
        runner.sessions.fork(parent.owner, 1, child.owner)
        runner.sessions.retain("p", [])
        assert call("x + 1", child).text == "6"
        call(attack, replace(parent, turn=1))
        look = f"alive = []\n{EACH_OTHER}alive.append(open(f'/proc/{{pid}}/stat').read().split(') ')[1][0])\nalive"
        assert call(look, replace(parent, turn=2)).text in ("[]", "['Z']")
        found = call("x + 2, signal.sigpending()", replace(child, turn=2))
        assert found.text == "(7, set())" and found.replayed == 2 and found.replay_mismatches == 0
    finally:
        runner.tools = {}  # the other tests need the notebook
        runner.close()


def test_siblings_that_leave_each_other_alone_are_never_replayed(forking):
    async def story(one: Notebook) -> list[str]:
        await forking.run("import os, subprocess, signal\nx = 1\nsignal.alarm(0)", CONTEXT, one)
        two = await forking.fork(one, CONTEXT)
        work = "subprocess.run(['true'])\nos.kill(os.getpid(), signal.SIGCONT)\nx += 1\nx"
        found = [await answers_to(forking, session, work) for session in (one, two) * 3]
        await forking.close(two)
        return found

    assert talk(forking, story) == [["2"], ["2"], ["3"], ["3"], ["4"], ["4"]]


def test_processes_that_hide_their_memory_are_counted(forking):
    hide = """
import ctypes, os, time
(hidden, is_hidden), (start, may_start) = os.pipe(), os.pipe()
children = []
for _ in range(8):
    children.append(os.fork())
    if children[-1] == 0:
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
        os.write(is_hidden, b"x")
        os.read(start, 1)
        block = b"x" * (48 << 20)
        time.sleep(100)
for child in children:
    os.read(hidden, 1)
for child in children:
    try:
        open(f"/proc/{child}/smaps_rollup").close()
    except PermissionError:
        continue
    raise SystemExit("it is not hidden")
os.write(may_start, b"x" * 8)
time.sleep(100)
"""
    assert cells(forking, hide)[0].error_kind == "memory_limit"
