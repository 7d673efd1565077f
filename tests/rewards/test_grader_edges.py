"""Answers that one could grade either way: what was decided for each, as docs/evaluation.md lists it."""

import pytest

from arpo.rewards.math_answer import exact_accuracy, math_equal
from arpo.rewards.qa import qa_accuracy, token_f1

CASES = {
    "blanks part thousands": [
        ("1 000", "1000", True),
        (r"1\,000", "1000", True),
        ("1\u00a0000", "1,000", True),
        (r"-12\,345.5", "-12345.5", True),
        ("1000", "1 000", True),
        ("1 2", "12", False),
        ("1 00", "100", False),
        (r"1\,000", "0", False),
    ],
    "a decimal comma is one where the answer is a single number": [
        ("3,14", "3.14", True),
        ("0,111", "0.111", True),
        ("0,111", "111", False),
        ("1,234", "1234", True),  # thousands before all
        ("1,234", "1.234", False),
        ("2,1", "1,2", True),  # lists: the answer is no single number
        ("1.2", "1,2", False),
    ],
    "mixed numbers": [
        ("2 1/2", "2.5", True),
        ("-2 1/2", "-2.5", True),
        (r"2\frac{1}{2}", "2 1/2", True),
        ("2 1/2", "1", False),  # no product
        ("2 1/2", "10.5", False),
        ("2 3/2", "3.5", False),
    ],
    "a unit may be missing, but not be another one": [
        ("5 dollars", "5", True),
        ("5", "5 dollars", True),
        (r"12 \text{ cm}", "12", True),
        ("12 centimeters", "12 cm", True),
        (r"3\sqrt{2} cm", r"3\sqrt{2}", True),
        ("1 000 m", "1000", True),
        ("12 cm", "12 m", False),
        (r"12\text{ cm}", r"12\text{ m}", False),
        ("6 dollars", "5", False),
        ("5 million", "5", False),
        ("5 x", "5", False),
    ],
    "an equation of plain numbers must be true": [
        ("4=5", "5", False),
        ("x = 4 = 5", "5", False),
        ("x=5", "5", True),
        ("2+3=5", "5", True),
        ("10/3 = 3.33", "3.33", True),
        ("10/3 = 3.43", "3.43", False),
        ("10/3 = 3", "3", False),
    ],
    "a decimal of six digits may be the truth rounded": [
        ("0.0666668", "0.066666793", True),
        ("-3.14159", "-3.14159265", True),
        ("3.14160", "3.14159265", False),  # no correct rounding
        ("0.0666667", "0.066666793", False),
        ("0.1", "0.0666", False),
        ("0.06667", "0.066666793", False),
        ("3.142", "3.14159265", False),
        ("123456", "123456.4", False),
        ("0.000000", "0.0000001", False),
        ("3.14159265", "3.14159", False),  # nor may the truth be one of the answer
    ],
    "options are A to J": [
        ("B. Paris", "B", True),
        ("W. E. B. Du Bois", "W", False),
        ("(W)", "W", True),
        ("w", "W", False),
    ],
    "a base counts": [
        ("101_2", "101", False),
        ("101_2", "5", True),
        ("102_2", "11", False),
        ("101_0", "101", False),
        ("101_" + "9" * 30, "101", False),
        ("101", "101_2", True),  # the question has named the base
        ("5", "101_2", False),
        ("101_{2}", "101_2", True),
    ],
    "words are no products": [
        ("cat", "act", False),
        ("Cat", "cat", True),
        ("yx", "xy", True),
    ],
    "a ratio is no plain number": [
        ("3:4", "0.75", False),
        ("0.75", "3:4", False),
        ("3:1", "3", False),
        ("6:8", "3:4", True),
        ("3:4", r"\frac{3}{4}", True),
        ("3/4", "3:4", True),
    ],
    "scientific notation": [
        ("1e3", "1000", True),
        ("1.5E-3", "0.0015", True),
        ("1e3", "1003", False),
        ("2e", "2", False),
    ],
    "an en dash may be a minus": [
        ("\u20135", "-5", True),
        ("\u20135", "5", False),
        ("x \u2013 3", "x-3", True),
        ("3\u20135", "-2", False),  # a range
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("prediction", "answer", "equal"),
    [pytest.param(*case, id=f"{name}-{case[:2]}") for name in CASES for case in CASES[name]],
)
def test_doubtful_answers_are_graded_as_the_docs_say(prediction, answer, equal):
    assert math_equal(prediction, answer) is equal


def test_in_questions_too_an_en_dash_is_a_minus_and_w_is_no_option():
    assert token_f1("\u20135", "-5") == 1.0 and token_f1("\u20135", "5") == 0.0
    assert token_f1("1914\u20131918", "1914-1918") == 1.0
    assert qa_accuracy("W. E. B. Du Bois", ["W"]) == pytest.approx(1 / 3) and qa_accuracy("W", ["W"]) == 1.0


def test_no_number_begins_with_a_zero_and_a_thousands_comma():
    assert exact_accuracy("0,111", ["111"]) == 0.0 and exact_accuracy("1,111", ["1111"]) == 1.0
