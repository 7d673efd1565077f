"""Our local search against SQLite's FTS5 (needs no package), on up to a million passages.

    python benchmarks/search_local.py [--quick]

A passage has 80 words: content words from a Zipf vocabulary, and stop words, as frequent as in English prose. A query
has six words of one passage and five stop words. `hit` is the share of queries with that passage among the ten best.
Both sides search for the same words, without the stop words. The last line is about the largest corpus. `ratio` =
SQLite's median time / ours.
"""

import argparse
import json
import random
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arpo.tools.search.bm25 import STOP_WORDS, Bm25Index, ranking_terms

TOP_K = 10
NUM_CONTENT_WORDS = 50
NUM_STOP_WORDS = 30
VOCABULARY = np.array([f"w{i}" for i in range(50_000)])


def write_corpus(path: Path, num_passages: int, num_queries: int) -> list[tuple[int, str]]:
    """Write the corpus to `path` in chunks, 0.45 kB per passage. Return (passage, query) pairs."""
    rng = np.random.default_rng(0)
    chunk = 10_000
    weights = 1 / np.arange(10, 10 + len(VOCABULARY))
    shares = np.cumsum(weights / weights.sum())
    stop_words = np.array(sorted(STOP_WORDS))
    wanted = set(random.Random(0).sample(range(num_passages), num_queries))
    queries = []
    with path.open("w") as file:
        for first in range(0, num_passages, chunk):
            ranks = np.searchsorted(shares, rng.random((chunk, NUM_CONTENT_WORDS))).clip(max=len(VOCABULARY) - 1)
            content = VOCABULARY[ranks]
            stop = rng.choice(stop_words, (chunk, NUM_STOP_WORDS))
            passages = rng.permuted(np.concatenate([content, stop.astype(content.dtype)], axis=1), axis=1)
            for i, words in enumerate(passages.tolist(), first):
                file.write(json.dumps({"text": f"passage {i} " + " ".join(words)}) + "\n")
                if i in wanted:
                    asked = [*rng.choice(content[i - first], 6, replace=False), *rng.choice(stop_words, 5)]
                    queries.append((i, " ".join(asked)))
    return queries


class Fts5:
    """The baseline: a table of passages and a table of their words, ranked by FTS5's own BM25."""

    def __init__(self, corpus: Path):
        self.path = corpus.with_suffix(".sqlite")
        self.connection = sqlite3.connect(self.path)
        self.connection.executescript(
            "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA mmap_size = 1073741824;"
            "CREATE TABLE passages (id INTEGER PRIMARY KEY, text TEXT NOT NULL);"
            "CREATE VIRTUAL TABLE words USING fts5(text, content='')"
        )
        with corpus.open() as file:
            for number, line in enumerate(file):
                row = (number, json.loads(line)["text"])
                self.connection.execute("INSERT INTO passages VALUES (?, ?)", row)
                self.connection.execute("INSERT INTO words (rowid, text) VALUES (?, ?)", row)
        self.connection.execute("INSERT INTO words (words) VALUES ('optimize')")
        self.connection.commit()

    def search(self, query: str, top_k: int) -> list[str]:
        expression = " OR ".join(f'"{term}"' for term in ranking_terms(query.split()))
        ranked = "SELECT rowid FROM words WHERE words MATCH ? ORDER BY rank, rowid LIMIT ?"
        best = self.connection.execute(ranked, (expression, top_k)).fetchall()
        of_row = "SELECT text FROM passages WHERE id = ?"
        return [self.connection.execute(of_row, row).fetchone()[0] for row in best]


def ask(ways: dict[str, Callable[[str], list[str]]], queries: list[tuple[int, str]]) -> dict[str, dict[str, float]]:
    """Return for each way the p50, p95 and longest time in ms, and the hit rate."""
    times_ms: dict[str, list[float]] = {way: [] for way in ways}
    hits = dict.fromkeys(ways, 0)
    for wanted, query in queries:
        # in turn, so that all have the same load and caches
        for way, search in ways.items():
            start = time.perf_counter()
            texts = search(query)
            times_ms[way].append((time.perf_counter() - start) * 1000)
            hits[way] += any(text.startswith(f"passage {wanted} ") for text in texts)
    return {
        way: {
            "p50": statistics.median(times),
            "p95": statistics.quantiles(times, n=20)[-1],
            "max": max(times),
            "hit": hits[way] / len(queries),
        }
        for way, times in times_ms.items()
    }


def disk_mib(path: Path) -> float:
    return sum(part.stat().st_size for part in ([path] if path.is_file() else path.iterdir())) / 2**20


def measure(num_passages: int, num_queries: int) -> dict[str, dict[str, float]]:
    """Write a corpus, print and return the results of `ask`, and delete the corpus."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        queries = write_corpus(corpus, num_passages, num_queries)
        print(f"{num_passages} passages, {disk_mib(corpus):.0f} MiB, {num_queries} queries", flush=True)
        indexes = {}
        for name, build in (("sqlite", Fts5), ("ours", Bm25Index)):
            start = time.perf_counter()
            indexes[name] = build(corpus)
            seconds = time.perf_counter() - start
            print(f"{name:>8}: indexed in {seconds:.1f} s, {disk_mib(indexes[name].path):.0f} MiB with the texts")
        ways = {name: lambda query, index=index: index.search(query, TOP_K) for name, index in indexes.items()}
        results = ask(ways, queries)
    for way, r in results.items():
        print(f"{way}: p50 {r['p50']:.2f} ms, p95 {r['p95']:.2f} ms, max {r['max']:.1f} ms, hit@{TOP_K} {r['hit']:.3f}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5,000 passages and 100 queries, seconds")
    args = parser.parse_args()
    sizes, num_queries = ([5_000], 100) if args.quick else ([20_000, 200_000, 1_000_000], 200)
    for num_passages in sizes:
        results = measure(num_passages, num_queries)
    ours = results["ours"]["p50"]
    baseline = results["sqlite"]["p50"]
    result = {"name": "search_local", "ratio": baseline / ours, "ours": ours, "baseline": baseline, "unit": "ms"}
    hit_rates = {"hit": results["ours"]["hit"], "hit_baseline": results["sqlite"]["hit"]}
    print(json.dumps({**result, **hit_rates, "passages": sizes[-1]}))


if __name__ == "__main__":
    main()
