"""Counts how plainly the code is said: `make lint` prints it. An alarm, not a target: a reader's first sight decides.

    python scripts/language.py                    the package, the scripts, extras and benchmarks
    python scripts/language.py arpo/tools FILE.py

Six well-read code bases of the field have 0.6 to 1.2 relative words and 1.4 to 3.2 vague pronouns per 100 words of
docstring, 0.2 to 7 tuple assignments per 1,000 lines, and 4 to 9 calls with five or more positional arguments per 1,000
lines of their training scripts. Above the limits below, the line is marked. Nothing fails.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("train_rl.py", "train_sft.py", "evaluate.py")
RELATIVE = re.compile(r"\b(that|which|whose|whom|what|whatever|whichever|who)\b", re.IGNORECASE)
VAGUE = re.compile(r"\b(it|its|they|them|their|those|these|one|ones|such|else|otherwise)\b", re.IGNORECASE)
WORD = re.compile(r"[A-Za-z][A-Za-z'-]+")
LIMITS = {
    "relative words per 100 words": 2.0,
    "vague pronouns per 100 words": 3.0,
    "tuple assignments per 1,000 lines": 6.0,
    "positional calls per 1,000 lines": 3.0,
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(tree: ast.AST) -> Iterable[ast.Constant]:
    """Yield the docstrings of modules, classes, functions and fields."""
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED):
            constants = (child.value for child in node.body if isinstance(child, ast.Expr))
            yield from (c for c in constants if isinstance(c, ast.Constant) and isinstance(c.value, str))


def prose(docstring: str) -> str:
    """Return the words without code: indented examples and names in backquotes are left out."""
    text = re.sub(r"^( {4,}|>>>|\.\.\.).*$", "", docstring, flags=re.MULTILINE)
    return re.sub(r"`[^`]*`", "X", text)


def count(source: str) -> Counter[str]:
    """Return the counts of one file."""
    tree = ast.parse(source)
    counts: Counter[str] = Counter()
    prose_lines: set[int] = set()
    for docstring in docstrings(tree):
        prose_lines.update(range(docstring.lineno, docstring.end_lineno + 1))
        text = prose(docstring.value)
        counts["words"] += len(WORD.findall(text))
        counts["relative"] += len(RELATIVE.findall(text))
        counts["vague"] += len(VAGUE.findall(text))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            counts["tuples"] += any(isinstance(target, ast.Tuple) for target in node.targets)
        elif isinstance(node, ast.Call) and len(node.args) >= 5:
            counts["positional"] += not any(isinstance(argument, ast.Starred) for argument in node.args)
    for number, line in enumerate(source.split("\n"), 1):
        if line.strip() and number not in prose_lines:
            counts["comments" if line.strip().startswith("#") else "code"] += 1
    return counts


def figures(sources: Iterable[str]) -> dict[str, float]:
    """Return the figures of some files together.

    One docstring of 20 words, two of them "that" -> "relative words per 100 words": 10
    """
    total: Counter[str] = sum((count(source) for source in sources), Counter())
    words = max(total["words"], 1)
    code = max(total["code"], 1)
    return {
        "relative words per 100 words": 100 * total["relative"] / words,
        "vague pronouns per 100 words": 100 * total["vague"] / words,
        "tuple assignments per 1,000 lines": 1000 * total["tuples"] / code,
        "positional calls per 1,000 lines": 1000 * total["positional"] / code,
        "comments per 100 lines": 100 * total["comments"] / code,
    }


def files_of(path: Path) -> list[Path]:
    """Return the Python files of a folder, or the file itself."""
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def main(names: list[str]) -> None:
    """Print the figures of each folder or file; `!` marks those above their limit."""
    paths = [Path(name) for name in names] or [ROOT / name for name in ("arpo", *SCRIPTS, "extras", "benchmarks")]
    for path in paths:
        shown = [
            f"{value:.1f}{'!' if value > LIMITS.get(name, float('inf')) else ''} {name}"
            for name, value in figures(file.read_text() for file in files_of(path)).items()
        ]
        print(f"{path.name}: {', '.join(shown)}")


if __name__ == "__main__":
    main(sys.argv[1:])
