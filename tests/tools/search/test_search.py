# ruff: noqa: RUF001 (full-width and other letters are meant)
"""The search tool and its local index: real SQLite, real tantivy, real processes."""

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.asking import ask
from helpers.files import write_jsonl
from helpers.forked import in_processes, killed

from arpo.config.tools import SearchConfig
from arpo.errors import UserError
from arpo.tools.base import ToolRunner
from arpo.tools.cache.rows import cache_key
from arpo.tools.search import SearchTool, bm25
from arpo.tools.search.bm25 import MAX_TERMS, Bm25Index, ranking_terms
from arpo.tools.search.tool import BACKENDS
from extras.demo.world import World

OTTERS = [
    {"key": "height of Silver Otter", "text": "height of Silver Otter is 482"},
    {"key": "owner of Red Fox", "text": "owner of Red Fox is Silver Otter"},
    {"key": "height of Red Fox", "text": "height of Red Fox is 77"},
]


@pytest.fixture
def corpus(tmp_path) -> Path:
    return write_jsonl(tmp_path / "corpus.jsonl", OTTERS)


def remains(folder: Path) -> list[str]:
    """Return the files that an index leaves beside its corpus, but for lock files."""
    return sorted(p.name for p in folder.iterdir() if not p.name.endswith((".jsonl", ".lock")))


def local(corpus: Path, **options) -> SearchTool:
    return SearchTool(SearchConfig(backend="local", corpus=str(corpus), **{"mode": "live", **options}))


def search(corpus: Path, query: str, **options) -> str:
    return ask(local(corpus, **options), query).text


# ---- what comes back


def test_the_best_passages_come_first_numbered(corpus):
    assert search(corpus, "height of Silver Otter", top_k=2) == (
        "Page 1: height of Silver Otter is 482\nPage 2: height of Red Fox is 77"
    )


def test_only_the_key_of_a_row_is_searched_and_only_its_text_is_shown(corpus):
    assert search(corpus, "owner of Silver Otter", top_k=1) == "Page 1: height of Silver Otter is 482"
    missed = ask(local(corpus), "482")
    assert (missed.text, missed.ok, missed.cached) == ("No search results found.", True, False)


def test_titles_are_searched_and_shown_where_the_text_does_not_begin_with_them_and_long_texts_are_cut(tmp_path):
    rows = [
        {"title": "Ada Lovelace", "text": "She wrote the first program."},
        {"title": "Alan Turing", "text": "Alan Turing broke\n\nEnigma."},
        {"contents": '"Grace Hopper"\nShe wrote a compiler.'},
        {"text": "word " * 1000},
    ]
    corpus = write_jsonl(tmp_path / "people.jsonl", rows)
    assert search(corpus, "Lovelace", top_k=1) == "Page 1: Ada Lovelace: She wrote the first program."
    assert search(corpus, "turing", top_k=1) == "Page 1: Alan Turing broke Enigma."
    assert search(corpus, "compiler", top_k=1) == 'Page 1: "Grace Hopper" She wrote a compiler.'
    assert search(corpus, "word") == f"Page 1: {'word ' * 199}word…"


def test_all_passages_that_tie_are_fetched_before_the_first_are_chosen():
    """A merged segment lies behind the others, so that the index may find equal passages in any order."""
    rows = [*range(4), *range(99, 3, -1)]  # the four best, then 96 that tie, the last one first

    class MergedSegments:
        num_docs = 100

        def search(self, _expression, limit, count):
            return SimpleNamespace(hits=[(9.0 if row < 4 else 1.0, row) for row in rows[:limit]])

        def fast_field_values(self, _field, addresses):
            return addresses

    index = object.__new__(Bm25Index)
    index._searcher = MergedSegments()
    assert index._best(None, 6) == [0, 1, 2, 3, 4, 5]


def test_an_index_of_several_segments_keeps_the_order_of_the_corpus(tmp_path, monkeypatch):
    rows = [{"key": f"same unique{i}", "text": f"number {i}"} for i in range(60_000)]
    corpus = write_jsonl(tmp_path / "segments.jsonl", rows)
    monkeypatch.setattr(bm25, "BUILD_MEMORY_BYTES", 15_000_000)  # the least that tantivy takes
    built = Bm25Index(corpus)
    assert len(list(built.path.glob("*.store"))) > 1
    assert built.search("same", 20) == [f"number {i}" for i in range(20)]
    assert built.search("same unique54321", 2) == ["number 54321", "number 0"]


