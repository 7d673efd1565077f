"""The <sql> tool: a SQLite database in memory for each trajectory, filled from the row's own column.

A database is a notebook (extras/tools/notebook.py) with sql_cell.py as the first cell. It lives in the jail, under the
limits of <python>. A branch gets a copy of the process, including open transactions.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from arpo.errors import require
from arpo.protocol.prompts import About
from arpo.protocol.schema import text_schema
from arpo.tools.interface import ToolContext, ToolResult
from extras.tools.notebook import Notebook, NotebookConfig, NotebookTool

CELL = Path(__file__).with_name("sql_cell.py")


@dataclass(frozen=True)
class SqlConfig(NotebookConfig):
    """The <sql> tool: a SQLite database in memory for each trajectory. The limits of a notebook apply."""

    setup_column: str = "sql"
    """Column of the data with SQL statements to fill a row's database. A row without the column gets an empty
    database."""
    max_steps: int = 50_000_000
    """Most instructions of SQLite's virtual machine in a call. The default takes about a second. Unlike a limit in
    seconds, the count is the same on every machine."""
    max_rows: int = 50
    """Most rows shown of a result."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in {"max_steps": 10_000, "max_rows": 1}.items():
            require(getattr(self, name) >= least, f"{name}={getattr(self, name)} must be at least {least}")


class SqlTool(NotebookTool):
    """Runs statements in the trajectory's database, and shows the rows of the last statement with rows."""

    tag = "sql"
    ended = "The database has ended; the next call begins with a new one, as it was at first."
    setting = "tools.options: sql"
    about = About(
        "a SQLite database",
        "to query or change it, write <sql> statements </sql>; what you change stays",
        "<sql> SELECT count(*) FROM films; </sql> <result> count(*)\n42 </result>",
    )
    schema = text_schema(
        "sql", "Query or change a SQLite database. What you change stays.", "statements", "SQL, one or more statements."
    )

    async def open(self, context: ToolContext) -> Notebook:
        """Return a database filled by the row's `setup_column`. Raises ValueError if the script fails."""
        script = str(context.row.get(self.cfg.setup_column) or "")
        session = self._noted(Notebook(f"{CELL.read_text()}\nbegin({script!r})"))
        reply = await self._on_thread(self._run_cell, session, "ask('', 0, 0)")
        if reply.status not in ("ok", "sandbox_error"):  # the next call reports a sandbox_error
            await self.close(session)
            why = self._reason(reply)
            raise ValueError(f"{context.prompt_id}: the column {self.cfg.setup_column} cannot be run: {why}")
        return session

    async def run(self, argument: str, context: ToolContext, session: Notebook) -> ToolResult:
        begun = hashlib.sha256(
            session.first_cell.encode(errors="backslashreplace")
        ).hexdigest()  # part of a cache's key
        code = f"ask({argument!r}, {self.cfg.max_steps}, {self.cfg.max_rows})  # {begun}"
        return await super().run(code, context, session)
