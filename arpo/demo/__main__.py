"""Build the offline demo, and show what came of it.

    python -m arpo.demo build --out data/demo --seed 0
    python -m arpo.demo build --task hard --out data/demo_hard --seed 0
    python -m arpo.demo llm --out data/llm --gsm8k FOLDER
    python -m arpo.demo report --runs runs

`build` writes data and a tiny model, `llm` the data of a real task and a pretrained model; `report` prints the table at
the end of `make demo` and, with `--name llm`, of `make demo-llm`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from arpo.demo.report import EVALUATIONS, draw, report
from arpo.errors import UserError, exit_with


def write_data(args: argparse.Namespace) -> None:
    from arpo.demo.build import build  # and with it torch, which the report does not wait for

    build(args.out, args.seed, args.task)


def write_llm(args: argparse.Namespace) -> None:
    from arpo.demo.llm import build

    build(args.out, args.seed, args.gsm8k, args.model)


def show_report(args: argparse.Namespace) -> None:
    print(report(args.runs, args.name))
    if args.picture:
        draw(args.runs, args.picture, args.name)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m arpo.demo", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("build", help="write the demo's data and model")
    command.add_argument("--out", type=Path, default=Path("data/demo"), help="folder to write")
    command.add_argument("--seed", type=int, default=0, help="seed of world, data and model")
    command.add_argument("--task", choices=("plain", "hard"), default="plain", help="hard = results may be ambiguous")
    command.set_defaults(run=write_data)
    command = commands.add_parser("llm", help="write GSM8K with tool calls, and a pretrained model")
    command.add_argument("--out", type=Path, default=Path("data/llm"), help="folder to write")
    command.add_argument("--seed", type=int, default=0, help="seed of what is SFT, RL and validation data")
    command.add_argument("--gsm8k", default="", help="folder with GSM8K's train and test files; empty = from the Hub")
    command.add_argument("--model", default="", help="folder or Hub name; empty = SmolLM2-135M-Instruct")
    command.set_defaults(run=write_llm)
    command = commands.add_parser("report", help="print the demo's results")
    command.add_argument("--name", choices=tuple(EVALUATIONS), default="demo", help="demo that the runs are of")
    command.add_argument("--runs", type=Path, nargs="+", default=[Path("runs")], help="folders of demo runs, by seed")
    command.add_argument("--picture", type=Path, help="also draw the reward curves of all folders to this PNG")
    command.set_defaults(run=show_report)
    args = parser.parse_args()
    try:
        args.run(args)
    except UserError as error:
        exit_with(error)


if __name__ == "__main__":
    main()
