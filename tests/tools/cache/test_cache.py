"""The search cache: real SQLite, real processes, some of them killed."""

import asyncio
import json
import logging
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from helpers.forked import in_processes, killed

from arpo.config.tools import SearchConfig
from arpo.errors import UserError
from arpo.tools.cache import sqlite_files
from arpo.tools.cache.__main__ import main
from arpo.tools.cache.cache import merge, open_cache, read_released
from arpo.tools.cache.rows import NO_RESULTS, cache_key, clean_query, unpack
from arpo.tools.cache.store import CacheFile

ROOT = Path(__file__).resolve().parents[3]


def put(cache: CacheFile, query: str, text: str, backend: str = "b") -> None:
    cache.put(cache_key(backend, {}, query), backend, query, text)


def get(cache: CacheFile, query: str, backend: str = "b") -> str | None:
    return cache.get(cache_key(backend, {}, query), query)


def entries_of(cache: CacheFile) -> list[tuple[str, str]]:
    return [unpack(row[3]) for row in cache.rows()]


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "cache.sqlite"


@pytest.fixture
def released(tmp_path) -> Path:
    """1,000 entries, as the released code writes them."""
    entries = {f"search query: what is {i}?": f"Page 1: {i}\nPage 2: Straße «{i}» …" for i in range(999)}
    file = tmp_path / "search_cache.json"
    file.write_text(json.dumps(entries | {"nothing": NO_RESULTS}, indent=2, ensure_ascii=False))
    return file


# ---- reading and writing


def test_an_answer_is_kept_for_later_runs(path):
    cache = CacheFile(path)
    put(cache, "otter", "Page 1: wet Straße")
    assert get(cache, "fox") is None
    cache.close()
    assert get(CacheFile(path), "otter") == "Page 1: wet Straße"


def test_the_first_answer_wins(path):
    cache = CacheFile(path)
    put(cache, "otter", "first")
    put(cache, "otter", "second")
    assert get(cache, "otter") == "first"


def test_the_key_holds_all_that_changes_the_answer():
    keys = {cache_key("b", {"k": 1}, "q"), cache_key("c", {"k": 1}, "q"), cache_key("b", {"k": 2}, "q"),
            cache_key("b", {"k": 1}, "r"), cache_key("b", {}, "q")}  # fmt: skip
    assert len(keys) == 5
    assert cache_key("b", {"x": 1, "y": 2}, "q") == cache_key("b", {"y": 2, "x": 1}, "q")


def test_queries_are_compared_as_the_released_code_sends_them(path):
    assert clean_query(' "Silver  Otter"\n\x00height ') == "Silver Otter height"
    assert clean_query("Otter") != clean_query("otter")
    assert clean_query(clean_query("word " * 200)) == clean_query("word " * 200) and len(clean_query("é" * 999)) == 512
    cache = CacheFile(path)
    put(cache, 'the "Silver Otter"', "wet")
    assert cache.get_any("the Silver Otter") == "wet"


def test_a_replay_takes_the_first_recorded_answer_of_any_backend(path):
    cache = CacheFile(path)
    put(cache, "otter", "from one", backend="one")
    put(cache, "otter", "from two", backend="two")
    assert cache.get_any("otter") == "from one" and get(cache, "otter", "two") == "from two"


def test_no_results_expires_while_recording_but_not_in_a_replay(path):
    cache = CacheFile(path)
    put(cache, "new film", NO_RESULTS)
    put(cache, "old film", "Page 1: seen")
    assert get(cache, "new film") == NO_RESULTS
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE entries SET created_s = created_s - 8 * 86400")
    assert get(cache, "new film") is None and get(cache, "old film") == "Page 1: seen"
    assert get(CacheFile(path, read_only=True), "new film") == cache.get_any("new film") == NO_RESULTS
    put(cache, "new film", "Page 1: out now")
    put(cache, "old film", "Page 1: seen again")
    assert get(cache, "new film") == "Page 1: out now" and get(cache, "old film") == "Page 1: seen"


