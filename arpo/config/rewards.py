"""The config section of the reward, for training and evaluation. See options.py."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, nan
from typing import Annotated, Literal

from arpo.config.facts import AtLeast, Needs
from arpo.config.named import check_name, definition_of, is_own, names_of
from arpo.errors import require

BUILT_IN = Needs("reward.file", "")
SAYS_BY_RULE = Needs("reward.terms", (), has=names_of("rewards/terms", "BY_RULE"), use="answer=1")
EARNS_BONUS = Needs("reward.terms", (), has=("answer", "tool_bonus"), use="answer=1")
ONE_REWARD = Needs("reward.terms", (), say="[] (name the function there: FILE.py:FUNCTION=WEIGHT)")


@dataclass(frozen=True)
class RewardConfig:
    """The score of a finished trajectory."""

    compat: Annotated[Literal["paper", "upstream"], BUILT_IN, SAYS_BY_RULE, Needs("protocol.format", "tags")] = "paper"
    """paper = ALGORITHM as published, with the format judged on model-written text; upstream = the released score,
    exactly."""
    bonus_tools: Annotated[tuple[str, ...], BUILT_IN, EARNS_BONUS, Needs("reward.compat", "paper")] = (
        "search",
        "python",
    )
    """A right answer earns 0.1 more if all these tools were called with success. Empty = no bonus."""
    file: Annotated[str, ONE_REWARD] = ""
    """Your own reward: FILE.py:FUNCTION, or FILE.py with a function compute_score. Empty = the built-in reward. The
    function takes (data_source, solution_str, ground_truth, extra_info) or (trajectory, prompt), and returns a float or
    a dict with `score`. Or it takes (trajectories, prompts), and returns a list of these. The function may be async."""

    @property
    def function(self) -> str:
        """`file` as FILE.py:FUNCTION."""
        return self.file if is_own(self.file) else f"{self.file}:compute_score"

    def __post_init__(self) -> None:
        if self.file:
            definition_of("reward.file", self.function)  # which raises


@dataclass(frozen=True)
class TrainingRewardConfig(RewardConfig):
    """The score of a finished trajectory, or the weighted sum of several."""

    terms: tuple[str, ...] = ()
    """Named rewards with weights, like answer=1 my_reward.py:style=0.2 (your own function). The weighted sum is the
    reward. Weight 0 = only log the term. Names: answer = the built-in reward, with the parts format, accuracy and
    tool_bonus; overlong = from 0 to -1 towards the length limit; or your own name (TERMS in arpo/rewards/terms.py).
    Empty = only the built-in reward, or the reward of reward.file."""
    overlong_buffer_tokens: Annotated[int, AtLeast(0), Needs("reward.terms", has=("overlong",), use="overlong=1")] = 0
    """overlong: number of last tokens of rollout.max_response_tokens. Over these tokens the value of overlong falls
    from 0 to -1 (DAPO: 4096 of 20480)."""

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each term. ("answer=1", "r.py:f=0.2") -> {"answer": 1.0, "r.py:f": 0.2}; ValueError for others."""
        weights: dict[str, float] = {}
        for entry in self.terms:
            name, _, number = entry.rpartition("=")
            try:
                weight = float(number)
            except ValueError:
                weight = nan
            require(name and isfinite(weight), f"reward.terms: {entry!r} is not of the form NAME=WEIGHT, like answer=1")
            require(name not in weights, f"reward.terms: {name} stands there twice; drop one")
            weights[name] = weight
        return weights

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.weights:
            check_name("reward.terms", name, "rewards/terms", "TERMS")
        require(
            "overlong" not in self.weights or self.overlong_buffer_tokens,
            "reward.terms has overlong, but reward.overlong_buffer_tokens=0; set it, or drop the term",
        )
