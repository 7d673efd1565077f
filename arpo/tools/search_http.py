"""Search over the network: Bing through Bright Data, Google through Serper, or a retriever of your own.

A service is a `Service`: its address, what is sent, and where the passages are in what comes back. `http_client` is
responsible for everything that can go wrong in between. Keys come from the environment and stay in this process.
"""

from __future__ import annotations

import asyncio
import os
import re
import unicodedata
import urllib.parse
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from arpo.config import UserError
from arpo.tools.http_client import HttpClient
from arpo.tools.http_policy import HttpPolicy, Time
from arpo.tools.options import SearchConfig
from arpo.tools.rate_limit import LocalRateLimit, RateLimit, RedisRateLimit
from arpo.tools.redis_client import is_redis_url
from arpo.tools.search import format_passages

PROBE_QUERY = "weather"
_CHINESE = re.compile(r"[\u4e00-\u9fff]")
_MARKET = re.compile(r"[a-z]{2}-[A-Z]{2}")


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
    max_passages: Callable[[SearchConfig], int]


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
        "num": cfg.max_results,
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
    return {"market": cfg.market, "max_results": cfg.max_results, "max_passage_chars": cfg.max_passage_chars}


SERVICES: dict[str, Service] = {
    "brightdata": Service(
        url="https://api.brightdata.com/request",
        key_variable="BRIGHTDATA_API_KEY",
        headers=lambda key: {"Authorization": f"Bearer {key}"},
        payload=_brightdata_payload,
        passages=lambda tree: _organic(tree, "description", "general"),
        params=_web_params,
        max_passages=lambda cfg: cfg.max_results,
    ),
    "serper": Service(
        url="https://google.serper.dev/search",
        key_variable="SERPER_API_KEY",
        headers=lambda key: {"X-API-KEY": key},
        payload=_serper_payload,
        passages=lambda tree: _organic(tree, "snippet", "searchParameters"),
        params=_web_params,
        max_passages=lambda cfg: cfg.max_results,
    ),
    "http": Service(
        url="",
        key_variable="",
        headers=lambda _: {},
        payload=lambda cfg, query: {"queries": [query], "topk": cfg.top_k},
        passages=_retrieved,
        params=lambda cfg: {"url": cfg.url, "top_k": cfg.top_k, "max_passage_chars": cfg.max_passage_chars},
        max_passages=lambda cfg: cfg.top_k,
    ),
}


class HttpBackend:
    """A `Backend` of `search`, over one of the services."""

    def __init__(self, cfg: SearchConfig, *, policy: HttpPolicy | None = None, time_source: Time | None = None):
        """Unless the config replays, rank 0 asks one query, so that a wrong key or address shows before training.

        Raises UserError for settings that cannot work, a missing or refused key, and a service that does not answer.
        """
        self._cfg, self._service = cfg, SERVICES[cfg.backend]
        self.params = self._service.params(cfg)
        check_settings(cfg)
        self._url = cfg.url or self._service.url
        check_url(self._url)
        self._policy = policy or HttpPolicy(deadline_s=cfg.deadline_s, max_concurrent=cfg.max_concurrent)
        self._time_source, self._limit = time_source, None
        self._client: HttpClient | None = None
        if not cfg.replays:
            key = read_key(cfg.backend, self._service.key_variable)
            self._limit = rate_limit_of(cfg)
            self._client = self._make_client(key)
            if os.environ.get("RANK", "0") == "0":
                with ThreadPoolExecutor(1) as thread:  # a loop of its own: the caller may be inside one
                    thread.submit(asyncio.run, self._probe(self._make_client(key))).result()

    async def search(self, query: str) -> str:
        return format_passages([found.text for found in await self.find(query)], self._cfg.max_passage_chars)

    async def find(self, query: str) -> list[Passage]:
        """The results, best first; those of `search`, with their addresses. Raises what `HttpClient.post` raises."""
        return await self._ask(self._client, query)

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.aclose()
        if isinstance(self._limit, RedisRateLimit):
            self._limit.close()

    def _make_client(self, key: str) -> HttpClient:
        what = f"the service refuses the key in {self._service.key_variable}" if key else "the service refuses access"
        return HttpClient(
            self._cfg.backend,
            self._url,
            self._policy,
            headers=self._service.headers(key),
            secret=key,
            refused=f"tools.search.backend {self._cfg.backend}: {what}",
            limit=self._limit,
            time_source=self._time_source,
        )

    async def _ask(self, client: HttpClient, query: str) -> list[Passage]:
        def parse(tree: Any) -> list[Passage]:
            passages = clean_passages(self._service.passages(tree), self._cfg.max_passage_chars)
            return passages[: self._service.max_passages(self._cfg)]

        return await client.post(self._service.payload(self._cfg, query), parse)

    async def _probe(self, client: HttpClient) -> None:
        try:
            await self._ask(client, PROBE_QUERY)
        except OSError as error:
            raise UserError(
                f"tools.search.backend {error}; start or repair the service"
                f"{' at tools.search.url' if self._cfg.url else ''}, or set tools.search.mode replay"
            ) from None
        finally:
            await client.aclose()


