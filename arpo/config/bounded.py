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
MAX_DEPTH = 100
MAX_PARTS = 1 << 27
"""Most values in a text of JSON, of which a list or an object counts as eight: "[]," has 3 bytes, and 72 when read."""
MAX_NODES = 100_000  # of a YAML file whose aliases are written out


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
    lists, objects, values = (text.count(mark if isinstance(text, str) else mark.encode()) for mark in "[{,")
    if 8 * (lists + objects) + values > MAX_PARTS:
        raise ValueError("too many lists, objects or values")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def check_plain(tree: Any, depth: int = 0) -> None:
    """Raise ValueError for a tree of JSON that is nested too deep, or whose texts UTF-8 does not have."""
    if isinstance(tree, str):
        try:
            tree.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"half of a character (a lone surrogate, {tree[error.start]!a})") from None
    elif isinstance(tree, list | dict):
        if depth > MAX_DEPTH:
            raise ValueError("nested too deep")
        for one in (*tree, *tree.values()) if isinstance(tree, dict) else tree:
            check_plain(one, depth + 1)


def compose_yaml(text: str) -> Any:
    """Return the nodes of a YAML text, which may be loaded then: a few aliases of aliases can stand for gigabytes.

    Raises yaml.YAMLError too.
    """
    import yaml

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError:
        raise ValueError("nested too deep") from None
    nodes, num_nodes = [root] if root else [], 0
    while nodes:
        children = nodes.pop().value
        for child in children if isinstance(children, list) else ():
            nodes += child if isinstance(child, tuple) else [child]
        num_nodes += 1
        if num_nodes + len(nodes) > MAX_NODES:
            raise ValueError("too large, or an alias (*name) stands inside what it names; write it out")
    return root


def read_yaml(path: Path) -> Any:
    """Return the tree of a file of YAML. Raises OSError and yaml.YAMLError too."""
    import yaml

    text = read_file(path).decode()
    compose_yaml(text)
    return yaml.safe_load(text)


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
