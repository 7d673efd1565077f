"""The scores of a training run, by the reward that the options say (rewards/)."""

from __future__ import annotations

from arpo import rewards
from arpo.config.rewards import TrainingRewardConfig
from arpo.engine.team import Team
from arpo.protocol import Codec
from arpo.rewards import load_custom
from arpo.rewards.terms import load_terms
from arpo.trajectory import Group, Prompt


class Scoring:
    """Scores the trajectories of a run; each team's first rank does so for its share."""

    def __init__(self, cfg: TrainingRewardConfig, team: Team, codec: Codec, max_response_tokens: int):
        """Raises UserError for files and functions that cannot be used."""
        self.cfg, self.team, self.codec = cfg, team, codec
        self.custom = load_custom("reward.file", cfg.function) if cfg.file else None
        self.terms = load_terms(cfg, max_response_tokens)
        self.functions = [self.custom] if self.custom else [*self.terms.custom.values()] if self.terms else []
        """Those of the user."""

    def try_on(self, prompt: Prompt) -> None:
        """Try the user's functions on an invented response to a real prompt. Raises UserError."""
        for function in self.functions:
            function.try_on(prompt, self.codec)

    def on_group(self, group: Group, seconds: list[float]) -> None:
        """Tell the functions that want to hear of it of a group that is whole; the rollout calls this."""
        for function in self.functions if self.team.is_first else ():
            if function.has_begin:
                function.begin(group)

    def __call__(self, groups: list[Group]) -> None:
        """Fill the reward of all trajectories of the groups that have none. Raises UserError."""
        rewards.score_groups(
            groups,
            self.cfg,
            self.custom,
            tools=self.codec.tools,
            terms=self.terms,
            form=self.codec.format,
            only_new=True,
        )
