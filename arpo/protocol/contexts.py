"""Context policies (rollout.context): what the policy has before it in a turn, where all before would be too much.

A response is one list of tokens, whatever the policy had before it while it sampled them. Under `append` that is the
prompt and all before. Another policy may put a new context in the prompt's place after a turn (Trajectory.contexts):

    prompt | turn 0, result, turn 1, result + request, note        a first sequence
    prompt with the note | turn 3, result, turn 4                  a second one, of the same response

There is one reward, and one row of advantages, for all of it; each token is trained behind what it was sampled behind,
and what sequences share is computed once (tree.py). A branch has its parent's contexts up to the place of the fork.

A policy is a function that is called after each turn (of a call: once that is answered). It returns None (go on; after
an answer: end), the token ids of a new context, or, after a call, a text that asks for a note: it stands behind the
newest result, and the next turn is the note.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from arpo.config.returned import ask, integers, whole_text
from arpo.errors import UserError
from arpo.options import RolloutConfig
from arpo.protocol.codec import Codec
from arpo.trajectory import Prompt, Trajectory, Turn

REQUEST = (
    "\n\nThere is little room left. Do not call a tool now: write down what you have found out so far and what is left "
    "to do. The question is asked again with these notes, and nothing else of this will be known then."
)
NOTES = "\n\nYour notes so far:\n"
_THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)


@dataclass(frozen=True)
class ContextEvidence:
    """Everything that a context policy may look at."""

    prompt: Prompt
    trajectory: Trajectory
    """The response so far; its last turn has ended, and its results, if it has any, are there."""
    num_tokens: int
    """Number of tokens that the policy has before it now, less those of the prompt."""
    codec: Codec
    cfg: RolloutConfig

    @property
    def turn(self) -> Turn:
        """The last turn."""
        return self.trajectory.turns[-1]

    @property
    def question(self) -> str:
        """The text of the prompt's last message."""
        return self.prompt.messages[-1]["content"]

    @property
    def is_answer(self) -> bool:
        """True where the turn called nothing, and is no note."""
        return not self.turn.tool_calls and not self.turn.is_note

    def text(self, turn: Turn) -> str:
        """Return what the policy wrote in a turn, without special tokens other than tags."""
        return self.codec.decode(self.trajectory.token_ids[turn.start : turn.end])

    def asked(self, question: str) -> list[int]:
        """Return the tokens of the prompt with another text in its last message."""
        *before, last = self.prompt.messages
        return self.codec.render_prompt([*before, {**last, "content": question}], self.prompt.tools)


def append(evidence: ContextEvidence) -> None:
    """Go on behind all that was sampled and read."""


def strip_thoughts(evidence: ContextEvidence) -> list[int] | None:
    """Leave the thoughts of earlier turns out, as chat templates of reasoning models do (R1, QwQ; Qwen3's where a new
    question follows), so that the policy reads in training what a server of the finished model lets it read. The rest
    of these turns is encoded anew, as a server does it."""
    if evidence.is_answer:
        return None
    token_ids, trajectory, codec = list(evidence.prompt.token_ids), evidence.trajectory, evidence.codec
    for turn in trajectory.turns:
        opened, size = codec.opened(token_ids)
        text = _THOUGHT.sub("", opened + evidence.text(turn))
        sampled = trajectory.token_ids[turn.start : turn.end]
        end = [token for token in sampled[-1:] if not codec.decode([token])]  # the turn's end token, which has no text
        before = codec.tokenizer.decode(token_ids[:-size] if size else token_ids)
        token_ids[len(token_ids) - size :] = codec.encode(text, before) + end
        token_ids += trajectory.token_ids[turn.end : turn.result_end]
    return token_ids


def summary(evidence: ContextEvidence) -> list[int] | str | None:
    """Once the context has more than rollout.context_tokens, ask for notes, and go on behind the question and these."""
    return take_notes(evidence, REQUEST, NOTES)


def take_notes(evidence: ContextEvidence, request: str, heading: str) -> list[int] | str | None:
    """Do what `summary` does in words of one's own: the request, and what stands between question and notes."""
    if evidence.turn.is_note:
        return evidence.asked(evidence.question + heading + evidence.text(evidence.turn).strip())
    is_full = not evidence.is_answer and evidence.num_tokens > evidence.cfg.context_tokens
    return request if is_full else None


CONTEXTS: dict[str, Callable[[ContextEvidence], list[int] | str | None]] = {
    "append": append,
    "strip_thoughts": strip_thoughts,
    "summary": summary,
}
"""Values of `rollout.context`."""


def next_context(evidence: ContextEvidence) -> list[int] | str | None:
    """Return what the context policy of the config says. Raises UserError where one of the user's returns neither token
    ids nor a text nor None."""
    name, codec = evidence.cfg.context, evidence.codec
    found = ask("rollout.context", name, CONTEXTS, evidence)
    if found is None:
        return None
    if isinstance(found, str):
        return whole_text(found)
    # A model may have sampled ids beyond the tokenizer's (padded vocabularies).
    high = max(codec.vocab_size - 1, *evidence.trajectory.token_ids)
    token_ids = integers(found, f"rollout.context={name}: the token ids of the new context", high)
    if not token_ids:
        raise UserError(f"rollout.context={name} returned no token ids; return None to go on behind all that was read")
    return token_ids
