"""Search over the network against a real server that fails in every way; pauses cost no time (`FakeTime`)."""

import asyncio
import json
import logging
import time
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from helpers.asking import ask
from helpers.redis_server import redis_server
from helpers.web_service import (
    WebService,
    found,
    half_an_answer,
    never,
    no_http_at_all,
    resets,
    says,
    slowly,
    ten_megabytes,
)

from arpo.config.tools import SearchConfig
from arpo.errors import UserError
from arpo.log.settings import save_config
from arpo.start.load import load_config
from arpo.tools.base import ToolRunner
from arpo.tools.cache.rows import NO_RESULTS
from arpo.tools.http import client
from arpo.tools.http.client import proxy_of
from arpo.tools.http.policy import HttpPolicy
from arpo.tools.search import SearchTool
from arpo.tools.search.tool import BACKENDS, UNAVAILABLE
from arpo.tools.search.web import HttpBackend, rate_limit_of
from extras.redis.rate_limit import RedisRateLimit
from train_rl import RLConfig

KEY = "sk-very-secret-0123456789"
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def keys(monkeypatch):
    monkeypatch.setenv("BRIGHTDATA_API_KEY", KEY)
    monkeypatch.setenv("SERPER_API_KEY", KEY)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def retriever(service: WebService, **options) -> SearchConfig:
    return SearchConfig(**{"backend": "http", "url": service.url, "mode": "live", "deadline_s": 20.0, **options})


@pytest.fixture
def impatient(monkeypatch, fake_time):
    """Backends of search whose pauses cost no time."""
    for name in ("http", "brightdata", "serper"):
        monkeypatch.setitem(BACKENDS, name, lambda cfg: HttpBackend(cfg, time_source=fake_time.source()))


@pytest.fixture
def unprobed(monkeypatch):
    """As on a rank that does not ask the service at the start."""
    monkeypatch.setenv("RANK", "1")


# ---- what is sent, and what comes back


BRIGHTDATA = {"backend": "brightdata", "zone": "serp_1", "mode": "live"}
SERPER = {"backend": "serper", "mode": "live"}


@pytest.mark.parametrize(
    ("options", "query", "sent"),
    [
        # as the released code asks for Bing's results
        (BRIGHTDATA, "Ötzi's height & weight",
         '{"zone":"serp_1","url":"https://www.bing.com/search?q=%C3%96tzi%27s+height+%26+weight&mkt=en-US&setLang=en'
         '&brd_json=1&cc=us","format":"raw"}'),
        (BRIGHTDATA, "水獭 身高", "&mkt=zh-CN&setLang=zh&brd_json=1&cc=cn"),
        (SERPER | {"market": "de-AT"}, "Höhe", '{"q":"Höhe","gl":"at","hl":"de","num":10}'),
        # a location is where the search is made, whatever the query's language
        (BRIGHTDATA | {"location": "cn"}, "otters", "&mkt=en-US&setLang=en&brd_json=1&cc=cn"),
        (SERPER | {"location": "cn"}, "otters", '"gl":"cn","hl":"en"'),
    ],
)  # fmt: skip
def test_a_service_is_asked_in_its_own_form_with_its_own_key_header(service, options, query, sent):
    service.then(says({"organic": []}))
    ask(SearchTool(SearchConfig(url=service.url, **options)), query)
    request = service.requests[-1]
    body = request.body.decode()
    assert body == sent if sent.startswith("{") else sent in body
    keys = {name: request.headers[name] for name in ("Authorization", "X-API-KEY") if name in request.headers}
    assert keys == ({"Authorization": f"Bearer {KEY}"} if options["backend"] == "brightdata" else {"X-API-KEY": KEY})
    assert request.headers["Content-Type"] == "application/json"


def test_another_location_is_not_answered_from_the_cache_but_older_caches_are_read(service, tmp_path):
    cfg = SearchConfig(backend="serper", url=service.url, cache=str(tmp_path / "cache.sqlite"))
    service.then(says({"organic": [{"snippet": "found"}]}))
    assert not ask(SearchTool(cfg), "q").cached
    assert not ask(SearchTool(replace(cfg, location="cn")), "q").cached
    assert ask(SearchTool(cfg), "q").cached and ask(SearchTool(replace(cfg, location="cn")), "q").cached
    without_location = {"market": "auto", "max_results": 10, "max_passage_chars": 1000}  # what older runs have written
    assert HttpBackend(replace(cfg, mode="replay")).params == without_location


