r"""GSM8K with tool calls: worked solutions become trajectories with <python> calls and real results of the tool.

GSM8K's solutions hold calculator annotations, "She earned 12/60 = $<<12/60=0.2>>0.2 per minute." One annotated line
becomes one thought and one call. So the next step of the reasoning follows each result:

    <think>She earned 12/60 per minute.</think><python>print(12/60)</python> <result>
    0.2
    </result><think>...</think><answer>\boxed{10}</answer>

A solution is used only if each call gives the value of the annotation, and the last call gives the final answer.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from arpo.data import read_rows
from arpo.errors import UserError
from arpo.protocol.tags import render_result
from arpo.tools.base import Tool

HUB_NAME = "openai/gsm8k"
MAX_LINES = 2
"""Most annotated lines of a question's solution, in all files except test_long. RL needs a policy with some right
samples: after SFT on solutions of any length, SmolLM2-135M was right in 1 % of the samples, and most groups had no
right sample."""
NUM_SFT_QUESTIONS = 1900
"""Number of training questions for SFT, with converted solutions; all other questions are for RL."""
NUM_VALID = {"sft": 60, "rl": 64}
CALLS_AT_ONCE = 64

_ANNOTATION = re.compile(r"<<([^<>=]*)=([^<>]*)>>")
_ARITHMETIC = re.compile(r"[\d+\-*/(). %]+")
_PERCENT = re.compile(r"([\d.]+)%")
_RESTATED = re.compile(r"\$?-?[\d,]*\.?\d+")
_UNIT = re.compile(r" \w+")
_EQUALS = re.compile(r"\s*=\s*\$?\s*$")


@dataclass(frozen=True)
class Step:
    """An annotated line of a solution."""

    thought: str
    """The line without the values of the annotations: "She earned 12/60 per minute."."""
    code: str
    """Python code to print these values, one per line."""
    values: tuple[float, ...]
    """Values as written in the annotations."""
    told: str
    """The line with the values: "She earned 12/60 = $0.2 per minute."."""


class Unusable(ValueError):
    """A solution cannot become a trajectory. The message is the reason, for the counts."""


def read_questions(folder: str, part: str) -> list[dict[str, str]]:
    """Read GSM8K's `part` (train or test) from a folder, or from the Hub for "". Return rows of question and answer.

    Raises UserError with advice if the file cannot be read.
    """
    path = local_file(folder, part) if folder else downloaded(part)
    rows = []
    for place, row in read_rows(path):
        if not all(isinstance(row.get(name), str) for name in ("question", "answer")) or "####" not in row["answer"]:
            raise UserError(f"{place}: not a row of GSM8K: needs question, and answer with '#### number' at its end")
        rows.append({"question": row["question"].strip(), "answer": row["answer"]})
    return rows


def local_file(folder: str, part: str) -> Path:
    """Return the file of this part in a folder, as jsonl or as the Hub's parquet. Raises UserError."""
    found = [*Path(folder).glob(f"{part}.jsonl"), *sorted(Path(folder).rglob(f"{part}-*.parquet"))]
    if not found:
        raise UserError(f"--gsm8k {folder}: neither {part}.jsonl nor {part}-*.parquet in it; download {HUB_NAME} there")
    return found[0]


def downloaded(part: str) -> Path:
    """Return the Hub's file of this part, from the local cache or over the network. Raises UserError."""
    from huggingface_hub import hf_hub_download

    offline = not hub_answers()
    file = f"main/{part}-00000-of-00001.parquet"
    try:
        return Path(hf_hub_download(HUB_NAME, file, repo_type="dataset", local_files_only=offline))
    except OSError as error:
        reason = " ".join(str(error).split())[:100]
        fix = "download its train and test files elsewhere and name their folder with --gsm8k"
        raise UserError(f"--gsm8k is empty, and {HUB_NAME} cannot be had from the Hub ({reason}...); {fix}") from None