def rate_limit_of(cfg: SearchConfig) -> RateLimit | None:
    """Over all ranks: in the Redis server that holds the cache, else an equal share for each. None = no limit."""
    if not cfg.requests_per_second:
        return None
    if cfg.mode != "live" and is_redis_url(cfg.cache):
        return RedisRateLimit(cfg.cache, cfg.backend, cfg.requests_per_second, setting="tools.search.cache")
    return LocalRateLimit(cfg.requests_per_second / int(os.environ.get("WORLD_SIZE", "1")))


def clean_passages(passages: Iterable[Passage], max_passage_chars: int) -> list[Passage]:
    """Each text is clean; empty ones and repetitions are left out."""
    by_text: dict[str, Passage] = {}
    for passage in passages:
        # the rest is cut anyway, and a megabyte of it takes a second to clean
        text = clean_text(passage.text[: 4 * max_passage_chars])
        by_text.setdefault(text, Passage(text, passage.link))
    by_text.pop("", None)
    return list(by_text.values())


def clean_text(text: str) -> str:
    """On one line, without control characters and lone surrogates."""
    spaced = "".join(" " if unicodedata.category(c) in ("Cc", "Cs") else c for c in text)
    return " ".join(spaced.split())


def check_settings(cfg: SearchConfig) -> None:
    """Raises UserError for a value that cannot work."""
    for name in ("top_k", "max_results", "max_passage_chars", "max_concurrent"):
        if getattr(cfg, name) < 1:
            raise UserError(f"tools.search.{name} must be at least 1, not {getattr(cfg, name)}")
    if cfg.requests_per_second < 0 or cfg.deadline_s <= 0:
        raise UserError("tools.search.requests_per_second must not be negative, and deadline_s must be positive")
    if cfg.market != "auto" and not _MARKET.fullmatch(cfg.market):
        raise UserError(f"tools.search.market must be auto or like en-US, not {cfg.market!r}")
    if cfg.backend == "brightdata" and not cfg.zone:
        raise UserError("tools.search.zone is empty; set it to the name of your Bright Data SERP API zone")
    if cfg.backend == "http" and not cfg.url:
        raise UserError("tools.search.url is empty; set it to the retriever, like http://host:8000/retrieve")


def check_url(url: str, setting: str = "tools.search.url") -> None:
    """Raises UserError where no request can go there, or where it holds a password: it would be saved with the run."""
    try:
        parts = urllib.parse.urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, a bracket without its other
        usable = False
    if not usable:
        raise UserError(f"{setting}: {url!r} is not an address like http://host:8000/retrieve")
    if parts.username or parts.password:
        raise UserError(f"{setting} must not hold a user or password: it is saved with the run")


def read_key(backend: str, variable: str) -> str:
    """The key from the environment; empty where the service needs none. Raises UserError, without quoting the key."""
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(f"tools.search.backend {backend} needs a key; set the environment variable {variable}")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise UserError(f"{variable} has characters that no key has; is it quoted or copied wrongly?")
    return key