def test_the_retriever_gets_one_query_in_all_forms_and_the_number_of_passages(service):
    """Search-R1's and verl's servers fail where scores are not asked for, SkyRL's refuses a body without "query"."""
    result = ask(SearchTool(retriever(service, top_k=5)), "otters")
    assert service.requests[-1].body == b'{"queries":["otters"],"query":"otters","topk":5,"return_scores":true}'
    assert service.requests[-1].path == "/retrieve" and result.ok and result.text == "Page 1: otters swim"


@pytest.mark.parametrize(("backend", "field"), [("brightdata", "description"), ("serper", "snippet")])
def test_web_results_are_numbered_snippets_without_empty_and_repeated_ones(service, backend, field):
    rows = [{"title": "A", field: "one\n two"}, {"link": "ad"}, {field: "one two"}, {field: None}, {field: "x" * 2000}]
    service.then(says({"organic": rows + [{field: f"more {i}"} for i in range(9)]}))
    cfg = SearchConfig(backend=backend, url=service.url, zone="z", mode="live", top_k=3)
    assert ask(SearchTool(cfg), "q").text == f"Page 1: one two\nPage 2: {'x' * 999}…\nPage 3: more 0"


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        # the common forms
        ({"result": [[{"document": {"id": "1", "contents": '"Otter"\nswims'}, "score": 1.5}]]}, '"Otter" swims'),
        ({"result": [[{"id": "1", "contents": '"Otter"\nswims'}]]}, '"Otter" swims'),
        ({"result": [['"Otter" swims']]}, '"Otter" swims'),
        ({"result": [[{"text": '"Otter" swims', "title": ""}]]}, '"Otter" swims'),
        # a title stands before a text that does not begin with it
        ({"result": [[{"title": "Otter", "text": "It swims"}, {"title": "Fox", "text": "Fox runs"}]]},
         "Otter: It swims\nPage 2: Fox runs"),
        # odd passages are left out, and so are characters that a tokenizer chokes on
        ({"result": [[{"document": {"contents": None}}, 3, {"contents": "otters"}]]}, "otters"),
        ('{"result": [["a\\ud800b\\u0000c\\u001b[31m"]]}', "a b c [31m"),
        ({"result": [[]]}, None),
    ],
)  # fmt: skip
def test_what_a_retriever_answers_is_read_whatever_its_content_type(service, answer, text):
    service.then(says(answer, Content_Type="text/plain; charset=latin-1"))
    assert ask(SearchTool(retriever(service)), "q").text == (f"Page 1: {text}" if text else NO_RESULTS)
    assert len(service.requests) == 2  # with that of the start


SERPER_BOXES = {
    "answerBox": {"title": "5 kilometers", "answer": "3.107 miles", "link": "http://a"},
    "knowledgeGraph": {
        "title": "Apple", "type": "Technology company", "website": "https://apple.com", "description": "Makes phones.",
        "descriptionLink": "http://b", "attributes": {"Founded": "April 1, 1976", "CEO": "Tim Cook"},
    },
}  # fmt: skip


