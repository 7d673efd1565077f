"""The rollouts of a training: which prompts a step draws, what is sampled, and what of it can teach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from arpo.branching_signal import BranchingSignal
from arpo.config.sections import RunConfig
from arpo.data import PromptOrder
from arpo.data.order import heard, next_prompts
from arpo.errors import UserError
from arpo.log import RunLog
from arpo.metrics import Metrics, rollout_metrics, source_names
from arpo.options import AdvantageConfig
from arpo.ranks import Timers
from arpo.sampling.branch_worth import BranchWorth
from arpo.sampling.carried_state import check_nothing_is_left, go_on_from, state_of
from arpo.sampling.carry_over import CarryOver
from arpo.sampling.gradient_noise import GradientNoise
from arpo.sampling.health import ToolHealth
from arpo.sampling.sampler import Sampler
from arpo.sampling.sources import OneRollout, Refilled
from arpo.sampling.validation import Validation
from arpo.selection import groups_to_train_on
from arpo.tools import take_counts
from arpo.trajectory import Group, Prompt


@dataclass(frozen=True)
class Batch:
    """The groups of a step, which are the same on every rank."""

    sampled: list[Group]
    """All of them, scored, in the order of the prompts."""
    groups: list[Group]
    """Those that the step is trained on; none where tools failed so often that they would teach to do without them."""
    metrics: Metrics
    """Of this rank's share."""
    values: dict[str, float]
    """Metrics of all groups."""


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
        """`prompts` are those of the training data, drawn in this order; num_steps: of the run.

        noise: watches the gradients, which the script gives it; here it is only saved and resumed.
        """
        self.sampler, self.order, self.prompts, self.advantage = sampler, order, prompts, advantage
        self.num_prompts, self.num_steps = order.num_per_step, num_steps
        self.validation: Validation | None = None
        self.sources = source_names(prompts)
        self.num_drawn = self.first_drawn = 0
        """Prompts of the data that the run has drawn: so far, and before the step that is under way."""
        self.health, self.signal = ToolHealth(), BranchingSignal(sampler.branching)
        self.worth = BranchWorth(sampler.rollout.group_size)
        self.noise = noise
        self.go_on_from({}, (), done_steps=0)

    def go_on_from(self, state: dict, rank_files: Sequence[Path], *, done_steps: int) -> None:
        """Go on where `state` and `rank_state` of `done_steps` steps ended; {} and none: at that step of the data.
        Collective. Raises UserError for files that do not fit."""
        self.num_drawn = state.get("num_drawn", done_steps * self.num_prompts)
        self.order.state = state.get("order", self.order.state)
        self.worth.resume(state.get("branch_worth", {}))
        if self.noise:
            self.noise.resume(state.get("gradient_noise", {}))
        self.carry: CarryOver | None = None
        if self.sampler.rollout.carry_over:
            self.carry = go_on_from(CarryOver(self.sampler, self.num_prompts), rank_files, self.prompts)
        else:
            check_nothing_is_left(rank_files)

    def state(self) -> dict:
        """Return what the next step depends on, the same on all ranks, as JSON can hold it."""
        return {
            "num_drawn": self.health.go_on_from(self.num_drawn),
            "order": self.order.state,
            "branch_worth": self.worth.state(),
            "gradient_noise": self.noise.state() if self.noise else {},
        }

    def rank_state(self) -> bytes | None:
        """Return what this rank has of its own for the next step; None where no rank has anything."""
        return state_of(self.carry) if self.carry and not self.health.must_stop else None

    def validate_on(self, prompts: Sequence[Prompt], log: RunLog, run: RunConfig, done_steps: int) -> None:
        """Validate on these prompts, now before the first step, and then as `run` says; never without any."""
        if prompts and run.validate_every:
            self.validation = Validation(self.sampler, log, prompts, run, self.num_steps)
            if done_steps == 0:
                self.validation.before_training()

    def next(self, step: int, timers: Timers) -> Batch:
        """Sample and score a step, then put the engine to sleep. Collective."""
        engine, team = self.sampler.engine, self.sampler.team
        num_prefilled = engine.stats.prefilled_tokens
        with timers("rollout"):
            source, drawn = self._begin(step)
            self.sampler.run(source, f"step {step} rollout", self.num_prompts // team.num_teams)
        with timers("reward"):
            self.sampler.score(source.to_score if team.is_first else [])
        with timers("exchange"):
            sampled = source.exchange()
        if isinstance(source, Refilled):
            drawn = drawn[: len(sampled)]  # what was cut off is drawn again
        self.num_drawn = drawn[-1][1] if drawn else self.num_drawn
        with timers("sync"):
            engine.sleep()
        batch = self._judged(step, sampled)
        batch.metrics.sum("tokens/prefilled", (engine.stats.prefilled_tokens - num_prefilled) * team.is_first)
        if isinstance(source, Refilled):
            self._count_refill(step, batch, source)
        return batch

    def _begin(self, step: int) -> tuple[CarryOver | OneRollout, list[tuple[int, int]]]:
        """Draw the prompts of a step. Return what samples them, and what `PromptOrder.queue` says of them."""
        carry, max_further = self.carry, 0
        self.first_drawn = self.num_drawn - (carry.num_behind if carry else 0)
        if self.advantage.dead_groups == "resample":
            max_further = self.num_prompts * self.advantage.max_resample
        count = carry.num_to_draw(self.num_steps - step + 1) if carry else self.num_prompts + max_further
        drawn = next_prompts(self.order, self.num_drawn, count, len(self.prompts))
        prompts = [self.prompts[i] for i, _ in drawn]
        if carry:
            return carry.begin_step(step, prompts), drawn
        if max_further:
            return Refilled(self.sampler, prompts, step, num_wanted=self.num_prompts), drawn
        return OneRollout(self.sampler, prompts, step), drawn

    def _judged(self, step: int, sampled: list[Group]) -> Batch:
        """Return the batch of a step's scored groups, after all who hear of each step have heard of it."""
        ranks, tools = self.sampler.team.ranks, self.sampler.tools
        share = sampled[ranks.rank :: ranks.world_size]  # each rank counts its share once
        metrics = rollout_metrics(share, self.sources, take_counts(tools.tools), step)
        values = self.signal.add(sampled) | self.worth.add(sampled) | heard(self.order, sampled)
        may_train = self.health.may_train(sampled, self.first_drawn)
        groups = groups_to_train_on(sampled, self.num_prompts, self.advantage) if may_train else []
        values |= {} if may_train else {"group/not_trained_on": 1.0}
        for warning in filter(None, (self.signal.warning, self.worth.warning, self.health.warning)):
            self.sampler.log.line(f"step {step}: {warning}")
        return Batch(sampled, groups, metrics, values)

    def _count_refill(self, step: int, batch: Batch, source: Refilled) -> None:
        is_main = self.sampler.team.ranks.is_main
        batch.metrics.sum("group/resampled_prompts", (len(batch.sampled) - self.num_prompts) * is_main)
        batch.metrics.sum("group/cut_off", source.num_cut_off * is_main)
        num_mixed = len(groups_to_train_on(batch.sampled, self.num_prompts, self.advantage))
        if num_mixed < self.num_prompts:
            found = f"only {num_mixed} groups to train on, after {len(batch.sampled)} prompts"
            self.sampler.log.line(f"step {step}: {found}")

    def after_update(self, step: int, timers: Timers) -> dict[str, float]:
        """Return the scores of the validation that is due now. Collective."""
        if not self.validation:
            return {}
        with timers("validate"):
            return self.validation.after(step)

    @property
    def must_stop(self) -> bool:
        """True where tools have failed so often in a row that the run cannot go on."""
        return self.health.must_stop

    def raise_if_broken(self) -> None:
        """Raise the UserError that ends a run which `must_stop`."""
        if self.health.must_stop:
            raise UserError(str(self.health))
