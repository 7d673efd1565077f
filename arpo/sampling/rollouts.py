"""The rollouts of a training run: they draw a step's prompts, sample them, and choose the groups to train on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from arpo.branching_signal import BranchingSignal
from arpo.config.returned import checked_names
from arpo.config.sections import RunConfig
from arpo.data import PromptOrder
from arpo.data.order import add_groups, next_prompts
from arpo.log import RunLog
from arpo.metrics import Metrics, rollout_metrics, source_names
from arpo.options import AdvantageConfig
from arpo.ranks import Timers
from arpo.sampling.branch_worth import BranchWorth
from arpo.sampling.carried_state import check_nothing_is_left, restore, state_of
from arpo.sampling.carry_over import CarryOver
from arpo.sampling.gradient_noise import GradientNoise
from arpo.sampling.health import ToolHealth
from arpo.sampling.sampler import Sampler
from arpo.sampling.sources import OneRollout, Refilled
from arpo.sampling.validation import Validation
from arpo.selection import groups_to_train_on, is_dead
from arpo.tools import take_counts
from arpo.trajectory import Group, Prompt


@dataclass(frozen=True)
class Batch:
    """The groups of a step. They are the same on every rank."""

    sampled: list[Group]
    """All groups, scored, in the order of the prompts."""
    groups: list[Group]
    """The groups to train on; none if tools or rewards failed in too many trajectories (health.py)."""
    local_metrics: Metrics
    """Metrics of this rank's share of the groups."""
    global_values: dict[str, float]
    """Metrics of all groups, the same on every rank."""