CORPUS_OF_SCRIPTS = [
    "孔子是中国古代的思想家和教育家，出生于山东曲阜。",
    "鲁迅原名周树人，浙江绍兴人，著有《狂人日记》。",
    "刷新令牌怎么实现，邮轮反馈，每日复盘 cron 备份",
    "東京は日本の首都であり、人口は約1400万人である。ｶﾞｲﾄﾞ付き",
    "スーパーマーケットでサーバーを買う",
    "서울은 대한민국의 수도이며 인구가 가장 많다.",
    "서점 앞에서 울고 있는 아이를 보았다.",
    "울타리 너머로 개가 짖고 있었다.",
    "กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทย",
    "เชียงใหม่เป็นจังหวัดทางภาคเหนือ",
    "तैनाती के लिए डॉकर का उपयोग हिन्दी में",
    "Le déploiement français à Đà Nẵng, Straße und ﬁne Æther",
    "Развёртывание должно быть автоматическим; новый май",
    "ΟΔΟΣ ΑΘΗΝΩΝ και İstanbul",
    "ＡＢＣ１２３ 全角文字",
    "Paris is the capital of France.",
    "Cafe\u0301 Zu\u0308rich, decomposed; ÅNGSTRÖM foo_bar",
]


QUERIES = [
    ("孔子出生于哪里", 0),
    ("山东曲阜", 0),
    ("鲁迅的原名是什么", 1),
    ("令牌", 2),  # vshulcz/deja-vu#337
    ("邮轮 反馈", 2),
    ("每日复盘 cron 备份", 2),  # MemPalace/mempalace PR#1338
    ("日本の首都", 3),
    ("1400万人", 3),
    ("ガイド", 3),  # half-width in the corpus
    ("サーバー", 4),  # the long-vowel mark: rohitg00/agentmemory PR#947
    ("서울", 5),  # deepset-ai/haystack#12867: single syllables would find row 6 first
    ("대한민국 수도", 5),
    ("개", 7),
    ("เมืองหลวง", 8),
    ("ภาคเหนือ", 9),
    ("हिन्दी डॉकर", 10),  # plur-ai/plur#780: marks belong to the word
    ("deploiement francais", 11),
    ("DÉPLOIEMENT Da Nang", 11),
    ("strasse FINE aether", 11),
    ("развертывание", 12),
    ("новый", 12),
    ("οδός Αθηνών", 13),
    ("istanbul", 13),
    ("abc123", 14),
    ("ｃａｐｉｔａｌ　ｏｆ　Ｆｒａｎｃｅ", 15),
    ("cafe zurich", 16),
    ("CAFÉ ZÜRICH", 16),
    ("Cafe\u0301 Zu\u0308rich", 16),
    ("angstrom", 16),
    ("foo_bar", 16),
]


def test_words_are_found_in_every_script_whatever_their_case_and_accents(tmp_path):
    index = Bm25Index(write_jsonl(tmp_path / "scripts.jsonl", [{"text": text} for text in CORPUS_OF_SCRIPTS]))
    found = [(query, index.search(query, 1)) for query, _ in QUERIES]
    assert found == [(query, [CORPUS_OF_SCRIPTS[row]]) for query, row in QUERIES]


def test_threads_find_every_fact_of_the_demo_by_its_own_key_and_two_indexes_answer_alike(tmp_path):
    documents = World(1).documents()
    one, two = (Bm25Index(write_jsonl(tmp_path / name, documents)) for name in ("one.jsonl", "two.jsonl"))
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda d: one.search(d["key"], 1), documents[:500]))
    assert found == [[d["text"]] for d in documents[:500]]
    queries = [f"info on {d['key'].split(' of ')[1]}" for d in documents[:100]]
    assert [one.search(q, 5) for q in queries] == [two.search(q, 5) for q in queries]
    assert one.corpus_sha256 == two.corpus_sha256


# ---- queries


def test_an_empty_query_is_told_so(corpus):
    for result in ask(local(corpus), "", "   ", "\n\t", "\x00\x07", '""', "\ud800"):
        assert not result.ok and result.error_kind == "empty_query" and "<search>" in result.text


HOSTILE = ['"', "*", "NEAR(", "-a", "OR", "AND NOT", ":", "^", "{indexed}:", "(", "a*", "'; DROP TABLE words; --",
           "\\", "\x00", "\ud800", "_", "\u0301", "日本", "+", "NEAR(a b, 3)", "?1", "x" * 400]  # fmt: skip


def test_search_syntax_in_a_query_is_only_text(corpus):
    results = ask(local(corpus, top_k=1), *(f"{hostile} silver height" for hostile in HOSTILE))
    texts = {hostile: result.text for hostile, result in zip(HOSTILE, results, strict=True)}
    assert texts == dict.fromkeys(HOSTILE, "Page 1: height of Silver Otter is 482")


