"""The SQL environment: a database per trajectory, and branches with an exact copy of it."""

import asyncio
import os
import random
import subprocess
import sys
import time

import pytest
from helpers.mounts import under_mount
from helpers.scripted_rollout import ANSWER, play, prompt

from arpo.options import BranchingConfig, RolloutConfig
from arpo.tools.base import ToolContext, ToolResult
from extras.tools.session_tool import CannotFork
from extras.tools.sql import SqlConfig, SqlTool, statements

SETUP = "CREATE TABLE films (name TEXT, year INTEGER); INSERT INTO films VALUES ('Alien', 1979), ('Heat', 1995);"
CONTEXT = ToolContext("p0", "0", 0, row={"sql": SETUP})
CFG = RolloutConfig(
    group_size=8, max_response_tokens=9000, max_result_tokens=900, answer_reserve_tokens=60, max_tool_calls=6
)


def ask(*calls: str, cfg: SqlConfig = SqlConfig(), context: ToolContext = CONTEXT) -> list[ToolResult]:  # noqa: B008
    """The answers of a trajectory that makes these calls."""

    async def talk() -> list[ToolResult]:
        tool = SqlTool(cfg)
        session = await tool.open(context)
        try:
            return [await tool.run(call, context, session) for call in calls]
        finally:
            await tool.close(session)

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


@pytest.mark.parametrize("call, words", [
    ("SELECT * FROM actors", "no such table: actors"),
    ("SELEC 1", "syntax error"),
    ("ATTACH '/etc/passwd' AS x", "not authorized"),
    ("CREATE TEMP TABLE t (x)", "not authorized"),
    ("SELECT random()", "not authorized"),
    ("PRAGMA foreign_keys = ON", "not authorized"),
    ("BEGIN; SAVEPOINT a", "not authorized"),
    ("SELECT json_group_array(1)", "not authorized"),
    ("SELECT load_extension('/x')", "not authorized"),
    ("VACUUM INTO '/tmp/x.db'", "authorization denied"),
    ("SELECT '\0'", "null character"),
    ("SELECT length(hex(zeroblob(300000000)))", "too big"),
    ("SELECT replace(printf('%.*c', 40000, 'a'), 'a', printf('%.*c', 40000, 'b'))", "too big"),
    ("SELECT printf('%.*c', 50000, 'a') LIKE '%' || printf('%.*c', 40000, 'a') || 'b'", "too complex"),
    (f"SELECT {', '.join(['zeroblob(50000)'] * 300)}", "too many columns"),
    ("SELECT fts3_tokenizer('simple')", "function: fts3_tokenizer"),  # refused, or not there at all
])  # fmt: skip
def test_errors_are_text_that_the_model_reads(call, words):
    failed, after = ask(call, "SELECT count(*) FROM films")
    assert not failed.ok and words in failed.text.lower() and after.text == "count(*)\n2"


def test_a_query_that_never_ends_and_a_database_that_grows_hit_their_limits():
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
    small = SqlConfig(max_steps=200_000, max_mib=1, max_rows=2)
    stopped, full, cut = ask(
        endless,
        f"CREATE TABLE t AS {' UNION ALL '.join(['SELECT zeroblob(50000)'] * 30)}",
        "SELECT 1 UNION SELECT 2 UNION SELECT 3",
        cfg=small,
    )
    assert stopped.error_kind == "step_limit" and "more than 200000 steps" in stopped.text
    assert not full.ok and "full" in full.text and cut.text == "1\n1\n2\n..."


NUMBERS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT 100000) SELECT"
COSTLY = [
    f"{NUMBERS} sum(instr(zeroblob(50000), CAST(zeroblob(25000) || x AS BLOB))) FROM n",
    f"{NUMBERS} sum(hex(zeroblob(20000)) LIKE '%' || hex(zeroblob(400)) || x) FROM n",
    f"{NUMBERS} count(DISTINCT zeroblob(50000) || x) FROM n",
]


@pytest.mark.parametrize("call", COSTLY)
def test_a_call_of_few_but_costly_steps_is_interrupted(call):
    started = time.monotonic()
    stopped, after = ask(f"{call}; {call}", "SELECT count(*) FROM films", cfg=SqlConfig(deadline_s=0.2))
    assert stopped.error_kind == "timeout" and stopped.text == "Error: more than 0.2 s"
    assert after.text == "count(*)\n2" and time.monotonic() - started < 60


def test_all_databases_together_have_a_limit():
    with pytest.raises(ValueError, match="max_sessions=1024 databases of max_mib=64 may take more than total_mib=4096"):
        SqlConfig(max_mib=64)


