"""Slow-down of good calls by hostile calls in the same sandbox.

    python benchmarks/sandbox_noisy_neighbours.py [--quick]

One caller makes good calls (in turn a trivial call and a call with NumPy), first alone, then while hostile callers burn
CPU, fork, fill memory, write files and flood their output. ratio = p95 of the good calls alone / beside hostile calls.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arpo.config.tools import PythonConfig
from arpo.tools.python import PythonTool

GOOD = {"print(1 + 1)": "2", "import numpy\nprint(numpy.arange(9).sum())": "36"}
HOSTILE = [
    "while True: pass",
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "while True: print('x' * 1000)",
    "import os\nfor i in range(10**6): open(str(i), 'w').write('x' * 10000)",
    "import threading\nfor _ in range(1000): threading.Thread(target=lambda: sum(range(10**9)), daemon=True).start()",
]
NUM_HOSTILE = 6
CONFIG = PythonConfig(wall_s=3.0, memory_mib=256, max_concurrent=NUM_HOSTILE + 1)


def p95(values: list[float]) -> float:
    return sorted(values)[min(int(0.95 * len(values)), len(values) - 1)]


async def good_calls(tool: PythonTool, seconds: float) -> list[float]:
    """Return the milliseconds of each good call. Fails on a wrong answer."""
    times = []
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        for code, expected in GOOD.items():
            start = time.perf_counter()
            result = await tool.run(code)
            times.append(1e3 * (time.perf_counter() - start))
            assert result.text == expected, result
    return times


async def hostile_calls(tool: PythonTool, offset: int) -> None:
    while True:
        for i in range(len(HOSTILE)):
            result = await tool.run(HOSTILE[(offset + i) % len(HOSTILE)])
            assert not result.infra_error, result


async def measure(tool: PythonTool, seconds: float) -> tuple[list[float], list[float]]:
    alone = await good_calls(tool, seconds)
    neighbours = [asyncio.create_task(hostile_calls(tool, offset)) for offset in range(NUM_HOSTILE)]
    await asyncio.sleep(1.0)
    beside = await good_calls(tool, seconds)
    for neighbour in neighbours:
        neighbour.cancel()
    outcomes = await asyncio.gather(*neighbours, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes), outcomes
    await tool.aclose()
    return alone, beside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds each")
    args = parser.parse_args()
    tool = PythonTool(CONFIG)
    alone, beside = asyncio.run(measure(tool, seconds=2.0 if args.quick else 30.0))
    print(f"tier {tool.sandbox.tier}, {os.cpu_count()} cores, {NUM_HOSTILE} hostile callers")
    for name, values in (("alone", alone), ("beside", beside)):
        median = statistics.median(values)
        print(f"{name:7} median {median:7.2f} ms   p95 {p95(values):7.2f} ms   ({len(values)} calls)")
    ours = p95(beside)
    baseline = p95(alone)
    print(f"the p95 of good calls is {ours / baseline:.1f} times as long beside hostile ones")
    result = {"name": "sandbox_noisy_neighbours", "ratio": baseline / ours, "ours": ours, "baseline": baseline}
    print(json.dumps(result | {"unit": "ms", "restarts": tool.sandbox.num_restarts}))


if __name__ == "__main__":
    main()
