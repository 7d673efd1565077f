"""Runs a program, and ends it with all that it has started when our process dies, however that dies.

    python -I guard.py PARENT_PID PROGRAM [ARGS ...]

A server that waits for input ends by itself then, as its standard input does; one that hangs, or a shell between it and
us, does not, nor do processes that have left its session. So the program runs below a keeper, to which all that it has
started belongs (prctl's subreaper), and the keeper runs below this process, which the client may kill. It imports
nothing of this package.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PARENT_DIED = signal.SIGUSR1
"""Not SIGTERM, which all of the session get when they are asked to end, and have a moment for it."""


def main(parent: int, command: list[str]) -> int:
    end_with(parent, signal.SIGKILL)
    guard, keeper = os.getpid(), os.fork()
    if not keeper:
        os.setsid()
        return keep(guard, command)
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(keeper, signal.SIGTERM))
    close_streams()
    return os.waitstatus_to_exitcode(os.waitpid(keeper, 0)[1])


def keep(guard: int, command: list[str]) -> int:
    """Run the program, and end what is left of it when it or the guard has ended."""
    signal.signal(PARENT_DIED, lambda *_: end_all())
    signal.signal(signal.SIGTERM, lambda *_: None)  # the program's to obey: we end when it has
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
    """Get a signal when our parent dies."""
    prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before we asked
        os.kill(os.getpid(), number)


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def close_streams() -> None:
    """Close our ends: the others must see when the program closes its own."""
    for stream in (0, 1):
        os.close(stream)


def end_children() -> None:
    """Kill our children, and theirs, which are ours then, until there are none."""
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
