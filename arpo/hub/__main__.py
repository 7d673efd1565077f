"""Fetch the papers' data sets and models from the Hub, or any others, and check them.

python -m arpo.hub list
python -m arpo.hub fetch ARPO-RL-Reasoning-10K          # or OWNER/NAME; what was interrupted goes on
python -m arpo.hub check data/train_10k.parquet         # what training would find in a file, or a model's folder
"""

from __future__ import annotations

import argparse
import logging
from fnmatch import fnmatch
from pathlib import Path

from arpo.data.hub_catalog import CATALOG, find
from arpo.errors import UserError, exit_with
from arpo.hub.check import describe_data, describe_model
from arpo.hub.fetch import fetch


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m arpo.hub", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="what the papers published, with link, size and licence")
    get = commands.add_parser("fetch", help="download into a folder, and check")
    get.add_argument("name", help="a name of the list, or OWNER/NAME")
    get.add_argument("--out", type=Path, help="folder (default: data, or models)")
    get.add_argument("--revision", default="", help="branch, tag or commit (default: main)")
    get.add_argument("--model", action="store_true", help="OWNER/NAME is a model (default: a data set)")
    check = commands.add_parser("check", help="read files with the readers of training")
    check.add_argument("paths", type=Path, nargs="+", help="files of questions or conversations, folders of models")
    args = parser.parse_args()
    logging.basicConfig(format="  %(message)s")
    try:
        if args.command == "list":
            list_all()
        elif args.command == "fetch":
            fetch_and_check(args.name, args.out, args.revision, is_model=args.model)
        else:
            for path in args.paths:
                print(f"{path}: {describe_model(path) if path.is_dir() else describe_data(path)}")
    except UserError as error:
        exit_with(error)
    except KeyboardInterrupt:
        exit_with(UserError("interrupted; the same command goes on from here"))


def list_all() -> None:
    for repo, entry in CATALOG.items():
        print(f"{entry.url(repo)}\n    {entry.what}; size: {entry.size}; licence: {entry.licence}")
    print("\nThe test sets of the papers: docs/data.md. Fetch one of these: python -m arpo.hub fetch NAME")


def fetch_and_check(name: str, out: Path | None, revision: str, *, is_model: bool) -> None:
    repo = find(name)
    entry = CATALOG.get(repo)
    kind = entry.kind if entry else "model" if is_model else "dataset"
    folder = out or Path("data" if kind == "dataset" else "models")
    if not entry or kind == "model":
        folder /= repo.partition("/")[2]  # the configs look for the papers' files in data/ itself
    paths = fetch(repo, kind, folder, revision=revision)
    if kind == "model":
        print(f"{folder}: {describe_model(folder)}")
    else:
        print_usable(paths, must_be_usable=entry.train if entry else "")
    if entry and entry.command:
        found = [path for path in paths if fnmatch(path.name, entry.train)] or [folder]
        print(f"next: {entry.command.format(path=found[0])}")


def print_usable(paths: list[Path], must_be_usable: str) -> None:
    """Say what is in each file. Raises UserError where one that must be usable is not, or none is."""
    errors = []
    for path in paths:
        try:
            print(f"{path}: {describe_data(path)}")
        except UserError as error:
            if fnmatch(path.name, must_be_usable):
                raise
            errors.append(error)
            print(f"{error}; not for training")
    if len(errors) == len(paths):
        raise UserError(f"none of the {len(paths)} files can be trained on")


if __name__ == "__main__":
    main()
