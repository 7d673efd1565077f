"""Token F1 for question answering: SQuAD's, with numbers kept whole, CJK per character, and option letters."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter

_WRAPPER = re.compile(r"\\(?:text|textbf|mathrm|mathbf|textit)\s*\{([^{}]*)\}")
_MARKDOWN = re.compile(r"\s*(\*{1,3}|__|`{1,3})(?=\S)([^*`]*[^*`\s])\1")
_CJK = re.compile(r"([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff])")
# The lookahead refuses "A. is wrong; B", which names two.
_OPTION = re.compile(r"(?!.+[;,:]\s*\(?[A-J]\)?\.?\s*$)\(?([A-J])\)?(?:[.):]\s.*|[.):])?$", re.DOTALL)
# SQuAD deletes all punctuation, which makes -5 of 5 and 105 of 1.05; what belongs to a number stays.
_NUMBER_MARK = re.compile(r"(?<=\d)[./](?=\d)|(?<![\w.)])[-\u2010-\u2013\u2212](?=[.\d])")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_EXACT_ONLY = ("yes", "no", "noanswer")


def unwrap(text: str) -> str:
    r"""Remove LaTeX around words, and Markdown at the start. "\text{(B)}" -> "(B)", "$5$" -> "5", "**B.**" -> "B." """
    if marked := _MARKDOWN.match(text):  # at the start alone: in x**2 + y**2 the stars are no marks
        text = marked[2] + text[marked.end() :]
    return _WRAPPER.sub(r"\1", text).strip().strip("$").strip()


def option_letter(text: str) -> str | None:
    """Return the option, A to J, that a text chooses: "B" for "B", "(B)", "B." and "B. Paris", else None."""
    match = _OPTION.match(unwrap(text))
    return match[1] if match else None


def tokens(text: str) -> list[str]:
    """Split a text into lower-case words and single CJK characters, without punctuation and, unless alone, articles.

    >>> tokens("The  PARIS, France."), tokens("-1,000.5"), tokens("北京市"), tokens("A")
    (['paris', 'france'], ['-1000.5'], ['北', '京', '市'], ['a'])
    """
    text = unicodedata.normalize("NFKC", unwrap(text)).lower()
    text = _THOUSANDS.sub("", text)
    marks = {match.start() for match in _NUMBER_MARK.finditer(text)}
    plain = "".join(
        ("-" if i in marks and c not in "./" else c)
        if i in marks or not (c in string.punctuation or unicodedata.category(c).startswith("P"))
        else ""
        for i, c in enumerate(text)
    ).replace("\u2212", "-")
    words = _CJK.sub(r" \1 ", plain).split()
    return [word for word in words if word not in ("a", "an", "the")] or words or text.split()


def token_f1(prediction: str, answer: str) -> float:
    """Return the F1 of the two bags of tokens; yes and no count only when they are the whole answer.

    >>> round(token_f1("Paris France", "Paris"), 4), token_f1("yes it is", "yes"), token_f1("A", "A")
    (0.6667, 0.0, 1.0)
    """
    predicted, expected = tokens(prediction), tokens(answer)
    if predicted != expected and (" ".join(predicted) in _EXACT_ONLY or " ".join(expected) in _EXACT_ONLY):
        return 0.0
    num_common = sum((Counter(predicted) & Counter(expected)).values())
    return 2 * num_common / (len(predicted) + len(expected)) if num_common else 0.0


def qa_accuracy(prediction: str, answers: list[str]) -> float:
    """Return the best F1 over the accepted answers; an answer that is an option's letter needs that very option."""
    return max(_of_option(prediction, answer, token_f1(prediction, answer)) for answer in answers)


def exact_match(prediction: str, answers: list[str]) -> float:
    """Return 1.0 if prediction and an answer are the same tokens (without case, punctuation, articles), else 0.0."""
    return max(_of_option(prediction, a, float(tokens(prediction) == tokens(a))) for a in answers)


def _of_option(prediction: str, answer: str, otherwise: float) -> float:
    """Return whether a prediction is the option that an answer like "B" or "(B)" asks for, else `otherwise`."""
    letter = option_letter(answer) if len(unwrap(answer).strip("().:")) == 1 else None
    return float(option_letter(prediction) == letter) if letter else otherwise
