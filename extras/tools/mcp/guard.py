"""Runs a program. If the parent process dies in any way, ends the program and all processes started by the program.

    python -I guard.py PARENT_PID PROGRAM [ARGS ...]

Without a guard, a server at rest would still end by itself, because its standard input ends with the parent. A hanging
server would stay, and so would a shell between server and parent, and a process in another session. So there are three
levels: this guard, a keeper below the guard, and the program below the keeper. The keeper inherits all processes of the
program (prctl's subreaper). The client may kill the guard. This module imports nothing of the package.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PARENT_DIED = signal.SIGUSR1
"""The signal for a dead parent. SIGTERM has another use: the whole session gets it as a request to end soon."""


def main(parent: int, command: list[str]) -> int:
    end_with(parent, signal.SIGKILL)
    guard = os.getpid()
    keeper = os.fork()
    if not keeper:
        os.setsid()
        return keep(guard, command)
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(keeper, signal.SIGTERM))
    close_streams()
    return os.waitstatus_to_exitcode(os.waitpid(keeper, 0)[1])


def keep(guard: int, command: list[str]) -> int:
    """Run the program. When the program or the guard has ended, end all processes left."""
    signal.signal(PARENT_DIED, lambda *_: end_all())
    signal.signal(signal.SIGTERM, lambda *_: None)  # for the program: the keeper ends after it
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    end_with(guard, PARENT_DIED)
    program = os.posix_spawnp(command[0], command, os.environ, setsigdef=[PARENT_DIED, signal.SIGTERM, signal.SIGINT])
    close_streams()
    status = None
    while status is None:
        pid, ended = os.wait()
        status = ended if pid == program else None
    end_children()
    return os.waitstatus_to_exitcode(status)


def end_with(parent: int, number: int) -> None:
    """Ask for a signal at the death of the parent."""
    prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent died before the request
        os.kill(os.getpid(), number)


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def close_streams() -> None:
    """Close our ends of the streams. Otherwise the peers would not see the program close its ends."""
    for stream in (0, 1):
        os.close(stream)


def end_children() -> None:
    """Kill all children. Grandchildren become children then, so repeat until none is left."""
    path = f"/proc/self/task/{os.getpid()}/children"
    while os.path.exists(path):
        with open(path) as file:
            children = [int(pid) for pid in file.read().split()]
        if not children:
            return
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)


def end_all() -> None:
    end_children()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
