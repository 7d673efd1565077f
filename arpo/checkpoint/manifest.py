"""The manifest of a checkpoint folder lists every file with its size and checksum, so that damage is noticed.

manifest.json: {"step": 100, "files": {"__0_0.distcp": [bytes, CRC-32], ...}}. It is written last; a folder without it
was never finished.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

MANIFEST = "manifest.json"
Files = dict[str, list[int]]


def step_of(folder: Path) -> int:
    """Return the step of a checkpoint's folder: step_000100 -> 100; -1 for any other name."""
    number = folder.name.removeprefix("step_")
    return int(number) if number.isdecimal() else -1


def files_of(folder: Path) -> list[str]:
    """Return the sorted names of all files below the folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def measure(folder: Path, names: Sequence[str]) -> Files:
    """Flush these files to disk, and return their sizes and checksums by name."""
    for name in names:
        sync(folder / name)
    return {name: size_and_checksum(folder / name) for name in names}


def write(folder: Path, step: int, files: Files) -> None:
    """Write the manifest, the last file of a checkpoint, and flush the folder to disk."""
    write_synced(folder / MANIFEST, json.dumps({"step": step, "files": files}, indent=1))
    sync(folder)


def read(folder: Path) -> Files | None:
    """Return the manifest's files, or None if there is no readable manifest of a folder of this name."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        is_ours = manifest["step"] == step_of(folder) and isinstance(manifest["files"], dict)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return manifest["files"] or None if is_ours else None


def find_problem(folder: Path, files: Files | None, part: slice = slice(None)) -> str | None:
    """Return what is wrong with (this part of) the folder's files, or None."""
    if files is None:
        return "it has no readable manifest"
    for name in sorted(files)[part]:
        try:
            found = size_and_checksum(folder / name)
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if found != files[name]:
            return f"{name} has size and checksum {found}, the manifest says {files[name]}"
    return None


def size_and_checksum(path: Path) -> list[int]:
    size = checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            size, checksum = size + len(block), zlib.crc32(block, checksum)
    return [size, checksum]


def write_synced(path: Path, text: str) -> None:
    path.write_text(text)
    sync(path)


def sync(path: Path) -> None:
    """Flush a file, or the list of a folder's entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
