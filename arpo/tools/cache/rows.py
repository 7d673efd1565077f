"""The rows of a cache: a question's key, and its answer, compressed."""

from __future__ import annotations

import hashlib
import json
import time
import unicodedata
import zlib

from arpo.config.bounded import inflate, parse_json

FORMAT = 1
MAX_QUERY_CHARS = 512
MAX_ENTRY_BYTES = 16 << 20
NO_RESULTS = "No search results found."
"""The answer where nothing matches, as in the released cache."""
PAGE, SUMMARY = "page", "summary"
"""Backends of what was recorded besides searches."""
Row = tuple[bytes, str, str, bytes, bool, float]
"""Key, backend, clean query, value (the compressed query and text), whether nothing was found, time of recording."""


def clean_text(text: str) -> str:
    """Return the text on one line, without control characters and lone surrogates."""
    spaced = "".join(" " if unicodedata.category(c) in ("Cc", "Cs") else c for c in text)
    return " ".join(spaced.split())


def clean_query(argument: str) -> str:
    """Return the query on one line, at most MAX_QUERY_CHARS, without control characters and double quotes.

    The released code drops double quotes too, so its cache is hit by the queries that it was recorded with.

    >>> clean_query(' height of\\n"Silver\\x00 Otter" ')
    'height of Silver Otter'
    """
    return clean_text(argument.replace('"', ""))[:MAX_QUERY_CHARS].rstrip()


def cache_key(backend: str, params: dict[str, object], query: str) -> bytes:
    """Return a hash of a question; `params` holds all that changes the backend's answer to it."""
    return hashlib.sha256(json.dumps([FORMAT, backend, params, query], sort_keys=True).encode()).digest()


def make_row(key: bytes, backend: str, query: str, text: str) -> Row:
    """Return the row of an answer that is recorded now."""
    value = zlib.compress(json.dumps({"query": query, "text": text}).encode())
    return key, backend, clean_query(query), value, text == NO_RESULTS, time.time()


class DamagedEntry(Exception):
    """The value of a row is not as it was written; its checksum does not hold."""


def unpack(value: bytes) -> tuple[str, str]:
    """Return the query, as it was recorded, and the text in a row's value. Raises DamagedEntry."""
    try:
        entry = parse_json(inflate(value, MAX_ENTRY_BYTES))
        query, text = entry["query"], entry["text"]
        if not isinstance(query, str) or not isinstance(text, str):
            raise TypeError("query and text are no texts")
        return query, text
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedEntry(f"damaged entry: {error}") from None
