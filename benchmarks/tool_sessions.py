"""256 notebooks at once: open, three cells, a copy for a branch, a cell in the copy, close; against fresh interpreters.

    python benchmarks/tool_sessions.py [--quick]

All three systems answer the same four calls of a trajectory, 8 calls at a time. Without sessions, a call must repeat
the code of the earlier calls that it needs. `baseline` does so in a fresh interpreter per call (without isolation),
`stateless` in the jail of the <python> tool. The cell in the copy must see the state at the time of the copy, although
its parent has continued. The ratio is baseline / ours in time per trajectory. Baseline and stateless run a part of the
trajectories, in turn with ours, so that other work on the machine slows all.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arpo.config.tools import PythonConfig
from arpo.tools.base import ToolContext
from arpo.tools.python import PythonTool
from extras.tools.notebook import Notebook, NotebookConfig, NotebookTool
from extras.tools.session_tool import CannotFork

NUM_SESSIONS = 256
CONCURRENCY = 8
CELLS = (
    "import numpy as np\ntotal = np.arange({n} + 3).sum()\nprint(total)",
    "squares = [i * i for i in range({n} % 7 + 3)]\nprint(total + sum(squares))",
    "squares.append(int(total))\nprint(len(squares))",
)
OF_COPY = "squares.append(0)\nprint(len(squares), total)"
SHARES = {"quick": (8, 1), "full": (64, 3)}
"""Trajectories of the baselines per round, and rounds."""


def expected(n: int) -> list[str]:
    """Return the outputs of the trajectory's four calls."""
    total = sum(range(n + 3))
    count = n % 7 + 3
    first = [str(total), str(total + sum(i * i for i in range(count))), str(count + 1)]
    return [*first, f"{count + 1} {total}"]  # the copy is made after the second cell


def codes(n: int) -> list[str]:
    """Return the code of each call without a session: the earlier cells that it needs, then its own."""
    cells = [cell.format(n=n) for cell in CELLS]
    quiet = [cell.rsplit("\n", 1)[0] for cell in cells]  # without the print
    return [
        cells[0],
        f"{quiet[0]}\n{cells[1]}",
        f"{quiet[0]}\n{quiet[1]}\n{cells[2]}",
        f"{quiet[0]}\n{quiet[1]}\n{OF_COPY}",
    ]


def fresh_interpreter(code: str) -> str:
    environment = {"PATH": os.defpath, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


async def trajectory(tool: NotebookTool, n: int, all_open: asyncio.Barrier, times: dict[str, list[float]]) -> None:
    """Run one trajectory and its branch. The second cell waits until all notebooks are open."""

    async def timed(name: str, work) -> object:
        started = time.perf_counter()
        result = await work
        times[name].append(1e3 * (time.perf_counter() - started))
        return result

    context = ToolContext("p", str(n), 0)
    cells = [cell.format(n=n) for cell in CELLS]
    session: Notebook = await tool.open(context)
    results = [await timed("open", tool.run(cells[0], context, session))]  # the process starts with the first cell
    await all_open.wait()
    results.append(await timed("cell", tool.run(cells[1], context, session)))
    try:
        copy = await timed("fork", tool.fork(session, context))
    except CannotFork:  # a tier without processes: the branch replays
        copy = await tool.open(context)
        for cell in cells[:2]:
            await tool.run(cell, context, copy)
    results.append(await timed("cell", tool.run(cells[2], context, session)))
    results.append(await timed("cell", tool.run(OF_COPY, context, copy)))
    await timed("close", tool.close(session))
    await tool.close(copy)
    assert [result.text for result in results] == expected(n), (n, results)


async def sessions(tool: NotebookTool, times: dict[str, list[float]]) -> float:
    """Return the seconds of all sessions."""
    barrier = asyncio.Barrier(NUM_SESSIONS)
    started = time.perf_counter()
    await asyncio.gather(*(trajectory(tool, n, barrier, times) for n in range(NUM_SESSIONS)))
    return time.perf_counter() - started


async def stateless(tool: PythonTool, count: int) -> float:
    """Return the seconds of `count` trajectories without sessions, in the jail."""

    async def one(n: int) -> None:
        results = [await tool.run(code) for code in codes(n)]
        assert [result.text for result in results] == expected(n), results

    started = time.perf_counter()
    await asyncio.gather(*(one(n) for n in range(count)))
    return time.perf_counter() - started


def fresh(count: int) -> float:
    """Return the seconds of `count` trajectories in fresh interpreters."""

    def one(n: int) -> None:
        assert [fresh_interpreter(code) for code in codes(n)] == expected(n)

    started = time.perf_counter()
    with ThreadPoolExecutor(CONCURRENCY) as threads:
        list(threads.map(one, range(count)))
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, under a minute")
    count, rounds = SHARES["quick" if parser.parse_args().quick else "full"]
    loop = asyncio.new_event_loop()
    limits = {"max_concurrent": CONCURRENCY, "wall_s": 120.0}  # patience: the machine may be busy
    notebook = NotebookTool(NotebookConfig(**limits, session_cpu_s=60.0))
    python = PythonTool(PythonConfig(**limits))
    per_trajectory: dict[str, list[float]] = {"ours": [], "stateless": [], "baseline": []}
    times: dict[str, list[float]] = {"open": [], "cell": [], "fork": [], "close": []}
    for _ in range(rounds):
        per_trajectory["ours"].append(loop.run_until_complete(sessions(notebook, times)) / NUM_SESSIONS)
        per_trajectory["stateless"].append(loop.run_until_complete(stateless(python, count)) / count)
        per_trajectory["baseline"].append(fresh(count) / count)
    tier = notebook.sandbox.tier
    for tool in (notebook, python):
        loop.run_until_complete(tool.aclose())
    loop.close()
    ms_of = {name: 1e3 * statistics.median(values) for name, values in per_trajectory.items()}
    print(f"tier {tier}, {os.cpu_count()} cores, {NUM_SESSIONS} notebooks open at once, {CONCURRENCY} calls at a time")
    for name, milliseconds in ms_of.items():
        print(f"{name:10} {milliseconds:7.1f} ms per trajectory of four calls")
    medians = {name: statistics.median(values) for name, values in times.items() if values}
    print("with the wait for a turn: " + ", ".join(f"{name} {value:.1f} ms" for name, value in medians.items()))
    result = {
        "name": "tool_sessions",
        "ratio": ms_of["baseline"] / ms_of["ours"],
        "ours": ms_of["ours"],
        "baseline": ms_of["baseline"],
        "unit": "ms",
        "stateless": ms_of["stateless"],
        "tier": tier,
        "stateless_ratio": ms_of["stateless"] / ms_of["ours"],
        "sessions": NUM_SESSIONS,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
