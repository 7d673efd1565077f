"""The demo's synthetic world: facts, questions, and a mediocre demonstrator who shows how tools are used.

Everything the demo's agent can learn about lives here, and nothing needs a network.

* One document per fact ("height of Silver Otter is 482"). A fifth of the entities is held out: no training file names
  them, so a question about them can be answered by searching only.
* Question families: calc (python), look (search), hop (search twice), mix (search, python), long (search twice
  and python).
* The demonstrator knows the right moves, but often guesses, sends sloppy queries, picks the wrong tool or breaks the
  format. Imitating it gives a mediocre agent; RL has to find out which of its habits pay.
"""

from __future__ import annotations

import ast
import operator
import random
from collections.abc import Callable
from dataclasses import dataclass

from arpo.protocol.tags import render_result

ADJECTIVES = (
    *("Red", "Blue", "Green", "Black", "White", "Gold", "Silver", "Dark", "Bright", "Old"),
    *("New", "Wild", "Calm", "Cold", "Warm", "Swift", "Quiet", "Tall", "Tiny", "Grand"),
)
NOUNS = (
    *("Otter", "Falcon", "Wolf", "Raven", "Tiger", "Eagle", "Bear", "Fox", "Lion", "Shark"),
    *("Whale", "Crane", "Horse", "Moose", "Lynx", "Hawk", "Viper", "Bison", "Panda", "Gecko"),
)
ATTRIBUTES = ("height", "age", "mass", "price", "speed")
FAMILIES = ("calc", "look", "hop", "mix", "long")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


@dataclass(frozen=True)
class Question:
    """One question and what it takes to answer it."""

    family: str
    text: str
    answer: str
    entity: str = ""
    attribute: str = ""
    factor: int = 0
    """mix, long: the number that the attribute's value is multiplied with."""
    expression: str = ""
    """calc: what to compute."""


class World:
    """The facts. `train` and `test` are disjoint lists of entity names; owners stay within the owned entity's part."""

    families: tuple[str, ...] = FAMILIES
    vocab_size = 608
    """Of its tokenizer. BPE would find about 620; a multiple of 32 below, so that the model has no unused ids."""

    def __init__(self, seed: int):
        rng = random.Random(seed)
        names = [f"{adjective} {noun}" for adjective in ADJECTIVES for noun in NOUNS]
        rng.shuffle(names)
        num_test = len(names) // 5
        self.entities = {"test": names[:num_test], "train": names[num_test:]}
        self.facts: dict[tuple[str, str], str] = {}  # (attribute or "owner", entity) -> value
        for part in self.entities.values():
            for entity in part:
                self.facts |= {(attribute, entity): str(rng.randint(100, 999)) for attribute in ATTRIBUTES}
                self.facts["owner", entity] = rng.choice(part)
        self._order = list(self.facts)
        rng.shuffle(self._order)  # so that equally good hits of a vague query come in no meaningful order

    def documents(self) -> list[dict[str, str]]:
        """The search corpus. Only `key` is indexed: "owner of Red Fox" must not find "owner of Red Lion is Blue Fox".

        [{"key": "height of Silver Otter", "text": "height of Silver Otter is 482"}, ...]
        """
        keys = [f"{attribute} of {entity}" for attribute, entity in self._order]
        return [
            {"key": key, "text": f"{key} is {self.facts[fact]}"} for key, fact in zip(keys, self._order, strict=True)
        ]

    def question(self, rng: random.Random, part: str, family: str | None = None) -> Question:
        """A random question about entities of `part` ("train" | "test")."""
        family = family or rng.choice(self.families)
        if family == "calc":
            a, b, c = (rng.randint(11, 99) for _ in range(3))
            expression = rng.choice([f"{a}*{b}", f"{a}*{b}+{c}", f"{a}*{b}-{c}"])
            return Question(family, f"compute {expression}", str(evaluate(expression)), expression=expression)
        entity, attribute = rng.choice(self.entities[part]), rng.choice(ATTRIBUTES)
        owned = family in ("hop", "long")
        value = self.facts[attribute, self.facts["owner", entity] if owned else entity]
        subject = f"the {attribute} of {'the owner of ' if owned else ''}{entity}"
        if family in ("look", "hop"):
            return Question(family, f"what is {subject}?", value, entity, attribute)
        factor = rng.randint(11, 99)
        answer = str(factor * int(value))
        return Question(family, f"what is {factor} times {subject}?", answer, entity, attribute, factor)


def evaluate(expression: str) -> int:
    """Integer arithmetic with + - *, and nothing else. Raises NameError as Python does.

    >>> evaluate("39*58+77")
    2339
    """

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name):
            raise NameError(f"name {node.id!r} is not defined")
        raise TypeError(f"{expression!r} is not integer arithmetic")

    return value(ast.parse(expression, mode="eval").body)


def python_result(code: str) -> str:
    """Return what the python tool answers to `print(<arithmetic>)`; a test compares the two.

    >>> python_result("print(6*7)"), python_result("print(age)")
    ('42', "NameError: name 'age' is not defined")
    """
    assert code.startswith("print(") and code.endswith(")"), code
    try:
        return str(evaluate(code[len("print(") : -1]))
    except NameError as error:
        return f"NameError: {error}"


