"""The long demo task in contexts of three searches: notes carry information from one context to the next.

`notes` is the context policy (rollout.context=extras/demo/notes.py:notes): `summary` in the words of this small world.
The next move depends on the newest result only, so a good note repeats it. The demonstrator's first note mostly says
"on the way", and then the demonstrator must start again.
"""

from __future__ import annotations

from arpo.protocol.contexts import ContextEvidence, take_notes
from arpo.protocol.tags import render_result
from extras.demo.long import LongTrace, LongWorld

REQUEST = "\ntake notes"
NOTES = "\nnotes: "
NEXT_CONTEXT = "\x1e"
"""Separates the contexts of a demonstration."""
NOTE_HABITS = {"told": 0.35, "vague": 0.65}
SEARCHES = (2, 3)
"""Searches of a context in the demonstrations."""


def notes(evidence: ContextEvidence) -> list[int] | str | None:
    """Return the notes of this task's context policy."""
    return take_notes(evidence, REQUEST, NOTES)


class NotesWorld(LongWorld):
    """The same trails. The request and the notes need some more words in the vocabulary."""

    vocab_size = 496
    ends = (100, 999)


class NotesTrace(LongTrace):
    """Writes one walk, in contexts of a few searches."""

    left: int | None = None
    """Searches left in this context."""
    has_noted = False

    def told(self, query: str) -> str:
        self.left = (self.rng.randint(*SEARCHES) if self.left is None else self.left) - 1
        found = self.search(query)
        self.text += f"<search>{query}</search>{render_result(found if self.left else found + REQUEST)}"
        if not self.left:
            self.left = self.rng.randint(*SEARCHES)
            is_vague = not self.has_noted and self.pick(NOTE_HABITS) == "vague"
            self.has_noted = True
            self.text += ("on the way" if is_vague else found.removeprefix("Page 1: ")) + NEXT_CONTEXT
            if is_vague:
                return f"next {self.question.entity}"  # from the beginning
        return found.rpartition(" is ")[2]
