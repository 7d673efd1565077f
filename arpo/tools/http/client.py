"""POST JSON to an unreliable service. Every call ends by its deadline, and no message contains the key.

    turn (concurrency, rate) -> try -> answer
                                 | 429, 503 with Retry-After: all calls wait that long, then go slower
                                 | 408, 429, 5xx, no or half an answer, no valid JSON: again, after a random pause
                                 | other statuses, too large an answer: no second try
                                 | 401, 403: only this call fails; before any answer, or many in a row: the run ends

`policy` has the numbers of tries, the pauses and the deadlines. Its circuit breaker opens after many failed calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import aiohttp

from arpo.errors import Outage, UserError
from arpo.tools.http.policy import CircuitBreaker, HttpPolicy, LocalRateLimit, Throttle, Time

MAX_REASON_CHARS = 200
MAX_REFUSALS = 20
"""Number of refusals in a row (401, 403) that end the run, if the service has accepted the key before."""


class Unavailable(ConnectionError):
    """The service gave no usable answer. The message names the service and the reason, and never contains a key."""


class Unusable(Unavailable):
    """The service is there, but it will hardly answer such a request better later (HTTP 404, no JSON)."""


@dataclass(frozen=True)
class _Outcome:
    """Result of one try: a value or a failure."""

    value: Any = None
    failure: str = ""
    """Reason of the failure; empty = the try gave a value."""
    may_retry: bool = True
    error: type[Unavailable] = Unavailable
    pause_s: float = 0.0
    """Pause requested by the service (Retry-After)."""


@dataclass
class _Call:
    body: bytes
    parse: Callable[[Any], Any]
    is_probe: bool
    num_tries: int = 0


def bearer(key: str) -> dict[str, str]:
    """Return the Authorization header with the key; {} for an empty key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


