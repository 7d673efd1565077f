"""benchmarks/lora_bf16.py: its ways to hand adapters to the engine, on a tiny model with a real vLLM."""

import json
import subprocess
import sys

import pytest
import torch
from helpers.edits import ROOT

from benchmarks.lora_bf16 import is_sum, stochastically_rounded


def test_stochastic_rounding_is_right_on_average_and_never_off_by_a_whole_step():
    generator = torch.Generator().manual_seed(0)
    value, step = 1.0 + 0.3 * 2**-7, 2**-7  # bfloat16 has 1 and 1 + 2^-7
    rounded = stochastically_rounded(torch.full((100_000,), value), generator).float()
    assert {*rounded.tolist()} == {1.0, 1.0 + step}
    assert rounded.mean().item() == pytest.approx(value, abs=0.01 * step)
    negative = stochastically_rounded(torch.full((100_000,), -value), generator).float()
    assert negative.mean().item() == pytest.approx(-value, abs=0.01 * step)


def test_a_small_change_is_lost_to_the_nearest_and_exact_weights_stay_as_they_are():
    """NVIDIA-NeMo/RL#3696, vllm-project/vllm#48297: while the change is small, W + s B A in bfloat16 is W."""
    weight = torch.randn(1000, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    generator = torch.Generator().manual_seed(0)
    assert torch.equal(stochastically_rounded(weight, generator).float(), weight)
    merged = weight * (1 + 2**-10)  # a quarter of bfloat16's step or less
    assert torch.equal(merged.bfloat16().float(), weight)
    assert not torch.equal(stochastically_rounded(merged, generator).float(), weight)


@pytest.mark.parametrize(
    ("response", "score"),
    [("15", 1.0), ("It is 15.", 1.0), ("14", 0.5), ("14, or 15", 0.0), ("fifteen", 0.0), ("15" + " ." * 20, 0.0)],
)
def test_a_short_response_with_one_number_counts(response, score):
    assert is_sum("", response, "15", {})["score"] == score


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_arm_hands_the_adapters_to_the_engine_and_a_second_call_runs_none_of_them_again(tiny_model_dir, tmp_path):
    """At this rate the change is far above bfloat16's steps, so that every arm's engine must show all of it.

    The two other arms, `nearest` and `float32`, are `stochastic` less the noise and with another type.
    """
    arms = ["merged", "stochastic", "unmerged"]
    command = [sys.executable, f"{ROOT}/benchmarks/lora_bf16.py", "--model", str(tiny_model_dir), "--arms", *arms]
    command += ["--out", str(tmp_path), "--steps", "3", "--lr", "1e-2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert [*result["arms"]] == arms and result["ratio"] == result["baseline"] / result["ours"]
    for arm, values in result["arms"].items():
        assert 0.9 < values["seen early"] < 1.1, (arm, values)
    again = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert json.loads(again.stdout.splitlines()[-1]) == result and "step 1/" not in again.stdout
