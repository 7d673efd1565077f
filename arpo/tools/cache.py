"""Which cache a run opens; files in the released format; and the command line.

    python -m arpo.tools.cache stats  cache.sqlite
    python -m arpo.tools.cache import cache.sqlite search_cache.json other_node.sqlite ...
    python -m arpo.tools.cache export cache.sqlite search_cache.json
    python -m arpo.tools.cache prune  cache.sqlite --older-than-days 30 [--backend local] [--no-results]

The released format is one JSON object, query -> text. SQLite does the work here, see `cache_store`.
"""

from __future__ import annotations

import argparse
import json
import logging
import sqlite3
import time
from pathlib import Path
from typing import NoReturn

from arpo.config import UserError, exit_with
from arpo.tools.cache_store import CacheFile
from arpo.tools.sqlite_files import derived_paths, first_writable

logger = logging.getLogger(__name__)


def open_cache(path: str | Path, *, read_only: bool) -> CacheFile:
    """The cache of a run. A .json file is imported into a SQLite file beside it (or, where that folder is read-only or
    on a network, in the user's cache folder); again only when it has changed. Raises UserError, see `CacheFile`.
    """
    path = Path(path)
    if path.suffix != ".json":
        return CacheFile(path, read_only=read_only)
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; set tools.search.cache to an existing cache")
    try:
        target = first_writable(derived_paths(path, ".sqlite"), local=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be imported: {error}") from None
    cache = CacheFile(target)
    import_json(cache, path, replace=True)
    if not read_only:
        return cache
    cache.close()
    return CacheFile(target, read_only=True)


def import_json(cache: CacheFile, path: Path, *, replace: bool = False) -> int:
    """Add a file in the released format; the number of new entries (0 when it is unchanged since its last import)."""
    try:
        stat = path.stat()
        if not cache.usable:
            raise UserError(f"{path}: cannot be imported into {cache.path}, which is not writable")
        return 0 if cache.has_imported(stat) else cache.import_entries(read_released(path), stat, replace=replace)
    except (OSError, sqlite3.Error) as error:
        raise UserError(f"{path}: cannot be imported into {cache.path} ({error})") from None


def read_released(path: Path) -> dict[str, str]:
    """query -> text of a released cache. Empty texts are left out: the released code writes them when a call failed."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not valid JSON ({error.msg}); is the file truncated?") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text; save it as UTF-8") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: must be one JSON object of query -> text, not {type(tree).__name__}")
    for query, text in tree.items():
        if not isinstance(text, str):
            raise UserError(f"{path}: the result of {query[:80]!r} must be a string, not {type(text).__name__}")
    answered = {query: text for query, text in tree.items() if text.strip()}
    if len(answered) < len(tree):
        logger.warning("%s: %d empty results (failed calls) left out", path, len(tree) - len(answered))
    return answered


def write_released(cache: CacheFile, path: Path) -> int:
    """Write the cache in the released format; the number of entries. Of several answers to a query the first counts."""
    entries: dict[str, str] = {}
    for query, text in cache.entries():
        entries.setdefault(query, text)
    writing = path.with_name(path.name + ".tmp")
    writing.write_text(json.dumps(entries, indent=2, ensure_ascii=False), encoding="utf-8")
    writing.replace(path)
    return len(entries)


def merge(cache: CacheFile, other: Path) -> int:
    """Add the entries of another cache file (another node's, say); the number of new ones."""
    CacheFile(other, read_only=True).close()  # raises UserError where it is none, or corrupt
    connection = cache.connection()
    connection.execute("ATTACH ? AS other", (str(other),))
    columns = "key, backend, query, value, negative, created_s"
    sql = f"INSERT INTO main.entries ({columns}) SELECT {columns} FROM other.entries WHERE true ORDER BY id"
    num_new = connection.execute(sql + " ON CONFLICT DO NOTHING").rowcount
    connection.execute("DETACH other")
    return num_new


def prune(cache: CacheFile, *, older_than_days: float = 0.0, backend: str = "", no_results: bool = False) -> int:
    """Delete the entries that meet all given conditions, and give the space back; the number of deleted ones."""
    connection = cache.connection()
    deleted = connection.execute(
        "DELETE FROM entries WHERE created_s <= ? AND (? = '' OR backend = ?) AND (negative OR NOT ?)",
        (time.time() - older_than_days * 86400, backend, backend, no_results),
    ).rowcount
    connection.execute("VACUUM")
    return deleted


def stats(cache: CacheFile) -> list[str]:
    """What the cache holds, a line each."""
    connection = cache.connection()
    total, negative, oldest_s, newest_s = connection.execute(
        "SELECT count(*), coalesce(sum(negative), 0), min(created_s), max(created_s) FROM entries"
    ).fetchone()
    lines = [f"entries     {total}"]
    by_backend = connection.execute("SELECT backend, count(*) FROM entries GROUP BY backend ORDER BY backend")
    lines += [f"  {backend:<10}{count}" for backend, count in by_backend]
    lines += [f"no results  {negative}", f"size        {cache.path.stat().st_size / 2**20:.1f} MiB"]
    if total:
        first, last = (time.strftime("%Y-%m-%d %H:%M", time.localtime(s)) for s in (oldest_s, newest_s))
        lines.append(f"recorded    {first} .. {last}")
    return lines


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        exit_with(UserError(f"{message}; see {self.prog} --help"))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m arpo.tools.cache", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="stats|import|export|prune")
    about = {"stats": "what is in it", "import": "add entries", "export": "write released JSON", "prune": "delete some"}
    sub = {name: commands.add_parser(name, help=text) for name, text in about.items()}
    for command in sub.values():
        command.add_argument("file", type=Path, metavar="FILE", help="the cache, SQLite or released JSON")
    sub["import"].add_argument("sources", type=Path, nargs="+", metavar="SOURCE", help="released JSON or SQLite caches")
    sub["export"].add_argument("target", type=Path, metavar="JSON")
    sub["prune"].add_argument("--older-than-days", type=float, default=0.0, metavar="N", help="recorded that long ago")
    sub["prune"].add_argument("--backend", default="", help="only what this backend answered (import = imported)")
    sub["prune"].add_argument("--no-results", action="store_true", help="only answers that found nothing")
    return parser


def _run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if args.command == "prune" and not (args.older_than_days or args.backend or args.no_results):
        parser.error("prune needs --older-than-days, --backend or --no-results")
    changes = args.command in ("import", "prune")
    cache = open_cache(args.file, read_only=not changes)
    if not cache.usable:
        raise UserError(f"{args.file}: not writable; copy it to a folder of yours")
    if args.command == "stats":
        print("\n".join(stats(cache)))
    elif args.command == "export":
        print(f"{write_released(cache, args.target)} entries written to {args.target}")
    elif args.command == "prune":
        conditions = {"older_than_days": args.older_than_days, "backend": args.backend, "no_results": args.no_results}
        print(f"{prune(cache, **conditions)} entries deleted")
    else:
        for source in args.sources:
            num_new = import_json(cache, source) if source.suffix == ".json" else merge(cache, source)
            print(f"{num_new} new entries from {source}")
    cache.close()


def main(argv: list[str] | None = None) -> None:
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        _run(args, parser)
    except (OSError, sqlite3.Error) as error:
        exit_with(UserError(f"{args.file}: {args.command} failed ({error})"))
    except UserError as error:
        exit_with(error)


if __name__ == "__main__":
    main()
