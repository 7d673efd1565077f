"""Cache and rate limit in a real Redis server, shared by real processes."""

import asyncio
import json
import os
import subprocess
import sys
import time

import pytest
from helpers.caches import entries_of, get, put
from helpers.forked import in_processes, killed
from helpers.processes import free_port
from helpers.python_tools import run
from helpers.redis_server import HANG_S, REDIS, redis_server

from arpo.config.tools import SearchConfig
from arpo.errors import Outage, UserError
from arpo.tools.cache.rows import NO_RESULTS
from arpo.tools.cache.store import CacheFile, open_cache
from arpo.tools.http.policy import LocalRateLimit
from arpo.tools.search import SearchTool
from extras.cache.__main__ import main
from extras.cache.released import merge
from extras.redis.client import PASSWORD_VARIABLE
from extras.redis.rate_limit import RedisRateLimit

WEEK_S = 7 * 86400


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def shared(server):
    import redis

    redis.Redis.from_url(server.url).flushdb()
    return server.cache


@pytest.fixture(params=["sqlite", "redis"])
def place(request, tmp_path):
    """A place of a cache: what holds for a file must hold for a server."""
    return str(tmp_path / "cache.sqlite") if request.param == "sqlite" else request.getfixturevalue("shared")


def make_older(cache, seconds: float) -> None:
    """Let time pass: the rows are taken out, and put back with an earlier date."""
    rows = list(cache.rows())
    cache._client.flushdb()
    cache.add([(*row[:5], row[5] - seconds) for row in rows])


# ---- what holds for a file (tools/cache/test_cache.py) holds for a server


def test_the_first_answer_wins_and_is_kept_for_later_runs(shared):
    cache = open_cache(shared, read_only=False)
    put(cache, 'the "Silver" otter', "Page 1: wet Straße")
    put(cache, 'the "Silver" otter', "second")
    put(cache, 'the "Silver" otter', "from two", backend="two")
    assert get(cache, "fox") is None
    cache.close()
    replay = open_cache(shared, read_only=True)
    assert get(replay, 'the "Silver" otter') == replay.get_any("the Silver otter") == "Page 1: wet Straße"
    assert get(replay, 'the "Silver" otter', "two") == "from two"


def test_no_results_expires_while_recording_but_not_in_a_replay(shared):
    cache = open_cache(shared, read_only=False)
    put(cache, "new film", NO_RESULTS)
    put(cache, "old film", "Page 1: seen")
    put(cache, "new film", "too early")
    assert get(cache, "new film") == NO_RESULTS
    make_older(cache, WEEK_S + 60)
    assert get(cache, "new film") is None and get(cache, "old film") == "Page 1: seen"
    assert get(open_cache(shared, read_only=True), "new film") == NO_RESULTS
    put(cache, "new film", "Page 1: out now")
    put(cache, "old film", "Page 1: seen again")
    assert get(cache, "new film") == "Page 1: out now" and get(cache, "old film") == "Page 1: seen"


# ---- the command line, for either


def test_imported_answers_serve_every_backend_and_come_back_in_order(place, tmp_path, capsys):
    entries = {f"search query: what is {i}?": f"Page 1: {i}\nPage 2: «{i}» …" for i in range(1200)}
    released, copy = tmp_path / "released.json", tmp_path / "copy.json"
    released.write_text(json.dumps(entries | {"nothing": NO_RESULTS}, indent=2, ensure_ascii=False))
    main(["import", place, str(released)])
    main(["import", place, str(released)])
    main(["stats", place])
    first, again, *stats = capsys.readouterr().out.splitlines()
    assert (first, again) == (f"1201 new entries from {released}", f"0 new entries from {released}")
    assert stats[:3] == ["entries     1201", "  import    1201", "no results  1"]
    cache = open_cache(place, read_only=False)
    assert get(cache, 'search query: what is "5"?', backend="whatever") == "Page 1: 5\nPage 2: «5» …"
    put(cache, "search query: what is 5?", "my own", backend="local")
    assert get(cache, "search query: what is 5?", backend="local") == "my own"
    main(["export", place, str(copy)])
    assert copy.read_bytes() == released.read_bytes()


