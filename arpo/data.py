"""Rows of files, prompts made of them, and an order over these that survives a restart.

Reads parquet, jsonl and json arrays in every schema that is around: the published RL files, the simple schema
`prompt, answer, data_source, tools`, and the evaluation files, whose field names differ. Bad input is a UserError that
names file, row and field; a few bad rows are skipped with a warning, many stop the run.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from arpo.errors import UserError
from arpo.trajectory import Prompt

logger = logging.getLogger(__name__)

QUESTION_FIELDS = ("prompt", "question", "Question", "problem", "query")
ANSWER_FIELDS = ("answer", "answers", "golden_answers", "ground_truth")
ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
}
# The published RL files were written with "\boxed" in a Python string without r"": \b became a backspace character.
DAMAGED_BOX, BOX = "\x08oxed", "\\boxed"
MAX_BAD_ROWS, MAX_BAD_SHARE = 3, 0.01


# ---- rows of a file


class BadRow(ValueError):
    """One row that cannot be used; the message names the field and what is wrong with it."""


def read_rows(path: str | Path, *, part: int = 0, num_parts: int = 1) -> Iterator[tuple[str, dict]]:
    """Yield the rows of a parquet, jsonl or json-array file as (place, row); the place is "file:line" or "file: row 3".

    Only a json array is read as a whole. `part` (from 0) of `num_parts` about equal, consecutive parts is read, so that
    ranks can share a file. Raises UserError for a file that is missing, empty, corrupt or of an unknown kind.
    """
    path = Path(path)
    if path.suffix not in (".parquet", ".jsonl", ".json"):
        raise UserError(f"{path}: unknown file type {path.suffix!r}; use .parquet, .jsonl or .json")
    try:
        if path.stat().st_size == 0:
            raise UserError(f"{path}: the file is empty; was the download or the export interrupted?")
        yield from (_parquet_rows if path.suffix == ".parquet" else _json_rows)(path, part, num_parts)
    except OSError as error:
        raise UserError(f"{path}: cannot read the file ({error.strerror or error}); check the path") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def _parquet_rows(path: Path, part: int, num_parts: int) -> Iterator[tuple[str, dict]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        begin, end = _bounds(file.metadata.num_rows, part, num_parts)
        number = 0
        for group in range(file.num_row_groups):
            num_rows = file.metadata.row_group(group).num_rows
            if number + num_rows <= begin or end <= number:
                number += num_rows
                continue
            for batch in file.iter_batches(batch_size=256, row_groups=[group]):
                for row in batch.to_pylist():
                    if begin <= number < end:
                        yield f"{path}: row {number}", row
                    number += 1
    except (pa.ArrowException, OSError) as error:  # a corrupt page is an OSError without errno
        if isinstance(error, OSError) and error.errno:
            raise
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: not a readable parquet file ({reason}); download or export it again") from None


def _json_rows(path: Path, part: int, num_parts: int) -> Iterator[tuple[str, dict]]:
    with path.open("rb") as file:
        is_array = path.suffix == ".json" and file.read(1) == b"["
        file.seek(0)
        for place, row in (_array_items if is_array else _lines)(path, file, part, num_parts):
            if not isinstance(row, dict):
                raise UserError(f"{place}: must be a JSON object, not {type(row).__name__}")
            yield place, row


def _array_items(path: Path, file: BinaryIO, part: int, num_parts: int) -> Iterator[tuple[str, object]]:
    try:
        items = json.loads(file.read().decode())
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not valid JSON ({error.msg}); is the file truncated?") from None
    for i in range(*_bounds(len(items), part, num_parts)):
        yield f"{path}: item {i}", items[i]


def _lines(path: Path, file: BinaryIO, part: int, num_parts: int) -> Iterator[tuple[str, object]]:
    """Yield the lines whose first byte lies in the part."""
    begin, end = _bounds(path.stat().st_size, part, num_parts)
    position, number = 0, 1
    if begin:
        for start in range(0, begin - 1, 1 << 20):
            number += file.read(min(begin - 1 - start, 1 << 20)).count(b"\n")
        position = begin - 1 + len(rest := file.readline())  # of the line that began in the part before
        number += rest.endswith(b"\n")
    while position < end and (line := file.readline()):
        position += len(line)
        if line.strip():
            try:
                yield f"{path}:{number}", json.loads(line.decode())
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{path}:{number}: not valid JSON ({error.msg} at column {error.colno}); is the line truncated?"
                ) from None
        number += 1


def _bounds(num: int, part: int, num_parts: int) -> tuple[int, int]:
    return num * part // num_parts, num * (part + 1) // num_parts


# ---- prompts


def load_prompts(path: str | Path, *, source: str = "") -> list[Prompt]:
    r"""Read all usable rows of a question file, in file order; `prompt_id` is file stem and row number.

    `source` is the data source of rows that name none; "" = the name of the file, or of the folder of a test.jsonl.
    The backspace defect of the published files (0x08 + "oxed") is repaired to "\boxed", counted and logged once.
    Raises UserError for unreadable files, and where more than 1 % of the rows (and more than 3) are bad.

    >>> load_prompts("questions.jsonl")[0]                       # {"question": "1 + 1?", "answer": 2}
    Prompt(prompt_id='questions-000000', messages=[{'role': 'user', 'content': '1 + 1?'}], answers=['2'], ...)
    """
    path = Path(path)
    is_generic = path.stem in ("test", "train", "valid", "dev")
    source = source or (
        path.absolute().parent.name if is_generic else path.stem
    )  # gsm8k/test.jsonl and gsm8k.jsonl: gsm8k
    prompts: list[Prompt] = []
    bad: list[str] = []
    num_repaired = num_rows = 0
    for index, (place, row) in enumerate(read_rows(path)):
        num_rows += 1
        try:
            prompt, repaired = parse_prompt(row, f"{path.stem}-{index:06d}", default_source=source)
        except BadRow as error:
            bad.append(f"{place}: {error}")
            continue
        num_repaired += repaired
        prompts.append(prompt)
    if not num_rows:
        raise UserError(f"{path}: the file has no rows; was the export interrupted?")
    if not prompts or len(bad) > max(MAX_BAD_ROWS, MAX_BAD_SHARE * num_rows):
        raise UserError(f"{bad[0]} ({len(bad)} of {num_rows} rows are bad); repair or remove them")
    for message in bad:
        logger.warning("%s; the row is left out", message)
    if num_repaired:
        logger.warning(r"%s: repaired 0x08 + 'oxed' to '\boxed' in %d of %d rows", path, num_repaired, num_rows)
    return prompts


def parse_prompt(row: dict, prompt_id: str, *, default_source: str) -> tuple[Prompt, bool]:
    """Return the prompt of a row of any schema, and whether it was repaired. Raises BadRow."""
    rest = dict(row)
    messages = _messages(_take(rest, QUESTION_FIELDS, "question"))
    reward_model = rest.pop("reward_model", None)
    if isinstance(reward_model, dict) and "ground_truth" in reward_model:
        answers = _answers(reward_model["ground_truth"], "reward_model.ground_truth")
    else:
        answers = _answers(_take(rest, ANSWER_FIELDS, "answer"), "answer")
    data_source = rest.pop("data_source", None) or default_source
    tools = rest.pop("tools", None)
    if isinstance(tools, str):
        tools = [name.strip() for name in tools.split(",") if name.strip()]
    if tools is not None and not (isinstance(tools, list) and all(isinstance(name, str) for name in tools)):
        raise BadRow(f"tools must be a list of tool names, not {tools!r}")
    repaired = any(DAMAGED_BOX in m["content"] for m in messages)
    if repaired:
        messages = [{**m, "content": m["content"].replace(DAMAGED_BOX, BOX)} for m in messages]
    meta = {name: _plain(value) for name, value in rest.items() if value is not None}
    prompt = Prompt(prompt_id, messages, answers, data_source=str(data_source), meta=meta)
    return (prompt if tools is None else replace(prompt, tools=tuple(tools))), repaired


def _take(row: dict, names: tuple[str, ...], meaning: str) -> object:
    """Remove and return the first of `names` that the row has; aliases of it stay in the row."""
    for name in names:
        if name in row:
            return row.pop(name)
    raise BadRow(f"has no {meaning}: needs one of {', '.join(names)}, has {', '.join(map(str, row)) or 'nothing'}")


def _messages(value: object) -> list[dict[str, str]]:
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise BadRow(f"the question must be text or a list of messages, not {type(value).__name__}")
    messages = [parse_message(m, "role", "content") for m in value]
    if messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise BadRow("the question's last message must be a user message with text")
    return messages


def parse_message(value: object, role_key: str, text_key: str) -> dict[str, str]:
    """Return a message of any style as {role: system | user | assistant | tool, content}. Raises BadRow."""
    if not isinstance(value, dict) or role_key not in value:
        raise BadRow(f"a message must be an object with {role_key!r} and {text_key!r}, not {str(value)[:80]!r}")
    role = ROLES.get(value[role_key])
    if role is None:
        raise BadRow(f"{role_key} {value[role_key]!r} is unknown; use one of {', '.join(ROLES)}")
    text = value.get(text_key)
    if isinstance(text, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in text):
        text = "".join(part["text"] for part in text)  # OpenAI's content parts
    if not isinstance(text, str):
        raise BadRow(f"{text_key} of the {role} message must be text, not {type(text).__name__}")
    return {"role": role, "content": text}


def _answers(value: object, field: str) -> list[str]:
    """Return the accepted answers. A worked solution in GSM8K's style stands for the number after its last "####".

    >>> _answers(["NYC", "New York"], "answer"), _answers(70, "answer"), _answers("so 2+2=4\\n#### 4", "answer")
    (['NYC', 'New York'], ['70'], ['4'])
    """
    values = list(value) if isinstance(value, list | tuple) else [value]
    answers = []
    for v in values:
        if isinstance(v, float) and not math.isfinite(v):
            v = None
        if isinstance(v, float) and v.is_integer():
            v = int(v)  # an integer column with gaps comes out of pandas as floats
        if not isinstance(v, str | int | float):
            raise BadRow(f"{field} must be text, a number or a list of them, not {type(v).__name__}")
        answers.append(str(v).rpartition("\n####")[2].strip())
    if not answers or any(not a for a in answers):
        raise BadRow(f"{field} is blank")
    return answers


def _plain(value: object) -> object:
    """Return the value in JSON types only, for dumps and for messages between ranks."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value if isinstance(value, str | bool | int | float) else str(value)


