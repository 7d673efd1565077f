"""Every benchmark, once with --quick: it ends well, and its last line is its result."""

import json
import os
import sys
from pathlib import Path

import pytest
from helpers.ranks import script_on_ranks, wait_for_all

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RUN_BY_THE_KIT = {"gpu_report", "update_mfu", "attention_backends", "optimizer_step"}
"""test_gpu_report.py runs the kit, and the kit runs these."""


def without_a_launcher(rank: int) -> None:
    """It is a process as `python benchmarks/NAME.py` is, which only has its imports behind it."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    sys.path.insert(0, str(BENCHMARKS))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({path.stem for path in BENCHMARKS.glob("*.py")} - RUN_BY_THE_KIT))
def test_a_quick_run_ends_with_its_result(name):
    script, prepare = f"benchmarks/{name}.py", without_a_launcher
    with script_on_ranks(script, "--quick", ranks=1, prepare=prepare) as (processes, file):
        code, output = wait_for_all(processes, 30), file.read_text()
    assert code == 0, output[-6000:]
    last = [line for line in output.splitlines() if line.startswith(("{", "skipped: "))][-1]
    if last.startswith("skipped: "):
        pytest.skip(last.removeprefix("skipped: "))
    assert json.loads(last)["name"] == name
