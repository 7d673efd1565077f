"""Measures and removes folders written by model code: folders of any depth, any mode and any name.

All functions use folder descriptors, not paths. A path has at most 4096 bytes. And the code could replace a folder of
a path by a link to another place.
"""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import stat
import time

from .limits import CallLimits

PATIENCE_S = 2.0
"""Seconds without progress until a removal gives up. It waits because a process may still write while it dies."""
MAX_REMOVAL_S = 600.0
"""Longest removal. Without isolation, a process may survive and keep writing. Some file systems take 2 ms per removed
folder."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def exceeds(folder: str, limits: CallLimits, num_bytes: int = 0) -> bool:
    """Return True if the files below a folder are too many, too large or too deep.

    `num_bytes`: size of further files elsewhere. The function holds one descriptor per level.
    """
    num_inodes = 0

    def goes_over(name: str, parent: int | None, depth: int) -> bool:
        nonlocal num_inodes, num_bytes
        try:
            fd = _open_readable(name, parent)
        except OSError:  # removed since it was listed
            return False
        subfolders = []
        try:
            for entry in _entries(fd):
                num_inodes += 1
                with contextlib.suppress(OSError):
                    num_bytes += os.stat(entry.name, dir_fd=fd, follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        subfolders.append(entry.name)
            if num_inodes > limits.scratch_inodes or num_bytes > limits.scratch_bytes:
                return True
            if subfolders and depth > limits.scratch_depth:
                return True
            return any(goes_over(subfolder, fd, depth + 1) for subfolder in subfolders)
        finally:
            os.close(fd)

    return goes_over(folder, None, 1)


def nameless_bytes(pid: int, folder: str, max_file_bytes: int) -> int:
    """Return the size of a process's removed but still open files below a folder. 0 if the process is gone.

    The size of a removed file is unknown if the process only mapped it. It then counts as `max_file_bytes`.
    """
    held: dict[int, int] = {}
    """Inode number -> bytes."""
    for path in glob.glob(f"/proc/{pid}/task/*/fd/*"):  # a thread may have its own descriptors
        with contextlib.suppress(OSError):  # closed since it was listed
            status = os.stat(path)
            if stat.S_ISREG(status.st_mode) and not status.st_nlink:
                held[status.st_ino] = status.st_blocks * 512
    maps = b""
    for path in glob.glob(f"/proc/{pid}/task/*/maps"):  # from a living thread: the first thread may have ended
        with contextlib.suppress(OSError), open(path, "rb") as file:
            maps = maps or file.read()
    if b" (deleted)\n" in maps:  # also for a library replaced by an update
        below = os.path.realpath(folder).encode() + b"/"
        for line in maps.splitlines():
            if line.endswith(b" (deleted)") and below in line:
                held.setdefault(int(line.split(maxsplit=5)[4]), max_file_bytes)
    return sum(held.values())


def _open_readable(name: str, parent: int | None) -> int:
    try:
        return os.open(name, FOLDER, dir_fd=parent)
    except PermissionError:  # made unreadable by the code
        return _open_writable(name, parent)


def _entries(fd: int) -> list[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(fd) as entries:
        return list(entries)
    return []


def remove_tree(folder: str) -> None:
    """Remove a folder. Never raises. Gives up if a surviving process keeps writing there."""
    last_progress = started = time.monotonic()
    while os.path.lexists(folder):
        progress = False
        with contextlib.suppress(OSError):
            progress = _shrink(folder, None)
        now = time.monotonic()
        last_progress = now if progress else last_progress
        if now - last_progress > PATIENCE_S or now - started > MAX_REMOVAL_S:
            return
        if not progress:
            time.sleep(0.02)


def _shrink(name: str, parent: int | None, root: int | None = None) -> bool:
    """Remove files and empty folders of the first two levels, and move deeper folders up to the first level.

    Repeated rounds remove a tree of any depth with two descriptors. Return True if anything has changed. `root`:
    descriptor of the first level, if this folder is on the second level.
    """
    progress = False
    fd = _open_writable(name, parent)
    try:
        for entry in _entries(fd):
            with contextlib.suppress(OSError):
                is_folder = entry.is_dir(follow_symlinks=False)
                if is_folder and root is None:
                    progress |= _shrink(entry.name, fd, fd)
                    continue
                if is_folder:
                    os.close(_open_writable(entry.name, fd))  # a folder to move must be writable itself
                    os.rename(entry.name, f"arpo-{secrets.token_hex(8)}", src_dir_fd=fd, dst_dir_fd=root)
                else:
                    os.unlink(entry.name, dir_fd=fd)
                progress = True
    finally:
        os.close(fd)
    with contextlib.suppress(OSError):  # it is not empty
        os.rmdir(name, dir_fd=parent)
        return True
    return progress


def _open_writable(name: str, parent: int | None) -> int:
    """Make a folder readable and writable for its owner, and open it. Raises OSError."""
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        with contextlib.suppress(OSError):  # another user's folder: the `open` below fails if that matters
            os.chmod(f"/proc/self/fd/{handle}", 0o700)  # fchmod refuses O_PATH; chmod by name follows links
        return os.open(".", FOLDER, dir_fd=handle)
    finally:
        os.close(handle)