BRIGHTDATA_KNOWLEDGE = {
    "name": "Otter", "subtitle": "Mammals", "description": "Otters swim.", "description_source": "Wikipedia",
    "description_link": "http://b", "images": [{"image": "http://c", "image_base64": "data:image/png;base64,AAAA"}],
    "facts": [
        {"key": "Mass", "predicate": "kc:/biology:mass", "value": [{"text": "North American: 8 kg"},
                                                                   {"text": "Sea: 27 kg", "link": "http://d"}]},
        {"key": "Family", "value": {"text": "Mustelidae"}}, {"key": "Order", "value": "Carnivora"}, "odd", {"value": 3},
    ],
    "widgets": [{"key": "People also search for", "items": [{"name": "Fox", "rank": 1}], "global_rank": 7}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "answer", "text"),
    [
        ("serper", SERPER_BOXES, "5 kilometers; answer: 3.107 miles\nPage 2: Apple; type: Technology company; "
                                 "Makes phones.; Founded: April 1, 1976; CEO: Tim Cook"),
        ("serper", {"answerBox": {"snippet": "330 m tall", "snippetHighlighted": ["330 m"]},
                    "organic": [{"snippet": "b"}]}, "330 m tall\nPage 2: b"),
        ("serper", {"answerBox": {"temperature": "83", "unit": "Fahrenheit"}}, "temperature: 83; unit: Fahrenheit"),
        ("serper", {"answerBox": "none", "organic": [{"snippet": "a"}]}, "a"),
        # odd rows beside good ones: assafelovic/gpt-researcher#694 and PR#1898
        ("serper", {"organic": [{"snippet": ["a", "b", 1]}, {"snippet": {"x": 1}}, 7, None, {"snippet": 42},
                                {"snippet": "c"}]}, "a b\nPage 2: 42\nPage 3: c"),
        ("serper", {"organic": [{"title": "only a title", "link": "http://a"}, {"title": "t", "snippet": "a"}]},
         "only a title\nPage 2: a"),
        # the fields of a client of this service (charmingruby/serpbright), and a page without organic results
        # (serpapi/public-roadmap#3257, #3509, #3787; brightdata-mcp#133)
        ("brightdata", {"knowledge": BRIGHTDATA_KNOWLEDGE}, "Otter; Mammals; Otters swim.; Mass: North American: 8 kg, "
                                                            "Sea: 27 kg; Family: Mustelidae; Order: Carnivora"),
        ("brightdata", {"knowledge": {"name": "Otter", "rank": 1}, "organic": [{"description": "a"}]},
         "Otter\nPage 2: a"),
        ("brightdata", {"featured_snippets": [{"title": "5 km in miles", "value": {"text": "3.107 miles"},
                                               "link": "http://a"}, 7]}, "5 km in miles; value: 3.107 miles"),
        ("brightdata", {"knowledge": [], "featured_snippets": None, "organic": [{"description": "a"}]}, "a"),
        # nothing found is a proper answer
        ("brightdata", {}, None), ("brightdata", {"organic": []}, None), ("serper", {"organic": None}, None),
        ("serper", {"organic": [{"link": "http://a"}]}, None),
    ],
)  # fmt: skip
def test_what_a_service_answers_beside_plain_results_is_read(service, backend, answer, text):
    beside = {"serper": {"searchParameters": {"q": "q"}}, "brightdata": {"general": {"search_engine": "bing"}}}
    service.then(says(beside[backend] | answer))
    result = ask(SearchTool(SearchConfig(backend=backend, url=service.url, zone="z", mode="live")), "q")
    assert result.ok and result.text == (f"Page 1: {text}" if text else NO_RESULTS) and len(service.requests) == 2


# ---- failures of one call

UNUSABLE = {
    "connection reset": resets,
    "half an answer": half_an_answer,
    "no HTTP": no_http_at_all,
    "invalid JSON": says('{"result": [[', Content_Type="application/json"),
    "wrong content type": says("<html>captcha</html>", Content_Type="text/html"),
    "empty": says(""),
    "not UTF-8": says(b'{"result": [["\xff\xfe"]]}'),
    "too deep": says("[" * 100_000),
    "an error that calls itself a success": says({"error": "quota", "organic": None}),
    "a list": says([1, 2]),
    "another shape": says({"result": {"0": []}}),
    "numbers": says({"result": [[3]]}),
    "500": says("oops", 500),
    "503": says("", 503),
    "408": says("", 408),
    "429": says("", 429),
}


@pytest.mark.parametrize("failure", UNUSABLE.values(), ids=UNUSABLE)
def test_what_may_pass_is_tried_again(service, impatient, failure):
    tool = SearchTool(retriever(service))
    service.then(failure, failure, found("otters swim"))
    result = ask(tool, "q")
    assert result.ok and result.text == "Page 1: otters swim" and len(service.requests) == 3


@pytest.mark.parametrize(
    ("backend", "failure", "num_tries"),
    [
        ("http", resets, 4), ("http", says({"result": {"0": []}}), 4), ("http", says("", 503), 4),
        ("serper", says({"error": "quota"}), 4), ("brightdata", says({"error": "quota"}), 4),
        # what will not pass
        ("http", says("", 400), 1), ("http", says("", 404), 1), ("http", says("", 422), 1),
        ("http", says("", 302, Location="http://127.0.0.1:1/"), 1), ("http", ten_megabytes, 1),
    ],
)  # fmt: skip
def test_after_its_tries_search_is_unavailable_and_the_trajectory_is_ours_to_drop(
    service, unprobed, impatient, backend, failure, num_tries
):
    tool = SearchTool(retriever(service, backend=backend, zone="z"))
    service.then(failure)
    result = ask(tool, "q")
    assert (result.text, result.ok, result.infra_error) == ("Error: search is unavailable.", False, True)
    assert len(service.requests) == num_tries


