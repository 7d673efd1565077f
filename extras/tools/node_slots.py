"""A limit on how many processes of a user do something on one machine at a time, whichever rank or run they belong to.

Slot k is a lock on the file slot-k in a folder of the user's. The kernel frees the locks of a process that dies,
however it dies, so no slot is lost. Containers with a /tmp of their own have a limit of their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from arpo.errors import UserError

POLL_S = 0.005
"""Seconds between looks for a free slot; of the threads of a process only one looks."""


class NodeSlots:
    """The `num_slots` slots of one `name`, shared by all processes of this user on this machine. Thread-safe."""

    def __init__(self, name: str, num_slots: int, *, folder: Path | None = None):
        """Raises UserError where there is no folder for the locks that is the user's alone."""
        assert num_slots >= 1, num_slots
        self._folder = (folder or runtime_folder()) / f"arpo-{name}-slots"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._num_slots = num_slots
        self._turn = threading.Lock()
        self._is_closed = False

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        """Hold a slot. Blocks until one is free, or until `close`, after which nobody has to wait."""
        file = self._wait()
        try:
            yield
        finally:
            if file is not None:
                fcntl.flock(file, fcntl.LOCK_UN)  # closing would not do where a fork of us has a copy
                os.close(file)

    def _wait(self) -> int | None:
        with self._turn:
            while not self._is_closed:
                # Not always from the first: those with fewer slots than others (another run's limit) use only those.
                for number in random.sample(range(self._num_slots), self._num_slots):
                    fd = os.open(self._folder / f"slot-{number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                    with contextlib.suppress(BlockingIOError):
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        return fd
                    os.close(fd)
                time.sleep(POLL_S * random.uniform(0.5, 1.5))
        return None

    def close(self) -> None:
        """End all waiting: whoever waits for a slot goes on without one."""
        self._is_closed = True


def runtime_folder() -> Path:
    """Return a folder on this machine that is the user's alone. Raises UserError where somebody else has its name."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.access(runtime, os.W_OK | os.X_OK):
        return Path(runtime)
    folder = Path(tempfile.gettempdir()) / f"arpo-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise UserError(f"{folder}: belongs to somebody else; set XDG_RUNTIME_DIR to a folder of yours on a local disk")
    return folder
