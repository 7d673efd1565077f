"""The rows of a cache: the key of a question, and the compressed answer."""

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
"""The answer to a query without hits, as in the released cache."""
PAGE = "page"
SUMMARY = "summary"
"""PAGE and SUMMARY: backend of a recorded page, and of a recorded summary. Other rows have the backend of a search."""
Row = tuple[bytes, str, str, bytes, bool, float]
"""Key, backend, clean query, value (query and text, compressed), True for an answer without hits, time of recording."""


def clean_text(text: str) -> str:
    """Return the text on one line, without control characters and lone surrogates."""
    spaced = "".join(" " if unicodedata.category(c) in ("Cc", "Cs") else c for c in text)
    return " ".join(spaced.split())


def clean_query(argument: str) -> str:
    """Return the query on one line, at most MAX_QUERY_CHARS, without control characters and double quotes.

    The released code drops double quotes too, so the released cache answers its recorded queries.

    >>> clean_query(' height of\\n"Silver\\x00 Otter" ')
    'height of Silver Otter'
    """
    return clean_text(argument.replace('"', ""))[:MAX_QUERY_CHARS].rstrip()


def cache_key(backend: str, params: dict[str, object], query: str) -> bytes:
    """Return the hash of a question. `params`: all settings with an effect on the backend's answer."""
    return hashlib.sha256(json.dumps([FORMAT, backend, params, query], sort_keys=True).encode()).digest()


def make_row(key: bytes, backend: str, query: str, text: str) -> Row:
    """Return a row with this answer, recorded now."""
    value = zlib.compress(json.dumps({"query": query, "text": text}).encode())
    return key, backend, clean_query(query), value, text == NO_RESULTS, time.time()


class DamagedEntry(Exception):
    """The value of a row is damaged, for example by a disk error: its checksum is wrong."""


def unpack(value: bytes) -> tuple[str, str]:
    """Return the recorded query and the text in a row's value. Raises DamagedEntry."""
    try:
        entry = parse_json(inflate(value, MAX_ENTRY_BYTES))
        query, text = entry["query"], entry["text"]
        if not isinstance(query, str) or not isinstance(text, str):
            raise TypeError("query and text are no texts")
        return query, text
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedEntry(f"damaged entry: {error}") from None
