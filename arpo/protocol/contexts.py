"""Context policies (rollout.context) decide what the model reads in each turn, if all earlier text would be too long.

A response is a single list of tokens. Under `append` the model reads the prompt and the whole response so far. Another
context policy may replace the prompt by a new context after a turn (Trajectory.contexts):

    prompt | turn 0, result, turn 1, result + request, note        the first sequence
    prompt with the note | turn 3, result, turn 4                  the second sequence of the same response

The response has one reward and one row of advantages. Training computes each token after the same tokens as sampling
did, and shared tokens are computed once (tree.py). A branch has the parent's contexts up to the fork.

A context policy is a function, called after each turn (after a call: as soon as the results are there). Return values:

    None          go on after all that was read; after an answer: end
    token ids     a new context
    a text        after a call: a request for a note. The text follows the newest result, and the next turn is the note
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from arpo.config.returned import call_named, checked_integers, whole_text
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
    """The input of a context policy."""

    prompt: Prompt
    trajectory: Trajectory
    """The response so far. The last turn has ended. After a call the turn includes the results."""
    num_tokens: int
    """Number of tokens in the model's context now, without the prompt."""
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
        """True if the turn has no calls and is no note."""
        return not self.turn.tool_calls and not self.turn.is_note

    def text(self, turn: Turn) -> str:
        """Return the model's text of a turn, without special tokens other than tags."""
        return self.codec.decode(self.trajectory.token_ids[turn.start : turn.end])

    def prompt_with(self, question: str) -> list[int]:
        """Return the tokens of the prompt with another text in its last message."""
        *before, last = self.prompt.messages
        return self.codec.render_prompt([*before, {**last, "content": question}], self.prompt.tools)


def append(evidence: ContextEvidence) -> None:
    """Go on after the prompt and the whole response so far."""


def strip_thoughts(evidence: ContextEvidence) -> list[int] | None:
    """Leave out the thoughts of earlier turns, as chat templates of reasoning models do (R1, QwQ; Qwen3's after a new
    question).

    So the model reads the same context in training and on a server later. The rest of each turn is encoded again, as on
    a server.
    """
    if evidence.is_answer:
        return None
    trajectory = evidence.trajectory
    codec = evidence.codec
    token_ids = list(evidence.prompt.token_ids)
    for turn in trajectory.turns:
        opened, num_opened_tokens = codec.opened_thought(token_ids)
        text = _THOUGHT.sub("", opened + evidence.text(turn))
        sampled = trajectory.token_ids[turn.start : turn.end]
        end = [token for token in sampled[-1:] if not codec.decode([token])]  # an end token has no text
        # The prompt's <think> belongs to the thought, so it is left out too.
        del token_ids[len(token_ids) - num_opened_tokens :]
        before = codec.tokenizer.decode(token_ids)
        token_ids += codec.encode(text, before) + end
        token_ids += trajectory.token_ids[turn.end : turn.result_end]
    return token_ids


def summary(evidence: ContextEvidence) -> list[int] | str | None:
    """Once the context has more than rollout.context_tokens, ask for notes, and go on after question and notes."""
    return take_notes(evidence, REQUEST, NOTES)


def take_notes(evidence: ContextEvidence, request: str, heading: str) -> list[int] | str | None:
    """Do the same as `summary` with a custom request, and a custom heading between question and notes."""
    if evidence.turn.is_note:
        note = evidence.text(evidence.turn).strip()
        return evidence.prompt_with(evidence.question + heading + note)
    is_full = not evidence.is_answer and evidence.num_tokens > evidence.cfg.context_tokens
    return request if is_full else None


CONTEXTS: dict[str, Callable[[ContextEvidence], list[int] | str | None]] = {
    "append": append,
    "strip_thoughts": strip_thoughts,
    "summary": summary,
}
"""Values of `rollout.context`."""


def next_context(evidence: ContextEvidence) -> list[int] | str | None:
    """Return the result of the config's context policy. Raises UserError if a custom policy returns anything but token
    ids, a text or None, or a text or None where only token ids can follow."""
    name = evidence.cfg.context
    result = call_named("rollout.context", name, CONTEXTS, evidence)
    if result is None or isinstance(result, str):
        is_end = evidence.is_answer and result is None
        # Without calls the turn is a note or an answer. Only a new context can follow it.
        if not evidence.turn.tool_calls and not is_end:
            raise UserError(
                f"rollout.context={name} must return token ids after a note, and None or token ids after an answer, "
                f"not {type(result).__name__}"
            )
        return None if result is None else whole_text(result)
    # Models with a padded vocabulary may sample ids that the tokenizer does not have.
    max_id = max(evidence.codec.vocab_size - 1, *evidence.trajectory.token_ids)
    token_ids = checked_integers(result, f"rollout.context={name}: the token ids of the new context", max_id)
    if not token_ids:
        raise UserError(f"rollout.context={name} returned no token ids; return None to go on behind all that was read")
    return token_ids
