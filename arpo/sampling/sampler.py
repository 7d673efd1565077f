"""The sampler of a run: what rollouts need besides prompts and settings, and this team's part of the prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from arpo.dispatch import Dealt, ExpectedLengths, PromptQueue, RefilledQueue
from arpo.engine import Engine
from arpo.engine.team import Team
from arpo.log import Console
from arpo.options import BranchingConfig, RolloutConfig
from arpo.protocol import Codec
from arpo.retrospective import NEED_REWARDS
from arpo.rollout import Loop, rollout
from arpo.sampling.drafts import Drafts
from arpo.selection import until_full
from arpo.tools.base import ToolRunner
from arpo.trajectory import Group, Prompt, SignalStatistics


@dataclass(frozen=True)
class Share:
    """The groups of a rollout that this team has sampled."""

    groups: list[Group]
    places: Sequence[int]
    """The place of each group's prompt among those of the rollout."""
    cut_off: Sequence[int] = ()
    """Places of the prompts that were begun, but not finished."""
    queue: PromptQueue | None = None
    """Where the prompts came from; None if they were dealt out."""
    num_prompts: int = 0
    """Prompts of the rollout."""
    num_wanted: int = 0
    """Mixed groups that the teams sampled for; 0 = all prompts."""


@dataclass(frozen=True)
class Sampler:
    """A run's engine, tools and seed, with which `rollout` samples this team's part of the prompts."""

    engine: Engine | None
    """Engine or ServerEngine; None only where there is nothing to sample."""
    tools: ToolRunner
    codec: Codec
    team: Team
    """The ranks that share this rank's engine."""
    log: Console
    seed: int
    score: Callable[[list[Group]], None] | None = None
    """Fills the reward of all trajectories of groups that have none; selectors of NEED_REWARDS need it here, and so
    does a step that goes on until enough groups are mixed. In a training a `Scoring`."""
    max_num_seqs: int = 256
    """engine.max_num_seqs: trajectories that a team decodes at the same time before it takes no further prompt."""
    lengths: ExpectedLengths | None = None
    """What is known of the prompts' lengths, for rollout.pull_order=longest_first."""
    drafts: Drafts | None = None
    """Earlier rollouts of the prompts, for rollout.reuse_last_epoch."""

    def __call__(
        self,
        prompts: list[Prompt],
        cfg: RolloutConfig,
        branching: BranchingConfig,
        *,
        description: str,
        step: int | str = 0,
        statistics: SignalStatistics | None = None,
        is_part: bool = True,
        on_group: Callable[[Group, list[float]], None] | None = None,
        max_at_once: int = 0,
        num_wanted: int = 0,
        guests: Loop | None = None,
    ) -> Share:
        """Return the groups that this team has sampled of `prompts`, in their order and not all scored; see `rollout`.

        `description` stands before the progress bar; `is_part`: within a step that has a progress of its own. With
        `num_wanted`, the teams stop pulling prompts once so many groups are mixed, and may leave some unfinished.
        """
        if not prompts:
            return Share([], ())
        team, queue = self.team, None
        places: Sequence[int] = team.share(range(len(prompts)))
        source: Dealt | PromptQueue = Dealt([prompts[place] for place in places], max_at_once)
        if cfg.dispatch == "pull":
            source = queue = self.queue(prompts, cfg, f"{description}/{step}", num_wanted)
            if num_wanted:
                on_group = queue.telling(on_group)
        with self.log.progress(len(places) * cfg.group_size, description, is_part=is_part) as progress:
            groups = rollout(
                source, self.engine, self.tools, self.codec, cfg, branching,
                seed=self.seed, step=step, statistics=statistics,
                score=self.score_alike if branching.selector in NEED_REWARDS else None, on_progress=progress.at,
                on_group=on_group, make_loop=self.drafts.loop if self.drafts and cfg.reuse_last_epoch else None,
                guests=guests,
            )  # fmt: skip
        for group in groups:
            group.sampled_by = team.index * team.size
        if queue is None:
            return Share(groups, places, num_prompts=len(prompts))
        groups.sort(key=lambda group: queue.places[group.prompt.prompt_id])
        places = [queue.places[group.prompt.prompt_id] for group in groups]
        cut_off = sorted({*queue.places.values()} - {*places})
        return Share(groups, places, cut_off, queue, len(prompts), num_wanted)

    def queue(self, prompts: list[Prompt], cfg: RolloutConfig, name: str, num_wanted: int) -> PromptQueue:
        first = prompts[: num_wanted or None]  # those that are sampled in any case
        order = self.lengths.longest_first(first) if cfg.pull_order == "longest_first" and self.lengths else None
        about = {"max_num_seqs": self.max_num_seqs, "group_size": cfg.group_size, "order": order}
        if num_wanted:
            return RefilledQueue(prompts, self.team, name, num_wanted=num_wanted, score=self.score, **about)
        return PromptQueue(prompts, self.team, name, **about)

    def exchange(self, share: Share) -> tuple[list[Group], int]:
        """Return the groups of all teams in the order of the prompts, and how many that were begun are not among them.

        With num_wanted these are the prompts up to the one that completes the step, whoever was faster. Collective.
        """
        begun: list[Group | None] = [*share.groups, *[None for _ in share.cut_off]]
        everything = self.team.exchange(begun, share.num_prompts, [*share.places, *share.cut_off])
        if share.queue and self.team.ranks.is_main:
            share.queue.delete_keys()  # all ranks have left the queue
        groups = until_full(everything, share.num_wanted) if share.num_wanted else everything
        return groups, len(everything) - len(groups)

    def score_alike(self, groups: list[Group]) -> None:
        """Score on the team's first rank and tell the others, since all of them must fork alike. Collective."""
        trajectories = [t for group in groups for t in group.trajectories]
        if self.team.is_first:
            self.score(groups)
        scored = self.team.from_first([(t.reward, t.reward_parts, t.reward_reason) for t in trajectories])
        for t, values in zip(trajectories, scored, strict=True):
            t.reward, t.reward_parts, t.reward_reason = values
