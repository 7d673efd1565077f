"""Reads what strangers may have written (runs, data, caches) in bounded time and memory.

What is no file, too large, nested too deep or damaged is a ValueError with a short reason, so that callers need no
second word for it.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from pathlib import Path
from typing import Any

MAX_BYTES = 1 << 30


def read_file(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the bytes of a file; a FIFO or a device would never end. Raises OSError too."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > max_bytes:
            raise ValueError(f"no file of at most {max_bytes >> 20:,} MiB")
        return file.read(max_bytes)


def read_json(path: Path) -> Any:
    """Return the tree of a file of JSON. Raises OSError too."""
    return parse_json(read_file(path))


def parse_json(text: str | bytes) -> Any:
    """Return the tree of a text of JSON."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def inflate(data: bytes, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the bytes that zlib or gzip has packed."""
    packed = zlib.decompressobj(zlib.MAX_WBITS | 32)  # of either kind
    try:
        plain = packed.decompress(data, max_bytes)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not packed.eof:
        raise ValueError(f"cut short, or more than {max_bytes >> 20:,} MiB when unpacked")
    return plain
