"""The HTTP client's patience: pauses, Retry-After, circuit breaker, rate. Real requests; the pauses cost no time."""

import asyncio
import random
import re

import pytest
from helpers.web_service import FakeTime, WebService, never, says

from arpo.errors import Outage, UserError
from arpo.tools.http.client import HttpClient, Unavailable, Unusable, chat_url, probe
from arpo.tools.http.policy import BreakerOpen, HttpPolicy, Throttle


class Posts:
    """A client of the server, asked from one event loop after the other as the tests of it need."""

    def __init__(self, service: WebService, fake_time: FakeTime, **policy):
        self.client = HttpClient(
            "service",
            service.url,
            HttpPolicy(**{"deadline_s": 20.0, **policy}),
            setting="tests",
            time_source=fake_time.source(),
        )

    def post(self, count: int = 1) -> list:
        """`count` calls at the same time; answers, or the exceptions."""

        async def all_of_them():
            calls = (self.client.post({"n": n}, lambda tree: tree) for n in range(count))
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            await self.client.aclose()
            return outcomes

        return asyncio.run(all_of_them())


# ---- the request before a run


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        *((says("no", status), Outage) for status in (500, 502, 503, 429, 408)),
        *((says("no", status), UserError) for status in (400, 402, 404, 302, 401, 403)),
        (says("<html>"), UserError),
        (None, Outage),
    ],
)
def test_a_service_that_is_down_is_told_from_a_mistake(service, fake_time, answer, kind):
    client = Posts(service, fake_time).client
    service.then(answer) if answer else service.stop()
    with pytest.raises(UserError) as error:
        asyncio.run(probe(client, {}, lambda tree: tree, "tests:", "start it"))
    assert type(error.value) is kind


WHOLE = "http://host:8001/v1/chat/completions"
OWN = ["http://host/judge", "http://host/openai/deployments/x/chat/completions?version=1"]
BASES = ["http://host:8001", "http://host:8001/", "http://host:8001/v1", "http://host:8001/v1/"]


def test_the_base_url_of_a_chat_is_completed_and_an_address_with_a_path_of_its_own_is_left_alone():
    assert [chat_url(address) for address in (*BASES, WHOLE, *OWN)] == [*[WHOLE] * 5, *OWN]


# ---- one call


def test_pauses_are_random_and_their_bound_doubles_up_to_a_cap(service, fake_time):
    posts = Posts(service, fake_time, deadline_s=1000.0, max_tries=9)
    service.then(says("", 500))
    [error] = posts.post()
    bounds = [0.5, 1, 2, 4, 8, 16, 20, 20]
    assert isinstance(error, Unavailable) and len(fake_time.slept) == 8
    assert all(0 <= slept <= bound for slept, bound in zip(fake_time.slept, bounds, strict=True))
    policy, rng = HttpPolicy(), random.Random(1)
    draws = [policy.backoff_s(3, rng) for _ in range(1000)]
    assert min(draws) < 0.1 and max(draws) > 1.9 and max(draws) <= 2


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_obeyed_by_every_call(service, fake_time, status):
    posts = Posts(service, fake_time)
    service.then(says("", status, Retry_After="7"), says({"ok": 1}))
    assert posts.post(count=3) == [{"ok": 1}] * 3
    assert fake_time.now_s - 1000.0 >= 7


@pytest.mark.parametrize(
    ("header", "pause_s"),
    [("7", 7), ("0", 0), ("-3", 0), ("100000", 60), ("inf", 60), ("nan", None), ("soon", None), ("", None),
     (None, None), ("Thu, 01 Jan 1970 00:01:50 GMT", 10), ("Thu, 01 Jan 1970 00:00:00 GMT", 0)],
)  # fmt: skip
def test_retry_after_is_seconds_or_a_date_and_capped(header, pause_s):
    assert HttpPolicy().retry_after_s(header, wall_clock_s=100.0) == pause_s


def test_a_pause_past_the_deadline_is_not_waited_for(service, fake_time):
    posts = Posts(service, fake_time, deadline_s=10.0)
    service.then(says("", 429, Retry_After="3600"))
    [error] = posts.post()
    assert isinstance(error, Unavailable) and "HTTP 429" in str(error)
    assert fake_time.slept == [] and len(service.requests) == 1


# ---- many calls


