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

from dataclasses import replace

from arpo.config.sections import RunConfig
from arpo.evals.scores import summarize
from arpo.growing import Live
from arpo.log import RunLog
from arpo.options import BranchingConfig, RolloutConfig
from arpo.rollout import Loop
from arpo.sampling.sampler import Sampler, Share
from arpo.trajectory import Group, Prompt, StopReason


class Validation:
    """The validations of a run. Without prompts, or with run.validate_every=0, there are none."""

    def __init__(
        self,
        sampler: Sampler,
        log: RunLog,
        prompts: list[Prompt],
        run: RunConfig,
        rollout: RolloutConfig,
        branching: BranchingConfig,
        num_steps: int,
    ):
        self.sampler, self.log, self.prompts, self.run, self.num_steps = sampler, log, prompts, run, num_steps
        self.rollout = replace(rollout, temperature=0.0, top_p=1.0, group_size=1, reuse_last_epoch=False)
        self.branching = replace(branching, selector="none", num_initial_rollouts=1, dynamic_budget=False)
        self.waiting: int | None = None
        """The step that is to be validated beside the next rollout."""
        self.guests: Guests | None = None

    def before_training(self, done_steps: int) -> None:
        """Validate before step 1; or begin that of the step from which the run goes on again, if it had not ended."""
        is_open = done_steps == 0 or (self.run.overlap_validation and done_steps < self.num_steps)
        if is_open and (values := self.after(done_steps)):
            self._log(done_steps, values | self.sampler.score.end_step())

    def after(self, step: int) -> dict[str, float]:
        """Return the scores after a step if they are due now; see run.overlap_validation. Also dumps the trajectories.

        Step 0 is before the first one. Collective.
        """
        is_last = step == self.num_steps
        if not (self.prompts and self.run.validate_every and (is_last or step % self.run.validate_every == 0)):
            return {}
        if self.run.overlap_validation and not is_last:
            self.waiting = step
            return {}
        names = {"step": step, "description": "validation", "on_group": self.sampler.score.on_group}
        return self._scores(self.sampler(self.prompts, self.rollout, self.branching, **names), step)

    def begin(self) -> Guests | None:
        """Begin the validation that waits. Return the loop that is to be the guest of the next rollout, if any."""
        if self.waiting is not None and self.guests is None:
            self.guests = Guests(self.sampler, self.prompts, self.rollout, self.branching, step=self.waiting)
        return self.guests

    def end(self) -> None:
        """Log the scores of the validation that was the rollout's guest, if there was one. Collective."""
        if self.guests is None:
            return
        self._log(self.waiting, self._scores(self.guests.share, self.waiting))
        self.waiting = self.guests = None

    def _log(self, step: int, values: dict[str, float]) -> None:
        self.log.scalars(step, values)
        self.log.line(f"step {step}  valid accuracy {values['valid/accuracy']:.3f}")

    def _scores(self, share: Share, step: int) -> dict[str, float]:
        self.sampler.score(share.groups if self.sampler.team.is_first else [])
        groups, _ = self.sampler.exchange(share)
        self.log.trajectories(step, groups, kind="valid")
        return {f"valid/{name}": value for name, value in summarize(groups, seed=self.run.seed).items()}


class Guests(Loop):
    """A loop that a rollout's loop plays along: its requests and calls go to the same engine and the same tools."""

    def __init__(
        self, sampler: Sampler, prompts: list[Prompt], cfg: RolloutConfig, branching: BranchingConfig, *, step: int
    ):
        """Begin this team's share of the prompts."""
        super().__init__(sampler.engine, sampler.tools, sampler.codec, cfg, branching, None, None)
        self.on_group, self.team = sampler.score.on_group, sampler.team
        self.num_prompts, self.places = len(prompts), sampler.team.share(range(len(prompts)))
        # requests and sessions go by prompt, and the rollout may have drawn one that is also validated on
        self.prompts = {f"validation after step {step}, {n}": prompts[n] for n in self.places}
        self.groups: dict[str, Group] = {}
        for name, prompt in self.prompts.items():
            self.start_group(replace(prompt, prompt_id=name), f"{sampler.seed}|{step}")

    def end(self, live: Live, reason: StopReason) -> None:
        super().end(live, reason)
        name, group = live.group.prompt.prompt_id, live.group.finish()  # of one trajectory, so it is whole
        group.prompt = self.prompts[name]
        group.trajectories[0].prompt_id = group.prompt.prompt_id
        group.sampled_by = self.team.index * self.team.size
        self.groups[name] = group
        if self.on_group:
            self.on_group(group, live.group.seconds)

    @property
    def share(self) -> Share:
        """This team's groups, once all of them are whole."""
        return Share([self.groups[name] for name in self.prompts], self.places, num_prompts=self.num_prompts)
