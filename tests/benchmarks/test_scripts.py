"""Every benchmark, once with --quick: it ends well, and its last line is its result.

The kit runs those for GPUs that start processes (test_gpu_report.py); lora_bf16 needs a model (test_lora_bf16.py).
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.ranks import script_on_ranks, wait_for_all

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NAMES = [
    *sorted({path.stem for path in BENCHMARKS.glob("*.py")} - {"gpu_report", "lora_bf16", "weight_sync"}),
    "gpu/decode_steps",
]

CHECKS = {
    "attention_backends": lambda result: result["auto"] == "sdpa" and result["difference"] < 1e-5,
    "optimizer_step": lambda result: result["numbers"] > 10**6,
    "rollout_streaming": lambda result: result["norms_ratio"] > 0,
    "update_mfu": lambda result: 0 < result["ratio"] < 1,
    "gpu/decode_steps": lambda result: result["step_ms_16"] > result["ours_ms_16"] > 0,
    "gpu/colocated": lambda result: result["all_gather_gb_s"] > 0,
}
"""What a result must hold besides its name, of those that measure something right or wrong."""


def begin(rank: int) -> None:
    sys.path.insert(0, str(BENCHMARKS))
    torch._dynamo.config.disable = True  # compiling for each shape takes long on a CPU


def begin_without_launcher(rank: int) -> None:
    """It is a process as `python benchmarks/NAME.py` is, which only has its imports behind it."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
                 "TORCHELASTIC_USE_AGENT_STORE"):  # fmt: skip
        del os.environ[name]
    begin(rank)


def last_line(name: str, *flags: str, ranks: int, prepare: Callable[[int], None]) -> dict:
    with script_on_ranks(f"benchmarks/{name}.py", "--quick", *flags, ranks=ranks, prepare=prepare) as (processes, file):
        code, output = wait_for_all(processes, 30), file.read_text()
    assert code == 0, output[-6000:]
    last = [line for line in output.splitlines() if line.startswith(("{", "skipped: "))][-1]
    if last.startswith("skipped: "):
        pytest.skip(last.removeprefix("skipped: "))
    return json.loads(last)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_quick_run_ends_with_its_result(name):
    result = last_line(name, ranks=1, prepare=begin_without_launcher)
    assert result["name"] == Path(name).name and CHECKS.get(name, bool)(result), result


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, flags",
    [("update_mfu", ["--shape", "tiny", "--hsdp"]), ("gpu/colocated", ["--shape", "tiny"]), ("weight_sync", [])],
)
def test_what_takes_all_gpus_runs_on_two_ranks(name, flags):
    result = last_line(name, *flags, ranks=2, prepare=begin)
    assert result["ours"] > 0 and CHECKS.get(name, bool)(result), result