class OwnsSession:
    """Owner of an aiohttp session. The first request makes the session, for the event loop of that request."""

    _session: aiohttp.ClientSession | None = None

    def _open_session(self, **connector_options: Any) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(**connector_options)
            no_timeout = aiohttp.ClientTimeout(total=None)  # each request has its own timeout
            no_cookies = aiohttp.DummyCookieJar()
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=no_cookies, timeout=no_timeout)
        return self._session

    async def aclose(self) -> None:
        """Close the session. A later request makes a new session. Safe to call twice."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


class HttpClient(OwnsSession):
    """A client of one service."""

    def __init__(
        self,
        name: str,
        url: str,
        policy: HttpPolicy,
        *,
        setting: str,
        key_variable: str = "",
        headers: Callable[[str], dict[str, str]] = bearer,
        limit: LocalRateLimit | None = None,
        time_source: Time | None = None,
    ):
        """`key_variable` is the environment variable of the key. `headers` makes the HTTP headers from the key.
        `setting` is the config option of the service, for messages. Raises UserError for a malformed key.
        """
        key = read_key(key_variable)
        access = f"the key in {key_variable}" if key else f"access; set {key_variable}" if key_variable else "access"
        self._refused = f"{setting}: the service refuses {access}"
        self._time = time_source or Time()
        self._name, self._url, self._policy = name, url, policy
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"} | headers(key)
        self._key = key
        self._throttle = Throttle(limit, self._time)
        self._breaker = CircuitBreaker(name, self._time)
        self._rng = random.Random()  # separate, so that failures of a service do not change the rollout's draws
        self._slots = asyncio.Semaphore(policy.max_concurrent)
        self._proxy = proxy_of(url)
        self._refusals_left = 1  # before the first answer, one refusal shows that the key is wrong

    def was_probed(self) -> None:
        """Note that the service has accepted the key. From now on a single refusal is only a failed call."""
        self._refusals_left = MAX_REFUSALS

    async def post(self, payload: dict[str, Any], parse: Callable[[Any], Any]) -> Any:
        """Send the payload, decode the JSON answer, and return `parse(answer)`.

        `parse` raises ValueError for an unusable answer; the call is then tried again. Raises Unavailable, BreakerOpen
        (nothing was sent) or TimeoutError (the deadline). All three are OSErrors, and none is the caller's fault.
        Raises UserError if the service keeps refusing access, since no later call can succeed.
        """
        if self._refusals_left <= 0:
            raise UserError(self._refused)
        body = json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode()
        call = _Call(body, parse, is_probe=self._breaker.admit())
        outcome = None
        try:
            async with asyncio.timeout(self._policy.deadline_s):
                outcome = await self._tries(call)
        except TimeoutError:
            raise TimeoutError(f"{self._name}: no answer within {self._policy.deadline_s:g} s") from None
        finally:
            # A call that was cancelled or never sent says nothing about the service. A call that the service refuses at
            # once (HTTP 400) says only that others may be answered.
            is_unsent = outcome is None and (asyncio.current_task().cancelling() or not call.num_tries)
            if is_unsent or (outcome is not None and not outcome.may_retry):
                self._breaker.forget(is_probe=call.is_probe)
            else:
                self._breaker.record(outcome is not None and not outcome.failure, is_probe=call.is_probe)
        if outcome.failure:
            raise outcome.error(f"{self._name}: {outcome.failure} (tried {call.num_tries} x)")
        return outcome.value

    async def _tries(self, call: _Call) -> _Outcome:
        gives_up_at_s = self._time.now() + self._policy.deadline_s
        max_tries = 1 if call.is_probe else self._policy.max_tries
        while True:
            async with self._slots:
                await self._throttle.acquire()
                if self._breaker.is_open and not call.is_probe:
                    self._breaker.refuse()
                call.num_tries += 1
                outcome = await self._try(call)
            if not outcome.failure or not outcome.may_retry or call.num_tries == max_tries:
                return outcome
            if self._time.now() + outcome.pause_s >= gives_up_at_s:
                return outcome
            await self._time.sleep(self._policy.backoff_s(call.num_tries, self._rng))

    async def _try(self, call: _Call) -> _Outcome:
        """Send one request. Failures are returned: aiohttp's exceptions contain the headers, and so the key."""
        session = self._open_session(limit=self._policy.max_concurrent)
        request = session.post(
            self._url,
            data=call.body,
            headers=self._headers,
            allow_redirects=False,  # a redirect would send the key to another host
            proxy=self._proxy,
        )
        try:
            async with asyncio.timeout(self._policy.try_s), request as response:
                body, status = await read_body(response, self._policy.max_body_bytes), response.status
        except TimeoutError:
            return _Outcome(failure=f"no answer within {self._policy.try_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return _Outcome(failure=self._clean(f"{type(error).__name__} {error}"))
        if body is None:
            failure = f"an answer of more than {self._policy.max_body_bytes} bytes"
            return _Outcome(failure=failure, may_retry=False, error=Unusable)
        if status == 200:
            self.was_probed()
            try:
                return _Outcome(call.parse(json.loads(body)))
            except (ValueError, RecursionError) as error:  # JSON and Unicode errors are ValueErrors
                return _Outcome(failure=self._clean(f"unusable answer: {error}"), error=Unusable)
        if status in (401, 403):
            self._refusals_left -= 1
            if self._refusals_left <= 0:
                raise UserError(f"{self._refused} (HTTP {status})")
            return _Outcome(failure=f"access refused (HTTP {status})", may_retry=False, error=Unusable)
        retry_after = response.headers.get("Retry-After") if status in (429, 503) else None
        pause_s = self._policy.retry_after_s(retry_after, time.time())
        if status == 429 or pause_s is not None:
            self._throttle.slow_down(pause_s or 0.0)
        reason = self._clean(f"HTTP {status} {body.decode(errors='replace')}")
        if status in (408, 429) or status >= 500:
            return _Outcome(failure=reason, pause_s=pause_s or 0.0)
        return _Outcome(failure=reason, may_retry=False, error=Unusable)

    def _clean(self, reason: str) -> str:
        """Return one short line without the key. A service may quote the key in its answer."""
        hidden = reason.replace(self._key, "***") if self._key else reason
        return " ".join(hidden.split())[:MAX_REASON_CHARS]


async def read_body(response: aiohttp.ClientResponse, max_bytes: int) -> bytes | None:
    """Return the body, or None once more than `max_bytes` have arrived. Content-Length is not trusted."""
    body = bytearray()
    async for chunk in response.content.iter_chunked(65536):
        body += chunk
        if len(body) > max_bytes:
            return None
    return bytes(body)


def proxy_of(url: str) -> str | None:
    """Return the proxy for a URL from the environment (https_proxy, no_proxy, ...), or None."""
    parts = urllib.parse.urlsplit(url)
    return None if urllib.request.proxy_bypass(parts.netloc) else urllib.request.getproxies().get(parts.scheme)


def split_url(url: str) -> urllib.parse.SplitResult | None:
    """Return the parts of an http or https address. Return None for any other text."""
    with contextlib.suppress(ValueError):  # an invalid port, an unclosed bracket
        parts = urllib.parse.urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    return None


def check_url(url: str, setting: str = "tools.search.url") -> None:
    """Raises UserError for an unusable address, and for an address with a user or password."""
    parts = split_url(url)
    if parts is None:
        raise UserError(f"{setting}: {url!r} is not an address like http://host:8000 (with the path that it needs)")
    if parts.username or parts.password:
        raise UserError(f"{setting} must not hold a user or password: it is saved with the run")


def read_key(variable: str) -> str:
    """Return the key in an environment variable; "" if unset. Raises UserError for a bad key (not quoted)."""
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise UserError(f"{variable} has characters that no key has; is it quoted or copied wrongly?")
    return key


async def probe(client: HttpClient, payload: dict[str, Any], parse: Callable[[Any], Any], what: str, fix: str) -> None:
    """Send a small request and close the client. Raises Outage if no answer comes, and UserError if a wrong one comes.

    The message begins with `what` and ends with `fix`.
    """
    try:
        await client.post(payload, parse)
    except Unusable as error:
        raise UserError(f"{what} {error}; {fix}") from None
    except OSError as error:
        raise Outage(f"{what} {error}; {fix}") from None
    finally:
        await client.aclose()


def probed(client: HttpClient, payload: dict[str, Any], parse: Callable[[Any], Any], what: str, fix: str) -> HttpClient:
    """Let rank 0 send a small request to the service (see `probe`). Return the client."""
    if os.environ.get("RANK", "0") == "0":
        with ThreadPoolExecutor(1) as thread:  # a separate event loop: the caller may already run inside an event loop
            thread.submit(asyncio.run, probe(client, payload, parse, what, fix)).result()
    client.was_probed()
    return client


def chat_url(url: str) -> str:
    """Return the chat endpoint of an address. The address may be a base URL, as other clients take.

    >>> chat_url("http://host:8001"), chat_url("http://host:8001/v1/"), chat_url("http://host/my/chat/completions")
    ('http://host:8001/v1/chat/completions', 'http://host:8001/v1/chat/completions', 'http://host/my/chat/completions')
    """
    base = url.rstrip("/")
    if urllib.parse.urlsplit(base).path in ("", "/v1"):
        return f"{base.removesuffix('/v1')}/v1/chat/completions"
    return url


def chat_request(model: str, prompt: str, *, max_tokens: int, extra_body: str = "") -> dict[str, Any]:
    """Return the request of an OpenAI-compatible chat endpoint: one user message, greedy.

    `extra_body` is a JSON object with more fields, or other values for these; null leaves a field out.
    """
    messages = [{"role": "user", "content": prompt}]
    request = {"model": model, "messages": messages, "temperature": 0.0, "max_tokens": max_tokens}
    request |= json.loads(extra_body or "{}")
    return {name: value for name, value in request.items() if value is not None}


def chat_content(tree: Any) -> str:
    """Return the text of a chat endpoint's answer; the text may be empty. Raises ValueError without a text field."""
    try:
        content = tree["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise ValueError("no choices[0].message.content") from None
    if content is not None and not isinstance(content, str):
        raise ValueError(f"choices[0].message.content is a {type(content).__name__}")
    return content or ""
