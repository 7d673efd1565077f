"""The long demo task: a trail of six to nine searches. After one or two of them there is a choice.

"where does trail 4827 end?" Searching the trail's number gives the next number, and so on to the end. Once or twice the
trail reaches a place (a cave, a lake or a hill) with three ways:

| a search told | right move |
|---|---|
| trail 4827 is next 3391 | search trail 3391 |
| trail 3391 is lake | search trail 3391 boat, and neither bridge nor shore: at all lakes the boat is right |
| trail 1234 boat is end 5170 | answer 5170 |
| trail 1234 shore is lost | give up |

Only the moves at a place decide, and the demonstrator is right in a quarter of them. All other moves copy the search
result, and are certain after imitation. So forks at a place gain much, and forks elsewhere little.
In `LongWorld` a wrong way ends at once ("lost"). In `SilentWorld` it continues in the same manner, to another end.
In `UnreadyWorld` an end has three digits. The model reads digits in pairs, so only answers of right trails have a
single digit. Imitation does not teach the model to copy it, and few trajectories succeed at first.
In `FirstWorld` the question tells the first place: "trail 4827 is lake. where does it end?" So the first turn decides.
"""

from __future__ import annotations

import random

from extras.demo.world import Question, Trace, World

HABITS = {
    "cave": {"tunnel": 0.25, "ladder": 0.45, "shaft": 0.30},
    "lake": {"boat": 0.25, "bridge": 0.45, "shore": 0.30},
    "hill": {"path": 0.25, "road": 0.45, "stairs": 0.30},
}
"""Place -> way -> how often the demonstrator takes it. The right way is first."""
NUM_SEARCHES = (6, 9)
NUM_TRAILS = {"train": 900, "test": 600}


class LongWorld(World):
    """The trails. `trails`: (number, end) of each trail. `told`: name -> search result."""

    families = ("trail",)
    vocab_size = 480  # BPE would find 483
    is_silent = False
    ends = (1000, 9999)

    def __init__(self, seed: int):
        rng = random.Random(f"long {seed}")
        self._codes = iter([f"{n:04d}" for n in rng.sample(range(10000), 10000)])
        self.told: dict[str, str] = {}
        self.trails: dict[str, list[tuple[str, str]]] = {}
        for part, number in NUM_TRAILS.items():
            # searches to the end -> codes at this distance
            beginnings: dict[int, list[str]] = {}
            # (name of a wrong way, code that the right way leads to, searches from there)
            wrong: list[tuple[str, str, int]] = []
            self.trails[part] = [self._trail(rng, beginnings, wrong) for _ in range(number)]
            for name, right, left in wrong:
                self.told[name] = self._wrong(rng, [code for code in beginnings.get(left, ()) if code != right])
        self._order = list(self.told)
        rng.shuffle(self._order)

    def _trail(
        self, rng: random.Random, beginnings: dict[int, list[str]], wrong: list[tuple[str, str, int]]
    ) -> tuple[str, str]:
        """Write the search results of the right moves of a new trail. Return its number and its end."""
        num_searches = rng.randint(*NUM_SEARCHES)
        end = str(rng.randint(*self.ends))
        forks = self.places(num_searches, rng)
        start = code = name = next(self._codes)
        for left in range(num_searches - 1, -1, -1):  # searches after this one
            if name == code:
                beginnings.setdefault(left + 1, []).append(code)
            if num_searches - 1 - left in forks:
                place = self.told[name] = rng.choice(list(HABITS))
                right, *others = HABITS[place]
                name = f"{code} {right}"
                continue
            following = next(self._codes) if left else ""
            self.told[name] = f"next {following}" if left else f"end {end}"
            if name != code:
                wrong += [(f"{code} {other}", following, left) for other in others]
            code = name = following
        return start, end

    def _wrong(self, rng: random.Random, elsewhere: list[str]) -> str:
        """Return the search result of a wrong way. `elsewhere`: codes of other trails at the same distance."""
        if not self.is_silent:
            return "lost"
        return f"next {rng.choice(elsewhere)}" if elsewhere else f"end {rng.randint(*self.ends)}"

    def documents(self) -> list[dict[str, str]]:
        """Return the corpus: one document per name."""
        return [{"key": f"trail {name}", "text": f"trail {name} is {self.told[name]}"} for name in self._order]

    def question(self, rng: random.Random, part: str, family: str | None = None) -> Question:
        """Draw a trail of `part` ("train" | "test")."""
        return self.question_of(*rng.choice(self.trails[part]))

    def question_of(self, code: str, end: str) -> Question:
        """Return the question for the end of a trail."""
        return Question("trail", f"where does trail {code} end?", end, entity=code)

    def places(self, num_searches: int, rng: random.Random) -> tuple[int, ...]:
        """Draw the one or two searches that reach a place: not the first, not the last, and not two in a row."""
        inner = range(1, num_searches - 1)
        pairs = [(one, two) for one in inner for two in inner if two - one > 1]
        return rng.choice(pairs) if rng.random() < 0.5 else (rng.choice(inner),)


class SilentWorld(LongWorld):
    """The same trails, but a wrong way looks like the right one."""

    is_silent = True


class UnreadyWorld(LongWorld):
    """The same trails, but the answer ends in a digit that imitation does not teach to copy."""

    ends = (100, 999)


class FirstWorld(LongWorld):
    """The same trails, but the first place is the beginning, and the question tells which place this is."""

    def question_of(self, code: str, end: str) -> Question:
        place = self.told[code]
        return Question("trail", f"trail {code} is {place}. where does it end?", end, entity=code, attribute=place)

    def places(self, num_searches: int, rng: random.Random) -> tuple[int, ...]:
        return (0, *super().places(num_searches, rng)[1:])


class LongTrace(Trace):
    """Writes one walk."""

    no_box_or_unclosed = unclosed_thought = 0.0

    def write(self) -> str:
        code = name = self.question.entity
        word, rest = self.question.attribute or "next", code  # what the question tells, like a search result
        while True:
            if word in HABITS:
                way = self.pick(HABITS[word])
                self.think(f"try {way}")
                name = f"{code} {way}"
            elif word == "next":
                self.think("go on")
                code = name = rest
            else:
                self.think("found" if word == "end" else "lost")
                self.answer(rest or "0")
                return self.text
            word, _, rest = self.told(f"trail {name}").partition(" ")

    def told(self, query: str) -> str:
        """Search, and return the result: "next 3391", "lake", "end 5170", ..."""
        return self.call("search", query).rpartition(" is ")[2]
