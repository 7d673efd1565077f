"""The search services: Bing through Bright Data, Google through Serper, or a retriever of your own.

A service is a `Service`: its address, what is sent, and where the passages are in what comes back.
"""

from __future__ import annotations

import re
import unicodedata
import urllib.parse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from arpo.tools.http.client import bearer
from arpo.tools.options import SearchConfig
from arpo.tools.search.passages import MAX_PASSAGE_CHARS

_CHINESE = re.compile(r"[\u4e00-\u9fff]")


@dataclass(frozen=True)
class Passage:
    """One result of a search."""

    text: str
    link: str = ""
    """Address of the page that it is from; empty where the service names none."""


@dataclass(frozen=True)
class Service:
    """What is particular to one search service."""

    url: str
    """Its address; empty = the user must name one."""
    key_variable: str
    """Environment variable of the key; empty = it needs none."""
    headers: Callable[[str], dict[str, str]]
    """From the key."""
    payload: Callable[[SearchConfig, str], dict[str, Any]]
    """What is posted for a query."""
    passages: Callable[[Any], list[Passage]]
    """From the decoded answer, best first; ValueError where it is not an answer to a search."""
    params: Callable[[SearchConfig], dict[str, object]]
    """The settings that change an answer."""


def market_of(cfg: SearchConfig, query: str) -> tuple[str, str]:
    """(language, country), like ("en", "US")."""
    market = cfg.market if cfg.market != "auto" else "zh-CN" if _CHINESE.search(query) else "en-US"
    language, country = market.split("-")
    return language, country


def _brightdata_payload(cfg: SearchConfig, query: str) -> dict[str, Any]:
    language, country = market_of(cfg, query)
    bing = {
        "q": query,
        "mkt": f"{language}-{country}",
        "setLang": language,
        "brd_json": "1",
        "cc": country.lower(),
    }
    return {"zone": cfg.zone, "url": f"https://www.bing.com/search?{urllib.parse.urlencode(bing)}", "format": "raw"}


def _serper_payload(cfg: SearchConfig, query: str) -> dict[str, Any]:
    language, country = market_of(cfg, query)
    return {
        "q": query,
        "gl": country.lower(),
        "hl": "zh-cn" if language == "zh" else language,
        "num": cfg.num_passages,
    }


def _organic(tree: Any, text_field: str, empty_mark: str) -> list[Passage]:
    """Of `organic` results. An answer without any must at least describe the search, else it is an error page."""
    if not isinstance(tree, dict) or not isinstance(tree.get("organic", []), list):
        raise ValueError("no object with a list of organic results")
    if "organic" not in tree and empty_mark not in tree:
        raise ValueError(f"neither organic results nor {empty_mark!r}; fields: {', '.join(sorted(tree))}")
    return [Passage(_text(row, text_field), _link(row, "link")) for row in tree.get("organic", [])]


def _retrieved(tree: Any) -> list[Passage]:
    """Passages of {"result": [[{"document": {"contents"}}, ...]]}, the answer to a list of one query.

    A row may be the document itself, or a string; a document has `contents`, or `text` and perhaps `title`;
    either may have a `url`.
    """
    rows = tree.get("result") if isinstance(tree, dict) else None
    if not isinstance(rows, list) or len(rows) != 1 or not isinstance(rows[0], list):
        raise ValueError('not an object with "result", a list that holds one list of passages per query')
    documents = [row["document"] if isinstance(row, dict) and "document" in row else row for row in rows[0]]
    return [_document(document) for document in documents]


def _document(document: Any) -> Passage:
    if isinstance(document, str):
        return Passage(document)
    text = _text(document, "contents") or _text(document, "text")
    if not text:
        raise ValueError("a passage has neither contents nor text")
    title = _text(document, "title")
    whole = f"{title}: {text}" if title and not text.startswith(title) else text
    return Passage(whole, _link(document, "url"))


def _link(row: dict[str, Any], name: str) -> str:
    """Empty where it is missing or anything but a string: the text is still good."""
    link = row.get(name)
    return link.strip() if isinstance(link, str) else ""


def _text(row: Any, name: str) -> str:
    """A field of a result; empty where it is missing or null, as it is in ads and maps."""
    if not isinstance(row, dict):
        raise ValueError("a result is not an object")
    value = row.get(name) or ""
    if not isinstance(value, str):
        raise ValueError(f"{name} of a result is not a string")
    return value


def _web_params(cfg: SearchConfig) -> dict[str, object]:
    return {"market": cfg.market, "max_results": cfg.num_passages, "max_passage_chars": MAX_PASSAGE_CHARS}


SERVICES: dict[str, Service] = {
    "brightdata": Service(
        url="https://api.brightdata.com/request",
        key_variable="BRIGHTDATA_API_KEY",
        headers=bearer,
        payload=_brightdata_payload,
        passages=lambda tree: _organic(tree, "description", "general"),
        params=_web_params,
    ),
    "serper": Service(
        url="https://google.serper.dev/search",
        key_variable="SERPER_API_KEY",
        headers=lambda key: {"X-API-KEY": key},
        payload=_serper_payload,
        passages=lambda tree: _organic(tree, "snippet", "searchParameters"),
        params=_web_params,
    ),
    "http": Service(
        url="",
        key_variable="",
        headers=lambda _: {},
        payload=lambda cfg, query: {"queries": [query], "topk": cfg.num_passages},
        passages=_retrieved,
        params=lambda cfg: {"url": cfg.url, "top_k": cfg.num_passages, "max_passage_chars": MAX_PASSAGE_CHARS},
    ),
}


def clean_passages(passages: Iterable[Passage]) -> list[Passage]:
    """Each text is clean; empty ones and repetitions are left out."""
    by_text: dict[str, Passage] = {}
    for passage in passages:
        # the rest is cut anyway, and a megabyte of it takes a second to clean
        text = clean_text(passage.text[: 4 * MAX_PASSAGE_CHARS])
        by_text.setdefault(text, Passage(text, passage.link))
    by_text.pop("", None)
    return list(by_text.values())


def clean_text(text: str) -> str:
    """On one line, without control characters and lone surrogates."""
    spaced = "".join(" " if unicodedata.category(c) in ("Cc", "Cs") else c for c in text)
    return " ".join(spaced.split())
