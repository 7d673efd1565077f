"""Carried groups on real ranks: who ends a step; whole runs of train_rl.py with vLLM, and how they go on."""

import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.cut_rollout import CutEngine, make_punctual, sampler_with, saved, train
from helpers.fakes import EchoTool
from helpers.files import read_jsonl
from helpers.kill import run_until_killed
from helpers.ranks import run_ranks, script_on_ranks, wait_for_all
from helpers.runs import differing
from helpers.scripted_rollout import ANSWER, prompt
from helpers.toy_run import build_toy_world

from arpo.log import read_metrics
from arpo.options import BranchingConfig, RolloutConfig
from arpo.sampling.carried_state import restore
from arpo.sampling.carry_over import CarryOver

NONE = BranchingConfig(selector="none", num_initial_rollouts=2)
CFG = RolloutConfig(
    group_size=2, max_response_tokens=600, max_result_tokens=200, answer_reserve_tokens=60, carry_over=1
)


def uneven(prompt_id: str, path: str, turn: int) -> str:
    """Every fifth prompt is ten times as long as the others, and some call a tool."""
    number = int(prompt_id[1:])
    if turn == 0 and number % 3 == 0:
        return "<think>t</think><search>q</search>"
    return "<think>" + "slow " * (80 if number % 5 == 1 else 8) + "</think>" + ANSWER


def scripted_steps(ranks, dispatch: str, folder: str, first: int, last: int) -> list[list[str]]:
    """Each step's prompts; rank 1 has the slower engine."""
    cfg = replace(CFG, dispatch=dispatch)
    carry = CarryOver(sampler_with(ranks, uneven, [EchoTool("search", "found", jitter_s=0.01)], cfg, NONE), 4)
    prompts = [prompt(f"p{i}") for i in range(24)]

    class Slower(CutEngine):
        def step(self):
            time.sleep(0.004 * ranks.rank)
            return super().step()

    carry.sampler.engine.__class__ = Slower
    restore(carry, sorted(Path(folder).glob("*.gz")), prompts)
    try:
        steps = train(carry, prompts, first, last, 6, num_drawn=carry.num_drawn)
        for step, groups in enumerate(steps, first):
            for t in (t for group in groups for t in group.trajectories):
                t.check()
                assert step - 1 <= t.versions[0][1] <= t.versions[-1][1] <= step
        ranks.barrier()  # all have read what is overwritten now
        saved(carry, Path(folder))
    finally:
        carry.sampler.tools.close()
    return [[group.prompt.prompt_id for group in groups] for groups in steps]


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["fixed", "pull"])
def test_ranks_end_a_step_together_and_go_on_as_one_rank(dispatch, tmp_path):
    """Four steps on two ranks of unequal speed, the last two on one rank, to which all that is unfinished is dealt."""
    one, other = run_ranks(2, scripted_steps, dispatch, str(tmp_path), 1, 4)
    assert one == other and [len(step) for step in one] == [4] * 4
    assert len(list(tmp_path.glob("*.gz"))) == 2
    [rest] = run_ranks(1, scripted_steps, dispatch, str(tmp_path), 5, 6)
    trained = [name for step in one + rest for name in step]
    assert sorted(trained) == sorted(f"p{i}" for i in range(24))


# ---- whole runs

CARRIES = [
    "--rollout.carry_over", "1", "--loss.rollout_correction", "tis", "--engine.max_num_seqs", "8",
    "--rollout.max_response_tokens", "40",
    "--run.num_steps", "6", "--run.validate_every", "3", "--run.save_every", "1",
    "--run.keep_checkpoints", "9", "--run.dump_every", "1",
]  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return build_toy_world(tmp_path_factory.mktemp("world"))


def argv_of(world: Path, name: str, *flags: str) -> list[str]:
    return [str(world / "config.yaml"), *CARRIES, "--run.name", name, *flags]


def run(world: Path, name: str, *flags: str, ranks: int = 2, prepare=None) -> Path:
    argv = argv_of(world, name, *flags)
    with script_on_ranks("train_rl.py", *argv, ranks=ranks, prepare=prepare) as (processes, output):
        assert wait_for_all(processes, 30) == 0, output.read_text()[-6000:]
    return world / "runs" / name


def check_steps(folder: Path) -> None:
    rows = [row for row in read_metrics(folder) if row["step"] > 0]
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert sum(row["carry_over/groups"] for row in rows) > 4 and rows[0]["carry_over/groups"] == 0
    assert {row["carry_over/staleness_max"] for row in rows} == {0.0, 1.0}
    assert all(0 <= row["carry_over/staleness"] <= 1 for row in rows)  # 1 where a busy rank begins nothing anew
    # what an older policy sampled has its logprobs, and the loss the trainer's of before the update
    fresh, stale = ([row["mismatch/abs"] for row in rows if (row["carry_over/staleness"] > 0) == x] for x in (0, 1))
    assert max(fresh) < 1e-4 < max(stale)  # of a step with one old token it may be anything
    assert all("mismatch/truncated_share" in row for row in rows)
    drawn = []
    for step in range(1, 7):
        trajectories = read_jsonl(folder / "trajectories" / f"step_{step:06d}.jsonl.gz")
        assert len(trajectories) == 4 * 8
        drawn += [t["prompt_id"] for t in trajectories][::8]  # at the border of two epochs one may come twice in a step
        for t in trajectories:
            assert t["versions"][0][0] == 0 and {version for _, version in t["versions"]} <= {step - 1, step}
    assert len(drawn) == 24 and all(drawn.count(name) in (1, 2) for name in drawn)  # 16 prompts: an epoch and a half


@pytest.mark.slow
def test_two_ranks_carry_groups_and_one_rank_goes_on_with_them(world):
    folder = run(world, "pull", "--rollout.dispatch", "pull")
    check_steps(folder)
    files = [sorted(path.name for path in c.glob("carried_*")) for c in sorted((folder / "checkpoints").glob("step_*"))]
    assert files == [["carried_00000.json.gz", "carried_00001.json.gz"]] * 6
    for checkpoint in (folder / "checkpoints").glob("step_*"):  # as if the run had died after its third save
        if int(checkpoint.name[5:]) > 3:
            shutil.rmtree(checkpoint)
    run(world, "pull", "--rollout.dispatch", "pull", ranks=1)
    check_steps(folder)


KILLS = [  # each start goes on behind the step before the kill
    ("arpo.sampling.carry_over:CarryOver._next_number", 6),
    ("arpo.sampling.carry_over:CarryOver.exchange", 2),
    ("arpo.sampling.carry_over:CarryOver.end", 1),
    ("arpo.sampling.rollouts:state_of", 2),
    ("arpo.checkpoint.manifest:write", 2),
    ("arpo.sampling.carried_state:_add_group", 1),
    ("arpo.sampling.carry_over:CarryOver.on_finished", 2),
]


@pytest.mark.slow
def test_a_run_that_is_killed_wherever_it_carries_groups_ends_as_the_one_that_never_was(world):
    """With AEPO's budget of roots, which belongs to what is carried too."""
    aepo = ("--branching.selector", "aepo", "--branching.entropy_tokens", "4", "--branching.dynamic_budget", "True")
    whole = run(world, "whole", *aepo, ranks=1, prepare=make_punctual)
    check_steps(whole)
    for place, call in KILLS:
        argv = argv_of(world, "killed", *aepo)
        run_until_killed((place, call, 0), "train_rl.py", *argv, ranks=1, prepare=make_punctual)
    assert differing(whole, run(world, "killed", *aepo, ranks=1, prepare=make_punctual)) == []
