"""The table of benchmarks: family, grader, system prompt and fields of each test set.

read_benchmark("gaia", BENCHMARKS["gaia"], data_dir) -> Prompts with their system prompt, from DATA_DIR/gaia/test.jsonl
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from arpo.data import BadRow, parse_prompt, read_rows
from arpo.errors import UserError
from arpo.evals.prompts import is_chinese, with_benchmark_prompt
from arpo.protocol.format_rules import last_box
from arpo.trajectory import Prompt


@dataclass(frozen=True)
class Benchmark:
    """A test set. Question and answer are read from one of the usual fields, unless `question` or `answer` names
    another."""

    family: Literal["math", "qa", "deepsearch"]
    grader: Literal["math", "qa"]
    prompt: str = "code_search"
    """Kind of system prompt, a key of arpo.evals.prompts.PROMPTS."""
    mixed_languages: bool = False
    """True = Chinese questions get the Chinese prompt."""
    question: str = ""
    """Field of the question."""
    answer: str = ""
    """Field of the answer. From a solution (GSM8K, MATH) the text after "####", or the last box, is taken."""
    split: str = ""
    """Field for scores per value. The number 1 in "Level" is reported as "level 1"; a text is reported as it is."""


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
ALIASES = {"MATH": "math"}
"""Another name for a benchmark with the name of a family ("math" means the family)."""


def select(names: tuple[str, ...], data_dir: str | Path) -> tuple[dict[str, Benchmark], list[str]]:
    """Return the benchmarks with these names, and the names of chosen benchmarks without a file.

    names: benchmarks, families, or "all". Raises UserError for an unknown name, for a benchmark chosen by its own name
    without a file, and if no benchmark is left.
    """
    for name in names:
        _check_name(name)
    named = {ALIASES.get(name, name) for name in names if name not in FAMILIES}
    wanted = {n: b for n, b in BENCHMARKS.items() if n in named or b.family in names or "all" in names}
    paths = {name: _path(name, data_dir) for name in wanted}
    absent = [name for name, path in paths.items() if not path.exists()]
    for name in absent:
        if name in named:
            there = f"{paths[name]}, which is not there"
            raise UserError(f"eval.benchmarks: {name} needs {there}; get it, or set eval.data_dir")
    chosen = {name: benchmark for name, benchmark in wanted.items() if name not in absent}
    if names and not chosen:
        fix = "set eval.data_dir, or get them (docs/data.md#the-test-sets)"
        raise UserError(f"eval.benchmarks: {data_dir} has none of {', '.join(absent)}; {fix}")
    return chosen, absent


def _path(name: str, data_dir: str | Path) -> Path:
    return Path(data_dir) / name / "test.jsonl"


def _check_name(name: str) -> None:
    valid = list(dict.fromkeys(("all", *FAMILIES, *BENCHMARKS, *ALIASES)))
    if name in valid:
        return
    # Reversed, so that of "math" and "MATH" the first one remains.
    by_lower = {valid_name.lower(): valid_name for valid_name in reversed(valid)}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    hint = f"did you mean {by_lower[close[0]]!r}? " if close else ""
    raise UserError(f"eval.benchmarks: unknown benchmark {name!r}; {hint}There are {', '.join(valid)}")


def read_benchmark(
    name: str, benchmark: Benchmark, data_dir: str | Path, *, max_questions: int = 0, form: str = "tags"
) -> list[Prompt]:
    """Read the first `max_questions` questions of a benchmark (0 = all), with their system prompt.

    `meta` of a prompt holds only the split. form: the value of protocol.format. Raises UserError with file, line and
    field at the first unusable row: a score over a part of a published set would be compared with full scores.
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
        prompt = replace(prompt, data_source=name, meta={"split": label})
        prompts.append(with_benchmark_prompt(prompt, kind, form))
    return prompts


def _usual_fields(row: dict, benchmark: Benchmark) -> dict:
    """Return the row with question and answer under the first names that `parse_prompt` looks for."""
    row = dict(row)
    if benchmark.question in row:
        row["prompt"] = row[benchmark.question]
    if benchmark.answer in row:
        answer = row[benchmark.answer]
        row["answer"] = last_box(answer) if isinstance(answer, str) and "\\boxed" in answer else answer
    return row
