"""The SQL environment: a database per trajectory, and branches with an exact copy of it."""

import asyncio
import resource
import sqlite3
import time
from collections.abc import Sequence

import pytest

from arpo.tools.base import ToolContext, ToolResult
from extras.tools.sql import SqlConfig, SqlTool
from extras.tools.sql_cell import statements

SETUP = "CREATE TABLE films (name TEXT, year INTEGER); INSERT INTO films VALUES ('Alien', 1979), ('Heat', 1995);"
CONTEXT = ToolContext("p0", "0", 0, row={"sql": SETUP})


def ask(*calls: str, cfg: SqlConfig = SqlConfig(), context: ToolContext = CONTEXT) -> list[ToolResult]:  # noqa: B008
    """The answers of a trajectory that makes these calls."""
    return ask_each([calls], cfg, context)[0]


def ask_each(
    trajectories: list[Sequence[str]], cfg: SqlConfig, context: ToolContext = CONTEXT
) -> list[list[ToolResult]]:
    """The answers of trajectories that make these calls, each in a database of its own."""

    async def talk() -> list[list[ToolResult]]:
        tool, answers = SqlTool(cfg), []
        try:
            for calls in trajectories:
                session = await tool.open(context)
                answers.append([await tool.run(call, context, session) for call in calls])
                await tool.close(session)
        finally:
            await tool.aclose()
        return answers

    return asyncio.run(talk())


def test_a_database_begins_as_its_row_says_and_keeps_what_is_changed():
    first, changed, then = ask(
        "SELECT name FROM films WHERE year < 1990", "INSERT INTO films VALUES ('Ran', 1985)", "SELECT * FROM films;"
    )
    assert first.text == "name\nAlien" and changed.text == "(no rows)"
    assert then.text == "name | year\nAlien | 1979\nHeat | 1995\nRan | 1985"
    [none] = ask("SELECT count(*) FROM sqlite_master", context=ToolContext("p", "0", 0))
    assert none.text == "count(*)\n0"


def test_several_statements_run_in_order_and_the_last_rows_are_shown():
    [result] = ask("SELECT 1; CREATE TABLE t (x); INSERT INTO t VALUES (';'), (NULL); SELECT x FROM t")
    assert result.text == "x\n;\nNULL"
    assert statements("SELECT ';'; -- c;\n SELECT 2") == ["SELECT ';';", " -- c;\n SELECT 2"]
    assert ask("  ")[0].text == "(no rows)"


def test_errors_are_text_that_the_model_reads_and_leave_the_database_as_it_was():
    errors = {
        "SELECT * FROM actors": "no such table: actors",
        "SELEC 1": "syntax error",
        "ATTACH '/etc/passwd' AS x": "not authorized",
        "SELECT random()": "not authorized",
        "SELECT load_extension('/x')": "not authorized",
        "VACUUM INTO '/tmp/x.db'": "authorization denied",
        "SELECT '\0'": "null character",
        "SELECT '\ud800'": "surrogates",
        "SELECT length(hex(zeroblob(600000000)))": "too big",
    }
    answers = ask(
        *(call for error in errors for call in (error, "SELECT count(*) FROM films")), cfg=SqlConfig(wall_s=120.0)
    )
    for (call, words), failed, after in zip(errors.items(), answers[::2], answers[1::2], strict=True):
        assert not failed.ok and words in failed.text.lower() and after.text == "count(*)\n2", call


def test_a_query_that_never_ends_is_stopped_after_the_same_steps_everywhere_and_long_results_are_cut():
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
    stopped, cut = ask(endless, "SELECT 1 UNION SELECT 2 UNION SELECT 3", cfg=SqlConfig(max_steps=200_000, max_rows=2))
    assert stopped.text == "Error: more than 200000 steps" and not stopped.ok
    assert cut.text == "1\n1\n2\n..."


def test_a_value_that_is_cut_shows_it():
    """clio #1296: each value was cut to 40 characters, and read as if that were all of it."""
    [result] = ask(
        "SELECT replace(hex(zeroblob(100)), '0', 'x') AS fits, replace(hex(zeroblob(101)), '0', 'x') AS longer"
    )
    assert result.text == f"fits | longer\n{'x' * 200} | {'x' * 200}…"


NUMBERS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT 100000) SELECT"
COSTLY = [
    (f"{NUMBERS} sum(instr(zeroblob(5000000), CAST(zeroblob(2500000) || x AS BLOB))) FROM n", "timeout"),
    (f"{NUMBERS} count(DISTINCT zeroblob(50000) || x) FROM n", "error"),
    (f"{NUMBERS} length(json_group_array(hex(zeroblob(25000)))) FROM n", "error"),
    (f"{NUMBERS} {', '.join(['zeroblob(5000000)'] * 300)} FROM n", "error"),
]


@pytest.mark.slow
@pytest.mark.parametrize("call, kind", COSTLY)
def test_what_takes_time_or_memory_ends_its_database_and_nothing_else(call, kind):
    """Few but costly steps, sorts, rows and aggregates: of our own process they take nothing."""
    ours = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # what the interpreter takes of it depends on the CPU: with AVX2 alone, 125 MiB
    stopped, after = ask(call, "SELECT count(*) FROM films", cfg=SqlConfig(wall_s=4.0, memory_mib=192))
    assert not stopped.ok and stopped.error_kind.replace("cpu_limit", "timeout") == kind, stopped.text
    ended = "begins with a new one, as it was at first."
    assert stopped.text.endswith(ended) if kind == "timeout" else stopped.text == "Error: out of memory"
    assert after.text == "count(*)\n2"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - ours < 50 << 10