class Rollouts:
    """The rollouts of a training run, one after the other."""

    def __init__(
        self,
        sampler: Sampler,
        order: PromptOrder,
        prompts: Sequence[Prompt],
        advantage: AdvantageConfig,
        num_steps: int,
        noise: GradientNoise | None = None,
    ):
        """`prompts` are the training data, drawn as `order` says. num_steps: number of steps of the run.

        noise: fed by the script, and only saved and resumed here.
        """
        self.sampler = sampler
        self.order = order
        self.prompts = prompts
        self.advantage = advantage
        self.num_prompts = order.num_per_step
        self.num_steps = num_steps
        self.validation: Validation | None = None
        self.sources = source_names(prompts)
        self.num_drawn = 0
        """Prompts drawn from the data so far."""
        self.num_drawn_before = 0
        """Place in the data, as `num_drawn`, before the current batch. A resumed run goes back to it if this batch was
        the first of the bad batches that ended the run."""
        self.carry = CarryOver(sampler, self.num_prompts) if sampler.rollout.carry_over else None
        self.health = ToolHealth()
        self.signal = BranchingSignal(sampler.branching)
        self.worth = BranchWorth(sampler.rollout.group_size)
        self.noise = noise

    # ---- what a checkpoint keeps

    def resume(self, state: dict, rank_files: Sequence[Path], *, done_steps: int) -> None:
        """Continue after `done_steps` steps. Collective. Raises UserError for files that do not fit.

        `state`: what the method `state` returned then. `rank_files`: what `rank_state` returned on each rank. Without a
        `state` the place in the data follows from `done_steps`.
        """
        self.num_drawn = state.get("num_drawn", done_steps * self.num_prompts)
        self.order.state = state.get("order", self.order.state)
        self.worth.resume(state.get("branch_worth", {}))
        if self.noise:
            self.noise.resume(state.get("gradient_noise", {}))
        if self.carry:
            restore(self.carry, rank_files, self.prompts)
        else:
            check_nothing_is_left(rank_files)

    def state(self) -> dict:
        """Return the state for `resume`, as JSON values. It is the same on all ranks."""
        return {
            "num_drawn": self.health.num_drawn_on_resume(self.num_drawn),
            "order": self.order.state,
            "branch_worth": self.worth.state(),
            "gradient_noise": self.noise.state() if self.noise else {},
        }

    def rank_state(self) -> bytes | None:
        """Return the state of this rank alone; None if no rank has any."""
        return state_of(self.carry) if self.carry and not self.health.must_stop else None

    # ---- validation

    def validate_on(self, prompts: Sequence[Prompt], log: RunLog, run: RunConfig, done_steps: int) -> None:
        """Validate on these prompts before the first step, and later as `run` says. Without prompts: never."""
        if prompts and run.validate_every:
            self.validation = Validation(self.sampler, log, prompts, run=run, num_steps=self.num_steps)
            if done_steps == 0:
                self.validation.before_training()

    def validate_if_due(self, step: int, timers: Timers) -> dict[str, float]:
        """Validate if it is due, and return the scores. Collective."""
        if not self.validation:
            return {}
        with timers("validate"):
            return self.validation.after(step)

    # ---- a step

    def next(self, step: int, timers: Timers) -> Batch:
        """Sample and score a step, then put the engine to sleep. Collective."""
        engine = self.sampler.engine
        team = self.sampler.team
        num_prefilled_before = engine.stats.prefilled_tokens
        with timers("rollout"):
            source, drawn = self._begin(step)
            self.sampler.run(source, f"step {step} rollout", self.num_prompts // team.num_teams)
        with timers("reward"):
            self.sampler.score(source.to_score if team.is_first else [])
        with timers("exchange"):
            sampled = source.exchange()
        if isinstance(source, Refilled):
            drawn = drawn[: len(sampled)]  # prompts that were cut off are drawn again
        if drawn:
            _, self.num_drawn = drawn[-1]
        with timers("sync"):
            engine.sleep()
        batch = self._judge(step, sampled)
        num_prefilled = engine.stats.prefilled_tokens - num_prefilled_before
        # the ranks of a team share one engine: only the first counts its tokens
        batch.local_metrics.sum("tokens/prefilled", num_prefilled * team.is_first)
        if isinstance(source, Refilled):
            self._count_refill(step, batch, source)
        return batch

    def _begin(self, step: int) -> tuple[CarryOver | OneRollout, list[tuple[int, int]]]:
        """Draw the prompts of a step. Return their source, and (index of the prompt, num_drawn after it) of each."""
        carry = self.carry
        self.num_drawn_before = self.num_drawn - (carry.num_to_redraw if carry else 0)
        max_further = 0
        if self.advantage.dead_groups == "resample":
            max_further = self.num_prompts * self.advantage.max_resample
        num_to_draw = carry.num_to_draw(self.num_steps - step + 1) if carry else self.num_prompts + max_further
        drawn = next_prompts(self.order, self.num_drawn, num_to_draw, len(self.prompts))
        prompts = [self.prompts[index] for index, _ in drawn]
        if carry:
            return carry.begin_step(step, prompts), drawn
        if max_further:
            return Refilled(self.sampler, prompts, step, num_wanted=self.num_prompts), drawn
        return OneRollout(self.sampler, prompts, step), drawn

    def _judge(self, step: int, sampled: list[Group]) -> Batch:
        """Measure and judge a step's scored groups, and choose the groups to train on."""
        ranks = self.sampler.team.ranks
        share = sampled[ranks.rank :: ranks.world_size]  # each rank counts its share once
        metrics = rollout_metrics(share, self.sources, take_counts(self.sampler.tools.tools), step)
        values = self.signal.add(sampled)
        verdict = self.health.judge(sampled, self.num_drawn_before)
        warnings = [self.signal.warning, verdict.warning]
        if verdict.may_train:  # else the rewards say more about the tools than about the prompts
            of_order = add_groups(self.order, sampled)
            checked_names(of_order, "data.order: the metrics of `add`", reserved=metrics.values())
            values |= of_order
            # under until_mixed the rewards decide which groups have branches, so these cannot be compared with roots
            if not self.sampler.branching.until_mixed:
                values |= self.worth.add(sampled)
                warnings.append(self.worth.warning)
            groups = groups_to_train_on(sampled, self.num_prompts, self.advantage)
            if self.advantage.keep_variance < 1:
                values["group/trained_share"] = len(groups) / len(sampled)
        else:
            groups = []
            values["group/not_trained_on"] = 1.0
        for warning in warnings:
            if warning:
                self.sampler.log.line(f"step {step}: {warning}")
        return Batch(sampled, groups, local_metrics=metrics, global_values=values)

    def _count_refill(self, step: int, batch: Batch, source: Refilled) -> None:
        is_main = self.sampler.team.ranks.is_main
        num_sampled = len(batch.sampled)
        batch.local_metrics.sum("group/resampled_prompts", (num_sampled - self.num_prompts) * is_main)
        batch.local_metrics.sum("group/cut_off", source.num_cut_off * is_main)
        num_mixed = sum(not is_dead(group) for group in batch.sampled)
        if num_mixed < self.num_prompts:
            self.sampler.log.line(f"step {step}: only {num_mixed} groups to train on, after {num_sampled} prompts")

    # ---- the end of a run that cannot go on

    @property
    def must_stop(self) -> bool:
        """True if a validation is good enough, or if tools have failed in too many steps in a row."""
        return self.health.must_stop or (self.validation is not None and self.validation.has_reached_target)

    def raise_if_broken(self) -> None:
        """Raise the final UserError of a run whose tools have failed in too many steps in a row."""
        if self.health.must_stop:
            raise self.health.stop_error()
