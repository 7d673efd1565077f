"""The hard demo task: search results that are sometimes contradictory, ambiguous or partial.

In the plain task (world.py) every right query gives the answer, so there is no choice after a result. Here a result has
one of four kinds, and after three of them there is a choice:

| kind | share | "height of Red Fox is ..." | what counts |
|---|---|---|---|
| plain | 40 % | 482 | 482 |
| disputed | 25 % | 482 or 517 | what "survey of height of Red Fox" says |
| dated | 15 % | old 482 new 517 (or: new 517 old 482) | the new one |
| pointer | 20 % | under Blue Owl | the height of Blue Owl, which is plain |

After a plain result the demonstrator nearly always makes the right move. After the others its moves are split between
the right one and tempting wrong ones. Imitating it gives a policy whose entropy after a result depends on the kind.
Entropy-driven branching is said to exploit this; random branching cannot see it. Owners are always plain.
"""

from __future__ import annotations

import random

from extras.demo.world import ATTRIBUTES, Trace, World

KINDS = {"plain": 0.40, "disputed": 0.25, "dated": 0.15, "pointer": 0.20}


class HardWorld(World):
    """Facts as in the plain world, in four kinds. `facts`: the true values. `told`: the results of the first search."""

    families = ("look", "hop", "mix")

    def __init__(self, seed: int):
        super().__init__(seed)
        rng = random.Random(f"kinds {seed}")
        # (attribute, entity) -> kind
        self.kinds: dict[tuple[str, str], str] = {}
        self.told: dict[tuple[str, str], str] = dict(self.facts)
        for part in self.entities.values():
            for attribute in ATTRIBUTES:
                kinds = rng.choices(list(KINDS), list(KINDS.values()), k=len(part))
                self.kinds |= {(attribute, entity): kind for entity, kind in zip(part, kinds, strict=True)}
                plain = [entity for entity, kind in zip(part, kinds, strict=True) if kind == "plain"]
                for entity in part:
                    self._tell(attribute, entity, plain, rng)

    def _tell(self, attribute: str, entity: str, plain: list[str], rng: random.Random) -> None:
        """Write `told` of one fact. A pointer takes its value from one of the `plain` entities."""
        fact = (attribute, entity)
        value = self.facts[fact]
        kind = self.kinds[fact]
        rival = str(rng.choice([n for n in range(100, 1000) if str(n) != value]))
        if kind == "disputed":
            self.told[fact] = " or ".join(rng.sample([value, rival], 2))
        elif kind == "dated":
            self.told[fact] = " ".join(rng.sample([f"old {rival}", f"new {value}"], 2))
        elif kind == "pointer":
            other = rng.choice(plain)
            self.told[fact] = f"under {other}"
            self.facts[fact] = self.facts[attribute, other]

    def documents(self) -> list[dict[str, str]]:
        """Return the corpus: one document per fact (as `told`), and one survey per disputed fact."""
        texts = {f"{attribute} of {entity}": self.told[attribute, entity] for attribute, entity in self._order}
        for (attribute, entity), kind in self.kinds.items():
            if kind == "disputed":
                texts[f"survey of {attribute} of {entity}"] = self.facts[attribute, entity]
        return [{"key": key, "text": f"{key} is {text}"} for key, text in texts.items()]


def kind_of(told: str) -> str:
    """Return the kind of a result from its text after "is".

    >>> [kind_of(told) for told in ("482", "482 or 517", "new 517 old 482", "under Blue Owl")]
    ['plain', 'disputed', 'dated', 'pointer']
    """
    words = told.split()
    if words[0] == "under":
        return "pointer"
    return "dated" if words[0] in ("old", "new") else "disputed" if "or" in words else "plain"


# The demonstrator's habits, as shares. Except after plain results, no move is much more frequent than the others, and
# the right move is not the most frequent.
LOOKUP = {"right": 0.72, "vague": 0.18, "guess": 0.10}
AFTER_WRONG_HIT = {"retry": 0.4, "guess": 0.6}
AFTER_RESULT = {
    "plain": {"use": 0.95, "again": 0.02, "guess": 0.03},
    "disputed": {"survey": 0.24, "first": 0.34, "second": 0.12, "again": 0.15, "guess": 0.15},
    "dated": {"new": 0.28, "first": 0.38, "again": 0.17, "guess": 0.17},
    "pointer": {"follow": 0.30, "vague": 0.35, "again": 0.17, "guess": 0.18},
}
COMPUTE = {"right": 0.88, "guess": 0.06, "wrong_operator": 0.06}


class HardTrace(Trace):
    """Writes one trajectory: after each result for a value, one of the moves of AFTER_RESULT."""

    compute_habits = COMPUTE

    def look_up(self, attribute: str, entity: str) -> str | None:
        """Search one fact. Return the value that the demonstrator believes, or None if it gave up."""
        habit = self.pick(LOOKUP)
        if habit == "guess":
            return None
        self.think(f"search {attribute}")
        hit = self.call("search", f"info on {entity}" if habit == "vague" else f"{attribute} of {entity}")
        if f"{attribute} of {entity} is " not in hit:
            if self.pick(AFTER_WRONG_HIT) == "guess":
                return None
            self.think("wrong, search again")
            hit = self.call("search", f"{attribute} of {entity}")
        told = hit.rpartition(" is ")[2]
        return told if attribute == "owner" else self.read(attribute, entity, told)

    def read(self, attribute: str, entity: str, told: str) -> str | None:
        """Make a move after a result. Return the value that the demonstrator believes, or None if it gave up."""
        kind = kind_of(told)
        move = self.pick(AFTER_RESULT[kind])
        if move == "again":  # useless: the same query has the same answer
            self.think("ask again")
            self.call("search", f"{attribute} of {entity}")
            move = self.pick({m: share for m, share in AFTER_RESULT[kind].items() if m != "again"})
        numbers = [word for word in told.split() if word.isdigit()]
        if move == "guess":
            return None
        if move == "use":
            return told
        if move in ("first", "second"):
            self.think(f"take {move}")
            return numbers[move == "second"]
        if move == "new":
            self.think("take new")
            return numbers[told.startswith("old")]
        return self.ask_further(move, attribute, entity, told.removeprefix("under "))

    def ask_further(self, move: str, attribute: str, entity: str, other: str) -> str | None:
        """Send a second query: the survey of a disputed fact, or the entity of a pointer."""
        if move == "survey":
            self.think("check survey")
            query = f"survey of {attribute} of {entity}"
        else:
            self.think(f"look under {other}" if move == "follow" else "more info")
            query = f"{attribute} of {other}" if move == "follow" else f"info on {other}"
        told = self.call("search", query).rpartition(" is ")[2]
        return told if told.isdigit() else None
