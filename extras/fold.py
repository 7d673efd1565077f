"""Folding: the policy works on a call of <fold> in a new context, and afterwards reads only the answer of this context.

    --protocol.format hermes --tools.names python search extras/fold.py:Fold --rollout.context extras/fold.py:fold

All contexts are one response with one reward (arpo/protocol/contexts.py). So the policy learns to choose a subtask, to
work on the subtask, and to answer. Training computes the text before a call only once, although the policy returns to
this text.
"""

from __future__ import annotations

import re
from dataclasses import replace

from arpo.errors import UserError
from arpo.protocol.contexts import ContextEvidence
from arpo.protocol.prompts import About
from arpo.protocol.schema import text_schema
from arpo.tools.interface import Tool, ToolResult
from arpo.trajectory import Turn

OPENED = "The question is worked on in a context of its own."
_THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)


class Fold(Tool):
    """The tool. The policy itself answers the calls."""

    tag = "fold"
    about = About(
        "a helper that works on a part of the question for you",
        "to hand a part over, write <fold> the question, with all that is needed to answer it </fold>",
        "<fold> When was the bridge built? </fold> <result> 1894 </result>",
    )
    schema = text_schema(
        "fold",
        "Work on a part of the question with fresh eyes; only the answer comes back.",
        "question",
        "The part's question, with all that is needed to answer it.",
    )

    async def run(self, argument: str) -> ToolResult:
        return ToolResult(OPENED, ok=True)


def fold(evidence: ContextEvidence) -> list[int] | None:
    """Context policy: a call of <fold> opens a context, and the answer in this context becomes the call's result."""
    if evidence.codec.format == "tags":
        raise UserError(
            "rollout.context=extras/fold.py:fold: with tags a response has one <answer>; set protocol.format"
        )
    *earlier, turn = evidence.trajectory.turns
    if folds(turn):
        *before, last = evidence.prompt.messages
        messages = [*before, {**last, "content": turn.tool_calls[-1].argument}]
        tools = evidence.prompt.tools
        return (
            evidence.codec.render_prompt(messages) if tools is None else evidence.codec.render_prompt(messages, tools)
        )
    opened: list[Turn] = []
    for one in earlier:
        if folds(one):
            opened.append(one)
        elif not one.tool_calls:
            opened.pop()
    return behind(evidence, opened[-1]) if evidence.is_answer and opened else None


def folds(turn: Turn) -> bool:
    """Return whether the turn opened a context."""
    return bool(turn.tool_calls) and turn.tool_calls[-1].tag == Fold.tag and turn.tool_calls[-1].executed


def behind(evidence: ContextEvidence, turn: Turn) -> list[int]:
    """Return the policy's context in a folding turn, then the turn, then the newest answer as the turn's result."""
    trajectory = evidence.trajectory
    codec = evidence.codec
    contexts = [(0, evidence.prompt.token_ids), *((c.start, c.token_ids) for c in trajectory.contexts)]
    start, before = [context for context in contexts if context[0] <= turn.start][-1]
    *others, call = turn.tool_calls
    answer = replace(call, result=_THOUGHT.sub("", evidence.text(evidence.turn)).strip())
    last_token = trajectory.token_ids[turn.end - 1]
    _, result = codec.encode_results([*others, answer], evidence.cfg.max_result_tokens, last_token=last_token)
    return [*before, *trajectory.token_ids[start : turn.end], *result]
