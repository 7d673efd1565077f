"""Bad input is answered with one line that names the file, the field and the fix, and with exit code 2."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from typing import NoReturn


AFTER_TORCHRUN = """
import os, select, sys
try:
    has_ended = select.select([os.pidfd_open(int(sys.argv[1]))], [], [], 60)[0]
except ProcessLookupError:
    has_ended = True
if has_ended:
    print(sys.argv[2], file=sys.stderr)
"""
"""Program that waits for the end of a process, up to a minute, and prints a line."""


class UserError(Exception):
    """Bad input. The message is one line that names the file, the field and the fix."""


class PrintableRecord(logging.LogRecord):
    """A line of the log, ours or a library's."""

    def getMessage(self) -> str:
        return printable(super().getMessage())


def printable(text: str) -> str:
    r"""Return a text that a terminal shows and does not obey: with control characters, but for tabs and line breaks,
    written out ("\x1b"). What strangers' services and files say is part of our lines."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)


def require(ok: object, message: str) -> None:
    """Raise ValueError with the message unless `ok`; for the `__post_init__` of a config."""
    if not ok:
        raise ValueError(message)


def exit_with(error: UserError) -> NoReturn:
    """Print the one line (once, from rank 0 where it can) and leave with code 2, which no launcher should retry.

    What is wrong is mostly wrong on every rank. Then rank 0 says so, and torchrun ends the others while they wait here;
    a rank that is still there afterwards is alone with its error, and must say it itself.
    """
    line = printable(f"error: {error}")
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:
        say_at_the_end(line)
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a training rank has a handler, which would only note it
        time.sleep(10)
        say_at_the_end(line.replace("error", f"error (rank {rank})", 1))
    sys.exit(2)


def say_at_the_end(line: str, *, now: bool = True) -> None:
    """Print why this process ends. Under torchrun the line is printed (now and) when that has ended, since its report
    of what it started is long, and knows nothing of reasons."""
    if now:
        print(line, file=sys.stderr, flush=True)
    restarts = [os.environ.get(f"TORCHELASTIC_{name}") for name in ("RESTART_COUNT", "MAX_RESTARTS")]
    if "TORCHELASTIC_RUN_ID" in os.environ and restarts[0] == restarts[1]:
        command = [sys.executable, "-I", "-S", "-c", AFTER_TORCHRUN, str(os.getppid()), line]
        nothing = subprocess.DEVNULL
        subprocess.Popen(command, start_new_session=True, stdin=nothing, stdout=nothing)
