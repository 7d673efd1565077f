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
from pathlib import Path

from arpo.tools.corpus import STOP_WORDS, Stamp, ranking_terms, read_corpus, ready_index

FORMAT = 1
"""Counted up when the schema below changes; an index of another format is built anew."""
NUM_CONNECTIONS = 4
"""Searches that run at the same time, per index."""
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


def _open(path: Path, stamp: Stamp) -> list[sqlite3.Connection] | None:
    """NUM_CONNECTIONS, opened at once: they keep reading this index, even if another run replaces it."""
    connections = []
    try:
        for _ in range(NUM_CONNECTIONS):
            connections.append(_connect(path))
            connections[-1].execute("PRAGMA mmap_size = 1073741824")
            built_from = connections[-1].execute("SELECT format, corpus_bytes, corpus_mtime_ns FROM meta").fetchone()
            if built_from != (FORMAT, *stamp):
                raise sqlite3.DatabaseError(f"built from {built_from}")
    except sqlite3.Error:
        for connection in connections:
            connection.close()
        return None
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
                return self._fill(connection, stamp)
        except sqlite3.Error as error:
            raise OSError(f"writing {path}: {error}") from None

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
