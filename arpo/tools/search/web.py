"""Search over the network: Bing through Bright Data, Google through Serper, or your own retriever.

A `Service` describes one service: its address, its request, and where its answer has the passages. `http/client.py`
handles all failures of the connection. Keys come from the environment and stay in this process.
"""

from __future__ import annotations

import os
import re
import urllib.parse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from arpo.config.named import is_own
from arpo.config.tools import SearchConfig
from arpo.errors import UserError
from arpo.tools.cache.rows import clean_text
from arpo.tools.cache.store import own_cache
from arpo.tools.http.client import HttpClient, bearer, check_url, probed, read_key
from arpo.tools.http.policy import HttpPolicy, LocalRateLimit, Time
from arpo.tools.search.passages import MAX_PASSAGE_CHARS, format_passages


@dataclass(frozen=True)
class Passage:
    """One result of a search."""

    text: str
    link: str = ""
    """Address of the page with this text; "" if the service names no page."""


@dataclass(frozen=True)
class Service:
    """Address, request and answer format of one search service."""

    payload: Callable[[SearchConfig, str], dict[str, Any]]
    """Returns the JSON request for a query."""
    passages: Callable[[Any], list[Passage]]
    """Returns the passages of the decoded answer, best first. Raises ValueError for an unusable answer."""
    params: Callable[[SearchConfig], dict[str, object]]
    """Returns all settings with an effect on the answer. They are part of the cache key."""
    url: str = ""
    """Address of the service; "" = the user must set tools.search.url."""
    key_variable: str = ""
    """Environment variable of the key; "" = the service needs no key."""
    headers: Callable[[str], dict[str, str]] = bearer
    """Returns the HTTP headers with the key."""


def _market_of(cfg: SearchConfig, query: str) -> list[str]:
    """Return [language, country], like ["en", "US"]."""
    market = cfg.market if cfg.market != "auto" else "zh-CN" if re.search(r"[\u4e00-\u9fff]", query) else "en-US"
    return market.split("-")


def _brightdata_payload(cfg: SearchConfig, query: str) -> dict[str, Any]:
    language, country = _market_of(cfg, query)
    location = cfg.location or country.lower()
    bing = {"q": query, "mkt": f"{language}-{country}", "setLang": language, "brd_json": "1", "cc": location}
    return {"zone": cfg.zone, "url": f"https://www.bing.com/search?{urllib.parse.urlencode(bing)}", "format": "raw"}


def _serper_payload(cfg: SearchConfig, query: str) -> dict[str, Any]:
    language, country = _market_of(cfg, query)
    language = "zh-cn" if language == "zh" else language
    return {"q": query, "gl": cfg.location or country.lower(), "hl": language, "num": cfg.num_passages}


ANSWER_BOXES = ("answerBox", "featured_snippets", "knowledgeGraph", "knowledge")
"""Fields beside the results with a direct answer (a unit converter, the weather) or facts about an entity. Serper has
answerBox and knowledgeGraph; Bright Data has featured_snippets (a list) and knowledge."""
PLAIN_FACTS = ("title", "name", "subtitle", "snippet", "description", "summary", "text")
"""Fields of an answer box shown without the field's name."""
NO_FACTS = ("rank", "global_rank", "image", "image_alt", "image_base64", "position", "description_source")


def _organic(tree: Any, text_field: str, empty_mark: str) -> list[Passage]:
    """Return the answer boxes, then the `organic` results. An answer without both must have the field `empty_mark`.
    Without this field the answer is an error page."""
    rows = tree.get("organic") if isinstance(tree, dict) else 0
    if not isinstance(rows, list | None):
        raise ValueError("no object with a list of organic results")
    fields = [tree.get(name) for name in ANSWER_BOXES]
    boxes = [
        box for field in fields for box in (field if isinstance(field, list) else [field]) if isinstance(box, dict)
    ]
    if rows is None and not boxes and empty_mark not in tree:
        raise ValueError(f"neither organic results nor {empty_mark!r}; fields: {', '.join(sorted(tree))}")
    read = [Passage(_box_text(box), _box_link(box)) for box in boxes]
    return read + _readable(rows or [], lambda row: _result(row, text_field))