# The demonstrator's habits, as shares. The wrong habit is the most frequent one where it matters ("info on X"), so that
# greedy decoding after SFT is mediocre too, and RL has something to find.
LOOKUP = {"right": 0.33, "vague": 0.42, "noun_only": 0.04, "guess": 0.12, "wrong_tool": 0.09}
AFTER_WRONG_HIT = {"retry": 0.45, "trust": 0.55}
COMPUTE = {"right": 0.55, "guess": 0.27, "wrong_operator": 0.09, "wrong_tool": 0.09}
GIVES_UP_AFTER_WRONG_TOOL = 0.5
FORGETS_THE_OWNER = 0.10
NO_BOX_OR_UNCLOSED = 0.06
UNCLOSED_THOUGHT = 0.04


class Demonstrator:
    """Writes one trajectory per question; it is right in about a third of all cases."""

    def __init__(self, search: Callable[[str], str], trace: type[Trace] | None = None):
        self.search = search  # query -> result text, as the search tool gives it
        self.trace = trace or Trace

    def trajectory(self, question: Question, rng: random.Random) -> str:
        """The whole assistant turn, tool results included, without EOS."""
        text = self.trace(self.search, question, rng).write()
        return text.replace("</think>", "", 1) if rng.random() < self.trace.unclosed_thought else text


class Trace:
    """One trajectory in the making."""

    compute_habits = COMPUTE
    no_box_or_unclosed, unclosed_thought = NO_BOX_OR_UNCLOSED, UNCLOSED_THOUGHT

    def __init__(self, search: Callable[[str], str], question: Question, rng: random.Random):
        self.search, self.question, self.rng = search, question, rng
        self.text = ""

    def write(self) -> str:
        q = self.question
        if q.family == "calc":
            self.compute(q.expression)
            return self.text
        subject: str | None = q.entity
        if q.family in ("hop", "long"):
            owner = self.look_up("owner", q.entity)
            subject = q.entity if owner and self.chance(FORGETS_THE_OWNER) else owner
        value = self.look_up(q.attribute, subject) if subject else None
        if value is None:
            self.guess()
        elif q.factor:
            self.compute(f"{q.factor}*{value}")
        else:
            self.think("found")
            self.answer(value)
        return self.text

    def look_up(self, attribute: str, entity: str) -> str | None:
        """Search one fact; what the demonstrator believes its value to be, None where it gave up."""
        habit = self.pick(LOOKUP)
        if habit == "guess":
            return None
        if habit == "wrong_tool":
            self.think("use python")
            self.call("python", f"print({attribute})")
            if self.chance(GIVES_UP_AFTER_WRONG_TOOL):
                return None
        queries = {"vague": f"info on {entity}", "noun_only": f"{attribute} of {entity.split()[1]}"}
        self.think(f"search {attribute}")
        hit = self.call("search", queries.get(habit, f"{attribute} of {entity}"))
        if f"{attribute} of {entity} is " not in hit:
            if self.pick(AFTER_WRONG_HIT) == "trust":
                value = hit.rpartition(" is ")[2]
                return value if value.isdigit() != (attribute == "owner") else None
            self.think("wrong, search again")
            hit = self.call("search", f"{attribute} of {entity}")
        return hit.rpartition(" is ")[2]

    def compute(self, expression: str) -> None:
        habit = self.pick(self.compute_habits)
        if habit == "guess":
            return self.guess()
        if habit == "wrong_tool":
            self.think("search it")
            self.call("search", expression)
            if self.chance(GIVES_UP_AFTER_WRONG_TOOL):
                return self.guess()
        if habit == "wrong_operator":
            at = self.rng.choice([i for i, c in enumerate(expression) if c in "*+-"])
            wrong = self.rng.choice([c for c in "*+-" if c != expression[at]])
            expression = expression[:at] + wrong + expression[at + 1 :]
        self.think("use python")
        result = self.call("python", f"print({expression})")
        self.think("done")
        return self.answer(result)

    def guess(self) -> None:
        """A round number, hardly ever right; random digits would be noise in the gradient."""
        self.think("I know it")
        self.answer(self.rng.choice(["100", "200", "500"]))

    def think(self, thought: str) -> None:
        self.text += f"<think>{thought}</think>"

    def call(self, tag: str, argument: str) -> str:
        result = python_result(argument) if tag == "python" else self.search(argument)
        self.text += f"<{tag}>{argument}</{tag}>{render_result(result)}"
        return result

    def answer(self, value: str) -> None:
        forms = ["<answer>\\boxed{%s}</answer>"]
        if self.chance(self.no_box_or_unclosed):
            forms = ["<answer>%s</answer>", "<answer>\\boxed{%s}"]
        self.text += self.rng.choice(forms) % value

    def pick(self, shares: dict[str, float]) -> str:
        return self.rng.choices(list(shares), list(shares.values()))[0]

    def chance(self, share: float) -> bool:
        return self.rng.random() < share
