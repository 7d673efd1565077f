r"""The released `deep_research` score with its defects, for comparison with published runs (UPSTREAM facts, sec. 3).

The defects: the score also reads tool results. All answers are scored by word F1, so 5 = -5 and 105 = 1.05. The bonus
is paid if both closing tags occur anywhere.
"""

from __future__ import annotations

import re
import string
from collections import Counter

from arpo.rewards.custom import RewardResult

TOOL_BONUS = 0.1


def upstream_score(response_text: str, answers: list[str]) -> RewardResult:
    """Return the score with the F1 as accuracy."""
    reason = _format_error(response_text)
    block = re.search(r"<answer>(.*?)</answer>", response_text, re.DOTALL)
    answer = _last_box(block[1]) if block and not reason else None
    if answer is None:
        parts = {"format": 0.0, "accuracy": 0.0, "tool_bonus": 0.0}
        return RewardResult(-1.0, parts, reason or "unbalanced_box")
    f1 = max(word_f1(answer, truth) for truth in answers)
    bonus = TOOL_BONUS if f1 > 0 and "</search>" in response_text and "</python>" in response_text else 0.0
    return RewardResult(f1 + bonus, {"format": 1.0, "accuracy": f1, "tool_bonus": bonus})


def _format_error(text: str) -> str:
    num_opened = text.count("<think>")
    num_closed = text.count("</think>")
    if not num_opened or not num_closed:
        return "missing_think"
    if num_opened != num_closed:
        return "unpaired_think"
    if text.count("<answer>") != 1 or text.count("</answer>") != 1:
        return "missing_answer" if "<answer>" not in text else "several_answers"
    for tag in ("search", "python"):
        position = 0
        while (start := text.find(f"<{tag}>", position)) >= 0:
            end = text.find(f"</{tag}>", start)
            result = text.find("<result>", start)
            result_end = text.find("</result>", result)
            if not start < end < result < result_end:
                return "call_without_result"
            position = result_end  # so all calls before this result share it
    start = text.find("<answer>")
    end = text.find("</answer>")
    if start > end:
        return "unclosed_answer"
    return "" if "\\boxed{" in text[start:end] and "}" in text[start:end] else "missing_box"


def _last_box(text: str) -> str | None:
    start = text.rfind("\\boxed{") + len("\\boxed{")
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
    return None


def _normalize(text: str) -> str:
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def word_f1(prediction: str, truth: str) -> float:
    """Return SQuAD's token F1. "yes", "no" and "noanswer" count only as an exact match."""
    predicted = _normalize(prediction)
    expected = _normalize(truth)
    exact_only = ("yes", "no", "noanswer")
    if predicted != expected and (predicted in exact_only or expected in exact_only):
        return 0.0
    num_common = sum((Counter(predicted.split()) & Counter(expected.split())).values())
    if not num_common:
        return 0.0
    precision = num_common / len(predicted.split())
    recall = num_common / len(expected.split())
    return 2 * precision * recall / (precision + recall)
