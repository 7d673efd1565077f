"""Validation during RL: greedy, one trajectory per prompt, no branching; alone, or beside the next step's rollout.

    run.overlap_validation   False                              True
    step 5                   update, weight sync, validation    update, weight sync
    step 6                   rollout                            rollout and the validation of step 5

The next rollout samples from the weights that are to be validated, so the two can share the engine: the long
trajectories of the one then do not wait for those of the other. The scores come a rollout later, in a second line of
step 5. A checkpoint of step 5 has not seen them, so a run that goes on from it validates again. The last validation has
no rollout beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from arpo.config.sections import RunConfig
from arpo.evals.scores import summarize
from arpo.log import RunLog
from arpo.sampling.sampler import Sampler
from arpo.sampling.sources import Dealt, dealt_or_pulled
from arpo.trajectory import Prompt


class Validation:
    """The validations of a run."""

    def __init__(self, sampler: Sampler, log: RunLog, prompts: Sequence[Prompt], run: RunConfig, num_steps: int):
        """`sampler` is that of training; num_steps: of the run."""
        greedy = replace(sampler.rollout, temperature=0.0, top_p=1.0, group_size=1)
        alone = replace(sampler.branching, selector="none", num_initial_rollouts=1, dynamic_budget=False)
        self.sampler = replace(sampler, rollout=greedy, branching=alone)
        self.log, self.prompts, self.run, self.num_steps = log, prompts, run, num_steps
        self.waiting: int | None = None
        """The step that is to be validated beside the next rollout."""
        self.beside: Beside | None = None

    def before_training(self, done_steps: int) -> None:
        """Validate before step 1; or begin that of the step from which the run goes on again, if it had not ended."""
        is_open = done_steps == 0 or (self.run.overlap_validation and done_steps < self.num_steps)
        if is_open and (values := self.after(done_steps)):
            self._log(done_steps, values)

    def after(self, step: int) -> dict[str, float]:
        """Return the scores after a step if they are due now; see run.overlap_validation. Also dumps the trajectories.

        Step 0 is before the first one. Collective.
        """
        is_last = step == self.num_steps
        if not (is_last or step % self.run.validate_every == 0):
            return {}
        if self.run.overlap_validation and not is_last:
            self.waiting = step
            return {}
        source = dealt_or_pulled(self.sampler, self.prompts, step, label="validation")
        self.sampler.run([source], "validation", len(self.sampler.team.share(self.prompts)))
        return self._scores(source, step)

    def begin(self) -> list[Beside]:
        """Return the validation that waits, to be sampled beside the next rollout, if there is one."""
        if self.waiting is not None:
            self.beside = Beside(self.sampler, self.prompts, self.waiting)
        return [self.beside] if self.beside else []

    def end(self) -> None:
        """Log the scores of the validation that was sampled beside the rollout, if there was one. Collective."""
        if self.beside is None:
            return
        self._log(self.waiting, self._scores(self.beside, self.waiting))
        self.waiting = self.beside = None

    def _log(self, step: int, values: dict[str, float]) -> None:
        self.log.scalars(step, values)
        name = "accuracy" if "valid/accuracy" in values else "reward"
        self.log.line(f"step {step}  valid {name} {values[f'valid/{name}']:.3f}")

    def _scores(self, source: Dealt, step: int) -> dict[str, float]:
        self.sampler.score(list(source.groups.values()) if self.sampler.team.is_first else [])
        groups = source.exchange()
        self.log.trajectories(step, groups, kind="valid")
        return {f"valid/{name}": value for name, value in summarize(groups, seed=self.run.seed).items()}


class Beside(Dealt):
    """A validation's prompts, sampled while a training rollout goes on. The rollout may have drawn one of them, so
    requests and sessions go by names of their own."""

    def start(self) -> None:
        while (place := self.take()) is not None:
            name = f"validation after step {self.seed.rpartition('|')[2]}, {place}"
            self.loop.start_group(self.prompts[place], self.seed, name=name)
            self.places[name] = place