def hub_answers() -> bool:
    """Return whether the Hub can be reached. Tried once, because each failing download takes half a minute."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    try:
        HfApi().dataset_info(HUB_NAME, timeout=10)
    except (OSError, HTTPError):  # OSError: HF_HUB_OFFLINE is set
        return False
    return True


def final_answer(row: dict[str, str]) -> str:
    """{"answer": "... = 1,200\\n#### 1,200"} -> "1200"."""
    return row["answer"].rpartition("####")[2].strip().replace(",", "")


def parse_solution(row: dict[str, str]) -> tuple[list[Step], str]:
    """Return the annotated lines as steps, and the text after the last annotated line. Raises Unusable.

    Lines without an annotation go before the thought of the next annotated line.
    """
    steps = []
    before = ""
    for line in row["answer"].rpartition("####")[0].splitlines():
        if not line.strip():
            continue
        if not _ANNOTATION.search(line):
            before += line.strip() + " "
            continue
        steps.append(parse_line(before + line.strip()))
        before = ""
    if not steps:
        raise Unusable("no annotated line")
    return steps, before.strip()


def parse_line(line: str) -> Step:
    """Parse a line with at least one annotation. Raises Unusable.

    >>> parse_line("She earned 12/60 = $<<12/60=0.2>>0.2 per minute.")
    Step(thought='She earned 12/60 per minute.', code='print(12/60)', values=(0.2,), told='She earned 12/60 = $0.2 ...')
    """
    thought = told = ""
    code = []
    values = []
    position = 0
    for annotation in _ANNOTATION.finditer(line):
        expression = annotation[1].strip()
        value = annotation[2].strip().replace(",", "")
        if not _ARITHMETIC.fullmatch(expression):
            raise Unusable("not plain arithmetic")
        between = line[position : annotation.start()]
        restated = _RESTATED.match(line, annotation.end())
        position = restated.end() if restated else annotation.end()
        equals = _EQUALS.search(between)
        thought += between[: equals.start()] if equals else between + expression
        told += between + (restated[0] if restated else annotation[2].strip())
        in_python = _PERCENT.sub(r"(\1/100)", expression)
        code.append(f"print({in_python})")
        values.append(number(value))
    rest = line[position:]
    if (unit := _UNIT.match(rest)) and thought.endswith(unit[0]):  # "5 - 3 pounds = 2 pounds left"
        thought = thought.removesuffix(unit[0])
    return Step(thought + rest, "\n".join(code), tuple(values), told + rest)


def number(text: str) -> float:
    """Convert a text to a number. Raises Unusable if this fails."""
    try:
        return float(text)
    except ValueError:
        raise Unusable("an annotation without a number") from None


def trajectory(row: dict[str, str], steps: list[Step], rest: str, results: dict[str, str]) -> str:
    """Write the solution with calls. `results`: code -> result of the tool. Raises Unusable for a wrong result."""
    text = ""
    printed = []
    for step in steps:
        result = results[step.code]
        try:
            printed = [float(line) for line in result.splitlines()]
        except ValueError:
            raise Unusable("a call fails") from None
        if len(printed) != len(step.values) or not all(map(agrees, printed, step.values)):
            raise Unusable("a result is not the annotation's")
        text += f"<think>{step.thought}</think><python>{step.code}</python>{render_result(result)}"
    answer = final_answer(row)
    if abs(printed[-1] - number(answer)) > 1e-6:
        raise Unusable("the last result is not the answer")
    return f"{text}<think>{rest or steps[-1].told}</think><answer>\\boxed{{{answer}}}</answer>"


def agrees(printed: float, noted: float) -> bool:
    """Return whether two values agree to two decimals (solutions note 10/3 as 3.33; some solutions round up)."""
    return abs(printed - noted) <= 0.01


async def run_all(codes: list[str], tool: Tool) -> dict[str, str]:
    """Run each code in the tool. Return code -> text for the model. Raises UserError if the sandbox fails."""
    results: dict[str, str] = {}
    for start in range(0, len(codes), CALLS_AT_ONCE):
        part = codes[start : start + CALLS_AT_ONCE]
        for code, result in zip(part, await asyncio.gather(*map(tool.run, part)), strict=True):
            if result.infra_error:
                raise UserError(f"the sandbox failed on {code!r} ({result.error_kind}); start the command again")
            results[code] = result.text
    return results


def convert(rows: list[dict[str, str]], tool: Tool) -> tuple[list[dict], Counter[str]]:
    """Return SFT rows of the converted solutions, in order, and the number of failed conversions by reason."""
    parsed = []
    reasons = Counter[str]()
    for row in rows:
        try:
            parsed.append((row, *parse_solution(row)))
        except Unusable as reason:
            reasons[str(reason)] += 1
    codes = sorted({step.code for _, steps, _ in parsed for step in steps})
    results = asyncio.run(run_all(codes, tool))
    converted = []
    for row, steps, rest in parsed:
        try:
            text = trajectory(row, steps, rest, results)
        except Unusable as reason:
            reasons[str(reason)] += 1
            continue
        question = {"role": "user", "content": row["question"]}
        converted.append({"messages": [question, {"role": "assistant", "content": text}]})
    return converted, reasons


def num_lines(row: dict[str, str]) -> int:
    """Return the number of annotated lines of a solution."""
    return sum(bool(_ANNOTATION.search(line)) for line in row["answer"].splitlines())


def rl_row(row: dict[str, str]) -> dict:
    """Return a question for RL or evaluation. `num_lines`, the annotated lines of the solution, measures difficulty."""
    return {
        "prompt": row["question"],
        "answer": final_answer(row),
        "data_source": "gsm8k",
        "tools": ["python"],
        "num_lines": num_lines(row),
    }


def build_data(folder: str, seed: int, tool: Tool) -> tuple[dict[str, list[dict]], Counter[str]]:
    """Return file stem -> rows, and the reasons for failed conversions. The same seed gives the same result.

    No training question is in two files. `test` has GSM8K's test questions with at most MAX_LINES annotated lines,
    shuffled; `test_long` has the longer questions.
    """
    train, test = (read_questions(folder, part) for part in ("train", "test"))
    train = [row for row in train if 1 <= num_lines(row) <= MAX_LINES]
    test = [row for row in test if num_lines(row)]
    rng = random.Random(f"gsm8k {seed}")
    rng.shuffle(train)
    rng.shuffle(test)
    sft, reasons = convert(train[:NUM_SFT_QUESTIONS], tool)
    rl = [rl_row(row) for row in train[NUM_SFT_QUESTIONS:]]
    files = {"sft_valid": sft[: NUM_VALID["sft"]], "sft_train": sft[NUM_VALID["sft"] :]}
    files |= {"rl_valid": rl[: NUM_VALID["rl"]], "rl_train": rl[NUM_VALID["rl"] :]}
    rows = [rl_row(row) for row in test]
    files |= {"test": [row for row in rows if row["num_lines"] <= MAX_LINES]}
    return files | {"test_long": [row for row in rows if row["num_lines"] > MAX_LINES]}, reasons
