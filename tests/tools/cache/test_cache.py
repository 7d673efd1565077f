"""The search cache: real SQLite, real processes, some of them killed."""

import os
import resource
import signal
import sqlite3
import subprocess
import tempfile
from pathlib import Path

import pytest
from helpers.caches import damage_value, entries_of, filled, get, put
from helpers.forked import in_processes, killed
from helpers.records import logged

from arpo.errors import UserError
from arpo.tools.cache import sqlite_files
from arpo.tools.cache.rows import NO_RESULTS, cache_key, clean_query
from arpo.tools.cache.store import CacheFile


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "cache.sqlite"


# ---- reading and writing


def test_the_first_answer_wins_and_is_kept_for_later_runs(path):
    cache = CacheFile(path)
    put(cache, 'the "Silver Otter"', "Page 1: wet Straße")
    put(cache, 'the "Silver Otter"', "second")
    assert get(cache, "fox") is None
    cache.close()
    later = CacheFile(path)
    assert get(later, 'the "Silver Otter"') == later.get_any("the Silver Otter") == "Page 1: wet Straße"


def test_the_key_holds_all_that_changes_the_answer():
    keys = {cache_key("b", {"k": 1}, "q"), cache_key("c", {"k": 1}, "q"), cache_key("b", {"k": 2}, "q"),
            cache_key("b", {"k": 1}, "r"), cache_key("b", {}, "q")}  # fmt: skip
    assert len(keys) == 5
    assert cache_key("b", {"x": 1, "y": 2}, "q") == cache_key("b", {"y": 2, "x": 1}, "q")


def test_queries_are_compared_as_the_released_code_sends_them():
    assert clean_query(' "Silver  Otter"\n\x00height ') == "Silver Otter height"
    assert clean_query("Otter") != clean_query("otter")
    assert clean_query(clean_query("word " * 200)) == clean_query("word " * 200) and len(clean_query("é" * 999)) == 512


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


# ---- many writers, some killed


def test_eight_forked_writers_lose_no_row(path):
    cache = CacheFile(path)
    put(cache, "parent", "1")
    of_parent = cache.connection()

    def write(number: int) -> tuple[bool, str | None]:
        for i in range(500):
            put(cache, f"{number} {i}", "text" * 100)
        return cache.usable and cache.connection() is not of_parent, get(cache, "parent")

    assert in_processes(write, 8) == [(True, "1")] * 8
    assert sum(1 for _ in entries_of(cache)) == 1 + 8 * 500
    assert get(cache, "7 499") == "text" * 100


@pytest.mark.slow
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


DAMAGE = {
    "garbage": lambda whole: b"\x93garbage" * 4096,
    "truncated": lambda whole: whole[: len(whole) // 2],
    "zeros": lambda whole: whole[:4096] + bytes(4096) + whole[8192:],
}


@pytest.fixture(params=DAMAGE)
def broken(request, path) -> bytes:
    """What a cache's file holds once it was damaged."""
    filled(path)
    path.write_bytes(DAMAGE[request.param](path.read_bytes()))
    return path.read_bytes()


def test_a_corrupt_file_is_kept_aside_and_the_run_goes_on(path, caplog, broken):
    cache = CacheFile(path)
    put(cache, "otter", "wet")
    assert get(cache, "otter") == "wet"
    [aside] = path.parent.glob("cache.sqlite.corrupt-*")
    assert aside.read_bytes() == broken
    assert [r.levelname for r in caplog.records] == ["WARNING"] and aside.name in caplog.text
    assert "cache.sqlite: corrupt cache" in caplog.text and "sqlite3 OLD .recover | sqlite3 NEW" in caplog.text


def test_a_replay_refuses_a_corrupt_file_and_leaves_it(path, broken):
    with pytest.raises(UserError, match=r"cache\.sqlite: cannot read the cache .*\.recover"):
        CacheFile(path, read_only=True)
    assert path.read_bytes() == broken and not list(path.parent.glob("*.corrupt-*"))


def test_a_damaged_answer_ends_a_replay_and_is_asked_for_again_where_the_others_are_kept(path, caplog):
    filled(path)
    damage_value(path, "q7")
    replay, cache = CacheFile(path, read_only=True), CacheFile(path)
    assert get(replay, "q8") is not None
    with pytest.raises(UserError, match=r"cache\.sqlite: cannot read the cache \(damaged entry: .*record it anew"):
        get(replay, "q7")
    assert get(cache, "q7") is None and get(cache, "q8") is not None
    [warning] = [record.getMessage() for record in caplog.records]
    assert "cache.sqlite: damaged entry" in warning and "asked for again" in warning
    put(cache, "q7", "as good as new")
    cache.close()
    assert get(CacheFile(path, read_only=True), "q7") == "as good as new"


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
    path.write_bytes(DAMAGE["truncated"](path.read_bytes()))

    def start(number: int) -> bool:
        cache = CacheFile(path)
        put(cache, f"rank {number}", "here")
        return cache.usable

    assert in_processes(start, 6) == [True] * 6
    assert len(list(path.parent.glob("*.corrupt-*"))) == 1
    assert {query for query, _ in entries_of(CacheFile(path))} == {f"rank {n}" for n in range(6)}


def test_a_file_that_breaks_while_another_run_uses_it_is_not_moved_under_it(path, caplog):
    user = CacheFile(path)
    put(user, "otter", "wet")
    user.connection().execute("PRAGMA wal_checkpoint(TRUNCATE)")
    path.write_bytes(DAMAGE["garbage"](b""))
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
        cache = CacheFile(path)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
        with logged() as messages:
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
    words = r"cache\.sqlite: is on TestFS, .*set tools\.search\.cache to a file on a local"
    with pytest.raises(UserError, match=words):
        CacheFile(path)
    assert not path.exists()
