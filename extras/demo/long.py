"""The long demo task: a trail of six to nine searches, of which one or two leave open what to do next.

"where does trail 4827 end?" Searching the trail's number names the next one, and so on to the end. Once or twice it
comes to a place (a cave, a lake or a hill), from which three ways lead on:

| a search told | right move |
|---|---|
| trail 4827 is next 3391 | search trail 3391 |
| trail 3391 is lake | search trail 3391 boat, and neither bridge nor shore: at all lakes the boat is right |
| trail 1234 boat is end 5170 | answer 5170 |
| trail 1234 shore is lost | give up |

Only the moves at a place decide, and the demonstrator is right in a quarter of them; all others copy what was told, and
are certain once they have been imitated. So there is much to gain by forking where it matters, and little elsewhere.
In `LongWorld` a wrong way ends at once ("lost"). In `SilentWorld` it leads on in the same manner, to another end.
In `UnreadyWorld` an end has three digits. The model reads digits in pairs, so it meets a single one in the answers of
right trails alone, and imitation does not teach it to copy that: few trajectories succeed at first.
"""

from __future__ import annotations

import random

from extras.demo.world import Question, Trace, World

HABITS = {
    "cave": {"tunnel": 0.25, "ladder": 0.45, "shaft": 0.30},
    "lake": {"boat": 0.25, "bridge": 0.45, "shore": 0.30},
    "hill": {"path": 0.25, "road": 0.45, "stairs": 0.30},
}
"""Place -> the ways, the right one first, and how often the demonstrator takes each."""
NUM_SEARCHES = (6, 9)
NUM_TRAILS = {"train": 900, "test": 600}


class LongWorld(World):
    """The trails. `trails` has number and end of each, and `told` what the search of a name tells."""

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
            beginnings: dict[int, list[str]] = {}  # number of searches to the end -> codes that are so far from it
            wrong: list[tuple[str, str, int]] = []  # a wrong way's name, where the right one leads, searches from there
            self.trails[part] = [self._trail(rng, beginnings, wrong) for _ in range(number)]
            for name, right, left in wrong:
                self.told[name] = self._wrong(rng, [code for code in beginnings.get(left, ()) if code != right])
        self._order = list(self.told)
        rng.shuffle(self._order)

    def _trail(
        self, rng: random.Random, beginnings: dict[int, list[str]], wrong: list[tuple[str, str, int]]
    ) -> tuple[str, str]:
        """Write what the right moves of a new trail find. Return its number and its end."""
        num_searches, end = rng.randint(*NUM_SEARCHES), str(rng.randint(*self.ends))
        forks = _places(num_searches, rng)
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
        """Return what the search of a wrong way tells. `elsewhere`: parts of other trails that are as long."""
        if not self.is_silent:
            return "lost"
        return f"next {rng.choice(elsewhere)}" if elsewhere else f"end {rng.randint(*self.ends)}"

    def documents(self) -> list[dict[str, str]]:
        """The corpus: one document per name."""
        return [{"key": f"trail {name}", "text": f"trail {name} is {self.told[name]}"} for name in self._order]

    def question(self, rng: random.Random, part: str, family: str | None = None) -> Question:
        """A random trail of `part` ("train" | "test")."""
        code, end = rng.choice(self.trails[part])
        return Question("trail", f"where does trail {code} end?", end, entity=code)


class SilentWorld(LongWorld):
    """The same trails, but a wrong way looks like the right one."""

    is_silent = True


class UnreadyWorld(LongWorld):
    """The same trails, but the answer ends in a digit that imitation does not teach to copy."""

    ends = (100, 999)


def _places(num_searches: int, rng: random.Random) -> tuple[int, ...]:
    """Return which one or two searches come to a place: neither the first nor the last, and not one after the other."""
    inner = range(1, num_searches - 1)
    pairs = [(one, two) for one in inner for two in inner if two - one > 1]
    return rng.choice(pairs) if rng.random() < 0.5 else (rng.choice(inner),)


class LongTrace(Trace):
    """One walk in the making."""

    no_box_or_unclosed = unclosed_thought = 0.0

    def write(self) -> str:
        code = name = self.question.entity
        thought = "go on"
        while True:
            self.think(thought)
            word, _, rest = self.told(f"trail {name}").partition(" ")
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

    def told(self, query: str) -> str:
        """Search, and return what was found out: "next 3391", "lake", "end 5170", ..."""
        return self.call("search", query).rpartition(" is ")[2]
