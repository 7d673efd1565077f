"""The long demo task in contexts of three searches: notes have to carry what a context cannot hold.

`notes` is the context policy, rollout.context=extras/demo/notes.py:notes: `summary` in words of this small world. The
newest result decides what to do next, so a good note repeats it. The demonstrator's first mostly says "on the way",
and so it begins anew.
"""

from __future__ import annotations

from arpo.contexts import ContextEvidence, take_notes
from arpo.protocol.tags import render_result
from extras.demo.long import HABITS, LongTrace, LongWorld

REQUEST, NOTES = "\ntake notes", "\nnotes: "
NEXT_CONTEXT = "\x1e"
"""Stands in a demonstration where a context ends."""
NOTE_HABITS = {"told": 0.35, "vague": 0.65}
SEARCHES = (2, 3)
"""Searches of a context in the demonstrations."""


def notes(evidence: ContextEvidence) -> list[int] | str | None:
    """Context policy of this task."""
    return take_notes(evidence, REQUEST, NOTES)


class NotesWorld(LongWorld):
    """The same trails; the request and the notes take some more words."""

    vocab_size = 496


class NotesTrace(LongTrace):
    """One walk in the making, in contexts of a few searches."""

    def write(self) -> str:
        code = name = self.question.entity
        thought, left, is_vague = "go on", self.rng.randint(*SEARCHES), None
        while True:
            self.think(thought)
            found = self.search(f"trail {name}")
            left -= 1
            self.text += f"<search>trail {name}</search>{render_result(found if left else found + REQUEST)}"
            if not left:
                left = self.rng.randint(*SEARCHES)
                is_vague = is_vague is None and self.pick(NOTE_HABITS) == "vague"
                self.text += ("on the way" if is_vague else found.removeprefix("Page 1: ")) + NEXT_CONTEXT
                if is_vague:
                    code = name = self.question.entity
                    thought = "go on"
                    continue
            word, _, rest = found.rpartition(" is ")[2].partition(" ")
            if word in HABITS:
                way = self.pick(HABITS[word])
                thought, name = f"try {way}", f"{code} {way}"
            elif word == "next":
                code = name = rest
                thought = "go on"
            else:
                self.think("found" if word == "end" else "lost")
                self.answer(rest or "0")
                return self.text
