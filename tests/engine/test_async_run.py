"""The nearest thing to a GPU run: train_rl.py with asynchronous scheduling and the GPU's noise, on two CPU ranks."""

from pathlib import Path

import pytest
import torch
from helpers.async_engine import sample_and_schedule_as_on_a_gpu, sample_as_on_a_gpu
from helpers.models import searching_model
from helpers.ranks import script_on_ranks, wait_for_all
from helpers.runs import learnt
from helpers.toy_run import build_toy_world

from arpo.log import read_metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="pretends CUDA's streams"),
]
# lr: 1e-2 makes of rounding, which batches of other rows do otherwise, another token
FLAGS = ("--run.num_steps", "3", "--run.validate_every", "3", "--run.save_every", "2", "--optim.lr", "1e-3")
TIMING = ("tokens/prefilled", "tokens/cached", "tokens/prefix_cached_share", "group/cut_off")
"""They depend on what else is in flight when a result, or a step's last group, comes."""


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    folder = build_toy_world(tmp_path_factory.mktemp("world"))
    searching_model(folder / "model")
    return folder


def run(world: Path, name: str, prepare, *flags: str) -> Path:
    argv = (str(world / "config.yaml"), "--run.name", name, *FLAGS, *flags)
    with script_on_ranks("train_rl.py", *argv, prepare=prepare) as (processes, output):
        assert wait_for_all(processes, 30) == 0, output.read_text()[-6000:]
    return world / "runs" / name


@pytest.mark.parametrize(
    "flags",
    [
        ("--branching.selector", "arpo", "--branching.compat", "upstream"),  # which reads the top logprobs
        ("--rollout.dispatch", "pull", "--advantage.dead_groups", "resample"),
    ],
    ids=["dealt", "refilled"],
)
def test_asynchronous_scheduling_changes_no_number_of_a_run(world, flags):
    if "resample" in flags:
        flags = (*flags, "--reward.file", f"{world}/reward.py:compute_hit")
    name = flags[1]
    plain = learnt(run(world, name, sample_as_on_a_gpu, *flags))
    other = learnt(run(world, f"{name}_async", sample_and_schedule_as_on_a_gpu, *flags))
    assert len(plain) == len(other) >= 4 and plain[-1]["tools/all/calls"] > 0
    for a, b in zip(plain, other, strict=True):
        assert a.keys() == b.keys()
        different = {n: (a[n], b[n]) for n in a if n not in TIMING and a[n] != pytest.approx(b[n], rel=1e-4, abs=2e-5)}
        assert not different, different


def test_groups_are_carried_over_under_asynchronous_scheduling(world):
    """Which ones is a matter of time, so there is no run to compare with: what is sampled anew is the policy's."""
    flags = ("--rollout.carry_over", "1", "--loss.rollout_correction", "tis", "--rollout.dispatch", "pull")
    flags += ("--engine.max_num_seqs", "8", "--run.num_steps", "4")
    rows = [row for row in read_metrics(run(world, "carried", sample_and_schedule_as_on_a_gpu, *flags)) if row["step"]]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    fresh = [row["mismatch/abs"] for row in rows if row["carry_over/staleness"] == 0]
    assert fresh and max(fresh) < 1e-4
    assert sum(row["carry_over/groups"] for row in rows) > 2
    assert {row["carry_over/staleness_max"] for row in rows} == {0.0, 1.0}
