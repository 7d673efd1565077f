"""Code that reaches for what is not its own: processes, files, the network, the kernel."""

import platform

from sandbox_attacks.attack import ATTEMPT, BLOCKED, Attack, ended, printed

KILL_EVERYBODY = """
import os
attempt("kill", lambda: os.kill(-1, 9))
report()
"""
SIGNAL_THE_SUPERVISOR = """
import os
for number in range(1, 65):
    try:
        os.kill(os.getppid(), number)
    except OSError:
        pass
print("done")
"""
SIGNAL_BY_FILE_OWNER = """
import fcntl, os
F_SETSIG, SIGKILL = 10, 9
a, b = os.pipe()
try:
    fcntl.fcntl(a, fcntl.F_SETOWN, WORLD["victim"])
    fcntl.fcntl(a, F_SETSIG, SIGKILL)
    fcntl.fcntl(a, fcntl.F_SETFL, os.O_ASYNC)
    os.write(b, b"x")
except OSError:
    pass
print("done")
"""
CHANGE_LIMITS_OF_OTHERS = """
import os, resource
for pid in (os.getppid(), WORLD["victim"]):
    attempt(pid, lambda: resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1)))
report()
"""
OUTLIVE_THE_SUPERVISOR = """
import ctypes
PR_SET_PDEATHSIG = 1
if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0) == 0:
    reached.append("PDEATHSIG")
report()
"""
READ_ENVIRONMENTS = """
import glob, os
print(os.environ)
for path in glob.glob("/proc/*/environ"):
    try:
        print(open(path, "rb").read())
    except OSError:
        pass
"""
READ_FILES = """
import os
for path in (WORLD["secret"], WORLD["repo"] + "/README.md", "/etc/shadow", "/root/.bash_history"):
    attempt(path, lambda: open(path).read())
for path in (WORLD["folder"], WORLD["repo"] + "/arpo", "/root/.ssh", "/home"):
    attempt(path, lambda: os.listdir(path))
report()
"""
READ_THROUGH_A_LINK = """
import os
os.symlink(WORLD["secret"], "link")
open("link").read()
"""
WRITE_FILES = """
import os
for path in (WORLD["secret"], WORLD["folder"] + "/new", os.__file__, "/usr/new", "/etc/hosts"):
    attempt(path, lambda: open(path, "a").write("x"))
report()
"""
CHANGE_METADATA = """
import os
for path in (WORLD["secret"], WORLD["folder"], os.__file__):
    attempt("chmod", lambda: os.chmod(path, 0))
    attempt("utime", lambda: os.utime(path, (0, 0)))
    attempt("chown", lambda: os.chown(path, os.getuid(), os.getgid()))
    attempt("xattr", lambda: os.setxattr(path, "user.x", b"x"))
    attempt("truncate", lambda: os.truncate(path, 0))
report()
"""
MOVE_AND_REMOVE = """
import os
attempt("remove", lambda: os.remove(WORLD["secret"]))
attempt("rename", lambda: os.rename(WORLD["secret"], WORLD["secret"] + "2"))
attempt("link", lambda: os.link(WORLD["secret"], "mine"))
attempt("mkdir", lambda: os.mkdir(WORLD["folder"] + "/new"))
attempt("symlink", lambda: os.symlink("/", WORLD["folder"] + "/new"))
report()
"""
STUBBORN_FILES = r"""
import os
os.makedirs("a\n b/" * 3)
for i in range(50):
    os.symlink(WORLD["folder"], f"link{i}")
    os.makedirs(f"deep/{i}")
os.umask(0o777)
os.mkdir("closed")
"""
CORE_DUMP = """
import ctypes, os
PR_SET_DUMPABLE = 4
ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
os.abort()
"""
CORE_FOR_THE_MACHINE = """
import ctypes, resource
attempt("setrlimit", lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)))
attempt("prlimit", lambda: resource.prlimit(0, resource.RLIMIT_CORE, (0, 0)))
if ctypes.CDLL(None).syscall(WORLD["setrlimit"], resource.RLIMIT_CORE, bytes(16)) == 0:
    reached.append("system call")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
report()
"""
LEASE = """
import fcntl
F_SETLEASE = 1024
with open("file", "w") as file:
    attempt("lease", lambda: fcntl.fcntl(file, F_SETLEASE, fcntl.F_WRLCK))
report()
"""
NAME_FOR_OTHER_CALLS = """
import socket
for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
    attempt(kind, lambda: socket.socketpair(socket.AF_UNIX, kind)[0].bind("\\0name"))
report()
"""
CONNECT = """
import socket
internet = [("127.0.0.1", WORLD["port"]), ("8.8.8.8", 53)]
addresses = [(socket.AF_INET, a) for a in internet] + [(socket.AF_UNIX, WORLD[k]) for k in ("unix", "abstract")]
for family, address in addresses:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        attempt(address, lambda: socket.socket(family, kind).connect(address))
report()
"""
SEND_FROM_A_SOCKETPAIR = """
import socket
for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
    for address in (WORLD["unix"], WORLD["abstract"]):
        attempt(kind, lambda: socket.socketpair(socket.AF_UNIX, kind)[0].sendto(b"x", address))
print("done")  # a packet may be sent, but only to the other end of the pair
"""
FORBIDDEN_SYSTEM_CALLS = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for name, number in WORLD["syscalls"].items():
    ctypes.set_errno(0)
    libc.syscall(number, 0, 0, 0, 0, 0, 0)
    if ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
        reached.append(name)
