"""Escapes and leaks that were reported of other projects' Python tools, against <python> and <notebook>.

Theirs restrict the language, which no report has needed more than a day to get around; here the process is in a jail,
so that each of these runs, and finds nothing.
"""

import asyncio
import os
import signal
import threading
import time

import pytest
from helpers.python_tools import HANG_S, TIERS, start, started
from sandbox_attacks.world import World

from arpo.config.tools import PythonConfig
from arpo.tools.base import ToolResult
from arpo.tools.python import PythonTool
from extras.tools.notebook import NotebookConfig, NotebookTool

LIMITS = {"wall_s": 60.0, "memory_mib": 256, "max_concurrent": 4}
TOOLS = {"python": (PythonTool, PythonConfig(**LIMITS)), "notebook": (NotebookTool, NotebookConfig(**LIMITS))}

REPORTED = {
    # huggingface/smolagents#2094: ctypes is in no list of forbidden modules
    "libc's system": """
import ctypes
done = ctypes.CDLL(None).system(f"cat {WORLD['secret']}; touch {WORLD['folder']}/by_ctypes".encode())
""",
    # smolagents#2125 (CVE-2025-9959), mcp-use/mcp-use#1718, heymrun/heym#94: from an object to Popen
    "subclasses of object": """
import subprocess
[popen] = [c for c in ().__class__.__base__.__subclasses__() if c.__name__ == "Popen"]
try:
    print(popen(["cat", WORLD["secret"]], stdout=-1, stderr=-1).communicate()[0])
except OSError:
    pass
print(popen.__init__.__globals__["os"].environ)
""",
    # crewAIInc/crewAI#4643: names that are made where they are used
    "names made of letters": """
name = "".join(map(chr, [95, 95, 115, 117, 98, 99, 108, 97, 115, 115, 101, 115, 95, 95]))
found = type.__dict__[name](object)
[loader] = [c for c in found if c.__name__ == "BuiltinImporter"]
posix = loader.load_module("posix")
print(posix.environ)
for path in (WORLD["secret"], "/root/.bash_history"):
    try:
        print(posix.read(posix.open(path, 0), 4096))
    except OSError:
        pass
""",
    # microsoft/agent-governance-toolkit#2631: what the caller has imported, and its frames
    "frames and modules of the caller": """
import gc, sys
frame = sys._getframe()
while frame:
    print({name: repr(value)[:200] for name, value in {**frame.f_globals, **frame.f_locals}.items() if name != "WORLD"})
    frame = frame.f_back
print([value for value in gc.get_objects() if isinstance(value, (str, bytes))])
print(sys.modules["os"].environ)
""",
    # InternLM/lagent#312: the address of the machine, and a way out
    "the network": """
import socket, urllib.request
def attempt(action):
    try:
        print("REACHED", action())
    except OSError:
        pass
def address():
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.connect(("8.8.8.8", 80))
    return s.getsockname()
attempt(address)
attempt(lambda: urllib.request.urlopen(f"http://127.0.0.1:{WORLD['port']}", timeout=2).status)
attempt(lambda: socket.create_connection(("127.0.0.1", WORLD["port"]), 2))
""",
    # smolagents#2395: methods that somebody else's code calls later
    "objects that act when they are dropped": """
import atexit, gc, os
class Bomb:
    def __del__(self, open=open, secret=WORLD["secret"], folder=WORLD["folder"]):
        for path, mode in ((secret, "r"), (folder + "/by_del", "w")):
            try:
                print(open(path, mode).read())
            except OSError:
                pass
    __eq__ = __repr__ = lambda self, *other: self.__del__() or "repr"
bomb = Bomb()
bomb.self = bomb
atexit.register(bomb.__del__)
bomb
""",
    # smolagents#983: thousands of pictures
    "pictures until the disk is full": """
written = 0
try:
    for i in range(10_000):
        with open(f"{i}.png", "wb") as file:
            written += file.write(bytes(1 << 20))
except OSError:
    pass
print("FULL" if written > 2 << 30 else "stopped")
""",
    # AgentEra/Agently#312, wanxingai/LightAgent#100: compiled from pieces of text
    "code that is a text": """
parts = ["__imp", "ort__('o", "s').po", "pen('cat ", WORLD["secret"], "; env').re", "ad()"]
try:
    print(eval(compile("".join(parts), "x", "eval")))
except OSError:
    pass
""",
    # a core dump, which is as large as the process, must not fill the call's folder
    "a core dump": """
import faulthandler, os, signal
try:
    if os.fork() == 0:
        signal.signal(signal.SIGABRT, signal.SIG_DFL)
        os.abort()
    os.wait()
except OSError:
    pass
print("CORE" if any("core" in name for name in os.listdir()) else "none")
""",
}


@pytest.fixture(scope="module")
def world():
    world = World()
    yield world
    world.close()


@pytest.fixture(scope="module", params=[(name, tier) for name in TOOLS for tier in TIERS], ids="-".join)
def tool(request, world):
    name, tier = request.param
    kind, cfg = TOOLS[name]
    with started(cfg, tier, kind=kind) as tool:
        yield tool


@pytest.mark.parametrize("name", REPORTED)
def test_what_escaped_elsewhere_finds_nothing_here(tool, world, name):
    result = asyncio.run(tool.run(world.as_code() + REPORTED[name]))
    assert not result.infra_error and result.error_kind not in ("timeout", "cpu_limit"), result
    signs = (world.secret, "ARPO_TEST_SECRET", "REACHED", "FULL", "CORE")
    assert [sign for sign in signs if sign in result.text] == [], result
    assert world.harm() == []
    assert asyncio.run(tool.run("import os\nos.listdir()")).text == "[]"


@pytest.mark.parametrize("tier", TIERS)
def test_calls_whose_hosts_are_killed_again_and_again_are_answered_or_ours(tier):
    """None is the model's mistake: each is answered, or an error of the sandbox, which leaves the loss."""
    tool = start(PythonConfig(**LIMITS), tier, grace_s=HANG_S)
    is_over = threading.Event()

    def kill() -> None:
        for _ in range(3):
            is_over.wait(1.5)
            if not is_over.is_set():
                os.kill(tool.sandbox.host.pid, signal.SIGKILL)

    async def call() -> list[ToolResult]:
        code = f"import time\nwhile time.time() < {time.time() + 6}: time.sleep(0.02)\nprint(6 * 7)"
        busy = "sum(i * i for i in range(10**6))\nprint(6 * 7)"
        return await asyncio.gather(*(tool.run(busy if i % 3 else code) for i in range(24)))

    killer = threading.Thread(target=kill)
    killer.start()
    results = asyncio.run(call())
    is_over.set()
    killer.join()
    restarts = tool.sandbox.num_restarts
    again = asyncio.run(tool.run("print(6 * 7)"))
    asyncio.run(tool.aclose())
    assert all((result.ok, result.text) == (True, "42") or result.infra_error for result in results), results
    assert sum(result.infra_error for result in results) <= 2, results
    assert again.text == "42" and restarts >= 1
