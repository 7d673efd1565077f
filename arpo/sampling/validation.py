"""Validation during RL: greedy, one trajectory per prompt, no branching."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from arpo.config.sections import RunConfig
from arpo.errors import UserError
from arpo.evals.scores import summarize
from arpo.log import RunLog
from arpo.sampling.sampler import Sampler
from arpo.sampling.sources import OneRollout
from arpo.trajectory import Prompt


class Validation:
    """The validations of a run."""

    def __init__(self, sampler: Sampler, log: RunLog, prompts: Sequence[Prompt], run: RunConfig, num_steps: int):
        """`sampler` is the sampler of the training. num_steps: number of steps of the run."""
        # carry_over=0: a validation is never cut, so the engine need not send each token alone (Rollout.submit)
        greedy = replace(sampler.rollout, temperature=0.0, top_p=1.0, group_size=1, carry_over=0)
        no_branching = replace(sampler.branching, selector="none", num_initial_rollouts=1, dynamic_budget=False)
        self.sampler = replace(sampler, rollout=greedy, branching=no_branching)
        self.log = log
        self.prompts = prompts
        self.run = run
        self.num_steps = num_steps
        self.has_reached_target = False
        """True once a validation has reached run.stop_at_accuracy."""

    def before_training(self) -> None:
        """Validate before step 1, and log the scores as step 0. Collective."""
        values = self.after(0)
        self.log.scalars(0, values)
        name = "accuracy" if "valid/accuracy" in values else "reward"
        shown = f"{name} {values[f'valid/{name}']:.3f}" if f"valid/{name}" in values else "has no reward"
        self.log.line(f"step 0  valid {shown}")

    def after(self, step: int) -> dict[str, float]:
        """If a validation is due after this step, return its scores and dump its trajectories. Collective."""
        if step % self.run.validate_every and step != self.num_steps:
            return {}
        source = OneRollout(self.sampler, self.prompts, step, label="validation")
        # the validation before step 1 is not a part of any step
        self.sampler.run(source, "validation", len(self.sampler.team.share(self.prompts)), is_part=step > 0)
        self.sampler.score(source.to_score if self.sampler.team.is_first else [])
        groups = source.exchange()
        self.log.trajectories(step, groups, kind="valid")
        values = {f"valid/{name}": value for name, value in summarize(groups, seed=self.run.seed).items()}
        target = self.run.stop_at_accuracy
        if target is None:
            return values
        if "valid/accuracy" not in values:
            raise UserError(
                f"run.stop_at_accuracy={target} is never reached: the reward has no accuracy. Let it return a dict "
                "with `accuracy` (docs/extending.md#a-reward)"
            )
        accuracy = values["valid/accuracy"]
        if accuracy >= target and step:
            self.has_reached_target = True
            self.log.line(f"step {step}: valid/accuracy {accuracy:.3f} has reached run.stop_at_accuracy={target}; done")
        return values
