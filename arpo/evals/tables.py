"""Tables of a report, and how they are written down."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Table:
    """A titled table whose cells are text."""

    title: str
    head: list[str]
    rows: list[list[str]]
    note: str = ""


def markdown_report(title: str, notes: Sequence[str], tables: Sequence[Table]) -> str:
    """Return a report as Markdown: the title, a list of the notes, then the tables."""
    lines = [f"# {_cell(title)}", "", *(f"- {_cell(note)}" for note in notes)]
    for table in tables:
        lines += ["", f"## {table.title}", "", *markdown_table(table.head, table.rows)]
        lines += ["", table.note] if table.note else []
    return "\n".join(lines) + "\n"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    head_line, *lines = ["| " + " | ".join(map(_cell, cells)) + " |" for cells in (head, *rows)]
    return [head_line, "|" + "---|" * len(head), *lines]


def _cell(text: str) -> str:
    """Names come from files: they must not end a cell or start HTML."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def with_interval(mean: float, low: float, high: float, sign: str = "", digits: int = 3) -> str:
    """(0.5, 0.4, 0.6) -> "0.500 [0.400, 0.600]"; `sign` "+" writes the sign of positive numbers too."""
    return f"{mean:{sign}.{digits}f} [{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]"


def replace_file(path: Path, parts: Iterable[str]) -> None:
    """Write a file made of these parts, whole or not at all."""
    writing = path.with_name(path.name + ".tmp")
    writing.unlink(missing_ok=True)  # a run of somebody else may have a link there
    with writing.open("x", encoding="utf-8", errors="replace") as file:
        file.writelines(parts)
    writing.replace(path)
