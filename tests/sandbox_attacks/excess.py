"""Code that uses too much: processes, memory, disk, time, output."""

from arpo.jail.wire import Reply
from sandbox_attacks.attack import ATTEMPT, BLOCKED, LIMITS, MARKER, STOPPED, Attack, ended, printed, raised

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
        time.sleep(30)
time.sleep(30)
"""
ZERO_DEVICE_MAPPING = """
import mmap
with open("/dev/zero", "r+b") as file:
    mmap.mmap(file.fileno(), 1 << 20)
"""
STACK_MAPPING = """
import mmap
MAP_GROWSDOWN = 0x100
mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_GROWSDOWN)
"""
FIRST_THREAD_ENDS = """
import ctypes, os, threading, time
def hold():
    time.sleep(0.2)
    block = b"x" * (48 << 20)
    time.sleep(30)
for _ in range(8):
    if os.fork() == 0:
        threading.Thread(target=hold).start()
        ctypes.CDLL(None).syscall(WORLD["exit"], 0)
time.sleep(30)
"""
NEW_PROGRAMS = """
import subprocess, sys, time
code = "import time; block = b'x' * (30 << 20); time.sleep(30)"
for _ in range(15):
    subprocess.Popen([sys.executable, "-S", "-c", code])
time.sleep(30)
"""
ONE_BLOCK_OF_MANY_PROCESSES = """
import os, time
block = b"x" * (100 << 20)
for _ in range(6):
    if os.fork() == 0:
        time.sleep(1)
        os._exit(0)
time.sleep(1)
print(len(block) >> 20)
"""
SOCKET_BUFFERS = """
import socket
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
a, b = socket.socketpair()
for option in (socket.SO_SNDBUF, socket.SO_RCVBUF, SO_SNDBUFFORCE, SO_RCVBUFFORCE):
    attempt(option, lambda: a.setsockopt(socket.SOL_SOCKET, option, 1 << 20))
report()
"""
FULL_SOCKETS = """
import os, socket, time
for _ in range(16):
    if os.fork() == 0:
        pairs = [socket.socketpair() for _ in range(60)]
        for end in (end for pair in pairs for end in pair):
            end.setblocking(False)
            try:
                while True:
                    end.send(bytes(4096))
            except BlockingIOError:
                pass
        time.sleep(30)
time.sleep(30)
"""
PROMISED_BLOCKS = """
import ctypes
FALLOC_FL_KEEP_SIZE = 1
with open("file", "wb") as file:
    size = ctypes.c_long(200 << 20)
    print(ctypes.CDLL(None).fallocate(file.fileno(), FALLOC_FL_KEEP_SIZE, ctypes.c_long(0), size))
"""
NAMELESS_FILES = """
import os
attempt("open", lambda: os.open(".", os.O_TMPFILE | os.O_RDWR))
attempt("openat", lambda: os.open(".", os.O_TMPFILE | os.O_WRONLY, dir_fd=os.open(".", os.O_RDONLY)))
report()
"""
LESS_LIKELY_TO_BE_KILLED = """
import ctypes, subprocess
PR_SET_DUMPABLE = 4
if ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) == 0:
    reached.append("PR_SET_DUMPABLE")
attempt("own", lambda: open("/proc/self/oom_score_adj", "w").write("0"))
attempt("child's", lambda: subprocess.run(["sh", "-c", "echo 0 >/proc/self/oom_score_adj"], check=True))
report()
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
time.sleep(30)
"""
DEEP_FOLDER = """
import os, time
for _ in range(1200):
    os.mkdir("d")
    os.chdir("d")
time.sleep(30)
"""
HOLD_REMOVED_FILES = """
import os, time
def hold():
    files = []
    for i in range(20):
        files.append(open("file", "wb"))
        os.remove("file")
        files[-1].write(bytes(20 << 20))
    time.sleep(30)
"""
REMOVED_OPEN_FILES = f"{HOLD_REMOVED_FILES}\nhold()"
REMOVED_FILES_OF_A_THREAD = f"""{HOLD_REMOVED_FILES}
import ctypes, threading
libc = ctypes.CDLL(None)
CLOSE_RANGE, CLOSE_RANGE_UNSHARE = 436, 2
def hold_alone():
    libc.syscall(CLOSE_RANGE, 9999, 9999, CLOSE_RANGE_UNSHARE)
    hold()
threading.Thread(target=hold_alone).start()
"""
REMOVED_FILES_WITHOUT_THE_FIRST_THREAD = f"{REMOVED_FILES_OF_A_THREAD}\nlibc.syscall(WORLD['exit'], 0)"
REMOVED_MAPPED_FILES = """
import ctypes, mmap, os, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
for i in range(20):
    with open("file", "w+b") as file:
        os.remove("file")
        file.write(bytes(20 << 20))
        file.flush()
        libc.mmap(None, ctypes.c_size_t(4096), mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), ctypes.c_long(0))