@pytest.mark.parametrize("script, why", [
    ("INSERT INTO x VALUES (1)", "no such table: x"),
    ("ATTACH 'other.db' AS x", "not authorized"),
    ("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n;", "TimeoutError"),
    ("CREATE TABLE t AS SELECT replace(hex(zeroblob(30000000)), '0', 'abcdefgh') AS x;", ".*emory"),
    ("CREATE TABLE t (x DEFAULT (randomblob(4))); INSERT INTO t DEFAULT VALUES;", ".*function raised"),
], ids=["no table", "forbidden", "endless", "too large", "random"])  # fmt: skip
def test_a_row_whose_script_fails_or_hits_a_limit_is_named_with_the_reason(script, why):
    row = ToolContext("p7", "0", 0, row={"sql": script})
    with pytest.raises(ValueError, match=f"p7: the column sql cannot be run: {why}") as error:
        ask("SELECT 1", cfg=SqlConfig(wall_s=4.0, memory_mib=128), context=row)
    assert "NameError" not in str(error.value)


def test_a_copy_shares_nothing_and_has_what_a_transaction_has_done():
    async def story() -> list[str]:
        tool = SqlTool(SqlConfig())
        one = await tool.open(CONTEXT)
        await tool.run("BEGIN; DELETE FROM films WHERE year > 1990", CONTEXT, one)
        two = await tool.fork(one, CONTEXT)
        await tool.run("INSERT INTO films VALUES ('Ran', 1985)", CONTEXT, one)
        await tool.run("UPDATE films SET year = 0; COMMIT", CONTEXT, two)
        texts = [(await tool.run("SELECT * FROM films", CONTEXT, s)).text for s in (one, two)]
        texts.append((await tool.run("ROLLBACK; SELECT * FROM films", CONTEXT, one)).text)
        for session in (one, two):
            await tool.close(session)
        await tool.aclose()
        return texts

    first, second, rolled_back = asyncio.run(story())
    assert first == "name | year\nAlien | 1979\nRan | 1985" and second == "name | year\nAlien | 0"
    assert rolled_back == "name | year\nAlien | 1979\nHeat | 1995"


@pytest.mark.slow
def test_a_recorded_answer_is_that_of_the_same_database(tmp_path):
    cfg = SqlConfig(cache=str(tmp_path / "sql.sqlite"))
    emptied = ToolContext("p1", "0", 0, row={"sql": SETUP + "DELETE FROM films;"})
    rows = (CONTEXT, CONTEXT, emptied)
    first, again, other = (ask("SELECT count(*) FROM films", cfg=cfg, context=row)[0] for row in rows)
    assert not first.cached and again.cached and again.text == first.text
    assert not other.cached and other.text == "count(*)\n0"


NOW_QUERIES = [  # sqlite.org/lang_datefunc.html: "now", no argument and "subsec" all mean the time of the clock
    "SELECT datetime('now')", "SELECT datetime()", "SELECT DateTime('NOW', '+1 day')", "SELECT date(), time('now')",
    "SELECT CURRENT_TIMESTAMP, CURRENT_DATE, CURRENT_TIME", "SELECT julianday('now') - julianday('2024-12-31')",
    "SELECT strftime('%s %f')", "SELECT strftime('%Y-%m-%d', 'now', 'start of year')", "SELECT unixepoch()",
    "SELECT datetime(x'6e6f77')", "SELECT datetime('now' || char(0) || 'x')", "SELECT julianday('subsec')",
    "CREATE TABLE t (x, at TEXT DEFAULT CURRENT_TIMESTAMP, next AS (date('2020-02-29', '+1 year')));"
    " INSERT INTO t (x) VALUES (1); SELECT * FROM t", "SELECT date('now', 'localtime') FROM films",
]  # fmt: skip
DATES = [
    "date('2024-01-31', '+1 month')", "strftime('%d', '2024-02-29')", "unixepoch('2024-01-01')", "time(0.5)",
    "datetime(1092941466, 'unixepoch')", "date(NULL)", "date('nowhere')", "julianday('2000-01-01')",
]  # fmt: skip


def test_the_clock_of_a_database_stands_still_and_dates_are_computed_as_sqlite_does():
    calls = [*NOW_QUERIES, *(f"SELECT {date} AS x" for date in DATES)]
    first, second = ask_each([calls] * 2, SqlConfig())
    told = [result.text for result in first]
    assert told == [result.text for result in second] and all(result.ok for result in first), told
    assert not any(time.strftime("%Y") in text for text in told) and "\n2025-01-01 00:00:00" in told[0]
    plain = sqlite3.connect(":memory:")
    known = [plain.execute(f"SELECT {date}").fetchone()[0] for date in DATES]
    assert told[len(NOW_QUERIES) :] == [f"x\n{'NULL' if value is None else value}" for value in known]
