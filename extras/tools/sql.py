"""The <sql> tool: a SQLite database in memory for each trajectory, filled from the row's own column.

An example of a tool with state whose branches are exact: everything that a statement can see is in the database, and a
copy of it is a copy of the session. What would be outside (random numbers, temporary tables, files) is refused.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from dataclasses import dataclass

from arpo.errors import require
from arpo.protocol.prompts import About
from arpo.protocol.schema import text_schema
from arpo.tools.interface import ToolContext, ToolResult
from extras.tools.session_tool import CannotFork, SessionTool

STEPS_PER_LOOK = 10_000
"""Instructions of SQLite's machine between two looks at their number."""
PAGE_BYTES = 4096
MAX_CELL_CHARS = 200
LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 51_200,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1000,
    sqlite3.SQLITE_LIMIT_COLUMN: 200,
}
"""Bytes of a value or a row, and of a pattern, and columns: one instruction, which nothing stops, may make, search or
compare values in our memory. A row that the data made larger can be read no more."""
READABLE_PRAGMAS = {"table_info", "table_list", "index_list", "index_info", "foreign_key_list"}
OUTSIDE = {
    "random", "randomblob", "last_insert_rowid", "changes", "total_changes", "load_extension", "fts3_tokenizer",
    "json_group_array", "json_group_object", "jsonb_group_array", "jsonb_group_object",
}  # fmt: skip
"""Functions of what is not in the database, and those that no limit of SQLite's keeps from taking all memory."""
DENIED = {
    sqlite3.SQLITE_SAVEPOINT,  # each may keep a copy of all pages in memory, which max_page_count does not count
    sqlite3.SQLITE_ATTACH,
    sqlite3.SQLITE_DETACH,
    sqlite3.SQLITE_CREATE_TEMP_INDEX,
    sqlite3.SQLITE_CREATE_TEMP_TABLE,
    sqlite3.SQLITE_CREATE_TEMP_TRIGGER,
    sqlite3.SQLITE_CREATE_TEMP_VIEW,
}


@dataclass(frozen=True)
class SqlConfig:
    """The <sql> tool: a SQLite database in memory for each trajectory."""

    setup_column: str = "sql"
    """Column of the data with the statements that fill a row's database; a row without it begins with an empty one."""
    max_sessions: int = 1024
    """Most databases of a rank at a time, copies for branches included. Who needs one more waits."""
    max_mib: int = 4
    """Largest size of a database in MiB."""
    total_mib: int = 4096
    """Largest size of all databases of a rank in MiB, which max_sessions of max_mib must not exceed: they are in its
    own memory."""
    max_steps: int = 50_000_000
    """Most instructions of SQLite's machine in a call: about a second, but the same everywhere."""
    deadline_s: float = 20.0
    """Longest time of a call in seconds: some instructions take a thousand times as long as others."""
    max_rows: int = 50
    """Most rows of a result that are shown."""

    def __post_init__(self) -> None:
        least = {"max_sessions": 1, "max_mib": 1, "max_steps": 10_000, "deadline_s": 0.1, "max_rows": 1}
        for name, number in least.items():
            require(getattr(self, name) >= number, f"{name}={getattr(self, name)} must be at least {number}")
        together = f"max_sessions={self.max_sessions} databases of max_mib={self.max_mib}"
        fits = self.max_sessions * self.max_mib <= self.total_mib
        require(fits, f"{together} may take more than total_mib={self.total_mib}; lower one of them, or raise that")