def _box_link(box: dict[str, Any]) -> str:
    return next(filter(None, (_link(box, name) for name in ("link", "descriptionLink", "description_link"))), "")


def _result(row: Any, text_field: str) -> Passage:
    return Passage(_text(row, text_field) or _text(row, "title"), _link(row, "link"))


def _box_text(box: dict[str, Any]) -> str:
    """Return the text of an answer box. {"title": "5 km", "answer": "3.1 mi"} -> "5 km; answer: 3.1 mi" """
    facts = {**box, **_named_facts(box.get("attributes")), **_named_facts(box.get("facts"))}
    shown = {name: text for name, value in facts.items() if name not in NO_FACTS and (text := _fact_text(value))}
    return "; ".join(text if name in PLAIN_FACTS else f"{name}: {text}" for name, text in shown.items())


def _named_facts(facts: Any) -> dict[str, Any]:
    """Return facts by name. Serper's attributes have this form already. Bright Data's list is converted:
    [{"key": "CEO", "value": [{"text": "Tim Cook"}]}] -> {"CEO": [{"text": "Tim Cook"}]}"""
    if isinstance(facts, list):
        return {str(fact["key"]): fact.get("value") for fact in facts if isinstance(fact, dict) and fact.get("key")}
    return facts if isinstance(facts, dict) else {}


def _fact_text(value: Any) -> str:
    """Return a fact as text. A fact is a text, a number, an object with a `text`, or a list of these objects. Return
    "" for any other value, and for web addresses."""
    if isinstance(value, dict):
        value = value.get("text")
    if isinstance(value, list):
        return ", ".join(filter(None, (_fact_text(part) for part in value if isinstance(part, dict))))
    text = str(value) if isinstance(value, str | int | float) else ""
    return "" if text.startswith(("http:", "https:", "data:")) else text


def _readable(rows: list[Any], read: Callable[[Any], Passage]) -> list[Passage]:
    """Read the rows, and skip unreadable rows. Raises ValueError if all rows are unreadable."""
    passages, problem = [], None
    for row in rows:
        try:
            passages.append(read(row))
        except ValueError as error:
            problem = error
    if problem and not passages:
        raise problem
    return passages


def _retriever_payload(cfg: SearchConfig, query: str) -> dict[str, Any]:
    """Return one request for all common retrievers: Search-R1's, verl's, slime's and miles' read `queries`, SkyRL's
    reads `query`. Search-R1's and verl's fail without `return_scores`."""
    return {"queries": [query], "query": query, "topk": cfg.num_passages, "return_scores": True}


def _retrieved(tree: Any) -> list[Passage]:
    """Return the passages of {"result": [[{"document": {"contents"}}, ...]]}, the answer to a list of one query.

    A row may be the document itself, or a string; a document has `contents`, or `text` and perhaps `title`;
    either may have a `url`.
    """
    rows = tree.get("result") if isinstance(tree, dict) else None
    if not isinstance(rows, list) or len(rows) != 1 or not isinstance(rows[0], list):
        raise ValueError('not an object with "result", a list that holds one list of passages per query')
    documents = [row["document"] if isinstance(row, dict) and "document" in row else row for row in rows[0]]
    return _readable(documents, _document)


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
    """Return a link of a result; "" for a missing link or another type, since the text is still usable."""
    link = row.get(name)
    return link.strip() if isinstance(link, str) else ""


def _text(row: Any, name: str) -> str:
    """Return a field of a result as text; "" if the field is missing or null, as in ads and maps."""
    if not isinstance(row, dict):
        raise ValueError("a result is not an object")
    value = row.get(name)
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list):
        return " ".join(part for part in value if isinstance(part, str))
    if isinstance(value, int | float):
        return str(value)
    raise ValueError(f"{name} of a result is not a text")


def _web_params(cfg: SearchConfig) -> dict[str, object]:
    params = {"market": cfg.market, "max_results": cfg.num_passages, "max_passage_chars": MAX_PASSAGE_CHARS}
    return params | ({"location": cfg.location} if cfg.location else {})  # cache keys of older versions lack it


