"""BM25 over a jsonl corpus: SQLite FTS5, text and index in one file that is built once and then only read.

FTS5 because it needs no dependency, indexes 100,000 passages in seconds and answers in tens of milliseconds. Stop words
are left out of queries: each costs a scan of half of the corpus and ranks nothing (`benchmarks/search_local.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import queue
import re
import sqlite3
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from arpo.config import UserError
from arpo.tools.sqlite_files import derived_paths, first_writable, lock_of

logger = logging.getLogger(__name__)

FORMAT = 1
"""Counted up when the schema below changes; an index of another format is built anew."""
MAX_TERMS = 32
"""Terms of a query that count; the others are ignored."""
NUM_CONNECTIONS = 4
"""Searches that run at the same time, per index."""
_STOP_WORDS = """
    a about am an and are as at be been being but by can could did do does for from had has have he her him his how i if
    in into is it its me my no nor not of on or our she should so such than that the their them then there these they
    this those to was we were what when where which who whom whose why will with would you your
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())
_TERM = re.compile(r"\w+")
_SCHEMA = """
    PRAGMA journal_mode = OFF;
    PRAGMA synchronous = OFF;
    CREATE TABLE passages (id INTEGER PRIMARY KEY, text TEXT NOT NULL);
    CREATE VIRTUAL TABLE words USING fts5(indexed, content='', tokenize='unicode61 remove_diacritics 2');
    CREATE TABLE meta (format INTEGER, corpus_bytes INTEGER, corpus_mtime_ns INTEGER, corpus_sha256 TEXT);
"""


def fts_query(query: str, stop_words: frozenset[str] = STOP_WORDS) -> str:
    """The query as FTS5 reads it: every term quoted, so that no operator is left in it. Empty when there is no term.

    A query of stop words alone keeps them: better a slow answer than none.

    >>> fts_query('What is the height of "Silver Otter"?')
    '"height" OR "silver" OR "otter"'
    """
    words = _TERM.findall(unicodedata.normalize("NFC", query).lower())
    words = list(dict.fromkeys(word for word in words if word.strip("_")))
    terms = [word for word in words if word not in stop_words] or words
    return " OR ".join(f'"{term}"' for term in terms[:MAX_TERMS])