def test_a_forked_process_can_go_on_using_the_cache(path):
    cache = CacheFile(path)
    put(cache, "parent", "1")
    of_parent = cache.connection()

    def child(number: int) -> tuple[bool, str | None]:
        put(cache, f"child {number}", "2")
        return cache.connection() is of_parent, get(cache, "parent")

    assert in_processes(child, 3) == [(False, "1")] * 3
    assert [get(cache, f"child {i}") for i in range(3)] == ["2"] * 3


# ---- many writers, some killed


def test_eight_writers_lose_no_row(path):
    def write(number: int) -> bool:
        cache = CacheFile(path)
        for i in range(500):
            put(cache, f"{number} {i}", "text" * 100)
        return cache.usable

    assert in_processes(write, 8) == [True] * 8
    cache = CacheFile(path)
    assert sum(1 for _ in entries_of(cache)) == 8 * 500
    assert get(cache, "7 499") == "text" * 100


def test_killed_writers_lose_no_acknowledged_row(path):
    def write(name: str, acknowledge: int) -> None:
        cache = CacheFile(path)
        for i in range(1_000_000):
            put(cache, f"{name} {i}", f"text {i} " * 20)
            os.write(acknowledge, f"{name} {i}\n".encode())

    acknowledged: set[str] = set()
    for attempt in range(6):
        acknowledged |= killed(write, [f"{attempt}.{number}" for number in range(8)], after_s=0.05)
        cache = CacheFile(path)  # checks the file too
        recorded = {query for query, _ in entries_of(cache)}
        cache.close()
        assert len(acknowledged) >= 8 * (attempt + 1) and acknowledged <= recorded
    assert not list(path.parent.glob("*.corrupt-*"))


# ---- files that cannot be used


def damage_garbage(path: Path) -> None:
    path.write_bytes(b"\x93garbage" * 4096)


def damage_truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def damage_flip(path: Path) -> None:
    blob = bytearray(path.read_bytes())
    blob[4096:8192] = bytes(4096)
    path.write_bytes(bytes(blob))


DAMAGE = [damage_garbage, damage_truncate, damage_flip]


def filled(path: Path) -> None:
    cache = CacheFile(path)
    for i in range(200):
        put(cache, f"q{i}", os.urandom(200).hex())
    cache.close()


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_corrupt_file_is_kept_aside_and_the_run_goes_on(path, caplog, damage):
    filled(path)
    damage(path)
    broken = path.read_bytes()
    cache = CacheFile(path)
    put(cache, "otter", "wet")
    assert get(cache, "otter") == "wet"
    [aside] = path.parent.glob("cache.sqlite.corrupt-*")
    assert aside.read_bytes() == broken
    assert [r.levelname for r in caplog.records] == ["WARNING"] and aside.name in caplog.text
    assert "cache.sqlite: corrupt cache" in caplog.text and "sqlite3 OLD .recover | sqlite3 NEW" in caplog.text


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_replay_refuses_a_corrupt_file_and_leaves_it(path, damage):
    filled(path)
    damage(path)
    broken = path.read_bytes()
    with pytest.raises(UserError, match=r"cache\.sqlite: cannot read the cache .*\.recover"):
        CacheFile(path, read_only=True)
    assert path.read_bytes() == broken and not list(path.parent.glob("*.corrupt-*"))


