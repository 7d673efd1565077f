"""Runs all benchmarks one after the other and writes the numbers to benchmarks/RESULTS.md.

    python benchmarks/shared/results.py [--quick] [--preliminary] [names ...]          (make results)

With names, only the named scripts run and replace their rows. `ratio` is baseline / ours: above 1 we are faster (or
smaller).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]
RESULTS = BENCHMARKS / "RESULTS.md"
EXTRAS = {
    "async_save": ("written_s", "gib"),
    "dumps": ("slows_python", "written_s", "plain_s"),
    "exchange": ("bytes_ratio", "mb", "baseline_mb"),
    "host_waits": (
        "row_us",
        "of_scheduler",
        "host_ms_512",
        "waits_grpo",
        "waits_aepo",
        "waits_critic",
        "limit_critic",
        "waits_engine_step",
    ),
    "mcp_overhead": ("http", "stdio_per_s", "http_per_s", "direct_per_s"),
    "head_memory": ("time_ratio",),
    "no_rank_waits": ("pull", "idle", "staleness", "refill_ratio", "pull_1024", "baseline_1024"),
    "real_model": ("rollout_ratio", "rollout_ratio_unread"),
    "rl_step_vs_trl": ("ratio_equal_lengths",),
    "rollout_streaming": ("ours_over_bound", "idle_share", "generate_ratio", "bare_ratio", "norms_ratio"),
    "sandbox_latency": ("trivial", "numpy", "calls_per_s_per_core", "waiting_s"),
    "weight_sync": ("cast", "gather", "packing", "over_gather", "over_gather_unpacked", "packing_pays_after"),
    "update_mfu": ("compile_ratio",),
    "optimizer_step": ("foreach_ratio",),
    "play_trace": (
        "ratio_instant_calls",
        "ratio_slow_engine",
        "ratio_7b",
        "grpo_ratio",
        "top_h_ratio",
        "decode_steps_ratio",
        "trained_ratio",
        "grpo_decoded_ratio",
        "grpo_trained_ratio",
        "grpo_calls_ratio",
        "baseline_waits",
        "published_reproduced",
        "published_predicted",
    ),
    "tree_training": (
        "token_ratio",
        "work_ratio",
        "unsplit_work_ratio",
        "gradient_difference",
        "contexts_ratio",
        "contexts_token_ratio",
    ),
}
"""Script -> further numbers of the last line for the column "more"."""
TIMEOUT_S = 3600
"""Limit for a script. no_rank_waits.py takes longest, about 20 minutes of a core."""
HEAD = """# Benchmarks

`make results` runs every script of this folder and rewrites this table; `make bench` only checks that they run
(--quick). `ratio` = baseline / ours, both measured in one run: above 1 we are faster (or smaller). What each script
compares is said at its top; the baselines of those far below 1 are bounds (mcp_overhead: the call without a server;
sandbox_noisy_neighbours: calls that are alone; update_mfu: one large matrix product; weight_sync: one memcpy of the
bytes). `scaling` is no speed: predicted / measured. `settings`: full, or quick (small sizes, one repeat). Preliminary:
other work shared the machine.

| benchmark | ratio | ours | baseline | unit | more | settings | date | hardware |
|---|---|---|---|---|---|---|---|---|
"""


def hardware() -> str:
    """Return the GPU or CPU, and torch's version."""
    cpu = next((line.split(":")[1].strip() for line in cpu_info() if line.startswith("model name")), platform.machine())
    gpu = subprocess.run(
        "nvidia-smi --query-gpu=name --format=csv,noheader", shell=True, capture_output=True, text=True
    )
    device = gpu.stdout.splitlines()[0] if gpu.returncode == 0 and gpu.stdout else f"{cpu}, {os.cpu_count()} cores"
    return f"{device}; torch {importlib.metadata.version('torch')}"


def cpu_info() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def run(script: Path, settings: str) -> str:
    """Run a script, print the output, and return the script's row of the table."""
    print(f"== {script.name}", flush=True)
    started = time.perf_counter()
    command = [sys.executable, str(script), *(["--quick"] if settings.startswith("quick") else [])]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
        output = done.stdout.strip().splitlines() if done.returncode == 0 else []
        failure = (done.stderr.strip() or "no output").splitlines()[-1]
    except subprocess.TimeoutExpired:
        output = []
        failure = f"not done after {TIMEOUT_S} s"
    print("\n".join(output or [failure]), f"\n({time.perf_counter() - started:.0f} s)", flush=True)
    return row(script.stem, output[-1] if output else failure, settings)


def row(name: str, last_line: str, settings: str) -> str:
    """Return a row of the table. If the last line is not a JSON object, the line is an error message for the row."""
    today = datetime.date.today().isoformat()
    if not last_line.startswith("{"):
        return f"| {name} | none | | | | {last_line} | {settings} | {today} | {hardware()} |"
    r = json.loads(last_line)
    more = ", ".join(f"{extra} {r[extra]:.3g}" for extra in EXTRAS.get(name, ()) if extra in r)
    numbers = f"{r['ratio']:.2f} | {r['ours']:.4g} | {r['baseline']:.4g} | {r['unit']}"
    return f"| {name} | {numbers} | {more} | {settings} | {today} | {hardware()} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="scripts without .py; none = all")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--preliminary", action="store_true", help="mark the rows so: the machine is not quiet")
    args = parser.parse_args()
    # gpu_report runs benchmarks itself
    scripts = {path.stem: path for path in sorted(BENCHMARKS.glob("*.py")) if path.stem != "gpu_report"}
    unknown = [name for name in args.names if name not in scripts]
    if unknown:
        sys.exit(f"no benchmark {', '.join(unknown)}; there are: {', '.join(scripts)}")
    settings = ("quick" if args.quick else "full") + (", preliminary" if args.preliminary else "")
    kept = [line for line in RESULTS.read_text().splitlines() if line.startswith("|")][2:] if RESULTS.exists() else []
    rows = {line.split("|")[1].strip(): line for line in kept}
    for name in args.names or scripts:
        rows[name] = run(scripts[name], settings)
        table = [rows[name] for name in scripts if name in rows]
        RESULTS.write_text(HEAD + "\n".join(table) + "\n")


if __name__ == "__main__":
    main()
