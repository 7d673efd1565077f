"""What leaving stop words out of queries saves in the local search: FTS5 with and without them, on one index.

    python benchmarks/search_local.py [--quick]

The corpus is drawn from a Zipf vocabulary, with stop words as frequent as in English prose. A query is some words of
one passage among stop words; `hit` is the share of queries whose ten best passages include that passage.
"""

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arpo.tools.bm25 import STOP_WORDS, Bm25Index, fts_query

TOP_K = 10


def write_corpus(path: Path, num_passages: int, rng: random.Random) -> list[list[str]]:
    """Passages of 40 stop words and 50 others; returns the others, per passage."""
    words = [f"word{i}" for i in range(50_000)]
    cumulated = list(itertools.accumulate(1 / (rank + 10) for rank in range(len(words))))
    stop_words = sorted(STOP_WORDS)
    contents = []
    with path.open("w") as file:
        for i in range(num_passages):
            content = rng.choices(words, cum_weights=cumulated, k=50)
            passage = content + rng.choices(stop_words, k=40)
            rng.shuffle(passage)
            file.write(json.dumps({"text": f"passage {i} " + " ".join(passage)}) + "\n")
            contents.append(content)
    return contents


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20,000 passages and 100 queries, under a minute")
    args = parser.parse_args()
    num_passages, num_queries = (20_000, 100) if args.quick else (100_000, 300)
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        contents = write_corpus(corpus, num_passages, rng)
        start = time.perf_counter()
        index = Bm25Index(corpus)
        index_s = time.perf_counter() - start
        ways = {"without": STOP_WORDS, "with": frozenset()}
        times_ms: dict[str, list[float]] = {way: [] for way in ways}
        hits = dict.fromkeys(ways, 0)
        for _ in range(num_queries):
            wanted = rng.randrange(num_passages)
            query = " ".join(rng.sample(contents[wanted], 6) + rng.sample(sorted(STOP_WORDS), 5))
            for way, stop_words in ways.items():  # in turns, so that both meet the same load and caches
                start = time.perf_counter()
                found = index.match(fts_query(query, stop_words), TOP_K)
                times_ms[way].append((time.perf_counter() - start) * 1000)
                hits[way] += any(text.startswith(f"passage {wanted} ") for text in found)
        index.close()
        index_mib = index.path.stat().st_size / 2**20
    median_ms = {way: statistics.median(times) for way, times in times_ms.items()}
    p95_ms = {way: statistics.quantiles(times, n=20)[-1] for way, times in times_ms.items()}
    print(f"{num_passages} passages indexed in {index_s:.1f} s, {index_mib:.0f} MiB with their texts")
    for way in ways:
        speed = f"median {median_ms[way]:.1f} ms, p95 {p95_ms[way]:.1f} ms"
        print(f"{way:>7} stop words: {speed}, hit {hits[way]}/{num_queries}")
    ours, baseline = median_ms["without"], median_ms["with"]
    result = {"name": "search_local", "ratio": baseline / ours, "ours": ours, "baseline": baseline, "unit": "ms"}
    hit_rates = {"hit": hits["without"] / num_queries, "hit_baseline": hits["with"] / num_queries}
    print(json.dumps({**result, **hit_rates, "passages": num_passages, "index_s": index_s, "index_mib": index_mib}))


if __name__ == "__main__":
    main()