def read_corpus(path: Path, digest) -> Iterator[tuple[str, str]]:
    """(what is indexed, what the model reads) of each row; every byte read goes through `digest` too.

    {"title": T, "text": P} -> (T P, T: P); {"contents": P} -> (P, P); {"key": K, "text": P} -> (K, P)
    Raises UserError for a row that is not like this; the message names file, line and field.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            digest.update(line)
            if not line.strip():
                continue
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


def _indexed_and_shown(row: dict, place: str) -> tuple[str, str]:
    body = "text" if "text" in row else "contents"
    if body not in row:
        raise UserError(f'{place}: neither "text" nor "contents" in the row; give it one of the two')
    for name in (body, "title", "key"):
        if not isinstance(row.get(name, ""), str):
            raise UserError(f'{place}: "{name}" must be a string, not {type(row[name]).__name__}')
    if not row[body].strip():
        raise UserError(f'{place}: "{body}" is empty; leave the row out')
    # Lone surrogates ("\ud800" is valid JSON) are no text: SQLite refuses them.
    text, title, key = (
        " ".join(row.get(name, "").encode("utf-8", "replace").decode().split()) for name in (body, "title", "key")
    )
    shown = f"{title}: {text}" if title and not key and not text.startswith(title) else text
    return key or f"{title} {text}", shown


def _connect(path: Path) -> sqlite3.Connection:
    # immutable: a finished index is replaced, never written, so it needs no locks, nor a file system that has any
    uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    return sqlite3.connect(uri, uri=True, check_same_thread=False, isolation_level=None)


def _is_index_of(built_from: tuple[int, int, int], path: Path) -> bool:
    """Is there an intact index at `path`, of the corpus as it is now?"""
    try:
        with contextlib.closing(_connect(path)) as connection:
            return connection.execute("SELECT format, corpus_bytes, corpus_mtime_ns FROM meta").fetchone() == built_from
    except sqlite3.Error:
        return False


class Bm25Index:
    """The index of one corpus. Any number of threads may search; NUM_CONNECTIONS of them at a time."""

    def __init__(self, corpus: str | Path):
        """Builds the index if there is none for the corpus as it is now. Raises UserError, see `read_corpus`."""
        self.corpus = Path(corpus)
        try:
            self.path = self._ready_index()
        except OSError as error:
            reason = error.strerror or error
            raise UserError(
                f"{self.corpus}: cannot read or index the corpus ({reason}); set tools.search.corpus to a jsonl file"
            ) from None
        # Opened here, all of them: they keep reading this index, even if another run replaces it.
        self._connections = [_connect(self.path) for _ in range(NUM_CONNECTIONS)]
        self._idle: queue.SimpleQueue[sqlite3.Connection] = queue.SimpleQueue()
        for connection in self._connections:
            connection.execute("PRAGMA mmap_size = 1073741824")
            self._idle.put(connection)
        [self.corpus_sha256] = self._connections[0].execute("SELECT corpus_sha256 FROM meta").fetchone()

    def _ready_index(self) -> Path:
        stat = self.corpus.stat()
        built_from = (FORMAT, stat.st_size, stat.st_mtime_ns)
        paths = derived_paths(self.corpus, ".fts5.sqlite")
        for path in paths:
            if _is_index_of(built_from, path):
                return path
        path = first_writable(paths)
        with lock_of(path) as is_alone:  # of several ranks one builds; the others wait here, and find it done
            if not _is_index_of(built_from, path):
                if is_alone:
                    for remains in path.parent.glob(f"{path.name}.{os.uname().nodename}.*.tmp"):  # of a killed build
                        remains.unlink()
                self._build(path, built_from)
        return path

    def _build(self, path: Path, built_from: tuple[int, int, int]) -> None:
        started = time.perf_counter()
        building = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
        try:
            with contextlib.closing(sqlite3.connect(building, isolation_level=None)) as connection:
                num_passages = self._fill(connection, built_from)
            with building.open("rb") as file:
                os.fsync(file.fileno())
            building.replace(path)  # readers of the index before it keep theirs
        except sqlite3.Error as error:
            raise OSError(f"writing {building}: {error}") from None
        finally:
            building.unlink(missing_ok=True)
        logger.info("%s: %d passages indexed in %.1f s", path, num_passages, time.perf_counter() - started)

    def _fill(self, connection: sqlite3.Connection, built_from: tuple[int, int, int]) -> int:
        connection.executescript(_SCHEMA)
        connection.execute("BEGIN")
        corpus_hash, num_passages = hashlib.sha256(), 0
        for indexed, shown in read_corpus(self.corpus, corpus_hash):
            num_passages += 1
            connection.execute("INSERT INTO passages VALUES (?, ?)", (num_passages, shown))
            connection.execute("INSERT INTO words (rowid, indexed) VALUES (?, ?)", (num_passages, indexed))
        if not num_passages:
            raise UserError(f"{self.corpus}: the corpus is empty; was the download or the export interrupted?")
        connection.execute("INSERT INTO words (words) VALUES ('optimize')")
        connection.execute("INSERT INTO meta VALUES (?, ?, ?, ?)", (*built_from, corpus_hash.hexdigest()))
        connection.execute("COMMIT")
        return num_passages

    def search(self, query: str, top_k: int, *, deadline_s: float = 30.0) -> list[str]:
        """The `top_k` best passages, best first; equally good ones in the order of the corpus. [] = nothing matches.

        Raises TimeoutError after `deadline_s`, and sqlite3.Error where the index file is damaged.
        """
        expression = fts_query(query)
        return self.match(expression, top_k, deadline_s=deadline_s) if expression else []

    def match(self, expression: str, top_k: int, *, deadline_s: float = 30.0) -> list[str]:
        """`search` for an expression in the language of FTS5."""
        ends = time.monotonic() + deadline_s
        connection = self._idle.get()
        try:
            connection.set_progress_handler(lambda: time.monotonic() > ends, 100_000)
            # Ranks first, texts of the winners after: the sorter then carries two numbers per hit, not a passage.
            best = connection.execute(
                "SELECT rowid FROM words WHERE words MATCH ? ORDER BY rank, rowid LIMIT ?", (expression, top_k)
            ).fetchall()
            sql = "SELECT text FROM passages WHERE id = ?"
            return [connection.execute(sql, rowid).fetchone()[0] for rowid in best]
        except sqlite3.OperationalError as error:
            if time.monotonic() > ends:
                raise TimeoutError(f"no answer within {deadline_s:g} s") from error
            raise
        finally:
            self._idle.put(connection)

    def close(self) -> None:
        """No search may be running."""
        for connection in self._connections:
            connection.close()
