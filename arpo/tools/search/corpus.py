"""What local search reads: the rows of a corpus, and the terms of a query.

Stop words are left out of queries: half of the corpus has them, so they rank nothing and cost most.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from arpo.errors import UserError

MAX_TERMS = 32
"""Terms of a query that count; the others are ignored."""
_STOP_WORDS = """
    a about am an and are as at be been being but by can could did do does for from had has have he her him his how i if
    in into is it its me my no nor not of on or our she should so such than that the their them then there these they
    this those to was we were what when where which who whom whose why will with would you your
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())


def ranking_terms(words: Iterable[str]) -> list[str]:
    """The MAX_TERMS words of a query that rank passages, each once.

    A query of stop words alone keeps them: better a slow answer than none.

    >>> ranking_terms(["what", "is", "the", "height", "of", "silver", "otter"])
    ['height', 'silver', 'otter']
    """
    unique = list(dict.fromkeys(words))
    return ([word for word in unique if word not in STOP_WORDS] or unique)[:MAX_TERMS]


def read_corpus(path: Path, digest) -> Iterator[tuple[str, str]]:
    """(what is indexed, what the model reads) of each row; every byte read goes through `digest` too.

    {"title": T, "text": P} -> (T P, T: P); {"contents": P} -> (P, P); {"key": K, "text": P} -> (K, P)
    Raises UserError for a row that is not like this (the message names file, line and field), or where there is none.
    """
    is_empty = True
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            digest.update(line)
            if not line.strip():
                continue
            is_empty = False
            place = f"{path}:{number}"
            try:
                row = json.loads(line)
            except UnicodeDecodeError:
                raise UserError(f"{place}: not UTF-8 text; save the corpus as UTF-8") from None
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{place}: not valid JSON ({error.msg} at column {error.colno}); fix the line"
                ) from None
            if not isinstance(row, dict):
                raise UserError(f"{place}: must be a JSON object, not {type(row).__name__}")
            yield _indexed_and_shown(row, place)
    if is_empty:
        raise UserError(f"{path}: the corpus is empty; was the download or the export interrupted?")


def _indexed_and_shown(row: dict, place: str) -> tuple[str, str]:
    body = "text" if "text" in row else "contents"
    if body not in row:
        raise UserError(f'{place}: neither "text" nor "contents" in the row; give it one of the two')
    for name in (body, "title", "key"):
        if not isinstance(row.get(name, ""), str):
            raise UserError(f'{place}: "{name}" must be a string, not {type(row[name]).__name__}')
    if not row[body].strip():
        raise UserError(f'{place}: "{body}" is empty; leave the row out')
    # Lone surrogates ("\ud800" is valid JSON) are no text: no index takes them.
    text, title, key = (
        " ".join(row.get(name, "").encode("utf-8", "replace").decode().split()) for name in (body, "title", "key")
    )
    shown = f"{title}: {text}" if title and not key and not text.startswith(title) else text
    return key or f"{title} {text}", shown