def test_places_of_either_kind_can_be_merged_into_each_other(place, tmp_path):
    file, other = CacheFile(tmp_path / "node.sqlite"), open_cache(place, read_only=False)
    put(other, "both", "first")
    put(file, "both", "second")
    put(file, "only the file", "x")
    assert merge(other, tmp_path / "node.sqlite") == 1
    assert (get(other, "both"), get(other, "only the file")) == ("first", "x")
    put(other, "only the other", "y")
    assert merge(file, place) == 1
    assert (get(file, "both"), get(file, "only the other")) == ("second", "y")


# ---- many writers, some killed


def test_eight_writers_agree_on_the_first_answers_and_lose_none(shared):
    def write(number: int) -> bool:
        cache = open_cache(shared, read_only=False)
        for i in range(200):
            put(cache, f"{number} {i}", "text" * 100)
            put(cache, f"shared {i}", f"by {number}")
        return cache.usable and [get(cache, f"shared {i}") for i in range(200)]

    seen = in_processes(write, 8)
    assert all(answers == seen[0] and None not in answers for answers in seen)
    assert len({query for query, _ in entries_of(open_cache(shared, read_only=True))}) == 9 * 200


def test_killed_writers_lose_no_acknowledged_answer_and_leave_no_half_one(shared):
    def write(name: str, acknowledge: int) -> None:
        cache = open_cache(shared, read_only=False)
        for i in range(1_000_000):
            put(cache, f"{name} {i}", f"text {i} " * 20)
            os.write(acknowledge, f"{name} {i}\n".encode())

    acknowledged = killed(write, "0123")
    cache = open_cache(shared, read_only=True)
    assert len(acknowledged) >= 4 and all(cache.get_any(query) for query in acknowledged)
    assert all(cache.get_any(query) == text for query, text in entries_of(cache))


def test_a_forked_process_can_go_on_using_the_cache(shared):
    cache = open_cache(shared, read_only=False)
    put(cache, "parent", "1")

    def child(number: int) -> str | None:
        put(cache, f"child {number}", "2")
        return get(cache, "parent")

    assert in_processes(child, 3) == ["1"] * 3
    assert [get(cache, f"child {i}") for i in range(3)] == ["2"] * 3


# ---- the tool


def ask(cfg: SearchConfig, *queries: str):
    tool = SearchTool(cfg)
    results = run(tool, *queries)
    asyncio.run(tool.aclose())
    return results


def test_the_search_tool_records_into_redis_and_replays_without_a_corpus(shared, tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"title": "Otter", "text": "The silver otter is 61 cm long."}\n')
    [recorded] = ask(SearchConfig(backend="local", corpus=str(corpus), cache=shared), "silver otter")
    [replayed, missing] = ask(SearchConfig(backend="replay", cache=shared, mode="replay"), "silver otter", "red fox")
    assert replayed.text == recorded.text and replayed.cached and not recorded.cached
    assert missing.error_kind == "not_recorded"
    with pytest.raises(UserError, match="no recorded result for 'red fox'"):
        ask(SearchConfig(backend="replay", cache=shared, mode="replay_strict"), "red fox")


def test_a_server_that_nobody_runs_is_one_line_before_training():
    cache = f"{REDIS}=redis://127.0.0.1:{free_port()}/0"
    with pytest.raises(Outage, match=r"tools\.search\.cache: no Redis server answers at redis://127") as error:
        SearchTool(SearchConfig(backend="replay", cache=cache))
    assert "\n" not in str(error.value)


def test_an_address_alone_is_refused_in_one_line_without_what_stands_in_it():
    with pytest.raises(UserError, match=r"^tools\.search\.cache: a cache at an address must be FILE\.py:NAME") as error:
        open_cache("redis://:s3cret@127.0.0.1:1/0", read_only=False)
    assert "s3cret" not in str(error.value)


