"""BM25 over a jsonl corpus: tantivy, for corpora on which FTS5 takes too long (`benchmarks/search_local.py`).

It skips blocks of passages that cannot be among the best. Text and index are in one folder that is built once and then
only read. Weights as in FTS5, but for the length of a passage, which is rounded, and for words that half of the corpus
has: passages of nearly equal worth may come in another order.
"""

from __future__ import annotations

import hashlib
import json
import time
import unicodedata
import zlib
from pathlib import Path

import tantivy
from tantivy import Filter, Occur, Query, TextAnalyzerBuilder, Tokenizer

from arpo.tools.search.corpus import DamagedIndex, Stamp, crc32_of, ranking_terms, read_corpus, ready_index

FORMAT = 2
"""Counted up when what follows changes; an index of another format, or of another tantivy, is built anew."""
BUILD_MEMORY_BYTES = 1_000_000_000
"""Memory of the builder, at most: a larger one makes fewer segments, which are searched one after the other."""
ABOUT = "arpo.json"
"""File in the index's folder: what it was built from, and the checksum of its parts. Written last."""
PANIC = "PanicException"
"""What Rust raises where it would crash, on a file that has changed under it; no Exception, nor can it be imported."""
ANALYZER = TextAnalyzerBuilder(Tokenizer.simple()).filter(Filter.ascii_fold()).filter(Filter.lowercase()).build()
"""Letters and digits are words, without their accents; passages and queries go through it, in NFC."""


def _schema() -> tantivy.Schema:
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("words", tokenizer_name="words", index_option="freq")
    builder.add_bytes_field("shown", stored=True)  # not text: text fields are indexed
    builder.add_integer_field("row", fast=True)
    return builder.build()


SCHEMA = _schema()


def _about(folder: Path, stamp: Stamp, corpus_sha256: str) -> dict:
    """What the file of that name says of an intact index. Raises OSError."""
    crc = zlib.crc32(corpus_sha256.encode())
    for part in sorted(folder.iterdir()):
        if part.name != ABOUT and not part.name.startswith("."):  # locks, and what only a writer reads
            with part.open("rb") as file:
                crc = crc32_of(file, crc)
    return {"built_from": [FORMAT, tantivy.__version__, *stamp], "corpus_sha256": corpus_sha256, "crc32": crc}


def _open(folder: Path, stamp: Stamp) -> tuple[tantivy.Searcher, str] | None:
    """A searcher, which keeps this index even if another run replaces it, and the hash of the corpus."""
    try:
        about = json.loads((folder / ABOUT).read_bytes())
        corpus_sha256 = about["corpus_sha256"]
        expected = _about(folder, stamp, corpus_sha256)
        if about["built_from"] != expected["built_from"]:
            return None
        if about != expected:
            raise DamagedIndex("its checksum does not hold")
        return tantivy.Index.open(str(folder)).searcher(), corpus_sha256
    except FileNotFoundError:  # there is none, or another run puts a new one here just now
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # JSON's words for damage, and tantivy's
        raise DamagedIndex(f"{type(error).__name__}: {error}") from None


class TantivyIndex:
    """The index of one corpus. Any number of threads may search at the same time."""

    def __init__(self, corpus: str | Path):
        """Builds the index if there is none for the corpus as it is now. Raises UserError, see `ready_index`."""
        self.corpus = Path(corpus)
        self.path, opened = ready_index(self.corpus, ".tantivy", open_index=_open, build=self._build)
        self._searcher: tantivy.Searcher | None = opened[0]
        self.corpus_sha256: str = opened[1]

    def _build(self, folder: Path, stamp: Stamp) -> int:
        folder.mkdir()
        corpus_hash, num_passages = hashlib.sha256(), 0
        try:
            index = tantivy.Index(SCHEMA, path=str(folder), reuse=False)
            index.register_tokenizer("words", ANALYZER)
            with index.writer(BUILD_MEMORY_BYTES, num_threads=1) as writer:  # its end commits, and waits for merges
                for num_passages, (indexed, shown) in enumerate(read_corpus(self.corpus, corpus_hash), 1):
                    words = unicodedata.normalize("NFC", indexed)
                    writer.add_document(tantivy.Document(words=words, shown=shown.encode(), row=num_passages))
        except ValueError as error:  # what tantivy says when the disk is full
            raise OSError(f"writing {folder}: {error}") from None
        (folder / ABOUT).write_text(json.dumps(_about(folder, stamp, corpus_hash.hexdigest())))
        return num_passages

    def search(self, query: str, top_k: int, *, deadline_s: float = 30.0) -> list[str]:
        """The `top_k` best passages, best first; equally good ones in the order of the corpus. [] = nothing matches.

        Raises TimeoutError after `deadline_s`, which is looked at between passes over the index, not within one (they
        take milliseconds), and OSError where the index has been damaged since it was opened.
        """
        ends = time.monotonic() + deadline_s
        terms = ranking_terms(ANALYZER.analyze(unicodedata.normalize("NFC", query).encode("utf-8", "replace").decode()))
        if not terms:
            return []
        each = [Query.term_query(SCHEMA, "words", term, index_option="freq") for term in terms]
        expression = Query.boolean_query([(Occur.Should, one) for one in each])
        try:
            best = sorted(self._hits(expression, top_k, ends), key=lambda hit: (-hit[0], hit[1]))[:top_k]
            return [self._searcher.doc(address).get_first("shown").decode() for _, _, address in best]
        except BaseException as error:
            if not (isinstance(error, ValueError) or type(error).__name__ == PANIC):
                raise
            raise OSError(f"{self.path}: {error}; the next run builds the index anew") from None

    def _hits(self, expression: Query, top_k: int, ends: float) -> list[tuple[float, int, tantivy.DocAddress]]:
        """(score, row, address) of the `top_k` best and of all that are as good as the last of them."""
        limit = 2 * top_k + 16
        while True:
            if time.monotonic() > ends:
                raise TimeoutError("no answer before the deadline")
            limit = min(limit, self._searcher.num_docs)
            hits = self._searcher.search(expression, limit, count=False).hits  # counting would visit every hit
            if len(hits) < limit or limit == self._searcher.num_docs or hits[-1][0] < hits[top_k - 1][0]:
                break
            limit *= 8
        addresses = [address for _, address in hits]
        rows = self._searcher.fast_field_values("row", addresses)
        return [(score, row, address) for (score, address), row in zip(hits, rows, strict=True)]

    def close(self) -> None:
        """No search may be running. Safe to call twice."""
        self._searcher = None