def test_the_breaker_opens_and_recovers(service, fake_time, caplog):
    posts = Posts(service, fake_time, max_tries=1)
    service.then(says("", 500))
    assert all(type(e) is Unavailable for e in posts.post(count=20))
    assert type(posts.post()[0]) is BreakerOpen and len(service.requests) == 20

    fake_time.now_s += 15.0
    first, *others = posts.post(count=5)
    assert type(first) is Unavailable and {type(e) for e in others} == {BreakerOpen} and len(service.requests) == 21

    fake_time.now_s += 29.0
    assert type(posts.post()[0]) is BreakerOpen
    service.then(says({"ok": 1}))
    fake_time.now_s += 1.0
    assert posts.post() == [{"ok": 1}] and posts.post(count=3) == [{"ok": 1}] * 3
    assert [r.getMessage() for r in caplog.records if r.name == "arpo.tools.http.policy"] == [
        "service: 20 of 20 calls failed; no calls for 15 s",
        "service: still down; no calls for 30 s",
        "service: is back",
    ]


def test_the_pause_between_probes_is_five_minutes_at_most(service, fake_time, caplog):
    posts = Posts(service, fake_time, max_tries=1)
    service.then(says("", 500))
    posts.post(count=20)
    for _ in range(7):
        fake_time.now_s += 300.0
        posts.post()
    assert re.findall(r"for (\d+) s", caplog.text) == ["15", "30", "60", "120", "240", "300", "300", "300"]


def test_half_of_the_calls_may_fail_and_old_failures_are_forgotten(service, fake_time):
    posts = Posts(service, fake_time, max_tries=1)
    service.then(*[says({"ok": 1}), says("", 500)] * 15)
    assert [type(posts.post()[0]) for _ in range(30)] == [dict, Unavailable] * 15
    fake_time.now_s += 31.0
    service.then(says("", 500))
    assert {type(o) for o in posts.post(count=19)} == {Unavailable}
    assert {type(o) for o in posts.post(count=1)} == {Unavailable}
    assert {type(o) for o in posts.post(count=1)} == {BreakerOpen}


@pytest.mark.parametrize("status", [400, 404, 413, 422])
def test_requests_that_the_service_refuses_keep_nobody_else_from_it(service, fake_time, status):
    """sglang #25811: a healthy server refused prompts that were too long, and then got no requests at all."""
    posts = Posts(service, fake_time)
    service.then(says({"ok": 1}), *[says("too long", status)] * 30, says({"ok": 1}))
    assert posts.post() == [{"ok": 1}]
    assert {type(error) for error in posts.post(count=30)} == {Unusable}
    assert posts.post() == [{"ok": 1}] and len(service.requests) == 32


def test_a_probe_that_is_refused_leaves_the_way_free_for_the_next(service, fake_time):
    posts = Posts(service, fake_time, max_tries=1)
    service.then(*[says("", 500)] * 20, says("too long", 400), says({"ok": 1}))
    posts.post(count=20)
    fake_time.now_s += 15.0
    assert type(posts.post()[0]) is Unusable
    assert posts.post() == [{"ok": 1}]


def test_calls_in_the_queue_are_let_go_when_the_breaker_opens(service, fake_time):
    posts = Posts(service, fake_time, max_tries=1, max_concurrent=1)
    service.then(says("", 500))
    outcomes = posts.post(count=50)
    assert [type(o) for o in outcomes] == [Unavailable] * 20 + [BreakerOpen] * 30 and len(service.requests) == 20


def test_a_cancelled_probe_leaves_the_way_free_for_the_next(service, fake_time):
    posts = Posts(service, fake_time, max_tries=1)
    service.then(says("", 500))
    posts.post(count=20)
    fake_time.now_s += 15.0
    service.then(never, says({"ok": 1}))

    async def cancel_the_probe_and_try_again():
        probe = asyncio.create_task(posts.client.post({}, lambda tree: tree))
        while not service.requests:
            await asyncio.sleep(0.005)
        probe.cancel()
        await asyncio.wait([probe])
        answer = await posts.client.post({}, lambda tree: tree)
        await posts.client.aclose()
        return probe.cancelled(), answer

    assert asyncio.run(cancel_the_probe_and_try_again()) == (True, {"ok": 1})


def test_too_many_requests_halve_the_rate_which_recovers(fake_time):
    class Counting:
        taken = 0

        async def acquire(self) -> None:
            self.taken += 1

    limit = Counting()

    async def tokens(throttle: Throttle) -> int:
        before = limit.taken
        await throttle.acquire()
        return limit.taken - before

    async def story() -> list:
        throttle = Throttle(limit, fake_time.source())
        seen = [await tokens(throttle)]
        for _ in range(30):  # the answers to one burst
            throttle.slow_down(5.0)
        seen.append(await tokens(throttle))
        for _ in range(9):
            throttle.slow_down(0.5)
            await fake_time.sleep(0.5)
        seen.append(await tokens(throttle))
        fake_time.now_s += 61.0
        return [*seen, await tokens(throttle)]

    assert asyncio.run(story()) == [1, 2, 8, 1] and fake_time.slept[0] == 5.0
