"""Validation during a run: when it comes, and that it changes nothing of what is trained on."""

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.cut_rollout import plain, random_tree
from helpers.fakes import EchoTool
from helpers.files import read_jsonl
from helpers.scripted_rollout import prompt
from helpers.stateful import ForkedNotes, Notes, shared_texts

from arpo.config.sections import RunConfig
from arpo.data import PromptOrder
from arpo.errors import UserError
from arpo.log import Console, RunLog, read_metrics
from arpo.options import AdvantageConfig, BranchingConfig, RolloutConfig
from arpo.ranks import Timers
from arpo.sampling import Rollouts
from arpo.trajectory import Group

CFG = RolloutConfig(
    group_size=6, max_response_tokens=900, max_result_tokens=200, answer_reserve_tokens=60, max_tool_calls=4
)
BRANCHES = BranchingConfig(num_initial_rollouts=2, weight=1.0, entropy_tokens=6)
PROMPTS = [prompt(f"p{i}") for i in range(12)]
KEEP, RESAMPLE = AdvantageConfig(), AdvantageConfig(dead_groups="resample", max_resample=1)
PULL = replace(CFG, dispatch="pull")
WAYS = {
    "dealt": (CFG, KEEP, EchoTool),
    "dealt, with sessions": (CFG, KEEP, Notes),
    "pulled": (PULL, KEEP, ForkedNotes),
    "refilled": (PULL, RESAMPLE, Notes),
    "carried": (replace(CFG, carry_over=1), KEEP, EchoTool),
    "carried, with sessions": (replace(CFG, carry_over=1), KEEP, Notes),
    "carried, with forked sessions": (replace(CFG, carry_over=1), KEEP, ForkedNotes),
}


def score(groups: list[Group]) -> None:
    for t in (t for group in groups for t in group.trajectories):
        t.reward = float(len(t.token_ids) % 2)
        t.reward_parts = {"accuracy": t.reward}


def steps(sampler_with, folder: Path, cfg: RolloutConfig, advantage: AdvantageConfig, tool, every: int) -> tuple:
    """Three steps, with a validation on questions that they sample too. Returns what is trained on."""
    sampler = sampler_with(random_tree, [tool], cfg, BRANCHES, score=score)
    log = RunLog(folder, RunConfig(), is_main=True)
    rollouts = Rollouts(sampler, PromptOrder(len(PROMPTS), 4, 0, option="n"), PROMPTS, advantage, num_steps=3)
    groups = []
    rollouts.validate_on(PROMPTS[:5], log, RunConfig(validate_every=every), done_steps=0)
    asked = sampler.engine.submitted
    assert bool(asked) == bool(every) and all(spec.temperature == 0 for *_, spec in asked)
    # under carry_over too, as a validation is never cut
    assert {spec.num_chunk_tokens for *_, spec in asked} <= {BRANCHES.entropy_tokens - 1}
    for step in range(1, 4):
        sampled = rollouts.next(step, Timers()).sampled
        groups.append(plain(sampled))
        for t in (t for group in sampled for t in group.trajectories if isinstance(tool, Notes)):
            assert [call.result for call in t.tool_calls] == shared_texts(t.tool_calls)  # of its own session
        assert sampler.tools.num_pending == sampler.engine.num_running == 0
        if values := rollouts.validate_if_due(step, Timers()):
            log.scalars(step, values)
    log.close()
    return groups, rollouts


@pytest.mark.parametrize(
    ("target", "last_step"), [(None, 3), (0.0, 2), (1.0, 3)], ids=["no target", "reached at once", "never reached"]
)
def test_a_run_ends_at_the_first_validation_that_is_good_enough(sampler_with, tmp_path, capsys, target, last_step):
    """A log file shows the progress of the one before the first step, which belongs to none."""
    sampler = sampler_with(random_tree, [EchoTool("search")], CFG, BRANCHES, score=score)
    sampler = replace(sampler, log=Console(is_main=True))
    log = RunLog(tmp_path, RunConfig(), is_main=True)
    rollouts = Rollouts(sampler, PromptOrder(len(PROMPTS), 4, 0, option="n"), PROMPTS, KEEP, num_steps=3)
    run = RunConfig(validate_every=2, stop_at_accuracy=target)
    rollouts.validate_on(PROMPTS[:5], log, run, done_steps=0)  # what is good from the start ends no run
    for step in range(1, 4):
        rollouts.next(step, Timers())
        rollouts.validate_if_due(step, Timers())
        if rollouts.must_stop or step == 3:
            break
    rollouts.raise_if_broken()
    log.close()
    assert step == last_step and rollouts.must_stop == (target == 0.0)
    assert capsys.readouterr().out.count("validation 5/5") == 1


def test_a_target_that_the_reward_cannot_reach_ends_the_run_before_its_first_step(sampler_with, tmp_path):
    """NeMo-RL #3404: a metric that a validation does not report. The run went on to its last step."""

    def without_accuracy(groups):
        score(groups)
        for t in (t for group in groups for t in group.trajectories):
            t.reward_parts = {}

    sampler = sampler_with(random_tree, [EchoTool("search")], CFG, BRANCHES, score=without_accuracy)
    rollouts = Rollouts(sampler, PromptOrder(len(PROMPTS), 4, 0, option="n"), PROMPTS, KEEP, num_steps=3)
    log = RunLog(tmp_path, RunConfig(), is_main=True)
    with pytest.raises(UserError, match=r"^run\.stop_at_accuracy=0\.5 is never reached: the reward has no accuracy"):
        rollouts.validate_on(PROMPTS[:5], log, RunConfig(stop_at_accuracy=0.5), done_steps=0)
    log.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_validation_is_the_same_each_time_and_changes_nothing_of_what_is_trained_on(sampler_with, tmp_path, way):
    """Same prompts, same names of trajectories; those that are carried may have all sessions that the tool can have."""
    cfg, advantage, kind = WAYS[way]
    results = {}
    for every in (0, 2):
        tool = EchoTool("search", "found", jitter_s=0.002) if kind is EchoTool else kind(max_sessions=3, jitter_s=0.002)
        results[every], rollouts = steps(sampler_with, tmp_path / str(every), cfg, advantage, tool, every)
        assert not rollouts.sampler.tools.sessions.records() and not (rollouts.carry and rollouts.carry.carried)
        assert kind is EchoTool or 0 == tool.num_open < tool.most_open <= tool.max_sessions
    if not cfg.carry_over:  # where the engine's load decides which group is whole first
        assert results[0] == results[2]
    rows = read_metrics(tmp_path / "2")
    assert [row["step"] for row in rows] == [0, 2, 3]  # before the first step, when due, and after the last one
    assert len({row["valid/accuracy"] for row in rows}) == 1  # nothing was learnt: the answers are the first ones
    for step in (0, 2, 3):
        found = read_jsonl(tmp_path / "2" / f"trajectories/valid_{step:06d}.jsonl.gz")
        assert [row["prompt_id"] for row in found] == ["p0", "p1", "p2", "p3", "p4"]
