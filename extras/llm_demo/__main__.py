"""Build what `make demo-llm` trains on, and show what came of it.

python -m extras.llm_demo build --out data/llm --gsm8k FOLDER
python -m extras.llm_demo report --runs runs
"""

from __future__ import annotations

import argparse

from arpo.start.load import run_or_exit
from extras.demo.__main__ import add_build, add_report
from extras.demo.report import Demo, report

LLM_DEMO = Demo(
    "llm",
    "make demo-llm",
    {
        "after SFT": ("llm_eval_sft", "test"),
        "after SFT, but greedy": ("llm_eval_sft_greedy", "test"),
        "after RL": ("llm_eval_arpo", "test"),
        "after RL, but greedy": ("llm_eval_arpo_greedy", "test"),
        "after RL, tools muted": ("llm_eval_arpo", "test_muted"),
    },
)


def write_files(args: argparse.Namespace) -> None:
    from extras.llm_demo.model import build  # imports torch: not at the top, so that the report is fast

    build(args.out, args.seed, args.gsm8k, args.model)


def show_report(args: argparse.Namespace) -> None:
    print(report(args.runs, LLM_DEMO))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m extras.llm_demo", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    command = add_build(commands, "data/llm", "write GSM8K with tool calls, and a pretrained model")
    command.add_argument("--gsm8k", default="", help="folder with GSM8K's train and test files; empty = from the Hub")
    command.add_argument("--model", default="", help="folder or Hub name; empty = SmolLM2-135M-Instruct")
    command.set_defaults(run=write_files)
    add_report(commands).set_defaults(run=show_report)
    args = parser.parse_args()
    run_or_exit(args.run, args)


if __name__ == "__main__":
    main()