WITHOUT = "leave search out: --tools.names python"
SERVICES: dict[str, Service] = {
    "brightdata": Service(
        url="https://api.brightdata.com/request",
        key_variable="BRIGHTDATA_API_KEY",
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
        payload=_retriever_payload,
        passages=_retrieved,
        params=lambda cfg: {"url": cfg.url, "top_k": cfg.num_passages, "max_passage_chars": MAX_PASSAGE_CHARS},
    ),
}


def clean_passages(passages: Iterable[Passage]) -> list[Passage]:
    """Clean the texts, and drop empty and repeated passages."""
    links: dict[str, str] = {}
    for passage in passages:
        # the rest is cut later anyway, and cleaning takes a second per megabyte
        links.setdefault(clean_text(passage.text[: 4 * MAX_PASSAGE_CHARS]), passage.link)
    return [Passage(text, link) for text, link in links.items() if text]


class HttpBackend:
    """A search backend on top of one of the services."""

    def __init__(self, cfg: SearchConfig, *, time_source: Time | None = None):
        """Rank 0 sends one test query before training, unless the config replays. Raises UserError for a refused key,
        and if the service does not answer."""
        self._cfg, self._service = cfg, SERVICES[cfg.backend]
        self.params = self._service.params(cfg)
        self._client: HttpClient | None = None
        if not cfg.replays:
            client = HttpClient(
                cfg.backend,
                cfg.url or self._service.url,
                HttpPolicy(deadline_s=cfg.deadline_s),
                setting=f"tools.search.backend {cfg.backend}",
                key_variable=self._service.key_variable,
                headers=self._service.headers,
                limit=rate_limit_of(cfg),
                time_source=time_source,
            )
            place = " at tools.search.url" if cfg.url else ""
            fix = f"start or repair the service{place}, or set tools.search.mode replay"
            asked = self._service.payload(cfg, "weather")
            self._client = probed(client, asked, self._service.passages, "tools.search.backend", fix)

    async def search(self, query: str) -> str:
        return format_passages([found.text for found in await self.find(query)], MAX_PASSAGE_CHARS)

    async def find(self, query: str) -> list[Passage]:
        """Return the results with their addresses, best first. Raises the errors of `HttpClient.post`."""
        payload = self._service.payload(self._cfg, query)
        found = await self._client.post(payload, self._service.passages)
        return clean_passages(found)[: self._cfg.num_passages]

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.aclose()


def rate_limit_of(cfg: SearchConfig) -> LocalRateLimit | None:
    """Return a limit shared by all ranks if the cache's class has one, or this rank's share; None = no limit."""
    if not cfg.requests_per_second:
        return None
    if cfg.mode != "live" and is_own(cfg.cache):
        made, place = own_cache(cfg.cache, "tools.search.cache")
        if hasattr(made, "rate_limit"):
            return made.rate_limit(place, cfg.backend, cfg.requests_per_second, setting="tools.search.cache")
    return LocalRateLimit(cfg.requests_per_second / int(os.environ.get("WORLD_SIZE", "1")))


def check_settings(cfg: SearchConfig) -> None:
    """Raises UserError for a missing key or an invalid setting."""
    variable, url = SERVICES[cfg.backend].key_variable, cfg.url or SERVICES[cfg.backend].url
    if variable and not cfg.replays and not read_key(variable):
        raise UserError(
            f"tools.search.backend {cfg.backend} needs a key; set the environment variable {variable}, or set "
            "tools.search.backend to http (a retriever at tools.search.url), local (the file in "
            f"tools.search.corpus) or replay (only what tools.search.cache holds), or {WITHOUT}"
        )
    if cfg.market != "auto" and not re.fullmatch(r"[a-z]{2}-[A-Z]{2}", cfg.market):
        raise UserError(f"tools.search.market must be auto or like en-US, not {cfg.market!r}")
    if cfg.location and not re.fullmatch(r"[a-z]{2}", cfg.location):
        raise UserError(f"tools.search.location must be a country like cn, or empty, not {cfg.location!r}")
    if cfg.backend == "brightdata" and not cfg.zone:
        raise UserError("tools.search.zone is empty; set it to the name of your Bright Data SERP API zone")
    if not url:
        raise UserError("tools.search.url is empty; set it to the retriever, like http://host:8000/retrieve")
    check_url(url)
