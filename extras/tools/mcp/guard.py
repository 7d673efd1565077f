"""Runs a program, and ends it with all that it has started when our process dies, however that dies.

    python -I guard.py PARENT_PID PROGRAM [ARGS ...]

A server that waits for input ends by itself then, as its standard input does; one that hangs, or a shell between it and
us, does not. The guard is the leader of the session that the program runs in. It imports nothing of this package.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PARENT_DIED = signal.SIGUSR1
"""Not SIGTERM, which all of the session get when they are asked to end, and have a moment for it."""


def main(parent: int, command: list[str]) -> int:
    signal.signal(PARENT_DIED, lambda *_: end_all())
    signal.signal(signal.SIGTERM, lambda *_: None)  # the program's to obey: we end when it has
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, PARENT_DIED, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        end_all()
    program = os.posix_spawnp(command[0], command, os.environ, setsigdef=[PARENT_DIED, signal.SIGTERM, signal.SIGINT])
    for stream in (0, 1):  # their other ends must see when the program closes its own
        os.close(stream)
    _, status = os.waitpid(program, 0)
    return os.waitstatus_to_exitcode(status)


def end_all() -> None:
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
