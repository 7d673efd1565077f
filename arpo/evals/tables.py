"""Tables of a report, and their Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Table:
    """A table of text cells with a title."""

    title: str
    head: list[str]
    rows: list[list[str]]
    note: str = ""


def markdown_report(title: str, notes: Sequence[str], tables: Sequence[Table]) -> str:
    """Return a report as Markdown: the title, a list of notes, the tables."""
    lines = [f"# {_cell(title)}", "", *(f"- {_cell(note)}" for note in notes)]
    for table in tables:
        lines += ["", f"## {table.title}", "", *markdown_table(table.head, table.rows)]
        lines += ["", table.note] if table.note else []
    return "\n".join(lines) + "\n"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    head_line, *row_lines = ["| " + " | ".join(map(_cell, cells)) + " |" for cells in (head, *rows)]
    return [head_line, "|" + "---|" * len(head), *row_lines]


def _cell(text: str) -> str:
    """Escape a text, so that a name from a file cannot end a cell or start HTML."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def with_interval(mean: float, low: float, high: float, sign: str = "", digits: int = 3) -> str:
    """(0.5, 0.4, 0.6) -> "0.500 [0.400, 0.600]". With `sign` "+" positive numbers have a sign too."""
    return f"{mean:{sign}.{digits}f} [{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]"


def replace_file(path: Path, parts: Iterable[str]) -> None:
    """Write a file from parts. A reader sees the old file or the complete new file."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # may be a link, in a run folder from somebody else
    with temporary.open("x", encoding="utf-8", errors="replace") as file:
        file.writelines(parts)
    temporary.replace(path)
