"""Prompts made of the rows of a file.

Knows every schema that is around: the published RL files, the simple schema `prompt, answer, data_source, tools`, and
the evaluation files, whose field names differ. Bad input is a UserError that names file, row and field; a few bad rows
are skipped with a warning, many stop the run.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from arpo.data.rows import read_rows
from arpo.errors import UserError
from arpo.protocol.messages import BOX, DAMAGED_BOX, BadRow, as_list, parse_message
from arpo.trajectory import Prompt

logger = logging.getLogger(__name__)

QUESTION_FIELDS = ("prompt", "question", "Question", "problem", "query")
ANSWER_FIELDS = ("answer", "answers", "golden_answers", "ground_truth", "Final answer", "final_answer")
LABEL_FIELD = "label"
"""slime's answer, where it is text. KTO's label is true or false, and a class's is a number: neither is an answer."""
MAX_BAD_ROWS, MAX_BAD_SHARE = 3, 0.01


def load_prompts(path: str | Path, *, source: str = "") -> list[Prompt]:
    r"""Read all usable rows of a question file, in file order; `prompt_id` is file stem and row number.

    `source` is the data source of rows that name none; "" = the name of the file, or of the folder of a test.jsonl.
    The backspace defect of the published files (0x08 + "oxed") is repaired to "\boxed", counted and logged once.
    Raises UserError for unreadable files, and where more than 1 % of the rows (and more than 3) are bad.

    >>> load_prompts("questions.jsonl")[0]                       # {"question": "1 + 1?", "answer": 2}
    Prompt(prompt_id='questions-000000', messages=[{'role': 'user', 'content': '1 + 1?'}], answers=['2'], ...)
    """
    path = Path(path)
    is_generic = path.name.partition(".")[0] in ("test", "train", "valid", "dev")  # gsm8k/test.jsonl: gsm8k
    source = source or (path.absolute().parent.name if is_generic else path.stem)
    prompts: list[Prompt] = []
    bad: list[str] = []
    num_repaired = 0
    for index, (place, row) in enumerate(read_rows(path)):
        try:
            prompt, repaired = parse_prompt(row, f"{path.stem}-{index:06d}", default_source=source)
        except BadRow as error:
            bad.append(f"{place}: {error}")
            continue
        num_repaired += repaired
        prompts.append(prompt)
    num_rows = len(prompts) + len(bad)
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
    rest = _bare_question(dict(row))
    messages = _messages(_take(rest, QUESTION_FIELDS, "question"))
    reward_model = rest.pop("reward_model", None)
    has_truth = isinstance(reward_model, dict) and "ground_truth" in reward_model
    if has_truth or (reward_model and not rest.keys() & {*ANSWER_FIELDS}):
        answers = _answers(_ground_truth(reward_model), "reward_model.ground_truth")
    else:
        label = (LABEL_FIELD,) if isinstance(rest.get(LABEL_FIELD), str | list) else ()
        answers = _answers(_take(rest, (*ANSWER_FIELDS, *label), "answer"), "answer")
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


def _ground_truth(reward_model: object) -> object:
    return reward_model.get("ground_truth") if isinstance(reward_model, dict) else None


def _bare_question(row: dict) -> dict:
    """Return a row of Search-R1's, or of verl's copy of it, with its bare question. Its prompt asks for other tags than
    ours, and its metadata has pages."""
    left_out = ("prompt", "metadata")
    if {"question", "golden_answers"} <= row.keys():
        left_out = ("prompt", "metadata", "reward_model")
    else:
        truth, extra = _ground_truth(row.get("reward_model")), row.get("extra_info")
        if not (isinstance(truth, dict) and isinstance(extra, dict) and isinstance(extra.get("question"), str)):
            return row
        kept = {name: value for name, value in extra.items() if name not in ("question", "tools_kwargs")}
        row = row | {"question": extra["question"], "extra_info": kept}
    return {name: value for name, value in row.items() if name not in left_out}


