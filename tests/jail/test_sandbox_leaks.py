"""Many calls, one host: what may grow, and does not.

ARPO_LEAK_CALLS=10000 python -m pytest tests/jail/test_sandbox_leaks.py
"""

import contextlib
import gc
import os
import random
import tempfile
from pathlib import Path

import pytest
from helpers.python_tools import HANG_S, TIERS, jail_of, processes_of, run, started, wait_until

from arpo.config.tools import PythonConfig

NUM_CALLS = int(os.environ.get("ARPO_LEAK_CALLS", "500"))
BATCH = 50
SHARED_BYTES = 12345
"""Tells shared memory of these calls from that of other programs, vLLM's above all."""
CODES = [
    "print(1 + 1)",
    "1 / 0",
    "import numpy as np\nnp.ones(1000).sum()",
    "open('left', 'w').write('x' * 100000)",
    "import os\nos._exit(3)",
    "import os\nos.abort()",
    "import os, time\nif os.fork() == 0: time.sleep(600)",
    "import tempfile\ntempfile.mkdtemp()",
    "import threading\nthreading.Thread(target=print, args=('t',)).start()",
    f"import multiprocessing.shared_memory as m\nm.SharedMemory(create=True, size={SHARED_BYTES})",
    "print('x' * 100000)",
    "x = [0] * 10**8",
    "open('/dev/shm/left', 'w').write('x')",
    "import os\nwhile True: os.write(1, b'x' * 65536)",
    "import os\nos.kill(-1, 9)",
    "a\0b",
]


def memory_kib(pids: list[int]) -> int:
    """Private memory of processes."""
    fields = (line.split() for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(field[1]) for field in fields if field[0] in ("RssAnon:", "VmSwap:"))


def mine(folder: str) -> set[str]:
    """Names in a shared folder of what a call may have left: other programs, hosts too, come and go there meanwhile."""
    found = set()
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # gone since it was listed
            if entry.name.startswith(("call-", "left")) or (
                entry.name.startswith("psm_") and entry.stat(follow_symlinks=False).st_size == SHARED_BYTES
            ):
                found.add(entry.name)
    return found


def state(tool) -> dict[str, object]:
    """Everything that a call might leave behind."""
    host, jail = tool.sandbox.host.pid, jail_of(tool)  # waits for the supervisors of calls to be gone
    gc.collect()
    return {
        "processes": len(jail),
        "zombies": len(processes_of(host, zombies=True)) - len(processes_of(host)),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "host descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in jail),
        "threads": len(os.listdir("/proc/self/task")),
        "mounts": len(Path(f"/proc/{jail[-1]}/mounts").read_text().splitlines()),
        "folders": len(os.listdir(tool.sandbox.host.base)) if tool.sandbox.host.base else 0,  # those of spares
        "temporary files": mine(tempfile.gettempdir()),
        "shared memory": mine("/dev/shm"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS)
def test_nothing_leaks_over_many_calls(tier):
    rng = random.Random(0)
    with started(PythonConfig(wall_s=30.0, memory_mib=256, max_concurrent=8), tier, grace_s=HANG_S) as tool:
        run(tool, *CODES)  # what is made once, at first use
        before, host_kib, own_kib = state(tool), memory_kib(jail_of(tool)), memory_kib([os.getpid()])
        for _ in range(NUM_CALLS // BATCH):
            assert not any(result.infra_error for result in run(tool, *rng.choices(CODES, k=BATCH)))
        assert tool.sandbox.num_restarts == 0
        assert wait_until(lambda: state(tool) == before), (before, state(tool))
        assert memory_kib(jail_of(tool)) <= host_kib + 2048
        assert memory_kib([os.getpid()]) <= own_kib + 16 * 1024
