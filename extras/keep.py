"""Keeps the questions of a training file solved by a model now and then. An evaluation of the model gives the rates.

    torchrun --nproc_per_node 8 evaluate.py CONFIG --eval.files data/train.jsonl --eval.num_samples 8 --run.name rate
    python -m extras.keep runs/rate data/train.jsonl --out data/train_kept.jsonl

A group has no advantages if all of its trajectories are right, or all wrong: the policy learns nothing from the group.
This script removes such questions once, before RL. `advantage.dead_groups=resample` replaces such groups in each step,
as the policy changes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from arpo.config.exits import exit_with
from arpo.data import load_prompts, read_rows
from arpo.errors import UserError
from arpo.evals import mean
from arpo.evals.grading import question_digest
from arpo.evals.records import grades_path, read_grades, read_records
from arpo.evals.scores import correct_by_question
from arpo.evals.tables import replace_file


def keep(run: Path, data: Path, out: Path, low: float = 0.01, high: float = 0.99) -> str:
    """Keep a row of `data` if the share of right samples is from `low` to `high`. Return a summary.

    Each row gets the share as `pass_rate`; custom rewards can read `sample.meta["pass_rate"]`. Rows without evaluation
    are left out. A sample that an infrastructure error cut off does not count. Raises UserError if the run has other
    questions, no row is kept, or a row is not plain data.
    """
    if not 0 <= low <= high <= 1:
        raise UserError(f"--low {low:g} --high {high:g}: must be 0 <= low <= high <= 1")
    if out.suffix != ".jsonl" or out.resolve() == data.resolve():
        raise UserError(f"--out {out}: must be a .jsonl file, and not the data itself")
    cut_off = {(r.question_id, r.sample) for r in read_records(run) if r.benchmark == data.stem and r.has_failed}
    grades = [g for g in read_grades(grades_path(run, data.stem)) if (g.question_id, g.sample) not in cut_off]
    # a custom reward without an accuracy: its column has the reward
    if wrong := [grade.correct for grade in grades if not 0 <= grade.correct <= 1]:
        why = f"a grade is {wrong[0]:g}, and no share of what is right"
        raise UserError(f"{run}: {why}; let reward.file return accuracy too, and regrade the run (eval.regrade)")
    rates = {question: mean(correct) for question, correct in correct_by_question(grades).items()}
    digests = {grade.question_id: grade.question_digest for grade in grades}
    prompts = {prompt.prompt_id: prompt for prompt in load_prompts(data)}
    kept = []
    counts = {"kept": 0, "solved less often": 0, "solved more often": 0, "not evaluated": 0}
    for index, (place, row) in enumerate(read_rows(data)):
        prompt_id = f"{data.stem}-{index:06d}"
        prompt = prompts.get(prompt_id)
        rate = rates.get(prompt_id)
        if prompt is None or rate is None:
            counts["not evaluated"] += 1
            continue
        if digests[prompt_id] != question_digest(prompt.messages[-1]["content"], prompt.answers):
            raise UserError(f"{run}: {prompt_id} is another question than in {data}; evaluate this file")
        if low <= rate <= high:
            counts["kept"] += 1
            kept.append(_line(row | {"pass_rate": round(rate, 4)}, place))
        else:
            counts["solved less often" if rate < low else "solved more often"] += 1
    told = f"{', '.join(f'{number} {fate}' for fate, number in counts.items())} (pass rate {low:g} to {high:g})"
    if not kept:
        raise UserError(f"{data}: {told}; widen --low and --high, or evaluate with more samples")
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(out, kept)
    return f"{out}: {told}"


def _line(row: dict, place: str) -> str:
    try:
        return json.dumps(row, ensure_ascii=False) + "\n"
    except TypeError as error:
        raise UserError(f"{place}: cannot be written as JSON ({error}); drop the field") from None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m extras.keep", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of the evaluation (runs/NAME)")
    parser.add_argument("data", type=Path, help="the file of questions that it was given")
    parser.add_argument("--out", type=Path, required=True, help="file to write (.jsonl)")
    parser.add_argument("--low", type=float, default=0.01, help="smallest share of right samples that is kept")
    parser.add_argument("--high", type=float, default=0.99, help="largest share of right samples that is kept")
    args = parser.parse_args()
    try:
        print(keep(args.run, args.data, args.out, args.low, args.high))
    except UserError as error:
        exit_with(error)


if __name__ == "__main__":
    main()
