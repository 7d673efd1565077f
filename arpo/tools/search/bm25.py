"""BM25 over a jsonl corpus with tantivy. One folder holds text and index. The folder is built once and then only read.

tantivy skips blocks of passages with scores too low for the result, so a query over a million passages takes
milliseconds (`benchmarks/search_local.py`). For passages of more than 40 words tantivy rounds the length. Stop words
are removed from queries: half of the corpus contains them, so they rank no passage and cost the most time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import tantivy
from tantivy import Filter, Occur, Query, TextAnalyzerBuilder, Tokenizer

from arpo.data.rows import read_rows
from arpo.errors import UserError
from arpo.tools.cache.sqlite_files import derived_paths, first_writable, lock_of
from arpo.tools.search.words import asked, indexed

logger = logging.getLogger(__name__)

MAX_TERMS = 32
"""Number of terms used from a query. Further terms are ignored."""
_STOP_WORDS = """
    a about am an and are as at be been being but by can could did do does for from had has have he her him his how i if
    in into is it its me my no nor not of on or our she should so such than that the their them then there these they
    this those to was we were what when where which who whom whose why will with would you your
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())
FORMAT = 3
"""Version of the index: raise after a change of the code below. An index of another version or tantivy is rebuilt."""
BUILD_MEMORY_BYTES = 1_000_000_000
"""Memory limit of the builder. More memory makes fewer segments; segments are searched one after the other."""
ABOUT = "arpo.json"
"""File in the index's folder with the source of the index (see `_about`) and a checksum. Written last."""
ANALYZER = TextAnalyzerBuilder(Tokenizer.simple()).filter(Filter.ascii_fold()).filter(Filter.lowercase()).build()
"""Splits the output of words.py into lower-case words of letters and digits, without accents."""
SCHEMA = (
    tantivy.SchemaBuilder()
    .add_text_field("words", tokenizer_name="words", index_option="freq")
    .add_bytes_field("shown", stored=True)  # not text: text fields are indexed
    .add_integer_field("row", fast=True)
    .build()
)


class Bm25Index:
    """The index of one corpus. Many threads may search at the same time."""

    def __init__(self, corpus: str | Path):
        """Open the index, or build it if the corpus has changed. Raises UserError for an unusable corpus."""
        try:
            self.path, (self._searcher, self.corpus_sha256) = _ready_index(Path(corpus))
        except OSError as error:
            problem = f"{corpus}: cannot read or index the corpus ({error.strerror or error})"
            raise UserError(f"{problem}; set tools.search.corpus to a jsonl file") from None

    def search(self, query: str, top_k: int) -> list[str]:
        """Return the `top_k` best passages, best first; [] = no match. Ties are in the order of the corpus.

        Raises OSError if the index was damaged after opening.
        """
        terms = ranking_terms(ANALYZER.analyze(asked(query.encode("utf-8", "replace").decode())))
        if not terms:
            return []
        each = [Query.term_query(SCHEMA, "words", term, index_option="freq") for term in terms]
        expression = Query.boolean_query([(Occur.Should, one) for one in each])
        try:
            best = self._best(expression, top_k)
            return [self._searcher.doc(address).get_first("shown").decode() for address in best]
        except BaseException as error:
            # If a file changes while it is open, Rust panics. A panic is not an Exception, and its class cannot be
            # imported: it is recognized by its name.
            if not (isinstance(error, ValueError) or type(error).__name__ == "PanicException"):
                raise
            raise OSError(f"{self.path}: {error}; delete the folder, it is built anew") from None

    def _best(self, expression: Query, top_k: int) -> list[tantivy.DocAddress]:
        """Return the `top_k` best by score, then row. Fetches all passages that tie with the last."""
        limit = 2 * top_k + 16
        while True:
            limit = min(limit, self._searcher.num_docs)
            hits = self._searcher.search(expression, limit, count=False).hits  # counting would visit every hit
            if len(hits) < limit or limit == self._searcher.num_docs or hits[-1][0] < hits[top_k - 1][0]:
                break
            limit *= 8
        rows = self._searcher.fast_field_values("row", [address for _, address in hits])
        best = sorted(zip(hits, rows, strict=True), key=lambda found: (-found[0][0], found[1]))[:top_k]
        return [address for (_, address), _ in best]


# ---- the folder beside the corpus


def _ready_index(corpus: Path) -> tuple[Path, tuple[tantivy.Searcher, str]]:
    """Return the folder of the index, and the opened index. Only one of several ranks builds it. Raises OSError."""
    stat = corpus.stat()
    built_from = [FORMAT, tantivy.__version__, stat.st_size, stat.st_mtime_ns]
    paths = derived_paths(corpus, ".tantivy")
    for path in paths:
        if opened := _open(path, built_from):
            return path, opened
    path = first_writable(paths)
    with lock_of(path):  # other ranks wait here, and then find the finished index
        if not (opened := _open(path, built_from)):
            _build(corpus, path, built_from)
            opened = _open(path, built_from)
    return path, opened


