"""The rollouts of a run: whatever the source, no drawn prompt is lost.

Its group is in exactly one step, or it is drawn again. A step in which tools or rewards failed is not trained on.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
from helpers.cut_rollout import random_tree
from helpers.fakes import EchoTool
from helpers.orders import indices
from helpers.scripted_rollout import prompt, score

from arpo.data import PromptOrder
from arpo.errors import UserError
from arpo.options import AdvantageConfig, BranchingConfig, RolloutConfig
from arpo.ranks import Timers
from arpo.sampling import Rollouts
from arpo.selection import is_dead
from arpo.tools.base import ToolResult

NUM_PROMPTS, PER_STEP, NUM_STEPS = 24, 4, 6
CFG = RolloutConfig(group_size=2, max_response_tokens=900, max_result_tokens=200, answer_reserve_tokens=60)
BRANCHES = BranchingConfig(num_initial_rollouts=1, weight=1.0, entropy_tokens=6)
KEEP, RESAMPLE = AdvantageConfig(), AdvantageConfig(dead_groups="resample", max_resample=2)
SOURCES = {
    "dealt": (CFG, KEEP),
    "pulled": (replace(CFG, dispatch="pull"), KEEP),
    "refilled, dealt": (CFG, RESAMPLE),
    "refilled, pulled": (replace(CFG, dispatch="pull"), RESAMPLE),
    "carried": (replace(CFG, carry_over=1), KEEP),
    "carried for long": (replace(CFG, carry_over=3, dispatch="pull"), KEEP),
}


@pytest.fixture
def begin(sampler_with) -> Callable[..., Rollouts]:
    def rollouts(source: str, search: EchoTool | None = None) -> Rollouts:
        cfg, advantage = SOURCES[source]
        tools = [search or EchoTool("search", "found", jitter_s=0.001), EchoTool("python", "2")]
        sampler = sampler_with(random_tree, tools, cfg, BRANCHES, score=score)
        order = PromptOrder(NUM_PROMPTS, PER_STEP, seed=3, option="data.num_prompts_per_step")
        return Rollouts(sampler, order, [prompt(f"p{i}") for i in range(NUM_PROMPTS)], advantage, NUM_STEPS)

    return rollouts


@pytest.mark.parametrize("source", SOURCES)
def test_each_prompt_that_was_drawn_is_trained_on_once_or_is_drawn_again(begin, source):
    rollouts = begin(source)
    in_order = [f"p{place}" for step in range(3 * NUM_STEPS) for place in indices(rollouts.order, step)]
    sampled, is_refilled = [], source.startswith("refilled")
    for step in range(1, NUM_STEPS + 1):
        batch = rollouts.next(step, Timers())
        assert rollouts.sampler.engine.num_sleeps == step  # the trainer has the GPU now
        sampled += [group.prompt.prompt_id for group in batch.sampled]
        assert len(batch.groups) == PER_STEP and (is_refilled or len(batch.sampled) == PER_STEP)
        if is_refilled:  # the step ends with the group that fills it
            assert [g for g in batch.sampled if not is_dead(g)] == batch.groups and not is_dead(batch.sampled[-1])
        epoch = sampled[: len(sampled) // NUM_PROMPTS * NUM_PROMPTS]
        assert sorted(epoch) == sorted(in_order[: len(epoch)])
    # nothing is left out and nothing comes twice: in all, these are the first prompts of the data's order
    assert sorted(sampled) == sorted(in_order[: len(sampled)]) and len(sampled) >= NUM_STEPS * PER_STEP
    if not source.startswith("carried"):
        assert sampled == in_order[: len(sampled)]


@pytest.mark.parametrize("source", [name for name in SOURCES if not name.startswith("carried")])
def test_a_run_goes_on_where_its_state_ends(begin, source):
    """Carried groups have a file besides: test_carry_over.py."""
    whole, first, second = (begin(source) for _ in range(3))
    expected = [[g.prompt.prompt_id for g in whole.next(step, Timers()).sampled] for step in (1, 2, 3)]
    found = [[g.prompt.prompt_id for g in first.next(step, Timers()).sampled] for step in (1, 2)]
    second.resume(first.state(), (), done_steps=2)
    found.append([g.prompt.prompt_id for g in second.next(3, Timers()).sampled])
    assert found == expected


@pytest.mark.parametrize("source", ["dealt", "refilled, pulled", "carried"])
def test_steps_in_which_tools_fail_are_not_trained_on_and_the_third_in_a_row_ends_the_run(begin, source):
    """Nor do they say how hard a prompt is (PrimeIntellect-ai/prime-rl#2076) or how branches end."""
    dead = EchoTool("search", lambda _: ToolResult("died", ok=False, error_kind="sandbox", infra_error=True))
    rollouts, judged_by_order = begin(source, dead), []
    rollouts.order.add = lambda groups: judged_by_order.append(groups) or {}
    for step in (1, 2, 3):
        rollouts.raise_if_broken()
        batch = rollouts.next(step, Timers())
        assert batch.sampled and batch.groups == [] and rollouts.must_stop == (step == 3)
        assert not judged_by_order and not rollouts.worth.pairs
    with pytest.raises(UserError, match=r"tools failed in .* of the trajectories, in 3 batches in a row; "):
        rollouts.raise_if_broken()
    assert rollouts.state()["num_drawn"] == 0 and rollouts.rank_state() is None  # nothing was learnt of them


def test_a_metric_of_an_order_has_no_name_of_another_number(begin):
    """It was lost, because the other number is written later (the review of trl #5233 found such a case)."""
    rollouts = begin("dealt")
    rollouts.order.add = lambda groups: {"reward/mean": -5.0}
    with pytest.raises(
        UserError, match=r"^data\.order: the metrics of `add` has 'reward/mean', which is another number"
    ):
        rollouts.next(1, Timers())
