"""Code that uses too much: processes, memory, disk, time, output."""

from arpo.tools.sandbox.wire import Reply
from sandbox_attacks.attack import LIMITS, MARKER, STOPPED, Attack, ended, printed, raised

FORK_BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
MEMORY_OF_MANY_PROCESSES = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        block = b"x" * (48 << 20)
        time.sleep(9)
time.sleep(9)
"""
ZERO_DEVICE_MAPPING = """
import mmap
with open("/dev/zero", "r+b") as file:
    mmap.mmap(file.fileno(), 1 << 20)
"""
FULL_DISK = """
for i in range(20):
    with open(f"file{i}", "wb") as file:
        file.write(bytes(20 << 20))
"""
LARGE_FILE = """
with open("file", "wb") as file:
    while True:
        file.write(bytes(1 << 20))
"""
MANY_FILES = """
import time
for i in range(20000):
    open(str(i), "w").close()
time.sleep(9)
"""
IGNORED_SIGNALS = """
import signal
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
while True:
    pass
"""
CLOSED_STREAMS = """
import os, time
for fd in (0, 1, 2):
    os.close(fd)
time.sleep(86400)
"""
DEADLOCK = """
import threading
lock = threading.Lock()
lock.acquire()
lock.acquire()
"""
ENDLESS_THREAD = """
import threading, time
threading.Thread(target=time.sleep, args=(86400,)).start()
"""
MUCH_OUTPUT = """
import os
while True:
    os.write(1, b"x" * 65536)
"""
BUSY_PROCESSES = """
import os
for _ in range(3):
    os.fork()
while True:
    pass
"""
MANY_THREADS = """
import threading, time
for _ in range(2000):
    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
"""
DAEMON = f"""
import subprocess
subprocess.Popen(["sleep", "{MARKER}"], start_new_session=True)
print("bye")
"""


def disk_was_limited(reply: Reply) -> bool:
    """Files may also be slow to make: then time runs out first."""
    return reply.status in ("disk_limit", "cpu_limit", "timeout") or "No space left" in reply.stderr


def is_short(stream: str) -> bool:
    return len(stream) < LIMITS.kept_output_bytes + 100


EXCESS = [
    Attack("fork_bomb", FORK_BOMB, STOPPED),
    Attack("much_memory", "block = bytearray(1 << 30)", raised("MemoryError")),
    Attack("memory_of_many_processes", MEMORY_OF_MANY_PROCESSES, ended("memory_limit"), ("namespaces",)),
    Attack("shared_anonymous_memory", "import mmap; mmap.mmap(-1, 700 << 20)", raised("OSError")),
    Attack("zero_device_mapping", ZERO_DEVICE_MAPPING, ended("error")),
    Attack("memfd", "import os; os.memfd_create('x')", raised("Function not implemented")),
    Attack("full_disk", FULL_DISK, disk_was_limited),
    Attack("large_file", LARGE_FILE, raised("File too large")),
    Attack("many_files", MANY_FILES, disk_was_limited),
    Attack("endless_loop", "while True: pass", STOPPED),
    Attack("endless_loop_in_c", "import re; re.match('(a+)+$', 'a' * 64 + 'b')", STOPPED),
    Attack("sleep", "import time; time.sleep(86400)", ended("timeout")),
    Attack("ignored_signals", IGNORED_SIGNALS, STOPPED),
    Attack("stopped_itself", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", ended("timeout")),
    Attack("closed_streams", CLOSED_STREAMS, ended("timeout")),
    Attack("deadlock", DEADLOCK, ended("timeout")),
    Attack("endless_thread", ENDLESS_THREAD, ended("timeout")),
    Attack("much_output", MUCH_OUTPUT, lambda r: r.status == "output_limit" and is_short(r.stdout)),
    Attack("long_message", "raise ValueError('x' * 5_000_000)", lambda r: r.status == "error" and is_short(r.stderr)),
    Attack("busy_processes", BUSY_PROCESSES, STOPPED, ("namespaces",)),
    Attack("many_threads", MANY_THREADS, ended("error", "process_limit")),
    Attack("many_open_files", "files = [open('/dev/null') for _ in range(5000)]", raised("Too many open files")),
    Attack("daemon", DAEMON, printed("bye"), ("namespaces",)),
]
