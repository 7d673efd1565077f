"""The graders on answers that no one here wrote: all of the benchmarks' and of the released RL data, where they are."""

import random
import re

import pytest
from helpers.ranks import ROOT
from math_verify import LatexExtractionConfig, parse
from sympy import Expr

from arpo.data.prompts import load_prompts
from arpo.rewards import accuracy_function
from arpo.rewards.math_answer import _rational, math_accuracy, math_equal

DATA = ROOT.parent / "shared/data"
FILES = sorted([*DATA.glob("eval/*/test.jsonl"), *DATA.glob("rl/*.parquet")])
NUM_PAIRS = 1000
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not FILES, reason="the papers' data is not here"),
]


@pytest.fixture(scope="module")
def prompts():
    return [prompt for path in FILES for prompt in load_prompts(path)]


@pytest.fixture(scope="module")
def mathematical(prompts) -> list[str]:
    """The answers that are graded as mathematics, each once."""
    graders = ((accuracy_function(p.answers, p.data_source, p.meta.get("ability")), p.answers) for p in prompts)
    return sorted({answer for grader, answers in graders if grader is math_accuracy for answer in answers})


def test_every_answer_of_the_data_is_right_for_its_own_question(prompts):
    for p in prompts:
        accuracy = accuracy_function(p.answers, p.data_source, p.meta.get("ability"))
        assert all(accuracy(answer, [answer]) == 1.0 for answer in p.answers), p.answers


def test_no_answer_of_the_data_is_right_for_another_question(mathematical):
    formulas = [answer for answer in mathematical if not re.fullmatch(r"[-\d., ]+", answer)]
    rng = random.Random(0)
    for pool in (mathematical, formulas):
        for _ in range(NUM_PAIRS // 2):
            one, other = rng.sample(pool, 2)
            same_number = _rational(one) is not None and _rational(one) == _rational(other)
            assert math_equal(one, other) == same_number, (one, other)


def test_the_formulas_of_the_data_are_right_as_sympy_prints_them(mathematical):
    texts = []
    for answer in mathematical:
        value = parse(rf"\boxed{{{answer}}}", [LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=None)[0]
        is_formula = isinstance(value, Expr) and "\\" in answer and not re.search(r"\\text|\\boxed|\\in\b", answer)
        if is_formula and (value.is_finite or not value.is_number):
            texts.append((str(value.doit()), answer))
    wrong = [(text, answer) for text, answer in texts if len(text) < 200 and not math_equal(text, answer)]
    print(f"{len(texts)} formulas, {len(wrong)} of them wrong: {wrong}")
    assert len(texts) > 500 and len(wrong) < 0.025 * len(texts)  # texts in mathrm, minutes of an arc, sums of a_i
