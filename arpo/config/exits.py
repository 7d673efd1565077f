"""How a process of ours ends before its work is done: with one line that says why, which stands last on the screen."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from arpo.errors import UserError, printable

logger = logging.getLogger(__name__)

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
SAY_AFTER_S, GIVE_UP_S = 60.0, 1800.0
"""Times after which a function of the user's that has not returned is named, and ends the run."""
asked_to_stop = threading.Event()
"""Set by a signal that asks a training to stop."""


def check_launch(environment: MutableMapping[str, str]) -> None:
    """Raise UserError where a scheduler has left a part of what torchrun sets. Without RANK this is a run of one."""
    rank = environment.get("RANK", "")
    if not rank:
        environment.pop("RANK", None)
        return
    numbers = {name: environment.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    wrong = [name for name, text in numbers.items() if not text.isdecimal()]
    wrong += [] if environment.get("MASTER_ADDR") else ["MASTER_ADDR"]
    if not wrong and int(rank) >= int(numbers["WORLD_SIZE"]):
        wrong = ["WORLD_SIZE"]
    if wrong:
        del environment["RANK"]  # with it, this process would leave the message to rank 0
        found = ", ".join(f"{name}={environment.get(name, rank if name == 'RANK' else '')!r}" for name in wrong)
        raise UserError(f"RANK={rank} is set, but {found}; start with torchrun, or unset RANK for a run of one process")


def exit_with(error: UserError) -> NoReturn:
    """Print the one line (once, from rank 0 where it can) and leave with code 2, which no launcher should retry.

    What is wrong is mostly wrong on every rank. Then rank 0 says so, and torchrun ends the others while they wait here;
    a rank that is still there afterwards must say it itself.
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
    """Print why this process ends. Under torchrun it is said (now and) after that has ended: its own report is long."""
    if now:
        print(line, file=sys.stderr, flush=True)
    restarts = [os.environ.get(f"TORCHELASTIC_{name}") for name in ("RESTART_COUNT", "MAX_RESTARTS")]
    if "TORCHELASTIC_RUN_ID" in os.environ and restarts[0] == restarts[1]:
        command = [sys.executable, "-I", "-S", "-c", AFTER_TORCHRUN, str(os.getppid()), line]
        nothing = subprocess.DEVNULL
        subprocess.Popen(command, start_new_session=True, stdin=nothing, stdout=nothing)


def exit_interrupted(number: int, frame: FrameType | None) -> NoReturn:
    """Handle Ctrl-C: leave with one line, and at once where it is pressed again while the process ends."""
    handler = signal.signal(number, signal.SIG_DFL)
    was_said = handler == signal.SIG_DFL  # the exit of a rank that wrote a checkpoint comes back as a KeyboardInterrupt
    if os.environ.get("RANK", "0") == "0" and not was_said:
        print("interrupted: the same command goes on after the newest checkpoint", file=sys.stderr)
    sys.exit(128 + number)


@contextmanager
def watched(what: str) -> Iterator[None]:
    """Name `what` where the block does not end, and end the run after a limit, or when it was asked to stop."""
    done = threading.Event()
    threading.Thread(target=wait_or_end, args=(done, lambda: what), name="arpo-watch", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def wait_or_end(done: threading.Event, what: Callable[[], str]) -> None:
    """Wait for an event, as `watched` does; `what` is asked for what it waits for, in words."""
    if done.wait(SAY_AFTER_S):
        return
    limit = f"; the run ends where it has not within {GIVE_UP_S:g} s"
    logger.warning("%s has not returned for %g s%s", what(), SAY_AFTER_S, limit)
    started = time.monotonic() - SAY_AFTER_S
    while not done.wait(1.0):
        seconds = time.monotonic() - started
        if seconds > GIVE_UP_S or asked_to_stop.is_set():
            say_at_the_end(printable(f"error: {what()} has not returned for {seconds:.0f} s"))
            sys.stdout.flush()
            os._exit(2)  # no exception reaches a thread that hangs
