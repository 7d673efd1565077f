"""Tables of a report, and how they are written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Table:
    """One table, cells as text."""

    title: str
    head: list[str]
    rows: list[list[str]]
    note: str = ""


def markdown(title: str, notes: Sequence[str], tables: Sequence[Table]) -> str:
    """A report as Markdown."""
    lines = [f"# {_cell(title)}", "", *(f"- {_cell(note)}" for note in notes)]
    for table in tables:
        lines += ["", f"## {table.title}", "", _row(table.head), "|" + "---|" * len(table.head)]
        lines += [_row(row) for row in table.rows]
        lines += ["", table.note] if table.note else []
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(text: str) -> str:
    """Names come from files: they must not end a cell or start HTML."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    writing = path.with_name(path.name + ".tmp")
    writing.write_text(text, encoding="utf-8", errors="replace")
    writing.replace(path)