time.sleep(30)
"""
FILES_IN_MESSAGES = """
import os, socket, time
a, b = socket.socketpair()
for i in range(20):
    with open("file", "wb") as file:
        os.remove("file")
        file.write(bytes(20 << 20))
        file.flush()
        socket.send_fds(a, [b"x"], [file.fileno()])
time.sleep(30)
"""
FILES_BELOW_LONG_PATHS = """
import os, time
for _ in range(20):
    os.mkdir("d" * 255)
    os.chdir("d" * 255)
for i in range(20):
    with open(f"file{i}", "wb") as file:
        file.write(bytes(20 << 20))
time.sleep(30)
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
NEW_SESSION = """
import subprocess
attempt("session", lambda: subprocess.run(["true"], start_new_session=True))
report()
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
    threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
"""
DAEMON = f"""
import subprocess
subprocess.Popen(["sleep", "{MARKER}"], process_group=0)
print("bye")
"""


def disk_was_limited(reply: Reply) -> bool:
    """Files may also be slow to make: then time runs out first."""
    return reply.status in ("disk_limit", "cpu_limit", "timeout") or "No space left" in reply.stderr


def disk_was_full(reply: Reply) -> bool:
    """For code that would run into another limit only much later."""
    return reply.status == "disk_limit" or "No space left" in reply.stderr


def is_short(stream: str) -> bool:
    return len(stream) < LIMITS.kept_output_bytes + 100


EXCESS = [
    Attack("fork_bomb", FORK_BOMB, STOPPED),
    Attack("much_memory", "block = bytearray(1 << 30)", raised("MemoryError")),
    Attack("memory_of_many_processes", MEMORY_OF_MANY_PROCESSES, ended("memory_limit"), ("namespaces",)),
    Attack("first_thread_ends", FIRST_THREAD_ENDS, ended("memory_limit"), ("namespaces",)),
    Attack("new_programs", NEW_PROGRAMS, ended("memory_limit"), ("namespaces",)),
    Attack("one_block_of_many_processes", ONE_BLOCK_OF_MANY_PROCESSES, printed("100"), ("namespaces",)),
    Attack("shared_anonymous_memory", "import mmap; mmap.mmap(-1, 700 << 20)", raised("OSError")),
    Attack("zero_device_mapping", ZERO_DEVICE_MAPPING, ended("error")),
    Attack("memfd", "import os; os.memfd_create('x')", raised("Function not implemented")),
    Attack("stack_mapping", STACK_MAPPING, raised("Operation not permitted")),
    Attack("socket_buffers", ATTEMPT + SOCKET_BUFFERS, BLOCKED),
    Attack("full_sockets", FULL_SOCKETS, ended("memory_limit"), ("namespaces",)),
    Attack("promised_blocks", PROMISED_BLOCKS, printed("-1")),
    Attack("nameless_files", ATTEMPT + NAMELESS_FILES, BLOCKED),
    Attack("less_likely_to_be_killed", ATTEMPT + LESS_LIKELY_TO_BE_KILLED, BLOCKED),
    Attack("full_disk", FULL_DISK, disk_was_limited),
    Attack("large_file", LARGE_FILE, raised("File too large")),
    Attack("many_files", MANY_FILES, disk_was_limited),
    Attack("deep_folder", DEEP_FOLDER, ended("disk_limit"), ("landlock",)),
    Attack("deep_folder_in_memory", DEEP_FOLDER, ended("timeout"), ("namespaces",)),
    Attack("removed_open_files", REMOVED_OPEN_FILES, disk_was_full),
    Attack("removed_files_of_a_thread", REMOVED_FILES_OF_A_THREAD, disk_was_full),
    Attack("removed_files_without_the_first_thread", REMOVED_FILES_WITHOUT_THE_FIRST_THREAD, disk_was_full),
    Attack("removed_mapped_files", REMOVED_MAPPED_FILES, disk_was_full),
    Attack("files_in_messages", FILES_IN_MESSAGES, disk_was_full, ("namespaces",)),
    Attack("files_in_messages_of_one_process", FILES_IN_MESSAGES, raised("Operation not permitted"), ("landlock",)),
    Attack("files_below_long_paths", FILES_BELOW_LONG_PATHS, disk_was_full),
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
    Attack("new_session", ATTEMPT + NEW_SESSION, BLOCKED),
    Attack("busy_processes", BUSY_PROCESSES, STOPPED, ("namespaces",)),
    Attack("many_threads", MANY_THREADS, ended("error", "process_limit")),
    Attack("many_open_files", "files = [open('/dev/null') for _ in range(5000)]", raised("Too many open files")),
    Attack("daemon", DAEMON, printed("bye"), ("namespaces",)),
]
