"""A loss or gradient that is not finite: one line that names step, mini-batch and rank, and a file that has it."""

import math
from pathlib import Path

import pytest
import torch
from helpers.models import build_tiny_model
from helpers.ranks import run_ranks, try_script
from helpers.sft_world import build_sft_world
from helpers.toy_run import build_toy_world
from helpers.updates import CASES, filled

from arpo.config.sections import ModelConfig
from arpo.errors import UserError
from arpo.log.nonfinite import reported_if_not_finite
from arpo.model import load_policy
from arpo.update import update_policy


def poisoned_update(ranks, model: str, run: str) -> str:
    """The line of an update with one bad advantage on rank 1."""
    cfg = ModelConfig(model, compute_dtype="float32", recompute_every_n_layers=0)
    policy = load_policy(cfg, ranks.mesh, device=torch.device("cpu"))
    case = "ppo, token_mean"
    micros = filled(ranks, policy, None, case, 64, 1)[0].micros
    if ranks.rank == 1:
        micros[0].advantages[0, 0] = math.nan
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    how = {"temperature": 0.9, "max_grad_norm": 1.0, "ranks": ranks, "is_first": False}
    with pytest.raises(UserError) as raised, reported_if_not_finite("step 3, mini-batch 2", micros, Path(run), ranks):
        update_policy(policy, optimizer, micros, CASES[case][1], **how)
    return str(raised.value)


def test_all_ranks_end_with_the_same_line_and_the_guilty_one_keeps_what_it_computed(tiny_model_dir, tmp_path):
    lines = run_ranks(2, poisoned_update, str(tiny_model_dir), str(tmp_path))
    start = "step 3, mini-batch 2: gradient norm is nan, the loss of rank 1 is not finite; "
    assert lines[0] == lines[1] and lines[0].startswith(start) and "\n" not in lines[0]
    [file] = (tmp_path / "nonfinite").iterdir()
    assert str(file) in lines[0]
    [bad] = [part for part in torch.load(file, weights_only=True) if not part["advantages"].isfinite().all()]
    assert {"input_ids", "targets", "loss_mask", "rollout_logprobs", "old_logprobs"} <= bad.keys()


def only_line(output: str) -> str:
    """The error, which must be the one thing that a run says of it."""
    [line] = [line for line in output.splitlines() if line.startswith("error")]
    assert "Traceback" not in output and "abort" not in output.lower() and "terminate" not in output.lower(), output
    return line


def test_a_fine_tuning_that_explodes_ends_with_one_line_and_code_2(tmp_path):
    world = build_sft_world(tmp_path)
    done = try_script("train_sft.py", str(world / "config.yaml"), "--optim.lr", "1e30")
    line = only_line(done.output)
    assert done.code == 2 and line.startswith("error: step 2: gradient norm is "), done.output[-3000:]
    assert "every loss is finite" in line  # RMSNorm makes small numbers of huge ones, but not of their gradients
    files = sorted(path.name for path in (world / "runs" / "sft" / "nonfinite").iterdir())
    assert files == ["step_2_rank_0.pt", "step_2_rank_1.pt"]


@pytest.mark.slow
def test_an_rl_run_that_explodes_ends_with_one_line_and_code_2(tmp_path):
    world = build_toy_world(tmp_path)
    build_tiny_model(world / "model")
    done = try_script("train_rl.py", str(world / "config.yaml"), "--optim.lr", "1e30", "--data.valid", "")
    line = only_line(done.output)
    assert done.code == 2 and line.startswith("error: step 1, mini-batch 2: gradient norm is "), done.output[-3000:]
    run = world / "runs" / "rl"
    assert list((run / "nonfinite").iterdir()) and (run / "trajectories" / "nonfinite_000001.jsonl.gz").exists()
