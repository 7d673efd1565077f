"""Token F1 for question answering, as in SQuAD. New: complete numbers, a token per CJK character, option letters."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter

_FONTS = r"text(?:bf|it|rm|sf|tt|sc|sl|up|normal)?|math(?:bf|it|rm|sf|tt|normal)|bm|boldsymbol|emph|mbox|hbox|underline"
BRACED = r"(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*"  # with braces in two levels, as in \frac{\sqrt{3}}{2}
_WRAPPER = re.compile(rf"\\(?:{_FONTS})\s*\{{({BRACED})\}}")
_MARKDOWN = re.compile(r"\s*(\*{1,3}|__|`{1,3})(?=\S)([^*`]*[^*`\s])\1")
_CJK = re.compile(r"([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff])")
# The lookaheads reject "A. is wrong; B" and "(A) or (B)", since they name two options.
_OPTION = re.compile(
    r"(?!.+[;,:]\s*\(?[A-J]\)?\.?\s*$)(?!\(?[A-J]\)?[.:]?\s*(?:or|and|/|&)\s*\(?[A-J](?![a-z]))"
    r"\(?([A-J])\)?(?:[.):]\\?\s.*|[.):])?$",
    re.DOTALL,
)
# SQuAD deletes all punctuation: -5 becomes 5, and 1.05 becomes 105. Here the marks within a number stay.
_NUMBER_MARK = re.compile(r"(?<=\d)[./](?=\d)|(?<![\w.)])[-\u2010-\u2013\u2212](?=[.\d])")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_EXACT_ONLY = ("yes", "no", "noanswer")


def unwrap(text: str) -> str:
    r"""Remove LaTeX around words, and Markdown at the start. "\text{(B)}" -> "(B)", "$5$" -> "5", "**B.**" -> "B." """
    # Only at the start: in x**2 + y**2 the stars are no Markdown.
    marked = _MARKDOWN.match(text)
    if marked:
        text = marked[2] + text[marked.end() :]
    while (inner := _WRAPPER.sub(r"\1", text)) != text:  # one font may stand within another
        text = inner
    return text.strip().strip("$").strip()


def option_letter(text: str) -> str | None:
    """Return the chosen option, A to J: "B" for "B", "(B)", "B." and "B. Paris". Return None for any other text."""
    match = _OPTION.match(unwrap(text))
    return match[1] if match else None


def tokens(text: str) -> list[str]:
    """Split a text into lower-case words and single CJK characters, without punctuation and articles. A text of
    articles only keeps them.

    >>> tokens("The  PARIS, France."), tokens("-1,000.5"), tokens("北京市"), tokens("A")
    (['paris', 'france'], ['-1000.5'], ['北', '京', '市'], ['a'])
    """
    text = unicodedata.normalize("NFKC", unwrap(text)).lower()
    text = _THOUSANDS.sub("", text)
    number_marks = {match.start() for match in _NUMBER_MARK.finditer(text)}
    plain = ""
    for i, char in enumerate(text):
        if i in number_marks:
            plain += char if char in "./" else "-"  # one sign for all dashes
        elif not (char in string.punctuation or unicodedata.category(char).startswith("P")):
            plain += char
    plain = plain.replace("\u2212", "-")
    words = _CJK.sub(r" \1 ", plain).split()
    return [word for word in words if word not in ("a", "an", "the")] or words or text.split()


def token_f1(prediction: str, answer: str) -> float:
    """Return the F1 of the two bags of tokens. "yes" and "no" count only as the full answer.

    >>> round(token_f1("Paris France", "Paris"), 4), token_f1("yes it is", "yes"), token_f1("A", "A")
    (0.6667, 0.0, 1.0)
    """
    predicted = tokens(prediction)
    expected = tokens(answer)
    if predicted != expected and (" ".join(predicted) in _EXACT_ONLY or " ".join(expected) in _EXACT_ONLY):
        return 0.0
    num_common = sum((Counter(predicted) & Counter(expected)).values())
    return 2 * num_common / (len(predicted) + len(expected)) if num_common else 0.0


def qa_accuracy(prediction: str, answers: list[str]) -> float:
    """Return the best F1 over the accepted answers. If an answer is an option's letter, only this option is right."""
    return max(_option_score(prediction, answer, token_f1(prediction, answer)) for answer in answers)


def exact_match(prediction: str, answers: list[str]) -> float:
    """Return 1.0 if the prediction has the tokens of an answer (without case, punctuation, articles), otherwise 0.0."""
    return max(_option_score(prediction, answer, float(tokens(prediction) == tokens(answer))) for answer in answers)


def _option_score(prediction: str, answer: str, score: float) -> float:
    """Return 1.0 or 0.0 if the answer is an option ("B" or "(B)"), otherwise `score`."""
    letter = option_letter(answer) if len(unwrap(answer).strip("().:")) == 1 else None
    return float(option_letter(prediction) == letter) if letter else score
