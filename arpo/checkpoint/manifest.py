"""The manifest of a checkpoint folder lists size and checksum of every file, so that damage is detected.

manifest.json: {"step": 100, "files": {"__0_0.distcp": [bytes, CRC-32], ...}}. It is written last. A folder without a
manifest is unfinished.
"""

from __future__ import annotations

import errno
import json
import os
import re
import zlib
from pathlib import Path

from arpo.config.bounded import read_json

MANIFEST = "manifest.json"
LARGE_BYTES = 1 << 30
"""Only larger files are checked for holes."""
Files = dict[str, list[int]]


def step_of(folder: Path, kind: str = "step") -> int:
    """Return the step in the name of a finished folder: step_000100 -> 100; -1 for any other name."""
    number = re.fullmatch(rf"{kind}_(\d{{6,}})", folder.name)
    return int(number[1]) if number else -1


def may_be_removed(folder: Path) -> bool:
    """Return True if the run has made this folder. A folder of another name, like step_000100_keep, and a link were
    made by the user."""
    is_ours = re.fullmatch(r"(step|best)_\d{6,}(\.tmp|\.broken)?", folder.name)
    return bool(is_ours) and not folder.is_symlink()


def write(folder: Path, step: int, files: Files) -> None:
    """Write the manifest, the last file of a checkpoint, and flush the folder to disk."""
    write_synced(folder / MANIFEST, json.dumps({"step": step, "files": files}, indent=1))
    sync(folder)


def read(folder: Path) -> Files | None:
    """Return the manifest's files, or None if the manifest is unreadable or of another step."""
    try:
        manifest = read_json(folder / MANIFEST)
        files = manifest["files"]
        is_valid = manifest["step"] == step_of(folder) and all(len(measures) == 2 for measures in files.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return files if files and is_valid else None


def find_problem(folder: Path, files: Files | None, share: slice = slice(None)) -> str | None:
    """Return the first problem of the folder's files (of this share of them), or None.

    A manifest from a stranger may name a device, or a file elsewhere. So only plain files of this folder are read, and
    only if their size is right.
    """
    if files is None:
        return "it has no readable manifest"
    with os.scandir(folder) as scan:
        entries = {entry.name: entry for entry in scan}
    for name, entry in entries.items():
        if not (entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)):
            return f"{name} is no plain file"  # even without an entry in the manifest: the loader might open it
    for name in sorted(files)[share]:
        if name not in entries:
            return f"{name} is missing"
        try:
            size = entries[name].stat().st_size
            if size == files[name][0] and size > LARGE_BYTES and _data_bytes(folder / name) < size / 10:
                return f"{name} is mostly a hole"  # reading a terabyte of zeros would take minutes
            measured = size_and_checksum(folder / name) if size == files[name][0] else [size, None]
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if measured != files[name]:
            return f"{name} has size and checksum {measured}, the manifest says {files[name]}"
    return None


def _data_bytes(path: Path) -> int:
    """Return the size of a file without its holes. Return its full size if the file system does not report holes."""
    position = num_bytes = 0
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while position < size:
            try:
                start = os.lseek(file.fileno(), position, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # no data after this position
                    break
                return size
            position = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            num_bytes += position - start
    return num_bytes


def size_and_checksum(path: Path) -> list[int]:
    size = checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            size += len(block)
            checksum = zlib.crc32(block, checksum)
    return [size, checksum]


def write_synced(path: Path, text: str) -> None:
    path.write_text(text)
    sync(path)


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of files, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