def _take(row: dict, names: tuple[str, ...], meaning: str) -> object:
    """Remove and return the first of `names` that the row has; aliases of it stay in the row."""
    for name in names:
        if name in row:
            return row.pop(name)
    raise BadRow(f"has no {meaning}: needs one of {', '.join(names)}, has {', '.join(map(str, row)) or 'nothing'}")


def _messages(value: object) -> list[dict[str, str]]:
    value = as_list(value)
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise BadRow(f"the question must be text or a list of messages, not {type(value).__name__}")
    messages = [parse_message(m, "role", "content") for m in value]
    if any("tool_calls" in message for message in messages):
        raise BadRow("the question's messages have calls in fields; write them into the text")
    if messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise BadRow("the question's last message must be a user message with text")
    return messages


def _answers(value: object, field: str) -> list[str]:
    """Return the accepted answers. A worked solution in GSM8K's style stands for the number after its last "####".

    >>> _answers(["NYC", "New York"], "answer"), _answers(70, "answer"), _answers("so 2+2=4\\n#### 4", "answer")
    (['NYC', 'New York'], ['70'], ['4'])
    """
    answers = []
    for v in _accepted(value):
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


def _accepted(value: object) -> list:
    """Return the accepted answers of a field: Search-R1's object with a target, SQuAD's with a text, TriviaQA's with
    aliases, a list, which may be a JSON text where all of it are texts (Skywork-OR1), or one answer. Raises BadRow for
    a list as Python prints it, which would be taken for one answer.

    >>> _accepted('["34", "35"]'), _accepted("[34, 35]"), _accepted({"value": "NYC", "aliases": ["New York"]})
    (['34', '35'], ['[34, 35]'], ['NYC', 'New York'])
    """
    for key in ("target", "text"):
        if isinstance(value, dict) and key in value:
            return _accepted(value[key])
    if isinstance(value, dict) and "value" in value and isinstance(value.get("aliases") or [], list):
        return list(dict.fromkeys([value["value"], *(value.get("aliases") or [])]))
    if isinstance(value, str) and value.lstrip().startswith("["):
        if re.match(r"\s*\['", value):
            raise BadRow(f"the answer {value[:40]!r} is a list of Python's; write it as JSON, with double quotes")
        try:
            listed = json.loads(value)
        except ValueError:
            listed = None
        if isinstance(listed, list) and listed and all(isinstance(one, str) for one in listed):
            return listed
    return list(value) if isinstance(value, list | tuple) else [value]


def _plain(value: object) -> object:
    """Return the value in JSON types only, for dumps and for messages between ranks."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value if isinstance(value, str | bool | int | float | None) else str(value)


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

    def rendered(prompt: Prompt) -> Prompt:
        try:
            offered = () if prompt.tools is None else (prompt.tools,)
            return replace(prompt, token_ids=tuple(render(prompt.messages, *offered)))
        except UserError as error:
            raise UserError(f"{path}: {prompt.prompt_id}: {error}") from None

    prompts = list(map(rendered, prompts))
    kept = [prompt for prompt in prompts if len(prompt.token_ids) <= max_prompt_tokens]
    num_dropped = len(prompts) - len(kept)
    if not num_dropped:
        return kept
    by_length = sorted(prompts, key=lambda prompt: len(prompt.token_ids))
    longest, median = by_length[-1], len(by_length[len(prompts) // 2].token_ids)
    what = (
        f"{path}: {num_dropped} of {len(prompts)} prompts exceed max_prompt_tokens={max_prompt_tokens} "
        f"({longest.prompt_id} has {len(longest.token_ids)}, half of all at least {median})"
    )
    if overlong == "error" or not kept:
        fix = "raise it, or shorten the prompts: data.system_prompt may be what is long"
        raise UserError(f"{what}; {fix}")
    logger.warning("%s; they are left out", what)
    return kept
