"""Search over the network, by one of services.py: its settings checked, its key read, tried before training.

`http/client.py` is responsible for everything that can go wrong on the way. Keys come from the environment and stay in
this process.
"""

from __future__ import annotations

import asyncio
import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from arpo.errors import UserError
from arpo.tools.cache.redis_client import is_redis_url
from arpo.tools.http.client import HttpClient, check_url, read_key
from arpo.tools.http.policy import HttpPolicy, Time
from arpo.tools.http.rate_limit import LocalRateLimit, RateLimit, RedisRateLimit
from arpo.tools.options import SearchConfig
from arpo.tools.search.passages import MAX_PASSAGE_CHARS, format_passages
from arpo.tools.search.services import SERVICES, Passage, clean_passages

PROBE_QUERY = "weather"
_MARKET = re.compile(r"[a-z]{2}-[A-Z]{2}")


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
        self._policy = policy or HttpPolicy(deadline_s=cfg.deadline_s)
        self._time_source, self._limit = time_source, None
        self._client: HttpClient | None = None
        if not cfg.replays:
            variable = self._service.key_variable
            if variable and not read_key(variable):
                raise UserError(
                    f"tools.search.backend {cfg.backend} needs a key; set the environment variable {variable}"
                )
            self._limit = rate_limit_of(cfg)
            self._client = self._make_client()
            if os.environ.get("RANK", "0") == "0":
                with ThreadPoolExecutor(1) as thread:  # a loop of its own: the caller may be inside one
                    thread.submit(asyncio.run, self._probe(self._make_client())).result()

    async def search(self, query: str) -> str:
        return format_passages([found.text for found in await self.find(query)], MAX_PASSAGE_CHARS)

    async def find(self, query: str) -> list[Passage]:
        """The results, best first; those of `search`, with their addresses. Raises what `HttpClient.post` raises."""
        return await self._ask(self._client, query)

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.aclose()
        if isinstance(self._limit, RedisRateLimit):
            self._limit.close()

    def _make_client(self) -> HttpClient:
        return HttpClient(
            self._cfg.backend,
            self._url,
            self._policy,
            setting=f"tools.search.backend {self._cfg.backend}",
            key_variable=self._service.key_variable,
            headers=self._service.headers,
            limit=self._limit,
            time_source=self._time_source,
        )

    async def _ask(self, client: HttpClient, query: str) -> list[Passage]:
        def parse(tree: Any) -> list[Passage]:
            passages = clean_passages(self._service.passages(tree))
            return passages[: self._cfg.num_passages]

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


def check_settings(cfg: SearchConfig) -> None:
    """Raises UserError for a value that cannot work."""
    if cfg.requests_per_second < 0 or cfg.deadline_s <= 0:
        raise UserError("tools.search.requests_per_second must not be negative, and deadline_s must be positive")
    if cfg.market != "auto" and not _MARKET.fullmatch(cfg.market):
        raise UserError(f"tools.search.market must be auto or like en-US, not {cfg.market!r}")
    if cfg.backend == "brightdata" and not cfg.zone:
        raise UserError("tools.search.zone is empty; set it to the name of your Bright Data SERP API zone")
    if cfg.backend == "http" and not cfg.url:
        raise UserError("tools.search.url is empty; set it to the retriever, like http://host:8000/retrieve")
