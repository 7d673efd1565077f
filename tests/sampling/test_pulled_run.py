"""Training under rollout.dispatch=pull: the numbers of a run do not depend on who sampled what, also after a cut."""

import pytest
from helpers.toy_run import build_toy_world, dumped, train, train_and_kill

from arpo.log import read_metrics

# lr: 1e-2 makes of rounding, which ranks do in another order, another token
SIZES = ("--run.num_steps", "4", "--run.validate_every", "0", "--run.save_every", "1", "--run.dump_every", "1",
         "--data.valid", "", "--rollout.group_size", "4", "--branching.num_initial_rollouts", "3",
         "--engine.max_num_seqs", "6", "--optim.lr", "1e-3")  # fmt: skip
PULL = ("--rollout.dispatch", "pull")
REFILL = ("--advantage.dead_groups", "resample")
ALIKE = ("reward/mean", "tokens/sampled", "response/tokens", "group/mixed_share")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return build_toy_world(tmp_path_factory.mktemp("world"))


def hits(world) -> tuple[str, str]:
    return "--reward.file", f"{world}/reward.py:compute_hit"


def run(world, name: str, *flags: str, ranks: int = 2) -> list[dict]:
    return train(world, name, *SIZES, *hits(world), *flags, ranks=ranks)


@pytest.fixture(scope="module")
def refilled(world) -> list[dict]:
    return run(world, "refilled", *PULL, *REFILL)


def assert_alike(world, one: str, other: str, *extra: str) -> None:
    """The first step, whose policy is the same to the bit, has the same tokens; all have the same numbers."""
    rows, others = (dumped(world, name, step=1) for name in (one, other))
    for key in ("prompt_id", "trajectory_id", "token_ids", "reward", "advantage"):
        assert [row[key] for row in rows] == [row[key] for row in others], key
    names = (*ALIKE, *extra)
    for a, b in zip(read_metrics(world / "runs" / one), read_metrics(world / "runs" / other), strict=True):
        assert [a[name] for name in names] == pytest.approx([b[name] for name in names], rel=1e-4)


@pytest.mark.slow
def test_a_refilled_run_is_the_same_on_one_rank(world, refilled):
    run(world, "alone", *PULL, *REFILL, ranks=1)
    assert_alike(world, "refilled", "alone", "group/resampled_prompts")
    assert any(row["group/resampled_prompts"] > 0 for row in refilled)
    assert all("group/cut_off" in row for row in refilled)


@pytest.mark.slow
def test_a_run_that_is_killed_at_its_queue_has_the_numbers_of_one_that_never_was(world, refilled):
    places = [
        ("pull", "arpo.sampling.sources:OneRollout.pull", 2, 1),
        ("verdict on a group", "arpo.sampling.sources:Refilled.poll", 4, 0),
        ("end of a step's queue", "arpo.sampling.sources:Refilled.delete_keys", 2, 0),
    ]
    assert len(train_and_kill(world, "killed", *SIZES, *hits(world), *PULL, *REFILL, places=places)) == len(refilled)
    assert_alike(world, "refilled", "killed", "group/resampled_prompts")