def test_a_query_of_ten_thousand_words_is_cut(corpus):
    assert search(corpus, "otter " + "the fox " * 5000, top_k=3).count("Page") == 3
    assert len(ranking_terms(f"w{i}" for i in range(500))) == MAX_TERMS


def test_stop_words_are_left_out_unless_there_is_nothing_else(tmp_path):
    assert ranking_terms(["what", "is", "the", "height", "of", "an", "otter"]) == ["height", "otter"]
    corpus = write_jsonl(tmp_path / "bands.jsonl", [{"text": "Queen are a band"}, {"text": "The Who"}])
    assert search(corpus, "the who", top_k=1) == "Page 1: The Who"


def test_a_search_past_its_deadline_is_given_up(corpus, monkeypatch):
    monkeypatch.setattr(Bm25Index, "search", lambda *_: time.sleep(0.5))
    result = ask(local(corpus, deadline_s=0.01), "otter")
    assert (result.error_kind, result.infra_error) == ("timeout", True) and "0.01 s" in result.text


# ---- the index file


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"text": 5}', '"text" must be a string, not int'),
        ('{"text": "x", "key": ["a"]}', '"key" must be a string, not list'),
        ('{"title": null, "text": "x"}', '"title" must be a string, not NoneType'),
        ('{"title": "x"}', 'neither "text" nor "contents"'),
        ('{"text": "  "}', '"text" is empty'),
        ('["x"]', "must be a JSON object, not list"),
        ('{"text": "x"', "not valid JSON"),
    ],
)
def test_a_malformed_row_is_named(tmp_path, line, complaint):
    """No folder remains: a writer that has not ended writes on while its folder is removed (tantivy#1774, #2262)."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(b'{"text": "fine"}\n\n' + line.encode() + b"\n")
    with pytest.raises(UserError) as error:
        Bm25Index(corpus)
    assert str(error.value).startswith(f"{corpus}:3: ") and complaint in str(error.value)
    assert remains(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot read"), (b"", "the file is empty"), (b"\n\n", "the corpus is empty"), (b'"\xff"\n', "not UTF-8")],
)
def test_an_empty_or_missing_corpus_is_refused(tmp_path, content, words):
    corpus = tmp_path / "corpus.jsonl"
    if content is not None:
        corpus.write_bytes(content)
    with pytest.raises(UserError, match=f"corpus.jsonl: {words}"):
        Bm25Index(corpus)


def test_the_index_is_built_once_and_again_when_the_corpus_or_its_format_changes(corpus, monkeypatch):
    first = Bm25Index(corpus)
    built = first.path.stat().st_ino
    assert Bm25Index(corpus).path.stat().st_ino == built
    monkeypatch.setattr(bm25, "FORMAT", bm25.FORMAT + 1)
    assert Bm25Index(corpus).path.stat().st_ino != built
    write_jsonl(corpus, [{"text": "new otter"}])
    assert Bm25Index(corpus).search("otter", 5) == ["new otter"]
    assert first.search("otter", 5) == ["height of Silver Otter is 482"]  # a running search keeps what it opened


def flipped(blob: bytes, place: float) -> bytes:
    """With another bit at that share of its length."""
    at = int(place * len(blob))
    return blob[:at] + bytes([blob[at] ^ 4]) + blob[at + 1 :]


DAMAGE = {
    "first bit": lambda blob: flipped(blob, 0.0),
    "another bit": lambda blob: flipped(blob, 0.6),
    "empty": lambda blob: b"",
    "half": lambda blob: blob[: len(blob) // 2],
}


def parts_of(path: Path) -> list[Path]:
    """The files of an index, by kind: each build gives them other names."""
    return sorted((p for p in path.glob("[!.]*") if p.stat().st_size), key=lambda p: (p.suffix, p.name))


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damage_anywhere_in_an_index_is_noticed_and_the_folder_named(tmp_path, damage):
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [{"text": f"otter word{i}"} for i in range(300)])
    for number in range(len(parts_of(Bm25Index(corpus).path))):
        path = Bm25Index(corpus).path
        part = parts_of(path)[number]
        damaged = damage(part.read_bytes())
        part.unlink()  # not in place: threads of an earlier index may still have it in their memory (SIGBUS)
        part.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"^the index is damaged \(.*\); delete the folder {path}, it is built"):
            Bm25Index(corpus)
        shutil.rmtree(path)
        assert Bm25Index(corpus).search("word123", 1) == ["otter word123"]


def test_an_index_that_is_damaged_while_it_is_searched_is_our_failure_in_one_line(tmp_path, caplog):
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [{"text": f"otter word{i}"} for i in range(300)])
    tool = SearchTool(SearchConfig(backend="local", corpus=str(corpus)))
    path = tool.backend.index.path
    for part in path.iterdir():
        with part.open("r+b") as file:  # in place: the tool has it open
            file.write(os.urandom(part.stat().st_size))
    result = ask(tool, "word123")
    assert (result.ok, result.infra_error, result.error_kind) == (False, True, "unavailable")
    [line] = [r.getMessage() for r in caplog.records]
    assert line.startswith(f"search failed: {path}: ") and line.endswith("; delete the folder, it is built anew")
    assert "\n" not in line


@pytest.fixture
def shared_folder(monkeypatch) -> Iterator[Path]:
    """A folder that other users can read; not tmp_path, whose parents are closed to them. The cache folder is in it."""
    with tempfile.TemporaryDirectory() as name:
        cache = Path(name) / "cache"
        cache.mkdir()
        cache.chmod(0o777)
        Path(name).chmod(0o755)
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        yield Path(name)


def found_by_nobody(corpus: Path) -> tuple[Path, list[str]]:
    """Where another user's index of the corpus is, and what it finds."""

    def find(_: int) -> tuple[Path, list[str]]:
        index = Bm25Index(corpus)
        return index.path, index.search("silver", 1)

    [found] = in_processes(find, as_nobody=True)
    return found


