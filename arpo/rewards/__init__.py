r"""The reward of a finished trajectory: by rule, by a custom function (custom.py), or a sum of terms (terms.py).

By rule the reward is -1 for a wrong format, 0 for a wrong answer, and otherwise the accuracy of the answer. A bonus of
0.1 is added if all of `reward.bonus_tools` were called with success (ARPO sec. 3, eq. 7: search and python). Accuracy
is mathematical equality for math, token F1 for questions, or an exact match if the data ask for this.

>>> score(r"<think>t</think><answer>\boxed{4}</answer>", ["4"], "gsm8k").total
1.0
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

from arpo.config.rewards import RewardConfig
from arpo.protocol import form_of
from arpo.protocol.format_rules import Segments
from arpo.protocol.tags import PAPER_TOOLS
from arpo.rewards.custom import CustomReward, RewardResult, custom_results, load_custom
from arpo.rewards.math_answer import exact_accuracy, math_accuracy
from arpo.rewards.qa import exact_match, qa_accuracy
from arpo.rewards.terms import Terms, sums_of_terms
from arpo.rewards.upstream import TOOL_BONUS, upstream_score
from arpo.trajectory import Group, Prompt, ToolCall, Trajectory, Turn

__all__ = ["RewardResult", "load_custom", "score", "score_by_rule", "score_groups"]

RewardFn = Callable[[str, list[str]], float]
ABILITIES: dict[str, RewardFn] = {"math": math_accuracy, "qa": qa_accuracy, "fact-reasoning": exact_match}
"""A prompt's `ability` -> accuracy function. "fact-reasoning" is from Search-R1's data."""
REWARDS: dict[str, RewardFn] = {
    **dict.fromkeys(("aime24", "aime25", "math500", "math", "gsm8k"), math_accuracy),
    **dict.fromkeys(("hotpotqa", "2wiki", "musique", "bamboogle", "SimpleQA", "webwalker", "xbench"), qa_accuracy),
    "demo": exact_accuracy,
}
"""Data source -> accuracy function. A prompt's `ability` comes first. Sources with mixed content are not listed."""

_LOOKS_LIKE_MATH = re.compile(r"[-+]?[\d.,/]*\d%?|.*(?:\\[a-zA-Z]{2,}|[\^_=$]).*", re.DOTALL)


def score(
    response_text: str,
    answers: list[str],
    data_source: str,
    *,
    compat: Literal["paper", "upstream"] = "paper",
    segments: Segments | None = None,
    tools: Sequence[str] = PAPER_TOOLS,
    bonus_tools: Sequence[str] = PAPER_TOOLS,
    form: str = "tags",
) -> RewardResult:
    """Return the reward of a response that is known only as text. Other arguments are as in `score_by_rule`.

    Calls are derived from the text, and so are the segments if they are not given.
    """
    rules = form_of(form).rules
    if segments is None:
        segments = rules.derive_segments(response_text, tools)
    calls = [ToolCall(tag, "", "", ok=True) for tag in rules.answered_calls(segments, tools)]
    response = Trajectory("", "", turns=[Turn(0, tool_calls=calls)], text=response_text, segments=segments)
    cfg = RewardConfig(compat=compat, bonus_tools=tuple(bonus_tools))
    return score_by_rule(response, Prompt("", [], answers, data_source), cfg, tools=tools, form=form)


def score_by_rule(
    t: Trajectory, prompt: Prompt, cfg: RewardConfig, *, tools: Sequence[str], form: str = "tags"
) -> RewardResult:
    """Return the built-in reward of a trajectory.

    tools: the tags of the loaded tools. form: the value of protocol.format. For the bonus all of `cfg.bonus_tools` must
    succeed (an empty tuple = no bonus). With `cfg.compat="upstream"` the released score is computed, from text and
    answers only.
    """
    if cfg.compat == "upstream":
        return upstream_score(t.text, prompt.answers)
    rules = form_of(form).rules
    segments = t.segments or rules.derive_segments(t.text, tools)
    answer, _ = rules.extract_answer(segments)
    measure = accuracy_function(prompt.answers, prompt.data_source, prompt.meta.get("ability"))
    accuracy = 0.0 if answer is None else measure(answer, prompt.answers)
    reason = rules.format_error(segments, tools)
    successful = {call.tag for call in t.tool_calls if call.ok and call.executed}
    earns_bonus = not reason and accuracy > 0 and cfg.bonus_tools and set(cfg.bonus_tools) <= successful
    bonus = TOOL_BONUS if earns_bonus else 0.0
    parts = {"format": float(not reason), "accuracy": accuracy, "tool_bonus": bonus}
    return RewardResult(-1.0 if reason else accuracy + bonus, parts, reason)


def accuracy_function(answers: list[str], data_source: str, ability: str | None) -> RewardFn:
    """Return the accuracy function for a prompt.

    It is chosen by `ability` (DAPO writes "MATH"), then by data source. Without either, answers that look like numbers
    or formulas are math, and all others are questions.
    """
    function = ABILITIES.get(str(ability).lower()) or REWARDS.get(data_source)
    if function is not None:
        return function
    looks_like_math = all(_LOOKS_LIKE_MATH.fullmatch(answer.strip()) for answer in answers)
    return math_accuracy if looks_like_math else qa_accuracy


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
    """Fill `reward`, `reward_parts` and `reward_reason` of the trajectories.

    terms: if given, the reward is their sum. custom: otherwise, if given, the reward is from this function. Without
    both it is by rule. tools: the tags of the loaded tools. form: the value of protocol.format. only_new: skip
    trajectories that were scored before. Raises UserError with file and sample if a custom reward fails.
    """
    pairs = [(t, group.prompt) for group in groups for t in group.trajectories]
    if only_new:
        pairs = [(t, prompt) for t, prompt in pairs if not t.is_scored]

    def by_rule(t: Trajectory, prompt: Prompt) -> RewardResult:
        return score_by_rule(t, prompt, cfg, tools=tools, form=form)

    if terms is not None:
        results = sums_of_terms(terms, pairs, by_rule)
    elif custom is not None:
        results = custom_results(custom, pairs)
    else:
        results = [by_rule(t, prompt) for t, prompt in pairs]
    for (t, _), result in zip(pairs, results, strict=True):
        t.reward = result.total
        t.reward_parts = dict(result.parts)
        t.reward_reason = result.reason
