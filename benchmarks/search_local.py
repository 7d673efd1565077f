"""Local search with tantivy against SQLite FTS5, on up to a million passages; and what stop words would cost.

    python benchmarks/search_local.py [--quick]

Passages of 80 words, drawn from a Zipf vocabulary among stop words as frequent as in English prose. A query is six
words of one passage among five stop words; `hit` is the share of queries whose ten best passages include that passage.
The last line is of the largest corpus; `ratio` is the median of SQLite over that of tantivy.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arpo.tools.search.bm25 import Bm25Index, fts_query
from arpo.tools.search.corpus import STOP_WORDS
from arpo.tools.search.tantivy_index import TantivyIndex

TOP_K = 10
NUM_CONTENT_WORDS, NUM_STOP_WORDS = 50, 30
VOCABULARY = np.array([f"w{i}" for i in range(50_000)])


def write_corpus(path: Path, num_passages: int, num_queries: int) -> list[tuple[int, str]]:
    """Streams the corpus to `path`, 0.45 kB per passage; returns (passage, query) pairs."""
    rng, chunk = np.random.default_rng(0), 10_000
    weights = 1 / np.arange(10, 10 + len(VOCABULARY))
    shares = np.cumsum(weights / weights.sum())
    stop_words = np.array(sorted(STOP_WORDS))
    wanted = set(random.Random(0).sample(range(num_passages), num_queries))
    queries = []
    with path.open("w") as file:
        for first in range(0, num_passages, chunk):
            ranks = np.searchsorted(shares, rng.random((chunk, NUM_CONTENT_WORDS))).clip(max=len(VOCABULARY) - 1)
            content, stop = VOCABULARY[ranks], rng.choice(stop_words, (chunk, NUM_STOP_WORDS))
            passages = rng.permuted(np.concatenate([content, stop.astype(content.dtype)], axis=1), axis=1)
            for i, words in enumerate(passages.tolist(), first):
                file.write(json.dumps({"text": f"passage {i} " + " ".join(words)}) + "\n")
                if i in wanted:
                    asked = [*rng.choice(content[i - first], 6, replace=False), *rng.choice(stop_words, 5)]
                    queries.append((i, " ".join(asked)))
    return queries


def disk_mib(path: Path) -> float:
    return sum(part.stat().st_size for part in ([path] if path.is_file() else path.iterdir())) / 2**20


def ask(ways: dict[str, Callable[[str], list[str]]], queries: list[tuple[int, str]]) -> dict[str, dict[str, float]]:
    """Of each way: p50, p95 and longest time in ms, and hit rate."""
    times_ms: dict[str, list[float]] = {way: [] for way in ways}
    hits = dict.fromkeys(ways, 0)
    for wanted, query in queries:
        for way, search in ways.items():  # in turns, so that all meet the same load and caches
            start = time.perf_counter()
            found = search(query)
            times_ms[way].append((time.perf_counter() - start) * 1000)
            hits[way] += any(text.startswith(f"passage {wanted} ") for text in found)
    return {
        way: {
            "p50": statistics.median(times),
            "p95": statistics.quantiles(times, n=20)[-1],
            "max": max(times),
            "hit": hits[way] / len(queries),
        }
        for way, times in times_ms.items()
    }


def measure(num_passages: int, num_queries: int, with_stop_words: bool) -> dict[str, dict[str, float]]:
    """Of each way, on a corpus of its own that is deleted afterwards; prints them."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        queries = write_corpus(corpus, num_passages, num_queries)
        print(f"{num_passages} passages, {disk_mib(corpus):.0f} MiB, {num_queries} queries", flush=True)
        indexes = {}
        for name, build in (("sqlite", Bm25Index), ("tantivy", TantivyIndex)):
            start = time.perf_counter()
            indexes[name] = build(corpus)
            seconds = time.perf_counter() - start
            print(f"{name:>8}: indexed in {seconds:.1f} s, {disk_mib(indexes[name].path):.0f} MiB with the texts")
        ways = {name: lambda query, index=index: index.search(query, TOP_K) for name, index in indexes.items()}
        if with_stop_words:
            ways["sqlite, stop words kept"] = lambda q: indexes["sqlite"].match(fts_query(q, frozenset()), TOP_K)
        results = ask(ways, queries)
        for index in indexes.values():
            index.close()
    for way, r in results.items():
        print(f"{way}: p50 {r['p50']:.2f} ms, p95 {r['p95']:.2f} ms, max {r['max']:.1f} ms, hit@{TOP_K} {r['hit']:.3f}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20,000 passages and 100 queries, under a minute")
    args = parser.parse_args()
    sizes, num_queries = ([20_000], 100) if args.quick else ([20_000, 200_000, 1_000_000], 200)
    for num_passages in sizes:
        results = measure(num_passages, num_queries, with_stop_words=num_passages == sizes[0])
    ours, baseline = results["tantivy"]["p50"], results["sqlite"]["p50"]
    result = {"name": "search_local", "ratio": baseline / ours, "ours": ours, "baseline": baseline, "unit": "ms"}
    hit_rates = {"hit": results["tantivy"]["hit"], "hit_baseline": results["sqlite"]["hit"]}
    print(json.dumps({**result, **hit_rates, "passages": sizes[-1]}))


if __name__ == "__main__":
    main()
