"""The command line of the cache, and the released format: real SQLite, real processes, some of them killed."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from helpers.caches import damage_value, entries_of, filled, put
from helpers.forked import fork, in_processes

from arpo.config.tools import SearchConfig
from arpo.errors import UserError
from arpo.tools.cache.rows import NO_RESULTS
from arpo.tools.cache.store import CacheFile
from arpo.tools.search import SearchTool
from extras.cache.__main__ import main
from extras.cache.released import ReleasedCache, imported_rows, read_released

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def released(tmp_path) -> Path:
    """1,000 entries and a call that failed, as the released code writes them."""
    entries = {f"search query: what is {i}?": f"Page 1: {i}\nPage 2: Straße «{i}» …" for i in range(999)}
    entries |= {"failed": "", "nothing": NO_RESULTS}
    file = tmp_path / "search_cache.json"
    file.write_text(json.dumps(entries, indent=2, ensure_ascii=False))
    return file


def test_a_released_cache_is_imported_but_for_calls_that_failed_and_leaves_nothing_beside_it(released):
    entries = json.loads(released.read_text())
    del entries["failed"]
    cache = ReleasedCache(released, read_only=True)
    assert {query: cache.get_any(query) for query in entries} == entries
    assert list(entries_of(cache)) == list(entries.items())
    cache.close()
    main(["stats", str(released)])
    assert [path.name for path in released.parent.iterdir()] == [released.name]


def test_what_a_run_records_stands_beside_the_released_cache_and_stays_when_that_is_changed(released):
    cache = ReleasedCache(released, read_only=False)
    assert cache.path == released.with_name("search_cache.json.sqlite")
    put(cache, "recorded", "kept")
    cache.close()
    assert ReleasedCache(released, read_only=True).get_any("recorded") == "kept"
    released.write_text(json.dumps({"nothing": "now something"}))
    cache = ReleasedCache(released, read_only=False)
    assert dict(entries_of(cache)) == {"recorded": "kept", "nothing": "now something"}


def test_an_unchanged_released_cache_is_not_read_again(released):
    stat = released.stat()
    ReleasedCache(released, read_only=True).close()
    released.write_bytes(b"x" * stat.st_size)
    os.utime(released, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert ReleasedCache(released, read_only=True).get_any("nothing") == NO_RESULTS


def test_an_import_that_another_rank_finished_first_adds_nothing(released):
    one, two = ReleasedCache(released), ReleasedCache(released)
    released.write_text(released.read_text() + "\n")
    entries, stat = read_released(released), released.stat()
    assert not one.has_imported(stat) and not two.has_imported(stat)
    assert one.replace_imported(entries, stat) == 1000
    assert two.replace_imported(entries, stat) == 0


def test_ranks_that_start_together_import_once(released):
    assert in_processes(lambda _: sum(1 for _ in entries_of(ReleasedCache(released, read_only=True))), 6) == [1000] * 6


def test_an_import_that_was_killed_begins_anew(tmp_path, monkeypatch):
    source, target = tmp_path / "big.json", tmp_path / "cache.sqlite"
    source.write_text(json.dumps({f"query {i}": os.urandom(500).hex() for i in range(8000)}))

    def rows_then_killed(entries):
        for number, row in enumerate(imported_rows(entries)):
            if number == 7000:  # by then SQLite has written most of them
                os.kill(os.getpid(), signal.SIGKILL)
            yield row

    with monkeypatch.context() as patched:
        patched.setattr("extras.cache.released.imported_rows", rows_then_killed)
        importing = fork.Process(target=main, args=(["import", str(target), str(source)],))
        importing.start()
        importing.join()
    assert importing.exitcode == -signal.SIGKILL
    assert (tmp_path / "cache.sqlite-wal").stat().st_size > 500_000
    cache = CacheFile(target)
    assert sum(1 for _ in entries_of(cache)) == 0
    cache.close()
    main(["import", str(target), str(source)])
    assert sum(1 for _ in entries_of(CacheFile(target))) == 8000


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
            cache = ReleasedCache(source, read_only=True)
            return cache.path.parent, cache.get_any("otter")

        assert in_processes(start, as_nobody=True) == [(caches / "arpo", "wet")]
        source.parent.chmod(0o755)


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
        ReleasedCache(source, read_only=True)


def test_export_and_merge_leave_damaged_answers_out_and_say_how_many(tmp_path, caplog, capsys):
    path = tmp_path / "cache.sqlite"
    filled(path)
    damage_value(path, "q7")
    main(["export", str(path), str(tmp_path / "released.json")])
    main(["import", str(tmp_path / "new.sqlite"), str(path)])
    assert "199 entries written" in (said := capsys.readouterr().out) and "199 new entries" in said
    assert "q7" not in json.loads((tmp_path / "released.json").read_text())
    assert [r.getMessage() for r in caplog.records] == [f"{path}: 1 damaged entries left out"] * 2


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
    command = [sys.executable, "-m", "extras.cache", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and complaint in done.stderr and done.stderr.count("\n") == 1


def test_the_search_tool_replays_a_released_cache_but_not_by_its_bare_name(released):
    own = f"{ROOT}/extras/cache/released.py:ReleasedCache={released}"
    result = asyncio.run(SearchTool(SearchConfig(backend="replay", cache=own)).run(' "nothing" '))
    assert (result.text, result.ok, result.cached) == (NO_RESULTS, True, True)
    with pytest.raises(UserError, match=r"search_cache\.json: the released format is read by FILE\.py:NAME="):
        SearchTool(SearchConfig(backend="replay", cache=str(released)))