SORT = """
import asyncio
from arpo.tools.base import ToolContext
from extras.tools.sql import SqlConfig, SqlTool
async def ask():
    tool = SqlTool(SqlConfig())
    session = await tool.open(ToolContext("p", "0", 0))
    rows = "WITH RECURSIVE n(x, y) AS (SELECT 1, zeroblob(1000) UNION ALL SELECT x + 1, y FROM n) SELECT y, x FROM n"
    print((await tool.run(f"{rows} ORDER BY y, x DESC", ToolContext("p", "0", 0), session)).text)
    print((await tool.run("SELECT 1", ToolContext("p", "0", 0), session)).text)
asyncio.run(ask())
"""


def test_rows_that_are_sorted_fill_no_disk(tmp_path):
    """On a disk of 40 MB. Nothing but the steps would end the query, after 4 GB."""
    within = under_mount("-t", "tmpfs", "-o", "size=40m", "none", str(tmp_path))
    environment = os.environ | {"TMPDIR": str(tmp_path), "SQLITE_TMPDIR": str(tmp_path)}
    done = subprocess.run([*within, sys.executable, "-c", SORT], capture_output=True, text=True, env=environment)
    assert done.stdout == "Error: too much to sort or to compare\n1\n1\n", done.stderr


def test_a_row_whose_script_fails_is_named():
    with pytest.raises(ValueError, match="p7: the column sql cannot be run: no such table: x"):
        ask("SELECT 1", context=ToolContext("p7", "0", 0, row={"sql": "INSERT INTO x VALUES (1)"}))
    with pytest.raises(ValueError, match="cannot be run: not authorized"):
        ask("SELECT 1", context=ToolContext("p7", "0", 0, row={"sql": "ATTACH 'other.db' AS x"}))


def test_a_copy_shares_nothing_and_an_open_transaction_allows_none():
    async def story() -> list[str]:
        tool = SqlTool(SqlConfig())
        one = await tool.open(CONTEXT)
        await tool.run("DELETE FROM films WHERE year > 1990", CONTEXT, one)
        two = await tool.fork(one, CONTEXT)
        await tool.run("INSERT INTO films VALUES ('Ran', 1985)", CONTEXT, one)
        await tool.run("UPDATE films SET year = 0", CONTEXT, two)
        texts = [(await tool.run("SELECT * FROM films", CONTEXT, s)).text for s in (one, two)]
        refused = await tool.run("SELECT random()", CONTEXT, two)
        await tool.run("BEGIN; DELETE FROM films", CONTEXT, one)
        with pytest.raises(CannotFork):
            await tool.fork(one, CONTEXT)
        await tool.close(one)
        await tool.close(two)
        return [*texts, refused.text]

    first, second, refused = asyncio.run(story())
    assert first == "name | year\nAlien | 1979\nRan | 1985" and second == "name | year\nAlien | 0"
    assert "not authorized" in refused


def wandering(seed: int):
    """A script of random inserts, updates, transactions, errors and queries."""

    def script(prompt_id: str, path: str, turn: int) -> tuple[str, float]:
        rng = random.Random(f"{seed}|{prompt_id}|{path}|{turn}")
        calls = [
            f"INSERT INTO films VALUES ('{path}-{turn}', {rng.randrange(3000)})",
            f"UPDATE films SET year = year + {rng.randrange(9)} WHERE rowid % 2 = {turn % 2}",
            "DELETE FROM films WHERE year % 3 = 0; SELECT count(*), sum(year) FROM films",
            "SELECT * FROM films", "SELECT nothing", "BEGIN", "COMMIT",
        ]  # fmt: skip
        what = rng.choices(calls, [4, 4, 2, 4, 1, 1, 1])[0]
        return (f"<sql>{what}</sql>" if turn < 6 else ANSWER), rng.uniform(0.2, 2.0)

    return script


@pytest.mark.parametrize("selector", ["random", "tree_grpo"])
def test_siblings_read_what_a_fresh_trajectory_with_their_calls_reads(selector):
    branching = BranchingConfig(
        selector=selector, num_initial_rollouts=2, **{"base": 1.0} if selector == "random" else {}
    )
    num_branches = 0
    for seed in range(3):
        row = prompt(tools=("sql",))
        row.meta["sql"] = SETUP
        [group] = play(wandering(seed), tools=[SqlTool(SqlConfig())], cfg=CFG, branching=branching, prompts=[row])
        for t in group.trajectories:
            calls = [call for call in t.tool_calls if call.executed]
            assert [c.result for c in calls] == [r.text for r in ask(*(c.argument for c in calls))], t.trajectory_id
            num_branches += t.parent_id is not None
            assert not any(call.replay_mismatches for call in t.tool_calls)
    assert num_branches >= 6
