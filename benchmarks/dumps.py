"""Size and time of a trajectory dump, and how much writing it slows down the run.

    python benchmarks/dumps.py [--quick]

Writes a step of random trajectories twice. First as plain JSON lines, while the run waits. Then with arpo.log.dumps,
while a loop of Python runs beside it (like an engine's work between two kernels). Prints the ratios.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arpo.log.dumps import SUFFIX, DumpWriter
from arpo.trajectory import Group, Prompt, Trajectory, Turn

WORDS = ("the", "of", "and", "to", "in", "is", "that", "result", "search", "python", "answer", "number", "year", "city")


def make_groups(num_groups: int, group_size: int, num_tokens: int) -> list[Group]:
    rng = random.Random(0)
    groups = []
    for g in range(num_groups):
        prompt = Prompt(f"q-{g}", [{"role": "user", "content": "Who?"}], ["a"])
        trajectories = []
        for i in range(group_size):
            pieces = [" " + rng.choice(WORDS) for _ in range(num_tokens)]
            text = "".join(pieces)
            token_ids = [rng.randrange(150_000) for _ in range(num_tokens)]
            logprobs = [-rng.random() for _ in range(num_tokens)]
            trajectories.append(
                Trajectory(
                    prompt.prompt_id,
                    str(i),
                    token_ids=token_ids,
                    loss_mask=[1] * num_tokens,
                    rollout_logprobs=logprobs,
                    turns=[Turn(0, num_tokens, num_tokens)],
                    segments=[(text, True)],
                    text=text,
                    token_chars=list(map(len, pieces)),
                    reward=1.0,
                )
            )
        groups.append(Group(prompt, trajectories))
    return groups


def busy_loop() -> float:
    """Return the seconds of a fixed amount of Python."""
    started = time.perf_counter()
    total = 0
    for i in range(4_000_000):
        total += i & 3
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the trajectories")
    args = parser.parse_args()
    groups = make_groups(12 if args.quick else 128, 16, 1200)
    num_tokens = sum(len(t.token_ids) for group in groups for t in group.trajectories)
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "plain.jsonl"
        started = time.perf_counter()
        with plain.open("w") as file:
            for group in groups:
                for trajectory in group.trajectories:
                    file.write(json.dumps(trajectory.to_dict()) + "\n")
        plain_s = time.perf_counter() - started
        alone_s = busy_loop()
        writer = DumpWriter(Path(folder) / "trajectories")
        started = time.perf_counter()
        writer.write(1, groups, "step")
        handed_over_s = time.perf_counter() - started
        beside_s = busy_loop()
        writer.close()
        written_s = time.perf_counter() - started
        dump = Path(folder) / "trajectories" / f"step_000001{SUFFIX}"
        with gzip.open(dump) as file:
            assert sum(1 for _ in file) == sum(len(group.trajectories) for group in groups)
        plain_bytes = plain.stat().st_size
        dump_bytes = dump.stat().st_size
    print(f"{num_tokens:,} tokens in {sum(len(group.trajectories) for group in groups):,} trajectories")
    for name, size, waits_s in (("plain", plain_bytes, plain_s), ("arpo.log.dumps", dump_bytes, handed_over_s)):
        print(f"{name}: {size / num_tokens:.1f} bytes per token, the run waits {waits_s:.4f} s")
    print(f"written in {written_s:.2f} s; Python beside it takes {beside_s:.2f} s, alone {alone_s:.2f} s")
    result = {
        "name": "dumps",
        "ratio": plain_bytes / dump_bytes,
        "ours": dump_bytes / num_tokens,
        "baseline": plain_bytes / num_tokens,
        "unit": "bytes per token",
        "slows_python": beside_s / alone_s,
        "written_s": written_s,
        "plain_s": plain_s,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