def test_a_corpus_in_a_read_only_folder_is_indexed_in_the_cache_folder(shared_folder):
    folder = shared_folder / "data"
    folder.mkdir()
    corpus = write_jsonl(folder / "corpus.jsonl", OTTERS)
    folder.chmod(0o555)
    path, found = found_by_nobody(corpus)
    folder.chmod(0o755)
    assert path.parent == shared_folder / "cache/arpo" and found == ["height of Silver Otter is 482"]
    assert [p.name for p in folder.iterdir()] == ["corpus.jsonl"]


def test_beside_the_index_of_another_user_there_is_an_own_one(shared_folder):
    corpus = write_jsonl(shared_folder / "corpus.jsonl", OTTERS)
    own = Bm25Index(corpus).path  # of root
    path, found = found_by_nobody(corpus)
    assert len(found) == 1 and (path == own) == (os.getuid() != 0)


def test_processes_that_start_together_build_one_index(tmp_path):
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [{"text": f"word{i} common"} for i in range(5000)])

    def build(_: int) -> tuple[int, list[str]]:
        built = Bm25Index(corpus)
        return built.path.stat().st_ino, built.search("word4321", 1)

    outcomes = in_processes(build, 4)
    assert {found[0] for _, found in outcomes} == {"word4321 common"}
    assert len({inode for inode, _ in outcomes}) == 1 and len(remains(tmp_path)) == 1


def test_a_killed_build_leaves_nothing_that_the_next_one_trusts(tmp_path):
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [{"text": f"word{i} common"} for i in range(50_000)])

    def build_most_of_it(_: str, acknowledge: int) -> None:
        def most_rows(*args, read_corpus=bm25.read_corpus):
            for number, row in enumerate(read_corpus(*args)):
                if number == 45_000:
                    os.write(acknowledge, b"most rows are in\n")
                    time.sleep(600)
                yield row

        bm25.read_corpus = most_rows
        Bm25Index(corpus)

    assert killed(build_most_of_it, ["builder"], after_s=0.2)
    [left] = remains(tmp_path)
    assert left.endswith(".tmp")
    assert Bm25Index(corpus).search("word49999", 1) == ["word49999 common"]
    assert len(remains(tmp_path)) == 1 and not list(tmp_path.glob("*.tmp"))


# ---- the tool: cache, modes, failures


def test_a_recorded_answer_is_replayed_without_the_corpus(corpus, tmp_path):
    cache = str(tmp_path / "cache.sqlite")
    first = ask(local(corpus, cache=cache, mode="record"), "height of Silver Otter")
    again = ask(local(corpus, cache=cache, mode="record"), '  height of "Silver  Otter"')
    corpus.unlink()
    replayed = ask(SearchTool(SearchConfig(backend="replay", cache=cache)), "height of Silver Otter")
    assert first.ok and first.text == again.text == replayed.text
    assert (first.cached, again.cached, replayed.cached) == (False, True, True)


@pytest.fixture
def recorded(corpus, tmp_path) -> SearchConfig:
    """A replay of a cache that holds one answer."""
    cfg = SearchConfig(backend="local", corpus=str(corpus), cache=str(tmp_path / "cache.sqlite"))
    ask(SearchTool(cfg), "height of Silver Otter")
    return replace(cfg, mode="replay")