def test_a_missing_redis_package_is_one_line_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(UserError, match=r"^tools\.search\.cache: .*pip install -e '\.\[redis\]'$"):
        SearchTool(SearchConfig(backend="replay", cache=f"{REDIS}=redis://127.0.0.1:1/0"))


def test_a_password_belongs_into_the_environment(tmp_path, monkeypatch):
    with redis_server(tmp_path, "--requirepass", "s3cret") as server:
        with pytest.raises(UserError, match=PASSWORD_VARIABLE) as error:
            open_cache(f"{REDIS}=redis://:s3cret@127.0.0.1:{server.port}/0", read_only=False)
        assert "s3cret" not in str(error.value)
        with pytest.raises(UserError, match="no Redis server answers") as error:
            open_cache(server.cache, read_only=False)
        assert not isinstance(error.value, Outage), "waiting brings no password"
        monkeypatch.setenv(PASSWORD_VARIABLE, "s3cret")
        cache = open_cache(server.cache, read_only=False)
        put(cache, "otter", "wet")
        assert get(cache, "otter") == "wet"


def test_a_server_lost_in_mid_run_costs_one_warning_until_it_is_back_and_ends_a_replay(tmp_path, caplog):
    with redis_server(tmp_path) as server:
        recording, replay = (open_cache(server.cache, read_only=read_only) for read_only in (False, True))
        put(recording, "otter", "wet")
        server.process.kill()
        server.process.wait()
        put(recording, "fox", "red")
        assert get(recording, "otter") is None and get(recording, "otter") is None and not recording.usable
        assert [record.levelname for record in caplog.records] == ["WARNING"] and "goes on without" in caplog.text
        with pytest.raises(UserError, match="cannot read the cache"):
            get(replay, "otter")
        again = subprocess.Popen(server.process.args, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + HANG_S
        try:
            while get(recording, "fox") is None and time.monotonic() < deadline:
                put(recording, "fox", "red")
                time.sleep(0.1)
            assert get(recording, "fox") == "red"
        finally:
            again.kill()
            again.wait()


def test_each_time_that_it_is_still_away_it_is_left_alone_for_longer(tmp_path, monkeypatch):
    with redis_server(tmp_path) as server:
        cache = open_cache(server.cache, read_only=False)
    now_s, pauses = 1000.0, []
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    for _ in range(9):
        assert cache.usable
        cache.give_up(OSError("away"))
        pauses.append(cache._use_again_s - now_s)
        now_s = cache._use_again_s
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    now_s += 100
    cache.give_up(OSError("away"))
    assert cache._use_again_s - now_s == 1


# ---- the rate limit


def test_processes_share_one_bucket_of_which_the_first_call_goes_at_once(server):
    def take(_: int) -> list[float]:
        limit = RedisRateLimit(server.url, "shared", 0.01)
        return [limit.take() for _ in range(5)]

    waits_s = sorted(wait_s for part in in_processes(take, 4) for wait_s in part)
    assert waits_s == pytest.approx([100 * i for i in range(20)], abs=60)
    for limit in (RedisRateLimit(server.url, "another", 0.01), LocalRateLimit(0.01)):
        waits_s = [limit.take() for _ in range(4)]
        assert waits_s == pytest.approx([0, 100, 200, 300], abs=30) and waits_s[0] == 0


def test_acquire_waits_for_the_token(server):
    async def five(limit) -> float:
        started = time.monotonic()
        await asyncio.gather(*(limit.acquire() for _ in range(5)))
        return time.monotonic() - started

    for limit in (LocalRateLimit(20), RedisRateLimit(server.url, "waits", 20)):
        assert asyncio.run(five(limit)) >= 0.19


def test_a_lost_server_leaves_each_process_its_own_limit(tmp_path, caplog):
    with redis_server(tmp_path) as server:
        limit = RedisRateLimit(server.url, "lost", 1000)
        server.process.kill()
        server.process.wait()
        for _ in range(3):
            asyncio.run(limit.acquire())
    assert len(caplog.records) == 1 and "limits itself alone" in caplog.text