def damage_value(path: Path, query: str) -> None:
    """One bit of one answer; no check of SQLite's notices it."""
    with sqlite3.connect(path) as connection:
        [value] = connection.execute("SELECT value FROM entries WHERE query = ?", (query,)).fetchone()
    connection.close()
    blob = bytearray(path.read_bytes())
    blob[blob.index(value) + len(value) // 2] ^= 4
    path.write_bytes(blob)


def test_a_damaged_answer_is_asked_for_again_and_the_others_are_kept(path, caplog):
    filled(path)
    damage_value(path, "q7")
    cache = CacheFile(path)
    assert get(cache, "q7") is None and get(cache, "q8") is not None
    assert (
        len(caplog.records) == 1 and "cache.sqlite: damaged entry" in caplog.text and "asked for again" in caplog.text
    )
    put(cache, "q7", "as good as new")
    cache.close()
    assert get(CacheFile(path, read_only=True), "q7") == "as good as new"


def test_a_replay_stops_at_a_damaged_answer(path):
    filled(path)
    damage_value(path, "q7")
    cache = CacheFile(path, read_only=True)
    assert get(cache, "q8") is not None
    with pytest.raises(UserError, match=r"cache\.sqlite: cannot read the cache \(damaged entry: .*record it anew"):
        get(cache, "q7")


def test_export_and_merge_leave_damaged_answers_out_and_say_how_many(path, tmp_path, caplog, capsys):
    filled(path)
    damage_value(path, "q7")
    main(["export", str(path), str(tmp_path / "released.json")])
    main(["import", str(tmp_path / "new.sqlite"), str(path)])
    assert "199 entries written" in (said := capsys.readouterr().out) and "199 new entries" in said
    assert "q7" not in json.loads((tmp_path / "released.json").read_text())
    assert [r.getMessage() for r in caplog.records] == [f"{path}: 1 damaged entries left out"] * 2


def test_an_index_that_does_not_fit_its_table_is_noticed(path):
    filled(path)
    connection = sqlite3.connect(path)
    [key] = connection.execute("SELECT key FROM entries WHERE query = 'q7'").fetchone()
    connection.close()
    blob = bytearray(path.read_bytes())
    place = blob.index(key)  # in the table or its index, whichever comes first: a search would find nothing, silently
    blob[place] ^= 4
    path.write_bytes(blob)
    with pytest.raises(UserError, match=r"cannot read the cache \(.*missing from index"):
        CacheFile(path, read_only=True)


def test_ranks_that_find_a_corrupt_file_together_begin_one_new_file(path):
    filled(path)
    damage_truncate(path)

    def start(number: int) -> bool:
        cache = CacheFile(path)
        put(cache, f"rank {number}", "here")
        return cache.usable

    assert in_processes(start, 6) == [True] * 6
    assert len(list(path.parent.glob("*.corrupt-*"))) == 1
    queries = [query for query, _ in entries_of(CacheFile(path))]
    assert {f"rank {n}" for n in range(6)} == set(queries)


def test_a_file_that_breaks_while_another_run_uses_it_is_not_moved_under_it(path, caplog):
    user = CacheFile(path)
    put(user, "otter", "wet")
    user.connection().execute("PRAGMA wal_checkpoint(TRUNCATE)")
    damage_garbage(path)
    newcomer = CacheFile(path)
    put(newcomer, "fox", "red")
    assert not newcomer.usable and len(caplog.records) == 1
    assert not list(path.parent.glob("*.corrupt-*"))


def test_another_programs_file_is_refused_and_never_moved(tmp_path):
    with sqlite3.connect(tmp_path / "mine.sqlite") as connection:
        connection.execute("CREATE TABLE photos (name TEXT)")
    (tmp_path / "train.jsonl").write_text('{"prompt": "x"}\n' * 100)
    for name in ("mine.sqlite", "train.jsonl"):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(UserError, match=f"{name}: not a cache"):
            CacheFile(tmp_path / name)
        assert (tmp_path / name).read_bytes() == before


def test_a_cache_that_cannot_be_made_costs_one_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    cache = CacheFile(tmp_path / "file" / "cache.sqlite")
    put(cache, "otter", "wet")
    assert get(cache, "otter") is None and not cache.usable
    assert len(caplog.records) == 1 and "goes on without" in caplog.text


def test_a_full_disk_ends_writing_with_one_warning_and_never_reading(path):
    def fill(_: int) -> tuple[bool, bool, list[str]]:
        messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())
        logging.getLogger("arpo").addHandler(handler)
        cache = CacheFile(path)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
        for i in range(2000):
            put(cache, f"q{i}", os.urandom(500).hex())
        return cache.usable, get(cache, "q5") is not None, messages

    [(usable, still_read, messages)] = in_processes(fill)
    assert usable and still_read
    assert len(messages) == 1 and "cannot write the cache" in messages[0] and "still read" in messages[0]
    cache = CacheFile(path)  # what was recorded before is intact
    put(cache, "otter", "wet")
    assert get(cache, "otter") == "wet" and sum(1 for _ in entries_of(cache)) > 10