@pytest.mark.parametrize("backend", ["local", "replay"])
def test_a_replay_miss_is_an_error_that_the_model_reads(recorded, backend):
    hit, miss = ask(SearchTool(replace(recorded, backend=backend)), "height of Silver Otter", "height of Red Fox")
    assert hit.ok and hit.cached
    assert not miss.ok and miss.error_kind == "not_recorded" and "no recorded result" in miss.text
    assert not miss.infra_error


def test_a_strict_replay_miss_stops_the_run(recorded):
    runner = ToolRunner({"search": SearchTool(replace(recorded, backend="replay", mode="replay_strict"))})
    runner.start("hit", "search", "height of Silver Otter")
    [(_, hit)] = runner.collect(block=True)
    assert hit.cached and hit.seconds > 0
    runner.start("miss", "search", "height of Red Fox")
    with pytest.raises(UserError, match=r"cache.sqlite: no recorded result for 'height of Red Fox'"):
        runner.collect(block=True)
    runner.close()


def test_live_neither_reads_nor_writes_the_cache(corpus, tmp_path):
    cache = tmp_path / "cache.sqlite"
    assert not any(ask(local(corpus, cache=str(cache)), "silver otter").cached for _ in range(2))
    assert not cache.exists()


def test_another_corpus_or_top_k_is_not_answered_from_the_cache(corpus, tmp_path):
    recording = {"cache": str(tmp_path / "cache.sqlite"), "mode": "record"}
    for top_k in (1, 2):
        assert search(corpus, "height", top_k=top_k, **recording).count("Page") == top_k
    write_jsonl(corpus, [{"text": "height of nothing"}])
    assert search(corpus, "height", top_k=1, **recording) == "Page 1: height of nothing"


@pytest.mark.parametrize("index", [{}, {"index": "tantivy"}])
def test_what_an_index_of_an_older_kind_found_is_not_replayed(corpus, tmp_path, index):
    cfg = SearchConfig(backend="local", corpus=str(corpus), cache=str(tmp_path / "cache.sqlite"))
    tool = SearchTool(cfg)
    older = {name: value for name, value in tool.backend.params.items() if name != "index"} | index
    tool.cache.put(cache_key("local", older, "height"), "local", "height", "Page 1: what was ranked first then")
    assert ask(tool, "height").text.startswith("Page 1: height of ")
    assert ask(SearchTool(replace(cfg, mode="replay_strict")), "height").cached


class SlowBackend:
    """A backend that keeps its requests, and fails as it is told."""

    def __init__(self, _: SearchConfig):
        self.params: dict[str, object] = {}
        self.requests: list[str] = []
        self.failure: Exception | None = None

    async def search(self, query: str) -> str:
        self.requests.append(query)
        await asyncio.sleep(0.01)
        if self.failure:
            raise self.failure
        return f"about {query}"

    async def aclose(self) -> None: ...


@pytest.fixture
def slow(monkeypatch, tmp_path) -> SearchTool:
    monkeypatch.setitem(BACKENDS, "slow", SlowBackend)
    return SearchTool(SearchConfig(backend="slow", cache=str(tmp_path / "cache.sqlite")))


def test_32_identical_queries_at_once_are_one_request(slow):
    results = ask(slow, *['"otter"', " otter "] * 16)
    assert [r.text for r in results] == ["about otter"] * 32 and slow.backend.requests == ["otter"]


@pytest.mark.parametrize(
    ("failure", "kind"), [(TimeoutError(), "timeout"), (ConnectionResetError("reset"), "unavailable")]
)
def test_a_backend_that_is_down_is_our_failure_and_is_not_recorded(slow, failure, kind):
    async def down_then_up():
        slow.backend.failure = failure
        down = await slow.run("otter")
        slow.backend.failure = None
        return down, await slow.run("otter"), await slow.run("otter")

    down, up, again = asyncio.run(down_then_up())
    assert not down.ok and down.infra_error and down.error_kind == kind and down.text.startswith("Error: ")
    assert up.text == again.text == "about otter" and (up.cached, again.cached) == (False, True)


def test_a_bug_in_a_backend_is_not_hidden(slow):
    slow.backend.failure = KeyError("organic")
    with pytest.raises(KeyError):
        ask(slow, "otter")


def test_a_cancelled_caller_does_not_cancel_the_others(slow):
    async def one_gives_up():
        impatient = asyncio.create_task(slow.run("otter"))
        patient = asyncio.create_task(slow.run("otter"))
        await asyncio.sleep(0)
        impatient.cancel()
        return await patient

    assert asyncio.run(one_gives_up()).text == "about otter"
