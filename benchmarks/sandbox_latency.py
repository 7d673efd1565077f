"""Time of a <python> call in the sandbox, against a fresh interpreter per call (without isolation).

    python benchmarks/sandbox_latency.py [--quick]

Three snippets: trivial, with NumPy, and with NumPy and SymPy (for the ratio). Sandbox and interpreter take turns, so
that other work on the machine slows both.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arpo.config.tools import PythonConfig
from arpo.tools.python import PythonTool

SNIPPETS = {
    "trivial": "print(1 + 1)",
    "numpy": "import numpy as np\nprint(np.arange(9).sum())",
    "numpy_sympy": "import numpy, sympy\nx = sympy.Symbol('x')\nprint(sympy.diff(x**3, x), numpy.arange(9).sum())",
}
CONCURRENCY = 8


def fresh_interpreter(code: str) -> str:
    environment = {"PATH": os.defpath, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def timed(action: Callable[[], str], expected: str) -> float:
    """Return the milliseconds of a call. Fails on a wrong answer."""
    start = time.perf_counter()
    text = action()
    milliseconds = 1e3 * (time.perf_counter() - start)
    assert text.strip() == expected, text
    return milliseconds


def measure(tool: PythonTool, loop: asyncio.AbstractEventLoop, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Return snippet -> "ours" or "baseline" -> milliseconds of each call, one call at a time."""
    times: dict[str, dict[str, list[float]]] = {}
    for name, code in SNIPPETS.items():
        expected = fresh_interpreter(code).strip()
        ways = {
            "ours": lambda code=code: loop.run_until_complete(tool.run(code)).text,
            "baseline": lambda code=code: fresh_interpreter(code),
        }
        times[name] = {way: [] for way in ways}
        for _ in range(repeats):
            for way, action in ways.items():
                times[name][way].append(timed(action, expected))
    return times


def calls_per_second(
    tool: PythonTool, loop: asyncio.AbstractEventLoop, code: str, num_calls: int
) -> tuple[float, float]:
    """Throughput at CONCURRENCY: (ours, baseline)."""

    async def ours() -> None:
        await asyncio.gather(*(tool.run(code) for _ in range(num_calls)))

    start = time.perf_counter()
    loop.run_until_complete(ours())
    middle = time.perf_counter()
    num_fresh = max(num_calls // 10, CONCURRENCY)
    with ThreadPoolExecutor(CONCURRENCY) as threads:
        list(threads.map(fresh_interpreter, [code] * num_fresh))
    return num_calls / (middle - start), num_fresh / (time.perf_counter() - middle)


def waiting_calls_s(loop: asyncio.AbstractEventLoop, num_calls: int) -> float:
    """Return the seconds of calls that sleep 0.3 s each, 64 at once. Without any overhead 256 calls take 1.2 s."""
    tool = PythonTool(PythonConfig(max_concurrent=64))

    async def run() -> float:
        start = time.perf_counter()
        results = await asyncio.gather(*(tool.run("import time\ntime.sleep(0.3)\nprint(1)") for _ in range(num_calls)))
        elapsed = time.perf_counter() - start
        assert all(result.ok for result in results)
        await tool.aclose()
        return elapsed

    return loop.run_until_complete(run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer calls, under a minute")
    args = parser.parse_args()
    loop = asyncio.new_event_loop()
    started = time.perf_counter()
    tool = PythonTool(PythonConfig(max_concurrent=CONCURRENCY))
    start_s = time.perf_counter() - started
    times = measure(tool, loop, repeats=2 if args.quick else 200)
    num_calls = 16 if args.quick else 1000
    per_s = {name: calls_per_second(tool, loop, SNIPPETS[name], num_calls) for name in ("numpy", "numpy_sympy")}
    tier = tool.sandbox.tier
    loop.run_until_complete(tool.aclose())
    num_waiting = 64 if args.quick else 256
    waiting_s = waiting_calls_s(loop, num_waiting)
    loop.close()

    print(f"tier {tier}, {os.cpu_count()} cores, host started and tested in {start_s:.2f} s")
    for name, ways in times.items():
        for way, values in ways.items():
            median = statistics.median(values)
            p95 = percentile(values, 0.95)
            print(f"{name:12} {way:9} median {median:7.2f} ms   p95 {p95:7.2f} ms   ({len(values)} calls)")
    for name, (ours_per_s, baseline_per_s) in per_s.items():
        rates = f"ours {ours_per_s:.0f} calls/s, baseline {baseline_per_s:.1f} calls/s"
        print(f"{name:12} {CONCURRENCY} at a time: {rates}; by core {ours_per_s / os.cpu_count():.0f} calls/s")
    print(f"{num_waiting} calls that wait 0.3 s, 64 at a time: {waiting_s:.2f} s")
    medians = {name: {way: statistics.median(values) for way, values in ways.items()} for name, ways in times.items()}
    ours = medians["numpy_sympy"]["ours"]
    baseline = medians["numpy_sympy"]["baseline"]
    trivial_ratio = medians["trivial"]["baseline"] / medians["trivial"]["ours"]
    ratio = baseline / ours
    print(f"a fresh interpreter takes {ratio:.1f} times as long ({trivial_ratio:.1f} times for the trivial snippet)")
    result = {"name": "sandbox_latency", "ratio": ratio, "ours": ours, "baseline": baseline, "unit": "ms"}
    ours_per_s, baseline_per_s = per_s["numpy_sympy"]
    more = {"trivial_ratio": trivial_ratio, "ours_per_s": ours_per_s, "baseline_per_s": baseline_per_s, "tier": tier}
    more |= {"trivial": medians["trivial"]["ours"], "numpy": medians["numpy"]["ours"]}
    more |= {"calls_per_s_per_core": per_s["numpy"][0] / os.cpu_count(), "waiting_s": waiting_s}
    print(json.dumps(result | more))


if __name__ == "__main__":
    main()
