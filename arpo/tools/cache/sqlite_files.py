"""Folders for files built by tools, and a lock for building."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

NETWORK_FILESYSTEMS = {
    0x6969: "NFS",
    0x0BD00BD0: "Lustre",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB",
    0x00C36400: "Ceph",
    0x19830326: "BeeGFS",
    0x47504653: "GPFS",
    0x01021997: "9P",
}
"""statfs magic -> name. SQLite's write-ahead log needs shared memory, and no network file system offers it."""


def network_filesystem(folder: Path) -> str | None:
    """Return the name of the network file system of `folder`; None for a local file system."""
    statfs = ctypes.create_string_buffer(256)  # f_type is its first word
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(folder), statfs) != 0:
        return None
    return NETWORK_FILESYSTEMS.get(ctypes.c_long.from_buffer(statfs).value & 0xFFFFFFFF)


def derived_paths(source: Path, suffix: str) -> list[Path]:
    """Return paths for a file made from `source`: beside it, in the user's cache folder, in the temporary folder.

    data/corpus.jsonl -> data/corpus.jsonl.tantivy, ~/.cache/arpo/corpus.jsonl.1f0c9a64.tantivy, ...
    """
    source = source.resolve()
    name = f"{source.name}.{hashlib.sha256(os.fsencode(source)).hexdigest()[:8]}{suffix}"
    temporary = Path(tempfile.gettempdir())
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME", temporary)) / ".cache")
    folders = [cache_home / "arpo", temporary / f"arpo-{os.getuid()}"]
    return [source.with_name(source.name + suffix), *(folder / name for folder in folders if _is_users(folder))]


def first_writable(paths: list[Path], *, local: bool = False) -> Path:
    """Return the first path with a writable folder (on a local disk, if `local`). Raises OSError if there is none."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Make a file: permission bits are no test for root and for read-only mounts.
            tempfile.TemporaryFile(dir=path.parent).close()
            if not (local and network_filesystem(path.parent)):
                return path
    raise OSError(f"no folder takes {paths[0].name}; set XDG_CACHE_HOME to a writable local folder")


def _is_users(folder: Path) -> bool:
    """Return False for another user's folder. Another user could guess the name in /tmp and put a file there."""
    try:
        return folder.stat().st_uid == os.getuid()
    except OSError as error:
        return isinstance(error, FileNotFoundError)


@contextlib.contextmanager
def lock_of(path: Path) -> Iterator[None]:
    """Hold the lock of `path` during the block: one process at a time. Raises OSError without file locks."""
    with path.with_name(path.name + ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
