"""The demo's synthetic world: facts, questions, and a mediocre demonstrator who shows how tools are used.

The demo's agent learns about this world only. Nothing needs a network.

* One document per fact ("height of Silver Otter is 482"). A fifth of the entities is held out: no training file names
  them, so questions about them can only be answered by searching.
* Question families: calc (python), look (search), hop (search twice), mix (search, python), long (search twice
  and python).
* The demonstrator knows the right moves, but often guesses, sends vague queries, picks the wrong tool or breaks the
  format. Imitating it gives a mediocre agent. RL must find the good habits among its habits.
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
    """One question, and the facts needed to answer it."""

    family: str
    text: str
    answer: str
    entity: str = ""
    attribute: str = ""
    factor: int = 0
    """mix, long: factor of the attribute's value in the answer."""
    expression: str = ""
    """calc: the expression to compute."""


class World:
    """The facts. `train` and `test` are disjoint lists of entities. An owner is in the same list as its entity."""

    families: tuple[str, ...] = FAMILIES
    vocab_size = 608
    """Tokens of the tokenizer: a multiple of 32 below the 620 that BPE would find, so that no id is unused."""

    def __init__(self, seed: int):
        rng = random.Random(seed)
        names = [f"{adjective} {noun}" for adjective in ADJECTIVES for noun in NOUNS]
        rng.shuffle(names)
        num_test = len(names) // 5
        self.entities = {"test": names[:num_test], "train": names[num_test:]}
        # (attribute or "owner", entity) -> value
        self.facts: dict[tuple[str, str], str] = {}
        for part in self.entities.values():
            for entity in part:
                self.facts |= {(attribute, entity): str(rng.randint(100, 999)) for attribute in ATTRIBUTES}
                self.facts["owner", entity] = rng.choice(part)
        self._order = list(self.facts)
        # equally good hits of a vague query must not come in a meaningful order
        rng.shuffle(self._order)

    def documents(self) -> list[dict[str, str]]:
        """Return the search corpus. The index covers `key` only: "owner of Red Fox" must not find "owner of Red Lion is
        Blue Fox".

        [{"key": "height of Silver Otter", "text": "height of Silver Otter is 482"}, ...]
        """
        keys = [f"{attribute} of {entity}" for attribute, entity in self._order]
        return [
            {"key": key, "text": f"{key} is {self.facts[fact]}"} for key, fact in zip(keys, self._order, strict=True)
        ]

    def question(self, rng: random.Random, part: str, family: str | None = None) -> Question:
        """Draw a question about entities of `part` ("train" | "test")."""
        family = family or rng.choice(self.families)
        if family == "calc":
            a, b, c = (rng.randint(11, 99) for _ in range(3))
            expression = rng.choice([f"{a}*{b}", f"{a}*{b}+{c}", f"{a}*{b}-{c}"])
            return Question(family, f"compute {expression}", str(evaluate(expression)), expression=expression)
        entity = rng.choice(self.entities[part])
        attribute = rng.choice(ATTRIBUTES)
        owned = family in ("hop", "long")
        value = self.facts[attribute, self.facts["owner", entity] if owned else entity]
        subject = f"the {attribute} of {'the owner of ' if owned else ''}{entity}"
        if family in ("look", "hop"):
            return Question(family, f"what is {subject}?", value, entity, attribute)
        factor = rng.randint(11, 99)
        answer = str(factor * int(value))
        return Question(
            family,
            f"what is {factor} times {subject}?",
            answer,
            entity=entity,
            attribute=attribute,
            factor=factor,
        )


def evaluate(expression: str) -> int:
    """Compute integer arithmetic with + - *, and nothing else. Raises NameError for a name, as Python does.

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
    """Return the python tool's answer to `print(<arithmetic>)`. A test compares it with the real tool.

    >>> python_result("print(6*7)"), python_result("print(age)")
    ('42', "NameError: name 'age' is not defined")
    """
    assert code.startswith("print(") and code.endswith(")"), code
    try:
        return str(evaluate(code[len("print(") : -1]))
    except NameError as error:
        return f"NameError: {error}"


# The demonstrator's habits, as shares. Where it matters ("info on X"), a wrong habit is the most frequent one. So
# greedy decoding after SFT is mediocre too, and RL has something to improve.
LOOKUP = {"right": 0.33, "vague": 0.42, "noun_only": 0.04, "guess": 0.12, "wrong_tool": 0.09}
AFTER_WRONG_HIT = {"retry": 0.45, "trust": 0.55}
COMPUTE = {"right": 0.55, "guess": 0.27, "wrong_operator": 0.09, "wrong_tool": 0.09}
GIVES_UP_AFTER_WRONG_TOOL = 0.5
FORGETS_THE_OWNER = 0.10
NO_BOX_OR_UNCLOSED = 0.06
UNCLOSED_THOUGHT = 0.04


class Demonstrator:
    """Writes one trajectory per question. About a third of them are right."""

    def __init__(self, search: Callable[[str], str], trace: type[Trace] | None = None):
        """search: query -> result text of the search tool."""
        self.search = search
        self.trace = trace or Trace

    def trajectory(self, question: Question, rng: random.Random) -> str:
        """Return the complete assistant message, with tool results, without EOS."""
        text = self.trace(self.search, question, rng).write()
        return text.replace("</think>", "", 1) if rng.random() < self.trace.unclosed_thought else text


class Trace:
    """Writes one trajectory."""

    compute_habits = COMPUTE
    no_box_or_unclosed = NO_BOX_OR_UNCLOSED
    unclosed_thought = UNCLOSED_THOUGHT

    def __init__(self, search: Callable[[str], str], question: Question, rng: random.Random):
        self.search = search
        self.question = question
        self.rng = rng
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
        """Search one fact. Return the value that the demonstrator believes, or None if it gave up."""
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
        """Answer a round number, hardly ever right. Random digits would be noise in the gradient."""
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