def _open(folder: Path, built_from: list) -> tuple[tantivy.Searcher, str] | None:
    """Return a searcher and the hash of the corpus, or None if the folder has no usable index of `built_from`.

    The searcher keeps its files open, so another run may replace the folder. Raises UserError for a damaged index.
    """
    if not os.access(folder, os.W_OK):  # missing, or another user's: tantivy must write a lock there
        return None
    try:
        about = json.loads((folder / ABOUT).read_bytes())
        if about["built_from"] != built_from:
            return None
        if about != _about(folder, built_from, about["corpus_sha256"]):  # tantivy does not notice every flipped bit
            raise ValueError("its checksum does not hold")
        return tantivy.Index.open(str(folder)).searcher(), about["corpus_sha256"]
    except FileNotFoundError:  # no index, or another run is replacing it right now
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # raised by json and tantivy for damaged files
        raise UserError(f"the index is damaged ({error}); delete the folder {folder}, it is built anew") from None


def _about(folder: Path, built_from: list, corpus_sha256: str) -> dict:
    """Return the expected content of the file ABOUT for an intact index. Raises OSError."""
    crc = zlib.crc32(corpus_sha256.encode())
    for part in sorted(folder.iterdir()):
        if part.name == ABOUT or part.name.startswith("."):  # ABOUT itself, locks, and files that only a writer reads
            continue
        with part.open("rb") as file:
            while block := file.read(1 << 20):
                crc = zlib.crc32(block, crc)
    return {"built_from": built_from, "corpus_sha256": corpus_sha256, "crc32": crc}


def _build(corpus: Path, path: Path, built_from: list) -> None:
    """Build the index in a temporary folder, then move the folder to `path`. Raises OSError."""
    started = time.perf_counter()
    building = path.with_name(f"{path.name}.tmp")
    num_passages = 0
    try:
        shutil.rmtree(building, ignore_errors=True)  # left by a killed build
        building.mkdir()
        index = tantivy.Index(SCHEMA, path=str(building), reuse=False)
        index.register_tokenizer("words", ANALYZER)
        writer = index.writer(BUILD_MEMORY_BYTES, num_threads=1)
        try:
            for num_passages, (text, shown) in enumerate(read_corpus(corpus), 1):
                writer.add_document(tantivy.Document(words=indexed(text), shown=shown.encode(), row=num_passages))
            writer.commit()
        finally:
            writer.wait_merging_threads()  # its threads write to the folder until then, also after a refused row
        if not num_passages:
            raise UserError(f"{corpus}: the corpus is empty; was the download or the export interrupted?")
        with corpus.open("rb") as file:
            corpus_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        (building / ABOUT).write_text(json.dumps(_about(building, built_from, corpus_sha256)))
        shutil.rmtree(path, ignore_errors=True)  # the index of an old corpus; its readers keep their open files
        building.replace(path)
    except ValueError as error:  # raised by tantivy when the disk is full
        raise OSError(f"writing {building}: {error}") from None
    finally:
        shutil.rmtree(building, ignore_errors=True)
    logger.info("%s: %d passages indexed in %.1f s", path, num_passages, time.perf_counter() - started)


# ---- the corpus, and the terms of a query


def ranking_terms(words: Iterable[str]) -> list[str]:
    """Return the first MAX_TERMS different words of a query, without stop words. A query of only stop words keeps them.

    >>> ranking_terms(["what", "is", "the", "height", "of", "silver", "otter"])
    ['height', 'silver', 'otter']
    """
    unique = list(dict.fromkeys(words))
    return ([word for word in unique if word not in STOP_WORDS] or unique)[:MAX_TERMS]


def read_corpus(path: Path) -> Iterator[tuple[str, str]]:
    """Yield two texts per row: the text to index, and the text for the model.

    {"title": T, "text": P} -> (T P, T: P); {"contents": P} -> (P, P); {"key": K, "text": P} -> (K, P)
    Raises UserError for any other row. The message names file, line and field.
    """
    for place, row in read_rows(path):
        body = "text" if "text" in row else "contents"
        if body not in row:
            raise UserError(f'{place}: neither "text" nor "contents" in the row; give it one of the two')
        for name in (body, "title", "key"):
            if not isinstance(row.get(name, ""), str):
                raise UserError(f'{place}: "{name}" must be a string, not {type(row[name]).__name__}')
        if not row[body].strip():
            raise UserError(f'{place}: "{body}" is empty; leave the row out')
        # Replace lone surrogates: "\ud800" is valid JSON, but no index accepts it.
        texts = (row.get(name, "").encode("utf-8", "replace").decode() for name in (body, "title", "key"))
        text, title, key = (" ".join(text.split()) for text in texts)
        shown = f"{title}: {text}" if title and not key and not text.startswith(title) else text
        yield key or f"{title} {text}", shown