class SqlTool(SessionTool):
    """Runs statements in the trajectory's database, and shows the rows of the last one that has any."""

    tag = "sql"
    about = About(
        "a SQLite database",
        "to query or change it, write <sql> statements </sql>; what you change stays",
        "<sql> SELECT count(*) FROM films; </sql> <result> count(*)\n42 </result>",
    )
    schema = text_schema(
        "sql", "Query or change a SQLite database. What you change stays.", "statements", "SQL, one or more statements."
    )

    def __init__(self, cfg: SqlConfig):
        self.cfg = cfg
        self.max_sessions = cfg.max_sessions

    async def open(self, context: ToolContext) -> sqlite3.Connection:
        """Return a database with what the row's `setup_column` makes. Raises ValueError for a script that fails."""
        script = context.row.get(self.cfg.setup_column) or ""
        return await asyncio.to_thread(self._open, str(script), context.prompt_id)

    def _open(self, script: str, prompt_id: str) -> sqlite3.Connection:
        database = self._connect()
        try:
            database.executescript(script)
        except sqlite3.Error as error:
            raise ValueError(f"{prompt_id}: the column {self.cfg.setup_column} cannot be run: {error}") from None
        return self._confined(database)

    def _connect(self) -> sqlite3.Connection:
        database = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        database.execute(f"PRAGMA max_page_count = {self.cfg.max_mib * 2**20 // PAGE_BYTES}")
        database.set_authorizer(_authorize_setup)
        return database

    def _confined(self, database: sqlite3.Connection) -> sqlite3.Connection:
        database.set_authorizer(_authorize)
        for limit, value in LIMITS.items():
            database.setlimit(limit, value)
        return database

    async def run(self, argument: str, context: ToolContext, session: sqlite3.Connection) -> ToolResult:
        return await asyncio.to_thread(self._run, session, argument)

    def _run(self, database: sqlite3.Connection, text: str) -> ToolResult:
        looks_left, reason = self.cfg.max_steps // STEPS_PER_LOOK, ""
        folder = _temporary_folder()
        least_free = _free_bytes(folder) // 2

        def must_stop() -> bool:
            nonlocal looks_left, reason
            looks_left -= 1
            if looks_left < 0:
                reason = f"more than {self.cfg.max_steps} steps"
            elif _free_bytes(folder) < least_free:  # SQLite limits a database, not what it sorts outside of it
                reason = "too much to sort or to compare"
            return bool(reason)

        def interrupt() -> None:
            nonlocal reason
            reason = f"more than {self.cfg.deadline_s:g} s"
            database.interrupt()

        shown = "(no rows)"
        database.set_progress_handler(must_stop, STEPS_PER_LOOK)
        timer = threading.Timer(self.cfg.deadline_s, interrupt)
        timer.start()
        try:
            for statement in statements(text):
                if reason:  # between two statements there was nothing to interrupt
                    raise sqlite3.OperationalError
                cursor = database.execute(statement)
                if cursor.description:
                    shown = self._table(cursor)
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            kind = "error" if not reason else "timeout" if reason.endswith(" s") else "step_limit"
            return ToolResult(f"Error: {reason or error}", ok=False, error_kind=kind)
        finally:
            timer.cancel()
            database.set_progress_handler(None, 0)
        return ToolResult(shown, ok=True)

    def _table(self, cursor: sqlite3.Cursor) -> str:
        """Return the first rows as text, their names above, in the order in which SQLite yields them."""
        lines = [" | ".join(str(column[0]) for column in cursor.description)]
        for number, row in enumerate(cursor):
            if number == self.cfg.max_rows:
                lines.append("...")
                break
            lines.append(" | ".join("NULL" if cell is None else str(cell)[:MAX_CELL_CHARS] for cell in row))
        cursor.close()
        return "\n".join(lines)

    async def fork(self, session: sqlite3.Connection, context: ToolContext) -> sqlite3.Connection:
        if session.in_transaction:  # a copy would have what was committed only
            raise CannotFork("a transaction is open")
        return await asyncio.to_thread(self._fork, session)

    def _fork(self, database: sqlite3.Connection) -> sqlite3.Connection:
        copy = self._connect()
        database.backup(copy)
        return self._confined(copy)

    async def close(self, session: sqlite3.Connection) -> None:
        session.interrupt()
        await asyncio.to_thread(session.close)

    async def aclose(self) -> None:
        """Nothing to release: the sessions are closed."""


def _temporary_folder() -> str:
    """Return the folder to which SQLite writes what it sorts, by its own rules."""
    folders = (os.environ.get("SQLITE_TMPDIR"), os.environ.get("TMPDIR"), "/var/tmp", "/usr/tmp", "/tmp")
    return next((folder for folder in folders if folder and os.access(folder, os.W_OK | os.X_OK)), ".")


def _free_bytes(folder: str) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _authorize_setup(action: int, *_: str | None) -> int:
    """Allow what a row of the data may do before its database is used: all but other files."""
    return sqlite3.SQLITE_DENY if action == sqlite3.SQLITE_ATTACH else sqlite3.SQLITE_OK


def _authorize(action: int, first: str | None, second: str | None, database: str | None, trigger: str | None) -> int:
    is_outside = action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in OUTSIDE
    is_setting = action == sqlite3.SQLITE_PRAGMA and (first or "").lower() not in READABLE_PRAGMAS
    return sqlite3.SQLITE_DENY if action in DENIED or is_outside or is_setting else sqlite3.SQLITE_OK


def statements(text: str) -> list[str]:
    """Return the statements of a text, one by one. "a; b" -> ["a;", " b"]"""
    found, start = [], 0
    for end in [i + 1 for i, char in enumerate(text) if char == ";"]:
        if sqlite3.complete_statement(text[start:end]):
            found.append(text[start:end])
            start = end
    return [*found, text[start:]] if text[start:].strip() else found