def test_a_recorded_cache_can_be_replayed_from_a_read_only_folder():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        filled(folder / "cache.sqlite")
        for leftover in folder.glob("cache.sqlite?*"):
            leftover.unlink()
        folder.chmod(0o555)
        (folder / "cache.sqlite").chmod(0o444)
        replay = lambda _: len(CacheFile(folder / "cache.sqlite", read_only=True).get_any("q7"))  # noqa: E731
        assert in_processes(replay, as_nobody=True) == [400]
        folder.chmod(0o755)


def test_a_network_file_system_is_recognised_and_refused(path, monkeypatch):
    output = subprocess.run(["stat", "-f", "-c", "%t", path.parent], capture_output=True, text=True, check=True).stdout
    monkeypatch.setitem(sqlite_files.NETWORK_FILESYSTEMS, int(output, 16), "TestFS")  # the real magic of this disk
    with pytest.raises(
        UserError, match=r"cache\.sqlite: is on TestFS, .*set tools\.search\.cache to a file on a local"
    ):
        CacheFile(path)
    assert not path.exists()


# ---- the released format


def test_a_released_cache_is_imported_entire(released):
    entries = json.loads(released.read_text())
    cache = open_cache(released, read_only=True)
    assert {query: cache.get_any(query) for query in entries} == entries
    assert list(entries_of(cache)) == list(entries.items())


def test_who_only_reads_a_released_cache_leaves_nothing_beside_it(released):
    open_cache(released, read_only=True).close()
    main(["stats", str(released)])
    assert [path.name for path in released.parent.iterdir()] == [released.name]


def test_what_a_run_records_stands_beside_the_released_cache_and_is_read_from_there(released):
    cache = open_cache(released, read_only=False)
    assert cache.path == released.with_name("search_cache.json.sqlite")
    put(cache, "recorded", "kept")
    cache.close()
    assert open_cache(released, read_only=True).get_any("recorded") == "kept"


def test_imported_answers_serve_every_backend(released):
    cache = open_cache(released, read_only=False)
    assert get(cache, 'search query: what is "5"?', backend="whatever") == "Page 1: 5\nPage 2: Straße «5» …"
    put(cache, "search query: what is 5?", "my own", backend="local")
    assert get(cache, "search query: what is 5?", backend="local") == "my own"