@pytest.mark.parametrize("hangs", [never, slowly])
def test_a_service_that_hangs_is_given_up_at_the_deadline(service, unprobed, hangs):
    service.then(hangs)
    result = ask(SearchTool(retriever(service, deadline_s=0.4)), "q")
    assert (result.text, result.error_kind) == ("Error: search gave no answer within 0.4 s.", "timeout")
    assert result.infra_error and not result.ok and len(service.requests) <= 2


def test_the_deadline_includes_waiting_for_a_turn(service, unprobed, monkeypatch):
    monkeypatch.setattr("arpo.tools.search.web.HttpPolicy", partial(HttpPolicy, max_concurrent=1))
    service.then(never)
    results = ask(SearchTool(retriever(service, deadline_s=0.4)), *"abcdef")
    assert {r.error_kind for r in results} == {"timeout"} and len(service.requests) <= 2 * 2


def test_a_call_that_hangs_once_is_answered_by_its_second_try(service, impatient):
    tool = SearchTool(retriever(service, deadline_s=9.0))
    service.then(never, found("late"))
    assert ask(tool, "q").text == "Page 1: late"


# ---- limits and outages


def test_with_the_service_down_the_model_reads_nothing_and_the_calls_are_flagged(service, impatient):
    tool = SearchTool(retriever(service))
    service.stop()
    results = ask(tool, *(f"q{n}" for n in range(40)))
    assert {(r.text, r.infra_error, r.ok, r.error_kind) for r in results} == {(UNAVAILABLE, True, False, "unavailable")}


def test_no_more_requests_than_allowed_are_under_way(service, monkeypatch):
    monkeypatch.setattr("arpo.tools.search.web.HttpPolicy", partial(HttpPolicy, max_concurrent=4))
    tool = SearchTool(retriever(service, requests_per_second=0.0))
    service.then(says({"result": [["x"]]}, wait_s=0.1))
    ask(tool, *(f"q{n}" for n in range(20)))
    assert 1 < service.most_running <= 4 and len(service.requests) == 20


