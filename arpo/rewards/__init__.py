r"""The reward of a finished trajectory: by rule, by one's own function (custom.py), or a sum of several (terms.py).

By rule it is -1 if the format is wrong; 0 if the format is right and the answer wrong; else the accuracy of the answer,
plus 0.1 if all of `reward.bonus_tools` were called with success (ARPO sec. 3, eq. 7: search and python). Accuracy is
mathematical equality for math and token F1 for questions, or an exact match where the rows say so.

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
"""A prompt's `ability` -> accuracy. The last one is that of Search-R1's rows."""
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
    tools: Sequence[str] = PAPER_TOOLS,
    bonus_tools: Sequence[str] = PAPER_TOOLS,
    form: str = "tags",
) -> RewardResult:
    """Return the reward of a response of which there is no more than the text. The rest is as in `score_by_rule`.

    Calls are derived from the text, and so is what the model wrote of it, unless there are `segments`.
    """
    rules = form_of(form).rules
    segments = rules.derive_segments(response_text, tools) if segments is None else segments
    calls = [ToolCall(tag, "", "", ok=True) for tag in rules.answered_calls(segments, tools)]
    response = Trajectory("", "", turns=[Turn(0, tool_calls=calls)], text=response_text, segments=segments)
    cfg = RewardConfig(compat=compat, bonus_tools=tuple(bonus_tools))
    return score_by_rule(response, Prompt("", [], answers, data_source), cfg, tools=tools, form=form)


def score_by_rule(
    t: Trajectory, prompt: Prompt, cfg: RewardConfig, *, tools: Sequence[str], form: str = "tags"
) -> RewardResult:
    """Return the built-in reward of a trajectory. `tools` are the tags of the loaded tools.

    All of `cfg.bonus_tools` must have succeeded for the bonus (none = no bonus). `cfg.compat="upstream"` gives the
    released score and looks at nothing but text and answers. `form` is the value of protocol.format.
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
    """Choose by `ability` (DAPO writes "MATH"), else by data source, else by what the answers look like: numbers and
    formulas are math."""
    looks_like_math = all(_LOOKS_LIKE_MATH.fullmatch(answer.strip()) for answer in answers)
    return (
        ABILITIES.get(str(ability).lower())
        or REWARDS.get(data_source)
        or (math_accuracy if looks_like_math else qa_accuracy)
    )


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
    """Fill `reward`, `reward_parts` and `reward_reason` of the trajectories; `only_new`: of those without a reward.

    By `terms` where there are any, else by `custom`, else by rule. `tools` are the tags of the loaded tools, `form` is
    the value of protocol.format. Raises UserError where a custom reward fails; it names the file and the sample.
    """
    pairs = [
        (t, group.prompt) for group in groups for t in group.trajectories if not (only_new and t.reward is not None)
    ]

    def by_rule(t: Trajectory, prompt: Prompt) -> RewardResult:
        return score_by_rule(t, prompt, cfg, tools=tools, form=form)

    if terms is not None:
        results = sums_of_terms(terms, pairs, by_rule)
    elif custom is not None:
        results = custom_results(custom, pairs)
    else:
        results = [by_rule(t, prompt) for t, prompt in pairs]
    for (t, _), result in zip(pairs, results, strict=True):
        t.reward, t.reward_parts, t.reward_reason = result.total, dict(result.parts), result.reason
