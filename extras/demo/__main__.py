"""Build the offline demo, and show its results.

    python -m extras.demo build --out data/demo --seed 0
    python -m extras.demo build --task hard --out data/demo_hard --seed 0
    python -m extras.demo build --task long --out data/demo_long --seed 0
    python -m extras.demo report --runs runs

`build` writes data and a tiny model, `report` prints the table at the end of `make demo`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from arpo.start.load import run_or_exit
from extras.demo.report import report

TASKS = ("plain", "hard", "long", "long_silent", "long_unready", "long_first", "notes")
TASKS_HELP = (
    "hard = results may be ambiguous; long = chains of nine calls; long_silent = the same, nothing says so if lost; "
    "long_unready = long, imitation does not teach to copy the answer; "
    "long_first = long, the first turn decides, too; "
    "notes = long, in contexts of three calls"
)


def write_data(args: argparse.Namespace) -> None:
    from extras.demo.build import build  # imports torch, which the report does not need

    build(args.out, args.seed, args.task)


def show_report(args: argparse.Namespace) -> None:
    print(report(args.runs))


def add_build(commands: Any, folder: str, about: str) -> argparse.ArgumentParser:
    """Add the subcommand that writes a demo's data, and return its parser."""
    command = commands.add_parser("build", help=about)
    command.add_argument("--out", type=Path, default=Path(folder), help="folder to write")
    command.add_argument("--seed", type=int, default=0, help="seed of all that is drawn")
    return command


def add_report(commands: Any) -> argparse.ArgumentParser:
    """Add the subcommand that prints a demo's results, and return its parser."""
    command = commands.add_parser("report", help="print the demo's results")
    command.add_argument("--runs", type=Path, nargs="+", default=[Path("runs")], help="folders of demo runs, by seed")
    return command


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m extras.demo", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    command = add_build(commands, "data/demo", "write the demo's data and model")
    command.add_argument("--task", choices=TASKS, default="plain", help=TASKS_HELP)
    command.set_defaults(run=write_data)
    add_report(commands).set_defaults(run=show_report)
    args = parser.parse_args()
    run_or_exit(args.run, args)


if __name__ == "__main__":
    main()
