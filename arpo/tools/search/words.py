"""Prepare texts for the local search: one spelling per word, and words in scripts without blanks between words.

Text in such a script (Chinese, Japanese, Thai, ...) is cut into pairs of neighbouring characters, as in Lucene's
CJKAnalyzer. Pairs need no dictionary, and are rare enough to rank passages. "東京は" is indexed as 東, 京, は, 東京 and
京は; a query for "東京は" looks for 東京 and 京は. A query of a single character looks for this character.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from itertools import pairwise

# Chinese, Japanese, Korean, Thai, Lao, Khmer, Myanmar
_RUN = re.compile(
    "[\u3005-\u3007\u3041-\u309f\u30a1-\u30fa\u30fc-\u312f\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3"
    "\U00020000-\U0003ffff\u0e01-\u0e4e\u0e80-\u0ecf\u0edc-\u0eff\u1780-\u17d3\u1000-\u103f\u1050-\u108f]+"
)
_CHARACTER = re.compile(r"\w\W*|\W")
"""A character with its vowel signs."""
_KANA_MARKS = "\u3099\u309a"
_BREVE = "\u0306"  # й is a separate letter, not an accented и
_MARKS = "".join(
    c for c in map(chr, range(0x300, 0x3100)) if unicodedata.combining(c) and c not in _KANA_MARKS + _BREVE
)
_ACCENT = re.compile(f"[{''.join(sorted(_MARKS))}]|(?<!и){_BREVE}")


def indexed(text: str) -> str:
    """Return a passage with blanks between words. The analyzer then splits at every character but letters and digits.

    >>> indexed("Ｚürich, 東京は"), indexed("Straße")
    ('zurich,  東 京 は 東京 京は ', 'strasse')
    """
    return _words(text, _characters_and_pairs)


def asked(text: str) -> str:
    """Return a query with blanks between words. asked("東京は?") -> " 東京 京は ?" """
    return _words(text, lambda characters: _pairs(characters) or characters)


def _words(text: str, cut: Callable[[list[str]], list[str]]) -> str:
    if text.isascii():
        return text
    text = unicodedata.normalize("NFKD", text).casefold()
    text = unicodedata.normalize("NFC", _ACCENT.sub("", text))
    return _RUN.sub(lambda run: f" {' '.join(cut(_CHARACTER.findall(run[0])))} ", text)


def _pairs(characters: list[str]) -> list[str]:
    return [first + second for first, second in pairwise(characters)]


def _characters_and_pairs(characters: list[str]) -> list[str]:
    return characters + _pairs(characters)
