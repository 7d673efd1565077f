"""A real aiohttp server on loopback that misbehaves as it is told, and the clock of tests that do not want to wait."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web

from arpo.tools.http.policy import Time

Behaviour = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Received:
    at_s: float
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class WebService:
    """Answers the n-th request as `plan[n]` says, and all later ones as its last entry does."""

    plan: list[Behaviour]
    url: str = ""
    requests: list[Received] = field(default_factory=list)
    num_running: int = 0
    most_running: int = 0

    def __enter__(self) -> WebService:
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(120)
        return self

    def __exit__(self, *_) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(10)

    stop = __exit__

    def then(self, *plan: Behaviour) -> None:
        """From now on behave like this."""
        self.plan, self.requests[:] = list(plan), []

    def _serve(self, started: threading.Event) -> None:
        async def serve() -> None:
            self._stopping = asyncio.Event()
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", self._handle)
            runner = web.AppRunner(app, shutdown_timeout=0.05, handler_cancellation=True)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/retrieve"
            started.set()
            await self._stopping.wait()
            await runner.cleanup()

        self._loop.run_until_complete(serve())
        self._loop.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append(Received(time.monotonic(), request.path, dict(request.headers), body))
        behaviour = self.plan[min(len(self.requests), len(self.plan)) - 1]
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            return await behaviour(request)
        finally:
            self.num_running -= 1


# ---- behaviours


def says(payload: object, status: int = 200, *, wait_s: float = 0.0, **headers: str) -> Behaviour:
    """A string or bytes as they are, anything else as JSON."""

    async def answer(_: web.Request) -> web.Response:
        await asyncio.sleep(wait_s)
        body = payload if isinstance(payload, str | bytes) else json.dumps(payload)
        body = body.encode() if isinstance(body, str) else body
        return web.Response(body=body, status=status, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return answer


def found(*texts: str) -> Behaviour:
    """A retriever's answer."""
    return says({"result": [[{"document": {"contents": text}} for text in texts]]}, Content_Type="application/json")


async def half_an_answer(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"result": [[')
    request.transport.close()
    return response


async def resets(request: web.Request) -> web.StreamResponse:
    request.transport.abort()
    return web.Response()


async def no_http_at_all(request: web.Request) -> web.StreamResponse:
    request.transport.write(b"\x00\xff\x00 SSH-2.0-OpenSSH_9.2\r\n\r\n")
    request.transport.close()
    return web.Response()


async def ten_megabytes(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/html"})
    await response.prepare(request)
    for _ in range(160):
        await response.write(b"x" * 65536)
    return response


async def slowly(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/html"})
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.01)


async def never(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(3600)
    raise AssertionError


# ---- the clock


def fast_time(rate: float) -> Time:
    """`rate` seconds pass in one. For callers that sleep side by side, each of whom moves the clock of FakeTime."""
    return Time(now=lambda: rate * time.monotonic(), sleep=lambda seconds: asyncio.sleep(seconds / rate))


class FakeTime:
    """Sleeping moves the clock and takes no time."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds
        await asyncio.sleep(0)

    def source(self) -> Time:
        return Time(now=lambda: self.now_s, sleep=self.sleep)
