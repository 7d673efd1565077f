"""Look after a cache of tool results.

    python -m extras.cache stats  cache.sqlite
    python -m extras.cache import cache.sqlite search_cache.json other_node.sqlite ...
    python -m extras.cache export cache.sqlite search_cache.json

Wherever a file is named, FILE.py:NAME=PLACE may stand. The released format is one JSON object, query -> text.
"""

from __future__ import annotations

import argparse
import sqlite3
from pathlib import Path
from typing import NoReturn

from arpo.config.exits import exit_with
from arpo.config.named import is_own
from arpo.errors import UserError
from arpo.tools.cache.store import open_cache
from extras.cache.released import ReleasedCache, import_json, merge, stats, write_released


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        exit_with(UserError(f"{message}; see {self.prog} --help"))


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="python -m extras.cache", description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True, metavar="stats|import|export")
    about = {"stats": "what is in it", "import": "add entries", "export": "write released JSON"}
    sub = {name: commands.add_parser(name, help=text) for name, text in about.items()}
    for command in sub.values():
        command.add_argument("file", metavar="FILE", help="the cache: SQLite, released JSON, or FILE.py:NAME=PLACE")
    sub["import"].add_argument("sources", nargs="+", metavar="SOURCE", help="released JSON or other caches")
    sub["export"].add_argument("target", type=Path, metavar="JSON")
    return parser


def _run(args: argparse.Namespace) -> None:
    cache = (ReleasedCache if is_released(args.file) else open_cache)(args.file, read_only=args.command != "import")
    if not cache.usable:
        raise UserError(f"{args.file}: not writable; copy it to a folder of yours")
    if args.command == "stats":
        print("\n".join(stats(cache)))
    elif args.command == "export":
        print(f"{write_released(cache, args.target)} entries written to {args.target}")
    else:
        for source in args.sources:
            num_new = import_json(cache, Path(source)) if is_released(source) else merge(cache, source)
            print(f"{num_new} new entries from {source}")
    cache.close()


def is_released(place: str) -> bool:
    return place.endswith(".json") and not is_own(place)


def main(argv: list[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    try:
        _run(args)
    except (OSError, sqlite3.Error) as error:
        exit_with(UserError(f"{args.file}: {args.command} failed ({error})"))
    except UserError as error:
        exit_with(error)


if __name__ == "__main__":
    main()