def test_ranks_together_stay_below_the_limit(service, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    cfg = retriever(service, requests_per_second=40.0)
    tool, started_s = SearchTool(cfg), time.monotonic()
    assert all(result.ok for result in ask(tool, *(f"query {n}" for n in range(8))))
    assert rate_limit_of(cfg).calls_per_s == 20.0 and time.monotonic() - started_s > 0.99 * 7 / 20.0


def test_a_cache_in_redis_holds_the_limit_of_all_nodes_too(service, tmp_path):
    with redis_server(tmp_path) as redis:
        cfg = retriever(service, mode="record", cache=redis.cache, requests_per_second=40.0)
        tool = SearchTool(cfg)
        started_s = time.monotonic()
        assert {r.ok for r in ask(tool, *(f"q{n}" for n in range(8)))} == {True}
        assert max(r.at_s for r in service.requests) - started_s > 0.99 * 7 / 40.0
        assert isinstance(rate_limit_of(cfg), RedisRateLimit)


# ---- keys


def everything_said_by(error: BaseException | None) -> str:
    """The exception, and all that led to it, as a crash report would show them."""
    if error is None:
        return ""
    shown = "".join(traceback.format_exception(error)) + repr(error) + str(vars(error))
    return shown + everything_said_by(error.__cause__) + everything_said_by(error.__context__)


@pytest.mark.parametrize("backend", ["brightdata", "serper"])
@pytest.mark.parametrize(
    "answer",
    [
        says(f"bad key {KEY}", 500),
        says(f"{'bad key ':.<{client.MAX_REASON_CHARS - 20}}{KEY}", 500),  # across the place where an answer is cut
        says(f'["{KEY}"', 200),
        no_http_at_all,
        resets,
        never,
    ],
)
def test_a_key_is_in_no_log_and_no_exception(service, unprobed, impatient, caplog, backend, answer):
    caplog.set_level(logging.DEBUG)
    service.then(answer)
    deadline_s = 0.3 if answer is never else 20.0
    cfg = SearchConfig(backend=backend, url=service.url, zone="z", mode="live", deadline_s=deadline_s)
    tool = SearchTool(cfg)

    async def fail() -> list:
        outcomes = await asyncio.gather(tool.run("q"), tool.backend.search("q"), return_exceptions=True)
        await tool.aclose()
        return outcomes

    result, error = asyncio.run(fail())
    assert isinstance(error, OSError) and result.infra_error
    assert any(KEY in str(request.headers) for request in service.requests)
    assert KEY[:8] not in caplog.text + everything_said_by(error) + repr(result) + repr(tool) + repr(tool.backend)


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_ends_the_run_at_the_start_with_one_line(service, status, caplog):
    service.then(says(f"who is {KEY}?", status))
    words = rf"serper: the service refuses the key in SERPER_API_KEY \(HTTP {status}\)$"
    with pytest.raises(UserError, match=words) as e:
        SearchTool(SearchConfig(backend="serper", url=service.url, mode="live"))
    assert len(service.requests) == 1 and KEY not in everything_said_by(e.value) + caplog.text


def test_a_single_refusal_is_a_failed_call_and_many_in_a_row_end_the_run(service, monkeypatch):
    monkeypatch.setattr(client, "MAX_REFUSALS", 3)
    answer = says({"organic": []})
    service.then(answer, says("", 403), says("", 401), answer, *[says("", 401)] * 3)
    runner = ToolRunner({"search": SearchTool(SearchConfig(backend="serper", url=service.url, mode="live"))})

    def call(name: str) -> str | None:
        runner.start(name, "search", name)
        [(_, result)] = runner.collect(block=True)
        return result.error_kind

    assert [call(name) for name in "abcde"] == ["unavailable", "unavailable", None, "unavailable", "unavailable"]
    for name in ("third in a row", "not even sent"):
        with pytest.raises(UserError, match="refuses the key in SERPER_API_KEY"):
            call(name)
    runner.close()
    assert len(service.requests) == 7  # with the probe


def test_a_saved_config_holds_no_key(tmp_path):
    cfg = load_config(RLConfig, ["--data.train", "x", "--tools.search.backend", "serper"])
    save_config(cfg, tmp_path / "config.yaml")
    assert KEY not in (tmp_path / "config.yaml").read_text() + repr(cfg)


# ---- before training


@pytest.mark.parametrize("variable", ["BRIGHTDATA_API_KEY", "SERPER_API_KEY"])
@pytest.mark.parametrize("value", [None, "", "  "])
def test_a_missing_key_is_named(monkeypatch, variable, value):
    monkeypatch.delenv(variable) if value is None else monkeypatch.setenv(variable, value)
    backend = variable.partition("_")[0].lower()
    words = f"backend {backend} needs a key; set the environment variable {variable}"
    with pytest.raises(UserError, match=words) as e:
        SearchTool(SearchConfig(backend=backend))  # said before the missing zone, which nobody has without a key
    assert all(word in str(e.value) for word in ("http (a retriever", "local (the file", "replay"))
    assert "\n" not in str(e.value)


def test_live_search_begins_with_what_the_released_cache_holds(service, tmp_path):
    released = tmp_path / "search_cache.json"
    released.write_text(json.dumps({"who wrote it": "Page 1: Ann"}))
    cache = f"{ROOT}/extras/cache/released.py:ReleasedCache={released}"
    for is_new in (True, False):
        service.then(found("otters swim"))
        known, asked = ask(SearchTool(retriever(service, mode="record", cache=cache)), "who wrote it", "otters")
        assert (known.text, known.cached) == ("Page 1: Ann", True)
        assert (asked.text, asked.cached) == ("Page 1: otters swim", not is_new)
        queries = [json.loads(request.body)["queries"] for request in service.requests]
        assert queries == [["weather"], ["otters"]][: 1 + is_new]


@pytest.mark.parametrize("value", ["sk\nx", "two words", "sk-é", "“sk”"])
def test_a_key_that_no_header_can_hold_is_refused_without_quoting_it(monkeypatch, value):
    monkeypatch.setenv("SERPER_API_KEY", value)
    with pytest.raises(UserError, match="SERPER_API_KEY has characters that no key has") as error:
        SearchTool(SearchConfig(backend="serper"))
    assert value not in str(error.value)


READS = SERPER | {"read_pages": 3}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"backend": "http"}, r"tools\.search\.url is empty; set it to the retriever"),
        ({"backend": "http", "url": "host:80/r"}, r"tools\.search\.url: 'host:80/r' is not an address"),
        ({"backend": "http", "url": "ftp://host/x"}, r"tools\.search\.url: .* is not an address like http://"),
        ({"backend": "http", "url": "http://:80/x"}, r"tools\.search\.url: .* is not an address like http://"),
        ({"backend": "http", "url": "http://host:port/x"}, r"tools\.search\.url: .* is not an address like http://"),
        ({"backend": "http", "url": "http://me:pw@host/x"}, r"tools\.search\.url must not hold a user or password"),
        ({"backend": "brightdata"}, r"tools\.search\.zone is empty"),
        ({"backend": "serper", "location": "CN"}, r"tools\.search\.location must be a country like cn, .*not 'CN'"),
        ({"backend": "serper", "market": "english"}, r"tools\.search\.market must be auto or like en-US"),
        ({"backend": "replay"}, r"tools\.search\.cache is empty, and backend replay reads it; set it to"),
        ({"backend": "local", "corpus": "C", "mode": "replay"}, r"tools\.search\.cache is empty, and mode replay"),
        ({"backend": "replay", "cache": "C", "mode": "live"}, r"tools\.search\.mode live ignores the cache"),
        ({"backend": "replay", "cache": "/nowhere/c.sqlite"}, r"/nowhere/c\.sqlite: .*set tools\.search\.cache"),
        ({"backend": "local"}, r"tools\.search\.corpus is empty, .*set it to a \.jsonl file"),
        ({"backend": "local", "corpus": "/nowhere/c.jsonl"}, r"tools\.search\.corpus /nowhere/c\.jsonl: no such file"),
        (READS | {"summarizer_url": "host:80"}, r"tools\.search\.summarizer_url: 'host:80' is not an address"),
        (READS | {"summarizer_url": "http://u:pw@h/v1"}, r"tools\.search\.summarizer_url must not hold a user or pass"),
        (READS | {"summarizer_url": "http://host/v1"}, r"tools\.search\.summarizer_model is empty"),
    ],
)
def test_a_config_that_cannot_work_is_refused_with_the_fix(unprobed, options, complaint):
    with pytest.raises(UserError, match=complaint) as error:
        SearchTool(SearchConfig(**options))
    assert "\n" not in str(error.value) and "pw" not in str(error.value)


