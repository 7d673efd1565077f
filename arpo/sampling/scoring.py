"""The scores of a training run. The options choose the reward (rewards/)."""

from __future__ import annotations

from arpo import rewards
from arpo.config.rewards import TrainingRewardConfig
from arpo.engine.team import Team
from arpo.protocol import Codec
from arpo.rewards import load_custom
from arpo.rewards.terms import load_terms
from arpo.trajectory import Group, Prompt


class Scoring:
    """Scores the trajectories of a run. The first rank of each team scores its team's share."""

    def __init__(self, cfg: TrainingRewardConfig, team: Team, codec: Codec, max_response_tokens: int):
        """Load the reward. Raises UserError for files and functions that cannot be used."""
        self.cfg = cfg
        self.team = team
        self.codec = codec
        self.custom = load_custom("reward.file", cfg.function) if cfg.file else None
        self.terms = load_terms(cfg, max_response_tokens)
        self.functions = []
        """The user's functions."""
        if self.custom:
            self.functions = [self.custom]
        elif self.terms:
            self.functions = list(self.terms.custom.values())

    def try_on(self, prompt: Prompt) -> None:
        """Try the user's functions on an invented response to a real prompt. Raises UserError."""
        for function in self.functions:
            function.try_on(prompt, self.codec)

    def on_group(self, group: Group, seconds: list[float]) -> None:
        """Show a finished group to the user's functions that begin early. The rollout calls this.

        Under branching.until_mixed a group may be scored already; then there is nothing to begin.
        """
        if not self.team.is_first or all(t.is_scored for t in group.trajectories):
            return
        for function in self.functions:
            if function.has_begin:
                function.begin(group)

    def __call__(self, groups: list[Group]) -> None:
        """Score those trajectories of these groups that were not scored before. Raises UserError."""
        rewards.score_groups(
            groups,
            self.cfg,
            self.custom,
            tools=self.codec.tools,
            terms=self.terms,
            form=self.codec.format,
            only_new=True,
        )
