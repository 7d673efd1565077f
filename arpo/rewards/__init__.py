r"""The reward of a finished trajectory: by rule, by one's own function (custom.py), or a sum of several (terms.py).

By rule it is -1 if the format is wrong; 0 if the format is right and the answer wrong; else the accuracy of the answer,
plus 0.1 if all of `reward.bonus_tools` were called with success (ARPO sec. 3, eq. 7: search and python). Accuracy is
mathematical equality for math and token F1 for questions.

>>> score(r"<think>t</think><answer>\boxed{4}</answer>", ["4"], "gsm8k").total
1.0
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

from arpo.config.rewards import RewardConfig
from arpo.protocol import FORMS
from arpo.protocol.format_rules import Segments
from arpo.protocol.tags import PAPER_TOOLS
from arpo.rewards.custom import CustomReward, load_custom, score_with_custom
from arpo.rewards.math_answer import exact_accuracy, math_accuracy
from arpo.rewards.qa import qa_accuracy
from arpo.rewards.terms import RewardResult, Terms, score_terms
from arpo.rewards.upstream import upstream_score
from arpo.trajectory import Group, Prompt, ToolCall, Trajectory

__all__ = ["RewardResult", "load_custom", "score", "score_groups", "score_trajectories"]

TOOL_BONUS = 0.1

RewardFn = Callable[[str, list[str]], float]
ABILITIES: dict[str, RewardFn] = {"math": math_accuracy, "qa": qa_accuracy}
REWARDS: dict[str, RewardFn] = {
    **dict.fromkeys(("aime24", "aime25", "math500", "math", "gsm8k"), math_accuracy),
    **dict.fromkeys(("hotpotqa", "2wiki", "musique", "bamboogle", "SimpleQA", "webwalker", "xbench"), qa_accuracy),
    "demo": exact_accuracy,
}
"""Data source -> accuracy. A prompt's own `ability` comes first; sources of mixed content are not listed."""

_LOOKS_LIKE_MATH = re.compile(r"[-+]?[\d.,/]*\d%?|.*(?:\\[a-zA-Z]{2,}|[\^_=$]).*", re.DOTALL)


def score(
    response_text: str,
    answers: list[str],
    data_source: str,
    *,
    compat: Literal["paper", "upstream"] = "paper",
    segments: Segments | None = None,
    tool_calls: list[ToolCall] | None = None,
    ability: str | None = None,
    tools: Sequence[str] = PAPER_TOOLS,
    bonus_tools: Sequence[str] = PAPER_TOOLS,
    form: str = "tags",
) -> RewardResult:
    """Return the reward of one response. Without `segments` and `tool_calls`, both are derived from the text.

    `tools` are the tags of the loaded tools; all of `bonus_tools` must have succeeded for the bonus (none = no bonus).
    `compat="upstream"` gives the released score and looks at nothing but text and answers. `form`: protocol.format.
    """
    if compat == "upstream":
        total, f1, bonus, reason = upstream_score(response_text, answers)
        return RewardResult(total, {"format": float(not reason), "accuracy": f1, "tool_bonus": bonus}, reason)
    rules = FORMS[form].rules
    segments = rules.derive_segments(response_text, tools) if segments is None else segments
    answer, _ = rules.extract_answer(segments)
    accuracy = 0.0 if answer is None else accuracy_function(answers, data_source, ability)(answer, answers)
    reason = rules.format_error(segments, tools)
    if tool_calls is None:
        successful = rules.answered_calls(segments, tools)
    else:
        successful = {call.tag for call in tool_calls if call.ok and call.executed}
    earns_bonus = not reason and accuracy > 0 and bonus_tools and set(bonus_tools) <= successful
    bonus = TOOL_BONUS if earns_bonus else 0.0
    parts = {"format": float(not reason), "accuracy": accuracy, "tool_bonus": bonus}
    return RewardResult(-1.0 if reason else accuracy + bonus, parts, reason)


def accuracy_function(answers: list[str], data_source: str, ability: str | None) -> RewardFn:
    """Choose by `ability`, else by data source, else by what the answers look like: numbers and formulas are math."""
    looks_like_math = all(_LOOKS_LIKE_MATH.fullmatch(answer.strip()) for answer in answers)
    return ABILITIES.get(ability) or REWARDS.get(data_source) or (math_accuracy if looks_like_math else qa_accuracy)


def score_trajectories(
    trajectories: list[Trajectory],
    prompts_by_id: dict[str, Prompt],
    cfg: RewardConfig,
    custom: CustomReward | None = None,
    *,
    tools: Sequence[str],
    terms: Terms | None = None,
    form: str = "tags",
) -> None:
    """Fill `reward`, `reward_parts` and `reward_reason` of each trajectory; `tools` are the tags of the loaded tools.

    By `terms` where there are any, else by `custom`, else by rule. `form` is the value of protocol.format, in which the
    trajectories are written. Raises UserError where a custom reward fails; it names the file and the sample.
    """

    def by_rule(t: Trajectory, prompt: Prompt) -> RewardResult:
        return score(
            t.text, prompt.answers, prompt.data_source,
            compat=cfg.compat, segments=t.segments or None, tool_calls=t.tool_calls, ability=prompt.meta.get("ability"),
            tools=tools, bonus_tools=cfg.bonus_tools, form=form,
        )  # fmt: skip

    if terms is not None:
        score_terms(terms, trajectories, prompts_by_id, by_rule)
        return
    if custom is not None:
        score_with_custom(custom, trajectories, prompts_by_id)
        return
    for t in trajectories:
        result = by_rule(t, prompts_by_id[t.prompt_id])
        t.reward, t.reward_parts, t.reward_reason = result.total, dict(result.parts), result.reason


def score_groups(
    groups: list[Group],
    cfg: RewardConfig,
    custom: CustomReward | None = None,
    *,
    tools: Sequence[str],
    terms: Terms | None = None,
    form: str = "tags",
    only_new: bool = False,
) -> None:
    """Apply `score_trajectories` to all trajectories of all groups at once; `only_new`: those without a reward."""
    prompts_by_id = {group.prompt.prompt_id: group.prompt for group in groups}
    trajectories = [t for group in groups for t in group.trajectories if not (only_new and t.reward is not None)]
    score_trajectories(trajectories, prompts_by_id, cfg, custom, tools=tools, terms=terms, form=form)
