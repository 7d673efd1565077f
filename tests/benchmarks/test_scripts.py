"""Every benchmark, once with --quick: it ends well, and its last line is its result."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RUN_BY_THE_KIT = {"gpu_report", "update_mfu", "attention_backends", "optimizer_step"}
"""test_gpu_report.py runs the kit, and the kit runs these."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({path.stem for path in BENCHMARKS.glob("*.py")} - RUN_BY_THE_KIT))
def test_a_quick_run_ends_with_its_result(name):
    command = [sys.executable, BENCHMARKS / f"{name}.py", "--quick"]
    done = subprocess.run(command, cwd=BENCHMARKS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    last = done.stdout.splitlines()[-1]
    if last.startswith("skipped: "):
        pytest.skip(last.removeprefix("skipped: "))
    assert json.loads(last)["name"] == name
