"""Reads JSON, YAML and packed bytes from untrusted sources (runs, data, caches).

All functions raise ValueError, with a short reason, for content that is no file, too large, nested too deep or damaged.
"""

from __future__ import annotations

import json
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from arpo.errors import require

MAX_BYTES = 1 << 30
MAX_LINE_BYTES = 256 << 20
PIECE_BYTES = 1 << 20
"""Limit on the bytes to unpack at once."""
MAX_DEPTH = 100
MAX_VALUES = 1 << 27
"""Limit on the number of JSON values. A list or object counts 8, since "[]," has 3 bytes and takes 72 in memory."""


def read_file(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the bytes of a file. Raises OSError too."""
    # a FIFO or a device would never end
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > max_bytes:
        raise ValueError(f"no file of at most {max_bytes >> 20:,} MiB")
    return path.read_bytes()


def read_lines(path: Path, max_bytes: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """Yield the lines of a file with their line breaks; the last line may lack a line break. Raises OSError too."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("no plain file")
    with path.open("rb") as file:
        for line in iter(lambda: file.readline(max_bytes + 1), b""):
            if len(line) > max_bytes:
                raise ValueError(f"a line of more than {max_bytes >> 20} MiB")
            yield line


def read_json(path: Path) -> Any:
    """Return the value in a JSON file. Raises OSError too."""
    return parse_json(read_file(path))


def parse_json(text: str | bytes, *, unique_names: bool = False) -> Any:
    """Return the value in a JSON text. unique_names: raise ValueError for an object with the same name twice."""
    lists, objects, values = (text.count(mark if isinstance(text, str) else mark.encode()) for mark in "[{,")
    if 8 * (lists + objects) + values > MAX_VALUES:
        raise ValueError("too many lists, objects or values")
    try:
        return json.loads(text, object_pairs_hook=_object_of if unique_names else None)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. json would silently take the last of two values with the same name."""
    tree = dict(pairs)
    if len(tree) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{repeated!r} stands there twice; drop one")
    return tree


def parse_fields(option: str, text: str) -> dict[str, Any]:
    """Return the fields that an option adds to a request, from its JSON; {} for an empty text. Raises ValueError.

    ("judge.extra_body", '{"reasoning_effort": "low"}') -> {"reasoning_effort": "low"}
    """
    try:
        fields = parse_json(text or "{}")
    except ValueError:
        fields = None
    require(isinstance(fields, dict), f'{option}={text!r} must be a JSON object like {{"reasoning_effort": "low"}}')
    for name in ("model", "messages", "stream"):  # the report would name another model; a stream is not read
        require(name not in fields, f"{option} must not set {name!r}; the run sets it")
    return fields


def check_plain(tree: Any, depth: int = 0) -> None:
    """Raise ValueError for a JSON value that is nested too deep, or has a text without a UTF-8 encoding."""
    if isinstance(tree, str):
        try:
            tree.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"half of a character (a lone surrogate, {tree[error.start]!a})") from None
    elif isinstance(tree, list | dict):
        if depth > MAX_DEPTH:
            raise ValueError("nested too deep")
        children = (*tree, *tree.values()) if isinstance(tree, dict) else tree
        for child in children:
            check_plain(child, depth + 1)


class Written(NamedTuple):
    """A number or a truth value of YAML, with its text in the file."""

    text: str
    value: Any

    def __repr__(self) -> str:
        return self.text


def read_yaml(path: Path, *, as_written: bool = False) -> Any:
    """Return the value in a YAML file. Raises OSError too.

    Raises ValueError also for a repeated key (YAML would silently take the last one), and for an alias (a few aliases
    can expand to gigabytes).

    as_written: numbers and truth values become `Written`, keys and dates become texts. For YAML reads `no` as False,
    1.10 as 1.1, 010 as 8, and 1:30 as 90.
    """
    import yaml  # not above: the sandbox's client is imported by interpreters without it

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
            if self.check_event(yaml.AliasEvent):
                raise ValueError(f"line {self.peek_event().start_mark.line + 1}: an alias (*name); write it out")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
            lines: dict[str, int] = {}
            for key, _ in node.value:
                name, line = str(key.value), key.start_mark.line + 1
                if name in lines:
                    raise ValueError(f"{name!r} stands in lines {lines[name]} and {line}; drop one")
                lines[name] = line
            mapping = super().construct_mapping(node, deep)
            return {key.text if isinstance(key, Written) else key: value for key, value in mapping.items()}

    def written(usual: Callable[[yaml.SafeLoader, yaml.ScalarNode], Any]) -> Callable[..., Written]:
        return lambda loader, node: Written(node.value, usual(loader, node))

    for kind in ("bool", "int", "float") if as_written else ():
        tag = f"tag:yaml.org,2002:{kind}"
        Loader.add_constructor(tag, written(Loader.yaml_constructors[tag]))
    if as_written:
        Loader.add_constructor("tag:yaml.org,2002:timestamp", yaml.SafeLoader.construct_yaml_str)
    try:
        return yaml.load(read_file(path).decode(), Loader=Loader)
    except yaml.MarkedYAMLError as error:
        raise ValueError(f"line {error.problem_mark.line + 1}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("nested too deep") from None


def inflate(data: bytes, max_bytes: int = MAX_BYTES) -> bytearray:
    """Unpack bytes of zlib or gzip."""
    # The bytes are counted first, so that too many of them take no memory. They are unpacked in pieces, since zlib
    # would join its blocks at the end, and take the memory twice.
    num_bytes = 0
    for piece in _pieces(data):
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            raise ValueError(f"more than {max_bytes >> 20:,} MiB when unpacked")
    plain = bytearray()
    for piece in _pieces(data):
        plain += piece
    return plain


def _pieces(data: bytes) -> Iterator[bytes]:
    """Unpack bytes of zlib or gzip in pieces. Raises ValueError for damaged ones."""
    packed = zlib.decompressobj(zlib.MAX_WBITS | 32)  # zlib or gzip
    while not packed.eof:
        try:
            piece = packed.decompress(data, PIECE_BYTES)
        except zlib.error as error:
            raise ValueError(str(error)) from None
        data = packed.unconsumed_tail
        if not piece and not data and not packed.eof:
            raise ValueError("cut short")
        yield piece
