"""BM25 over a jsonl corpus: SQLite FTS5, text and index in one file that is built once and then only read.

FTS5 because it needs no dependency, indexes 100,000 passages in seconds and answers in tens of milliseconds. Its time
grows with the corpus: `arpo/tools/tantivy_index.py` is for larger ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import re
import sqlite3
import time
import unicodedata
import zlib
from pathlib import Path

from arpo.tools.search.corpus import STOP_WORDS, DamagedIndex, Stamp, crc32_of, ranking_terms, read_corpus, ready_index

FORMAT = 2
"""Counted up when the schema below changes; an index of another format is built anew."""
NUM_CONNECTIONS = 4
"""Searches that run at the same time, per index."""
HEADER_BYTES = 100
CHECKSUM = slice(60, 64)
"""The bytes of a SQLite header that belong to its user: here the CRC-32 of all others of the file."""
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

    >>> fts_query('What is the height of "Silver Otter"?')
    '"height" OR "silver" OR "otter"'
    """
    words = _TERM.findall(unicodedata.normalize("NFC", query).lower())
    return " OR ".join(f'"{term}"' for term in ranking_terms([word for word in words if word.strip("_")], stop_words))


def _connect(path: Path) -> sqlite3.Connection:
    # immutable: a finished index is replaced, never written, so it needs no locks, nor a file system that has any
    uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    return sqlite3.connect(uri, uri=True, check_same_thread=False, isolation_level=None)


def _checksum(path: Path) -> bytes:
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
        rest = zlib.crc32(header[: CHECKSUM.start] + header[CHECKSUM.stop :])
        return crc32_of(file, rest).to_bytes(4, "big")


def _seal(path: Path) -> None:
    checksum = _checksum(path)
    with path.open("r+b") as file:
        file.seek(CHECKSUM.start)
        file.write(checksum)


def _is_intact(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(HEADER_BYTES)[CHECKSUM] == _checksum(path)


def _open(path: Path, stamp: Stamp) -> list[sqlite3.Connection] | None:
    """NUM_CONNECTIONS, opened at once: they keep reading this index, even if another run replaces it."""
    if not path.is_file():
        return None
    with contextlib.ExitStack() as stack:
        try:
            connections = [stack.enter_context(contextlib.closing(_connect(path))) for _ in range(NUM_CONNECTIONS)]
            for connection in connections:
                connection.execute("PRAGMA mmap_size = 1073741824")
                built_from = connection.execute("SELECT format, corpus_bytes, corpus_mtime_ns FROM meta").fetchone()
        except sqlite3.Error as error:
            raise DamagedIndex(str(error)) from None
        if built_from != (FORMAT, *stamp):
            return None
        if not _is_intact(path):
            raise DamagedIndex("its checksum does not hold")
        stack.pop_all()
        return connections


class Bm25Index:
    """The index of one corpus. Any number of threads may search; NUM_CONNECTIONS of them at a time."""

    def __init__(self, corpus: str | Path):
        """Builds the index if there is none for the corpus as it is now. Raises UserError, see `ready_index`."""
        self.corpus = Path(corpus)
        self.path, self._connections = ready_index(self.corpus, ".fts5.sqlite", open_index=_open, build=self._build)
        self._idle: queue.SimpleQueue[sqlite3.Connection] = queue.SimpleQueue()
        for connection in self._connections:
            self._idle.put(connection)
        [self.corpus_sha256] = self._connections[0].execute("SELECT corpus_sha256 FROM meta").fetchone()

    def _build(self, path: Path, stamp: Stamp) -> int:
        try:
            with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
                num_passages = self._fill(connection, stamp)
        except sqlite3.Error as error:
            raise OSError(f"writing {path}: {error}") from None
        _seal(path)
        return num_passages

    def _fill(self, connection: sqlite3.Connection, stamp: Stamp) -> int:
        connection.executescript(_SCHEMA)
        connection.execute("BEGIN")
        corpus_hash, num_passages = hashlib.sha256(), 0
        for num_passages, (indexed, shown) in enumerate(read_corpus(self.corpus, corpus_hash), 1):
            connection.execute("INSERT INTO passages VALUES (?, ?)", (num_passages, shown))
            connection.execute("INSERT INTO words (rowid, indexed) VALUES (?, ?)", (num_passages, indexed))
        connection.execute("INSERT INTO words (words) VALUES ('optimize')")
        connection.execute("INSERT INTO meta VALUES (?, ?, ?, ?)", (FORMAT, *stamp, corpus_hash.hexdigest()))
        connection.execute("COMMIT")
        return num_passages

    def search(self, query: str, top_k: int, *, deadline_s: float = 30.0) -> list[str]:
        """The `top_k` best passages, best first; equally good ones in the order of the corpus. [] = nothing matches.

        Raises TimeoutError after `deadline_s`, and OSError where the index has been damaged since it was opened.
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
            found = [connection.execute("SELECT text FROM passages WHERE id = ?", rowid).fetchone() for rowid in best]
            if None in found:
                raise sqlite3.DatabaseError("a passage is missing")
            return [text for (text,) in found]
        except sqlite3.Error as error:
            if time.monotonic() > ends:
                raise TimeoutError(f"no answer within {deadline_s:g} s") from error
            raise OSError(f"{self.path}: {error}; the next run builds the index anew") from error
        finally:
            self._idle.put(connection)

    def close(self) -> None:
        """No search may be running."""
        for connection in self._connections:
            connection.close()
