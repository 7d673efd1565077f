"""How a process ends early: the last line on the screen says why."""

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
"""Program that waits up to a minute for the end of a process, and then prints a line."""
SAY_AFTER_S = 60.0
"""Time in seconds after which the log names a user's function that has not returned."""
GIVE_UP_S = 1800.0
"""Time in seconds after which a user's function that has not returned ends the run."""
asked_to_stop = threading.Event()
"""Set by a signal that asks a training run to stop."""


def check_launch(environment: MutableMapping[str, str]) -> None:
    """Raise UserError if only some of torchrun's variables are set (by a scheduler, say). No RANK: one process."""
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
    """Print the error as one line, and exit with its code (see arpo/errors.py).

    Most errors occur on every rank. Then rank 0 prints the line, and torchrun ends the other ranks while they wait
    here. A rank that still runs after the wait prints the line itself.
    """
    line = printable(f"error: {error}")
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:
        say_at_the_end(line)
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a training's own handler would only note the signal
        time.sleep(10)
        say_at_the_end(line.replace("error", f"error (rank {rank})", 1))
    sys.exit(error.exit_code)


def say_at_the_end(line: str, *, now: bool = True) -> None:
    """Print why this process ends. Under torchrun, print the line again after torchrun's long report.

    now=False: print the line only after the report.
    """
    if now:
        print(line, file=sys.stderr, flush=True)
    restarts = [os.environ.get(f"TORCHELASTIC_{name}") for name in ("RESTART_COUNT", "MAX_RESTARTS")]
    if "TORCHELASTIC_RUN_ID" in os.environ and restarts[0] == restarts[1]:
        command = [sys.executable, "-I", "-S", "-c", AFTER_TORCHRUN, str(os.getppid()), line]
        nothing = subprocess.DEVNULL
        subprocess.Popen(command, start_new_session=True, stdin=nothing, stdout=nothing)


def exit_interrupted(number: int, frame: FrameType | None) -> NoReturn:
    """Handle Ctrl-C: exit with one line. A second Ctrl-C ends the process at once."""
    handler = signal.signal(number, signal.SIG_DFL)
    # a rank that was writing a checkpoint comes here twice, the second time by a KeyboardInterrupt
    was_said = handler == signal.SIG_DFL
    if os.environ.get("RANK", "0") == "0" and not was_said:
        print("interrupted: the same command continues the run", file=sys.stderr)
    sys.exit(128 + number)


@contextmanager
def watched(what: str) -> Iterator[None]:
    """Log `what` if the block takes long. End the run after GIVE_UP_S, or when it was asked to stop."""
    done = threading.Event()
    threading.Thread(target=wait_or_end, args=(done, lambda: what), name="arpo-watch", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def wait_or_end(done: threading.Event, what: Callable[[], str]) -> None:
    """Wait for an event, with the log and the end of `watched`. `what()` returns the name of the awaited thing."""
    if done.wait(SAY_AFTER_S):
        return
    limit = f"; the run ends if it has not returned within {GIVE_UP_S:g} s"
    logger.warning("%s has not returned for %g s%s", what(), SAY_AFTER_S, limit)
    started = time.monotonic() - SAY_AFTER_S
    while not done.wait(1.0):
        seconds = time.monotonic() - started
        if seconds > GIVE_UP_S or asked_to_stop.is_set():
            say_at_the_end(printable(f"error: {what()} has not returned for {seconds:.0f} s"))
            sys.stdout.flush()
            os._exit(2)  # an exception would not reach the thread that hangs
