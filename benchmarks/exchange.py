"""The exchange between ranks: CPU seconds and bytes of a rank, from its scored groups to the trainer's rows.

    python benchmarks/exchange.py [--quick] [--ranks 8]

Baseline: pickles of the groups as sampled, with Python lists of numbers per token. Ours: arrays (arpo/engine/team.py).
A process does the work of a rank, without a network. Baseline and ours take turns, and medians are compared.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arpo.batch import row_of
from arpo.engine.team import compact
from arpo.trajectory import Group
from benchmarks.dumps import make_groups

ROUNDS = 3


def sampled(num_groups: int) -> list[Group]:
    """Make groups. Their logprobs are float32 numbers, like an engine's."""
    groups = make_groups(num_groups, 16, 4096)
    for group in groups:
        group.prompt = replace(group.prompt, token_ids=tuple(range(200)))
        for t in group.trajectories:
            t.rollout_logprobs = array("f", t.rollout_logprobs).tolist()
            t.segments = [(t.text[:-1], True), (t.text[-1:], False)]
    return groups


def bytes_exchanged(groups: list[Group], form: Callable[[Group], Group], num_ranks: int) -> int:
    """Exchange the groups in this form, and return the bytes that a rank receives. All ranks have equally many."""
    sent = pickle.dumps([form(group) for group in groups])
    for _ in range(num_ranks):
        for group in pickle.loads(sent):
            for t in group.trajectories:
                row_of(group, t)
    return num_ranks * len(sent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="an eighth of the prompts")
    args = parser.parse_args()
    num_prompts = 16 if args.quick else 128
    groups = sampled(num_prompts // args.ranks)
    forms: dict[str, Callable[[Group], Group]] = {"lists": lambda group: group, "arrays": compact}
    runs: dict[str, list[tuple[int, float]]] = {name: [] for name in forms}
    for _ in range(ROUNDS):
        for name, form in forms.items():
            started = time.process_time()
            num_bytes = bytes_exchanged(groups, form, args.ranks)
            runs[name].append((num_bytes, time.process_time() - started))
    size = {name: median(num_bytes for num_bytes, _ in pairs) for name, pairs in runs.items()}
    cpu_s = {name: median(seconds for _, seconds in pairs) for name, pairs in runs.items()}
    print(f"{num_prompts} prompts x 16 x 4,096 tokens on {args.ranks} ranks")
    for name in runs:
        print(f"{name}: {size[name] / 1e6:.1f} MB, {cpu_s[name]:.2f} CPU s in each rank")
    result = {"name": "exchange", "ratio": cpu_s["lists"] / cpu_s["arrays"], "ours": cpu_s["arrays"]}
    result |= {"baseline": cpu_s["lists"], "unit": "CPU s", "bytes_ratio": size["lists"] / size["arrays"]}
    print(json.dumps(result | {"mb": size["arrays"] / 1e6, "baseline_mb": size["lists"] / 1e6}))


if __name__ == "__main__":
    main()