def tokenize_prompts(
    prompts: list[Prompt],
    render: Callable[..., list[int]],
    max_prompt_tokens: int,
    overlong: Literal["drop", "error"],
    path: str | Path,
) -> list[Prompt]:
    """Fill `token_ids`; prompts over `max_prompt_tokens` are dropped with their number logged.

    `render` gets the messages, and the tools of a prompt that names some.
    Raises UserError where `overlong` is "error" and one is too long, and where nothing remains.
    """
    prompts = [
        replace(p, token_ids=tuple(render(p.messages) if p.tools is None else render(p.messages, p.tools)))
        for p in prompts
    ]
    kept = [prompt for prompt in prompts if len(prompt.token_ids) <= max_prompt_tokens]
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids), default=None)
    num_dropped = len(prompts) - len(kept)
    median = sorted(len(prompt.token_ids) for prompt in prompts)[len(prompts) // 2] if prompts else 0
    if num_dropped and (overlong == "error" or not kept):
        raise UserError(
            f"{path}: {num_dropped} of {len(prompts)} prompts exceed max_prompt_tokens={max_prompt_tokens} "
            f"({longest.prompt_id} has {len(longest.token_ids)}, half of all at least {median}); raise it, or shorten "
            "the prompts: data.system_prompt may be what is long"
        )
    if num_dropped:
        logger.warning(
            "%s: left out %d of %d prompts with more than %d tokens (the longest has %d)",
            path, num_dropped, len(prompts), max_prompt_tokens, len(longest.token_ids),
        )  # fmt: skip
    return kept


class PromptOrder:
    """The prompts of each step, as a pure function of the step, so that a resumed run needs no saved cursor.

    Every epoch has its own permutation (from seed and epoch); prompts at its end that do not fill a step are left out.

    >>> order = PromptOrder(num_prompts=5, num_per_step=2, seed=0, option="data.num_prompts_per_step")
    >>> order.steps_per_epoch, order.indices(0), order.indices(1), order.indices(2)
    (2, [2, 4], [3, 0], [1, 4])
    """

    def __init__(self, num_prompts: int, num_per_step: int, seed: int, *, option: str):
        """`option` names the setting that `num_per_step` comes from. Raises UserError where no step can be filled."""
        if num_per_step < 1:
            raise UserError(f"{option}={num_per_step} must be at least 1")
        if num_prompts < num_per_step:
            raise UserError(f"{num_prompts} usable rows of data.train are fewer than {option}={num_per_step}; lower it")
        self.num_prompts = num_prompts
        self.num_per_step = num_per_step
        self.seed = seed

    @property
    def steps_per_epoch(self) -> int:
        return self.num_prompts // self.num_per_step

    def indices(self, step: int) -> list[int]:
        """Return the prompt indices of a step (from 0), the same on every rank; rank r of w takes `[r::w]`."""
        return self.draw(step * self.num_per_step, self.num_per_step)[0]

    def draw(self, num_drawn: int, count: int) -> tuple[list[int], int]:
        """Return the next `count` <= num_per_step prompt indices after `num_drawn`, and num_drawn for the next draw.

        For steps that draw more than once. All are of one epoch, so that none comes twice: where the rest of an epoch
        is too short, it is skipped.
        """
        per_epoch = self.steps_per_epoch * self.num_per_step
        epoch, start = divmod(num_drawn, per_epoch)
        if start + count > per_epoch:
            epoch, start = epoch + 1, 0
        permutation = np.random.default_rng([self.seed, epoch]).permutation(self.num_prompts)
        return permutation[start : start + count].tolist(), epoch * per_epoch + start + count

    def queue(self, num_drawn: int, count: int) -> list[tuple[int, int]]:
        """Return (prompt index, num_drawn behind it) of the next `count` prompts: one `draw`, and what follows it.

        Those beyond num_per_step may be of the next epoch; none comes twice, so there may be fewer than `count`.
        """
        indices, end = self.draw(num_drawn, min(count, self.num_per_step))
        found = {index: end - len(indices) + number for number, index in enumerate(indices, start=1)}
        for _ in range(count - len(found)):
            [index], end = self.draw(end, 1)
            found.setdefault(index, end)
        return list(found.items())
