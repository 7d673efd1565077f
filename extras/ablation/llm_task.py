"""GSM8K's questions of three to six annotated lines, for a pretrained model of 135M: the task of `llm_forks`.

    python -m extras.ablation.llm_task --out data/llm_long --gsm8k FOLDER

Writes OUT/{sft_train, sft_again, questions}.jsonl. sft_again has the first rows of sft_train, and `questions` are the
questions of sft_again. The model hardly ever answers other questions of this length, and if all trajectories fail there
is nothing to compare.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from pathlib import Path

from arpo.config.tools import PythonConfig
from arpo.tools.python import PythonTool
from extras.llm_demo import gsm8k

LINES = range(3, 7)
MAX_CHARS = 560
"""Limit for question and solution together: short texts with long chains, for few cores."""
CANDIDATES = 96
NUM_SFT = 40
NUM_QUESTIONS = 20


def build(out: Path, folder: str) -> None:
    rows = [
        row
        for row in gsm8k.read_questions(folder, "train")
        if gsm8k.num_lines(row) in LINES and len(row["question"] + row["answer"]) <= MAX_CHARS
    ]
    random.Random("gsm8k long").shuffle(rows)
    tool = PythonTool(PythonConfig())
    try:
        converted, _ = gsm8k.convert(rows[:CANDIDATES], tool)
    finally:
        asyncio.run(tool.aclose())
    by_question = {row["question"]: row for row in rows}
    again = converted[:NUM_QUESTIONS]
    questions = [gsm8k.rl_row(by_question[row["messages"][0]["content"]]) for row in again]
    out.mkdir(parents=True, exist_ok=True)
    for name, part in {"sft_train": converted[:NUM_SFT], "sft_again": again, "questions": questions}.items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        print(f"{out / name}.jsonl: {len(part)} rows")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m extras.ablation.llm_task", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("data/llm_long"))
    parser.add_argument("--gsm8k", default="", help="folder with GSM8K's train file; empty = from the Hub")
    args = parser.parse_args()
    build(args.out, args.gsm8k)


if __name__ == "__main__":
    main()
