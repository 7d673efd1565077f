"""The table of benchmarks. An entry says where a test set lies, how its questions are asked and its answers graded.

questions("gaia", BENCHMARKS["gaia"], data_dir) -> Prompts with their system prompt, from DATA_DIR/gaia/test.jsonl
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from arpo.data import BadRow, parse_prompt, read_rows
from arpo.errors import UserError
from arpo.evals.prompts import asked_as, is_chinese
from arpo.protocol.format_rules import last_box
from arpo.trajectory import Prompt


@dataclass(frozen=True)
class Benchmark:
    """A test set. Question and answer are found in any of the usual fields, unless their fields are named here."""

    family: Literal["math", "qa", "deepsearch"]
    grader: Literal["math", "qa"]
    prompt: str = "code_search"
    """Kind of system prompt, a key of arpo.evals.prompts.PROMPTS."""
    mixed_languages: bool = False
    """True = Chinese questions are asked with the Chinese prompt."""
    question: str = ""
    """Field of the question."""
    answer: str = ""
    """Field of the answer. Of a solution in GSM8K's or MATH's style, what follows "####" or the last box is taken."""
    split: str = ""
    """Field whose values are reported one by one. "Level" with the number 1 -> "level 1"; texts stay as they are."""


BENCHMARKS: dict[str, Benchmark] = {
    "aime24": Benchmark("math", grader="math"),
    "aime25": Benchmark("math", grader="math"),
    "math500": Benchmark("math", grader="math"),
    "gsm8k": Benchmark("math", grader="math"),
    "math": Benchmark("math", grader="math", answer="solution", split="level"),
    "hotpotqa": Benchmark("qa", grader="qa"),
    "2wiki": Benchmark("qa", grader="qa"),
    "musique": Benchmark("qa", grader="qa"),
    "bamboogle": Benchmark("qa", grader="qa"),
    "SimpleQA": Benchmark("qa", grader="qa"),
    "webwalker": Benchmark("deepsearch", grader="qa", mixed_languages=True),
    "gaia": Benchmark("deepsearch", grader="qa", split="Level"),
    "hle": Benchmark("deepsearch", grader="qa", split="category"),
    "xbench": Benchmark("deepsearch", grader="qa", prompt="chinese"),
}
FAMILIES = ("math", "qa", "deepsearch")
ALONE = {"MATH": "math"}
"""Another name for each benchmark that has a family's name."""


def select(names: tuple[str, ...], data_dir: str | Path) -> tuple[dict[str, Benchmark], list[str]]:
    """Return the benchmarks of ("all",), families or names, and the names left out because their file is not there.
    Raises UserError for an unknown name, a named benchmark without its file, and where nothing is left."""
    for word in names:
        _check_name(word)
    named = {ALONE.get(word, word) for word in names if word not in FAMILIES}
    wanted = {n: b for n, b in BENCHMARKS.items() if n in named or b.family in names or "all" in names}
    paths = {name: _path(name, data_dir) for name in wanted}
    absent = [name for name, path in paths.items() if not path.exists()]
    if lost := [name for name in absent if name in named]:
        there = f"{paths[lost[0]]}, which is not there"
        raise UserError(f"eval.benchmarks: {lost[0]} needs {there}; get it, or set eval.data_dir")
    chosen = {name: benchmark for name, benchmark in wanted.items() if name not in absent}
    if names and not chosen:
        fix = "set eval.data_dir, or get them (docs/data.md#the-test-sets)"
        raise UserError(f"eval.benchmarks: {data_dir} has none of {', '.join(absent)}; {fix}")
    return chosen, absent


def _path(name: str, data_dir: str | Path) -> Path:
    return Path(data_dir) / name / "test.jsonl"


def _check_name(word: str) -> None:
    known = list(dict.fromkeys(("all", *FAMILIES, *BENCHMARKS, *ALONE)))
    if word in known:
        return
    lower = {name.lower(): name for name in reversed(known)}
    close = difflib.get_close_matches(word.lower(), lower, n=1)
    hint = f"did you mean {lower[close[0]]!r}? " if close else ""
    raise UserError(f"eval.benchmarks: unknown benchmark {word!r}; {hint}There are {', '.join(known)}")


def questions(
    name: str, benchmark: Benchmark, data_dir: str | Path, *, max_questions: int = 0, form: str = "tags"
) -> list[Prompt]:
    """Read the first questions of a benchmark (0 = all), with its system prompt; `meta` holds the split alone.

    `form` is the value of protocol.format. Raises UserError naming file, line and field at the first row that cannot be
    used: a score over part of a published set would be compared with scores over all of it.
    """
    prompts = []
    for place, row in read_rows(_path(name, data_dir)):
        if max_questions and len(prompts) == max_questions:
            break
        try:
            row = _usual_fields(row, benchmark)
            prompt, _ = parse_prompt(row, f"{name}-{len(prompts):06d}", default_source=name)
        except BadRow as error:
            raise UserError(f"{place}: {error}; repair the file, or get it again") from None
        split = row.get(benchmark.split, "")
        label = split if isinstance(split, str) else f"{benchmark.split.lower()} {split}"
        in_chinese = benchmark.mixed_languages and is_chinese(prompt.messages[-1]["content"])
        kind = "chinese" if in_chinese else benchmark.prompt
        prompts.append(asked_as(replace(prompt, data_source=name, meta={"split": label}), kind, form))
    return prompts


def _usual_fields(row: dict, benchmark: Benchmark) -> dict:
    """Return the row with question and answer under the names that `parse_prompt` knows first."""
    row = dict(row)
    if benchmark.question in row:
        row["prompt"] = row[benchmark.question]
    if benchmark.answer in row:
        answer = row[benchmark.answer]
        row["answer"] = last_box(answer) if isinstance(answer, str) and "\\boxed" in answer else answer
    return row