def test_a_retriever_that_is_not_there_is_found_before_training(service, impatient):
    service.stop()
    words = r"backend http: ClientConnector.*start or repair the service at tools\.search\.url"
    with pytest.raises(UserError, match=words):
        SearchTool(retriever(service))


def test_only_rank_0_probes(service, monkeypatch):
    SearchTool(retriever(service))
    monkeypatch.setenv("RANK", "1")
    SearchTool(retriever(service))
    assert [json.loads(r.body)["queries"] for r in service.requests] == [["weather"]]


def test_a_replay_needs_neither_key_nor_service(service, tmp_path, monkeypatch):
    cache = str(tmp_path / "cache.sqlite")
    service.then(says({"organic": [{"snippet": "found"}]}))
    cfg = SearchConfig(backend="serper", url=service.url, cache=cache)
    assert ask(SearchTool(cfg), "q").ok
    monkeypatch.delenv("SERPER_API_KEY")
    service.stop()
    replayed = ask(SearchTool(SearchConfig(**{**vars(cfg), "mode": "replay"})), "q")
    assert replayed.cached and replayed.text == "Page 1: found"


def test_the_proxy_of_the_environment_is_used_except_where_it_says_no(service, monkeypatch):
    monkeypatch.setenv("http_proxy", service.url.removesuffix("/retrieve"))
    monkeypatch.setenv("no_proxy", "localhost,127.0.0.1")
    assert proxy_of(service.url) is None
    result = ask(SearchTool(SearchConfig(backend="http", url="http://retriever.invalid/retrieve", mode="live")), "q")
    assert result.ok and service.requests[-1].headers["Host"] == "retriever.invalid"