def test_an_unchanged_released_cache_is_not_read_again(released):
    stat = released.stat()
    open_cache(released, read_only=True).close()
    released.write_bytes(b"x" * stat.st_size)
    os.utime(released, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert open_cache(released, read_only=True).get_any("nothing") == NO_RESULTS


def test_a_changed_released_cache_replaces_what_it_gave_before_but_not_what_was_recorded(released):
    cache = open_cache(released, read_only=False)
    put(cache, "recorded", "kept")
    cache.close()
    released.write_text(json.dumps({"nothing": "now something"}))
    cache = open_cache(released, read_only=False)
    assert dict(entries_of(cache)) == {"recorded": "kept", "nothing": "now something"}


def test_an_import_that_another_rank_finished_first_adds_nothing(path, released):
    one, two = CacheFile(path), CacheFile(path)
    entries, stat = read_released(released), released.stat()
    assert not one.has_imported(stat) and not two.has_imported(stat)
    assert one.replace_imported(entries, stat) == 1000
    assert two.replace_imported(entries, stat) == 0


def test_ranks_that_start_together_import_once(released):
    assert in_processes(lambda _: sum(1 for _ in entries_of(open_cache(released, read_only=True))), 6) == [1000] * 6


DYING_IMPORT = """
import os, signal, sys
from arpo.tools.cache.__main__ import main
from arpo.tools.cache.store import CacheFile

log, connect = sys.argv[1] + "-wal", CacheFile.connection

def die():
    if os.path.exists(log) and os.path.getsize(log) > 500_000:
        os.kill(os.getpid(), signal.SIGKILL)

def watched(cache):
    connection = connect(cache)
    connection.set_progress_handler(die, 1000)
    return connection

CacheFile.connection = watched
main(["import", *sys.argv[1:]])
"""
"""Kills itself in the middle: an import is over before another process would have looked."""


def test_an_import_that_was_killed_begins_anew(tmp_path):
    source = tmp_path / "big.json"
    source.write_text(json.dumps({f"query {i}": os.urandom(500).hex() for i in range(8000)}))
    command = [sys.executable, "-c", DYING_IMPORT, str(tmp_path / "cache.sqlite"), str(source)]
    assert subprocess.run(command, cwd=ROOT).returncode == -signal.SIGKILL
    assert (tmp_path / "cache.sqlite-wal").stat().st_size > 500_000
    cache = CacheFile(tmp_path / "cache.sqlite")
    assert sum(1 for _ in entries_of(cache)) == 0
    cache.close()
    main(["import", str(tmp_path / "cache.sqlite"), str(source)])
    assert sum(1 for _ in entries_of(CacheFile(tmp_path / "cache.sqlite"))) == 8000


def test_a_released_cache_in_a_read_only_folder_is_imported_into_the_cache_folder(monkeypatch):
    with tempfile.TemporaryDirectory() as name:
        source, caches = Path(name) / "data" / "c.json", Path(name) / "caches"
        for folder in (source.parent, caches):
            folder.mkdir()
        source.write_text('{"otter": "wet"}')
        for folder, mode in ((Path(name), 0o755), (caches, 0o777), (source.parent, 0o555)):
            folder.chmod(mode)
        monkeypatch.setenv("XDG_CACHE_HOME", str(caches))

        def start(_: int) -> tuple[Path, str | None]:
            cache = open_cache(source, read_only=True)
            return cache.path.parent, cache.get_any("otter")

        assert in_processes(start, as_nobody=True) == [(caches / "arpo", "wet")]
        source.parent.chmod(0o755)


def test_failed_calls_in_a_released_cache_are_left_out(tmp_path):
    source = tmp_path / "c.json"
    source.write_text(json.dumps({"failed": "", "fine": "Page 1: x"}))
    assert read_released(source) == {"fine": "Page 1: x"}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"a": "b",\n"c"', r"c\.json:2: not valid JSON"),
        ('["a"]', r"c\.json: must be one JSON object of query -> text, not list"),
        ('{"a": {"text": "b"}}', r"c\.json: the result of 'a' must be a string, not dict"),
        ('{"a": "\udcff"}', r"c\.json: not UTF-8"),
    ],
)
def test_a_malformed_released_cache_is_refused(tmp_path, content, complaint):
    source = tmp_path / "c.json"
    source.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=complaint):
        open_cache(source, read_only=True)


# ---- the command line


def test_import_stats_and_export(released, tmp_path, capsys):
    file, copy = str(tmp_path / "cache.sqlite"), tmp_path / "copy.json"
    main(["import", file, str(released)])
    main(["import", file, str(released)])
    assert capsys.readouterr().out.splitlines() == [
        f"1000 new entries from {released}",
        f"0 new entries from {released}",
    ]
    main(["stats", file])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["entries     1000", "  import    1000", "no results  1"]
    main(["export", file, str(copy)])
    assert copy.read_bytes() == released.read_bytes()


def test_the_caches_of_two_nodes_can_be_merged(tmp_path):
    one, two = CacheFile(tmp_path / "one.sqlite"), CacheFile(tmp_path / "two.sqlite")
    put(one, "both", "first")
    put(two, "both", "second")
    put(two, "only two", "x")
    assert merge(one, tmp_path / "two.sqlite") == 1
    assert (get(one, "both"), get(one, "only two")) == ("first", "x")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["stats", "nowhere.sqlite"], "nowhere.sqlite: there is no such cache"),
        (["import", "c.sqlite", "nowhere.json"], "nowhere.json: cannot be imported"),
        (["polish", "c.sqlite"], "invalid choice: 'polish'"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_and_code_2(tmp_path, arguments, complaint):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "0"}
    command = [sys.executable, "-m", "arpo.tools.cache", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and complaint in done.stderr and done.stderr.count("\n") == 1


def test_the_search_tool_replays_a_released_cache(released):
    from arpo.tools.search import SearchTool

    result = asyncio.run(SearchTool(SearchConfig(backend="replay", cache=str(released))).run(' "nothing" '))
    assert (result.text, result.ok, result.cached) == (NO_RESULTS, True, True)
