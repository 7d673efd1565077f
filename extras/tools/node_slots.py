"""A limit on how many processes of a user do something on one machine at a time, over all ranks and runs.

Slot k is a lock on the file slot-k in a folder of the user. The kernel frees the locks of a dead process, so no slot is
lost. A container with a private /tmp has a separate limit.
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
"""Seconds between two polls for a free slot. Only one thread of a process polls."""


class NodeSlots:
    """The `num_slots` slots of one `name`, shared by all processes of this user on this machine. Thread-safe."""

    def __init__(self, name: str, num_slots: int, *, folder: Path | None = None):
        """Raises UserError if there is no private folder of the user for the locks."""
        assert num_slots >= 1, num_slots
        self._folder = (folder or runtime_folder()) / f"arpo-{name}-slots"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._num_slots = num_slots
        self._turn = threading.Lock()
        self._is_closed = False

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        """Hold a slot. Blocks until a slot is free, or until `close`."""
        file = self._wait()
        try:
            yield
        finally:
            if file is not None:
                # closing alone does not unlock the file if a forked process has a copy of the descriptor
                fcntl.flock(file, fcntl.LOCK_UN)
                os.close(file)

    def _wait(self) -> int | None:
        with self._turn:
            while not self._is_closed:
                # In random order: a run with a smaller limit can only use the first slots.
                for number in random.sample(range(self._num_slots), self._num_slots):
                    fd = os.open(self._folder / f"slot-{number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                    with contextlib.suppress(BlockingIOError):
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        return fd
                    os.close(fd)
                time.sleep(POLL_S * random.uniform(0.5, 1.5))
        return None

    def close(self) -> None:
        """End all waiting: threads that wait for a slot continue without one."""
        self._is_closed = True


def runtime_folder() -> Path:
    """Return a private folder of the user on this machine. Raises UserError if it belongs to somebody else."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.access(runtime, os.W_OK | os.X_OK):
        return Path(runtime)
    folder = Path(tempfile.gettempdir()) / f"arpo-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise UserError(f"{folder}: belongs to somebody else; set XDG_RUNTIME_DIR to a folder of yours on a local disk")
    return folder
