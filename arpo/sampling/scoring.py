"""The scores of a training run: the reward that the options say, and a judge that works beside the rollout.

What a reward is stands in `rewards`, which is pure; here it meets files, ranks and a server.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from arpo import rewards
from arpo.config.evals import TrainingJudgeConfig
from arpo.config.rewards import TrainingRewardConfig
from arpo.engine.team import Team
from arpo.evals.training_judge import TrainingJudge
from arpo.metrics import Metrics
from arpo.protocol import Codec
from arpo.rewards import load_custom
from arpo.rewards.terms import load_terms
from arpo.trajectory import Group, Prompt


class Scoring:
    """Scores the trajectories of a run; each team's first rank does so for its share."""

    def __init__(
        self,
        cfg: TrainingRewardConfig,
        judge: TrainingJudgeConfig,
        team: Team,
        codec: Codec,
        max_response_tokens: int,
        *,
        folder: Path,
    ):
        """`folder` is the run's. Collective with a judge. Raises UserError for files and functions that cannot be used,
        and, on all ranks, where the judge cannot be reached."""
        self.cfg, self.team, self.codec = cfg, team, codec
        self.custom = load_custom("reward.file", cfg.function) if cfg.file else None
        self.terms = load_terms(cfg, max_response_tokens, judge.fallback)
        self.judge = self._begin_judge(judge, folder / "judge.sqlite") if "judge" in cfg.weights else None

    def _begin_judge(self, cfg: TrainingJudgeConfig, cache: Path) -> TrainingJudge | None:
        """Return the judge of this team, on its first rank. Rank 0 alone asks it something; all hear what is wrong."""
        if not self.team.is_first:
            return self.team.ranks.together(lambda: None)
        form, probes = self.codec.format, self.team.index == 0
        return self.team.ranks.together(lambda: TrainingJudge(cfg, cache, form=form, probes=probes))

    def try_on(self, prompt: Prompt) -> None:
        """Try the user's functions on an invented response to a real prompt. Raises UserError."""
        for custom in [self.custom] if self.custom else self.terms.custom.values() if self.terms else ():
            custom.try_on(prompt, self.codec)

    @property
    def on_group(self) -> Callable[[Group, list[float]], None] | None:
        """The function that the rollout calls with each group that is whole; None where nothing is to be done."""
        return self.judge.begin if self.judge else None

    def __call__(self, groups: list[Group]) -> None:
        """Fill the reward of all trajectories of the groups that have none. Raises UserError."""
        if self.judge:
            self.judge.collect(groups)
        rewards.score_groups(
            groups,
            self.cfg,
            self.custom,
            tools=self.codec.tools,
            terms=self.terms,
            form=self.codec.format,
            only_new=True,
        )

    def end_step(self) -> dict[str, float]:
        """Return the judge's numbers of the step, over all ranks; none without a judge. Collective with one."""
        if "judge" not in self.cfg.weights:
            return {}
        return self.team.ranks.reduce_metrics(self.judge.end_step() if self.judge else Metrics()).values()

    def close(self) -> None:
        if self.judge:
            self.judge.close()