report()
"""
NEW_USER_NAMESPACE = """
import ctypes
CLONE_NEWUSER, SIGCHLD = 0x10000000, 17
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(CLONE_NEWUSER) == 0:
    reached.append("unshare")
if libc.syscall(WORLD["clone"], CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0) >= 0:
    reached.append("clone")
report()
"""
REGAIN_CAPABILITIES = """
import os
attempt("root", lambda: os.setuid(0) if os.getuid() else os.chroot("/"))
attempt("device", lambda: os.mknod("disk", 0o60666, os.makedev(8, 0)))
report()
"""
CALLS_OF_32_BIT = """
import ctypes, mmap
block = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 7)
block.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid); int 0x80; ret
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(block)))()
"""
CALLS_OF_X32 = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall(0x40000000 | 39)
errno.errorcode[ctypes.get_errno()]
"""

OUTSIDE = [
    Attack("kill_everybody", ATTEMPT + KILL_EVERYBODY, BLOCKED),
    Attack("signal_the_supervisor", SIGNAL_THE_SUPERVISOR, printed("done")),
    Attack("signal_by_file_owner", SIGNAL_BY_FILE_OWNER, printed("done")),
    Attack("change_limits_of_others", ATTEMPT + CHANGE_LIMITS_OF_OTHERS, BLOCKED),
    Attack("outlive_the_supervisor", ATTEMPT + OUTLIVE_THE_SUPERVISOR, BLOCKED, ("landlock",)),
    Attack("read_environments", READ_ENVIRONMENTS, ended("ok")),
    Attack("read_memory", "import os; open(f'/proc/{os.getppid()}/mem', 'rb').read(1)", ended("error")),
    Attack("read_files", ATTEMPT + READ_FILES, BLOCKED),
    Attack("read_through_a_link", READ_THROUGH_A_LINK, ended("error")),
    Attack("write_files", ATTEMPT + WRITE_FILES, BLOCKED),
    Attack("change_metadata", ATTEMPT + CHANGE_METADATA, BLOCKED),
    Attack("move_and_remove", ATTEMPT + MOVE_AND_REMOVE, BLOCKED),
    Attack("stubborn_files", STUBBORN_FILES, ended("ok")),
    Attack("core_dump", CORE_DUMP, ended("signal")),
    Attack("core_for_the_machine", ATTEMPT + CORE_FOR_THE_MACHINE, BLOCKED),
    Attack("lease", ATTEMPT + LEASE, BLOCKED),
    Attack("name_for_other_calls", ATTEMPT + NAME_FOR_OTHER_CALLS, BLOCKED),
    Attack("connect", ATTEMPT + CONNECT, BLOCKED),
    Attack("send_from_a_socketpair", ATTEMPT + SEND_FROM_A_SOCKETPAIR, printed("done")),
    Attack("look_up_a_name", "import socket; socket.getaddrinfo('example.org', 80)", ended("error")),
    Attack("forbidden_system_calls", ATTEMPT + FORBIDDEN_SYSTEM_CALLS, BLOCKED),
    Attack("new_user_namespace", ATTEMPT + NEW_USER_NAMESPACE, BLOCKED),
    Attack("regain_capabilities", ATTEMPT + REGAIN_CAPABILITIES, BLOCKED),
]
if platform.machine() == "x86_64":
    SIGSYS = 31
    OUTSIDE += [
        Attack("calls_of_32_bit", CALLS_OF_32_BIT, lambda r: r.status == "signal" and r.exit_code == -SIGSYS),
        Attack("calls_of_x32", CALLS_OF_X32, printed("'ENOSYS'")),
    ]
