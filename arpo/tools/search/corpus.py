"""What the indexes of the local search share: a corpus's rows, a query's terms, an index that is built once.

Stop words are left out of queries: each costs a scan of half of the corpus and ranks nothing
(`benchmarks/search_local.py`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from arpo.errors import UserError
from arpo.tools.cache.sqlite_files import derived_paths, first_writable, lock_of

logger = logging.getLogger(__name__)

MAX_TERMS = 32
"""Terms of a query that count; the others are ignored."""
_STOP_WORDS = """
    a about am an and are as at be been being but by can could did do does for from had has have he her him his how i if
    in into is it its me my no nor not of on or our she should so such than that the their them then there these they
    this those to was we were what when where which who whom whose why will with would you your
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())

Stamp = tuple[int, int]
"""Bytes and modification time (ns) of a corpus: an index with another stamp is not one of the corpus as it is now."""
Opened = TypeVar("Opened")


def ranking_terms(words: Iterable[str], stop_words: frozenset[str] = STOP_WORDS) -> list[str]:
    """The MAX_TERMS words of a query that rank passages, each once.

    A query of stop words alone keeps them: better a slow answer than none.

    >>> ranking_terms(["what", "is", "the", "height", "of", "silver", "otter"])
    ['height', 'silver', 'otter']
    """
    unique = list(dict.fromkeys(words))
    return ([word for word in unique if word not in stop_words] or unique)[:MAX_TERMS]


# ---- rows


def read_corpus(path: Path, digest) -> Iterator[tuple[str, str]]:
    """(what is indexed, what the model reads) of each row; every byte read goes through `digest` too.

    {"title": T, "text": P} -> (T P, T: P); {"contents": P} -> (P, P); {"key": K, "text": P} -> (K, P)
    Raises UserError for a row that is not like this (the message names file, line and field), or where there is none.
    """
    is_empty = True
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            digest.update(line)
            if not line.strip():
                continue
            is_empty = False
            place = f"{path}:{number}"
            try:
                row = json.loads(line)
            except UnicodeDecodeError:
                raise UserError(f"{place}: not UTF-8 text; save the corpus as UTF-8") from None
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{place}: not valid JSON ({error.msg} at column {error.colno}); fix the line"
                ) from None
            if not isinstance(row, dict):
                raise UserError(f"{place}: must be a JSON object, not {type(row).__name__}")
            yield _indexed_and_shown(row, place)
    if is_empty:
        raise UserError(f"{path}: the corpus is empty; was the download or the export interrupted?")


def _indexed_and_shown(row: dict, place: str) -> tuple[str, str]:
    body = "text" if "text" in row else "contents"
    if body not in row:
        raise UserError(f'{place}: neither "text" nor "contents" in the row; give it one of the two')
    for name in (body, "title", "key"):
        if not isinstance(row.get(name, ""), str):
            raise UserError(f'{place}: "{name}" must be a string, not {type(row[name]).__name__}')
    if not row[body].strip():
        raise UserError(f'{place}: "{body}" is empty; leave the row out')
    # Lone surrogates ("\ud800" is valid JSON) are no text: no index takes them.
    text, title, key = (
        " ".join(row.get(name, "").encode("utf-8", "replace").decode().split()) for name in (body, "title", "key")
    )
    shown = f"{title}: {text}" if title and not key and not text.startswith(title) else text
    return key or f"{title} {text}", shown


# ---- an index beside its corpus


class DamagedIndex(OSError):
    """An index that says it is the wanted one, but is not as it was built. Found by a checksum: neither SQLite nor
    tantivy notices every flipped bit, and wrong passages look like right ones."""


def ready_index(
    corpus: Path,
    suffix: str,
    *,
    open_index: Callable[[Path, Stamp], Opened | None],
    build: Callable[[Path, Stamp], int],
) -> tuple[Path, Opened]:
    """Where the index of `corpus` as it is now lies, and what `open_index` makes of it; built first if there is none.

    `open_index(path, stamp)` gives None where `path` holds no index with that stamp, and raises DamagedIndex.
    `build(path, stamp)` makes a file or a folder, where no reader looks, and returns its number of passages.

    Raises UserError for a corpus that cannot be read or indexed, see `read_corpus`.
    """
    try:
        stat = corpus.stat()
        stamp = (stat.st_size, stat.st_mtime_ns)
        paths = derived_paths(corpus, suffix)
        for path in paths:
            with contextlib.suppress(DamagedIndex):
                if (opened := open_index(path, stamp)) is not None:
                    return path, opened
        path = first_writable(paths)
        with lock_of(path) as is_alone:  # of several ranks one builds; the others wait here, and find it done
            try:
                opened = open_index(path, stamp)
            except DamagedIndex as error:
                logger.warning("%s: the index is damaged (%s), and is built anew; is the disk well?", path, error)
                opened = None
            if opened is None:
                if is_alone:
                    for remains in path.parent.glob(f"{path.name}.{os.uname().nodename}.*.tmp"):  # of a killed build
                        _remove(remains)
                _build(path, lambda building: build(building, stamp))
                opened = open_index(path, stamp)
        if opened is None:
            raise OSError(f"{path} is damaged just after it was built")
        return path, opened
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"{corpus}: cannot read or index the corpus ({reason}); set tools.search.corpus to a jsonl file"
        ) from None


def crc32_of(file: BinaryIO, crc: int = 0) -> int:
    """Of what is left of the file, added to the `crc` of what was before it."""
    while block := file.read(1 << 20):
        crc = zlib.crc32(block, crc)
    return crc


def _build(path: Path, build: Callable[[Path], int]) -> None:
    started = time.perf_counter()
    building = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    replaced = building.with_suffix(".old.tmp")
    try:
        _remove(building)  # of a killed build with this number, where there are no locks
        num_passages = build(building)
        for part in building.iterdir() if building.is_dir() else [building]:
            with part.open("rb") as file:
                os.fsync(file.fileno())
        if path.is_dir():  # no folder takes the place of another at once; who comes in between waits at the lock
            path.rename(replaced)
        building.replace(path)  # readers of the index before it keep theirs
    finally:
        _remove(building)
        _remove(replaced)
    logger.info("%s: %d passages indexed in %.1f s", path, num_passages, time.perf_counter() - started)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
