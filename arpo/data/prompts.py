"""Reads the rows of a file as prompts.

All common schemas are read: the published RL files, the evaluation files with various field names, and the simple
schema `prompt, answer, data_source, tools`. A few bad rows are skipped with a warning. Many bad rows are a UserError
with file, row and field.
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
from arpo.protocol.messages import BOX, DAMAGED_BOX, BadRow, as_list, json_of, parse_message
from arpo.trajectory import Prompt

logger = logging.getLogger(__name__)

QUESTION_FIELDS = ("prompt", "question", "Question", "problem", "query")
ANSWER_FIELDS = ("answer", "answers", "golden_answers", "ground_truth", "Final answer", "final_answer")
LABEL_FIELD = "label"
"""slime's answer, if it is text. KTO's label is true or false, and a class label is a number: these are no answers."""
ALIAS_FIELDS = ("answer_aliases", "aliases")
"""Further accepted answers beside the answer, in rows of MuSiQue and TriviaQA."""
MEDIA_FIELDS = ("images", "image", "videos", "audios")
CHOICE_FIELDS = ("choices", "options")
MAX_BAD_ROWS = 3
MAX_BAD_SHARE = 0.01
"""A file is refused if more of its rows are bad than both limits allow."""


def load_prompts(path: str | Path, *, source: str = "") -> list[Prompt]:
    r"""Read all usable rows of a question file, in file order; `prompt_id` is file stem and row number.

    `source` is the data source of rows without one; "" = the name of the file, or of the folder of a test.jsonl.
    The published files have a backspace defect (0x08 + "oxed"); it is repaired to "\boxed", counted, and logged once.
    Raises UserError for unreadable files, and if more than 1 % of the rows (and more than 3) are bad.

    >>> load_prompts("questions.jsonl")[0]                       # {"question": "1 + 1?", "answer": 2}
    Prompt(prompt_id='questions-000000', messages=[{'role': 'user', 'content': '1 + 1?'}], answers=['2'], ...)
    """
    path = Path(path)
    if not source:
        is_generic = path.name.partition(".")[0] in ("test", "train", "valid", "dev")  # gsm8k/test.jsonl: gsm8k
        source = path.absolute().parent.name if is_generic else path.stem
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
    """Return (prompt, True if its text was repaired) for a row of any schema. Raises BadRow."""
    rest = _bare_question(dict(row))
    messages = _messages(_take(rest, QUESTION_FIELDS, "question"))
    _check_all_is_asked(rest, messages[-1]["content"])
    reward_model = rest.pop("reward_model", None)
    has_truth = isinstance(reward_model, dict) and "ground_truth" in reward_model
    if has_truth or (reward_model and not rest.keys() & {*ANSWER_FIELDS}):
        answers = _answers(_ground_truth(reward_model), "reward_model.ground_truth")
    else:
        label = (LABEL_FIELD,) if isinstance(rest.get(LABEL_FIELD), str | list) else ()
        answers = _answers(_take(rest, (*ANSWER_FIELDS, *label), "answer"), "answer")
    for field in ALIAS_FIELDS:
        if rest.get(field):
            answers = list(dict.fromkeys([*answers, *_answers(rest[field], field)]))
    data_source = rest.pop("data_source", None) or default_source
    tools = rest.pop("tools", None)
    if isinstance(tools, str):
        is_json = tools.lstrip().startswith("[")
        tools = json_of(tools, "tools are") if is_json else [name.strip() for name in tools.split(",") if name.strip()]
    if tools is not None and not (isinstance(tools, list) and all(isinstance(name, str) for name in tools)):
        raise BadRow(f"tools must be a list of tool names, not {tools!r}")
    is_damaged = any(DAMAGED_BOX in message["content"] for message in messages)
    if is_damaged:
        messages = [message | {"content": message["content"].replace(DAMAGED_BOX, BOX)} for message in messages]
    prompt = Prompt(
        prompt_id=prompt_id,
        messages=messages,
        answers=answers,
        data_source=str(data_source),
        tools=None if tools is None else tuple(tools),
        meta={name: _plain(value) for name, value in rest.items() if value is not None},
    )
    return prompt, is_damaged


def _check_all_is_asked(row: dict, question: str) -> None:
    """Raise BadRow for pictures, and for choices that the question does not show: nobody could answer it."""
    for field in MEDIA_FIELDS:
        if row.get(field):
            raise BadRow(f"the row has {field}, but the model reads only text; drop the row, or the field")
    for field in CHOICE_FIELDS:
        choices = _choice_texts(row.get(field))
        if choices and not any(choice in question for choice in choices):
            raise BadRow(f"the question does not show the row's {field}; write them into it, or drop the field")


def _choice_texts(choices: object) -> list[str]:
    """Return the texts of choices without their labels. {"text": ["iron", "gold"], "label": ["A", "B"]}, as in ARC, or
    {"A": "iron", "B": "gold"} -> ["iron", "gold"]"""
    if isinstance(choices, dict):
        choices = choices.get("text", [*choices.values()])
    if not isinstance(choices, list):
        return []
    return [str(choice.get("text", choice)) if isinstance(choice, dict) else str(choice) for choice in choices]


def _ground_truth(reward_model: object) -> object:
    return reward_model.get("ground_truth") if isinstance(reward_model, dict) else None


def _bare_question(row: dict) -> dict:
    """Return a row of Search-R1, or of verl's copy of it, with the bare question; any other row unchanged.

    Its prompt asks for other tags than this package's, and its metadata contains entire pages.
    """
    left_out = ("prompt", "metadata")
    if {"question", "golden_answers"} <= row.keys():
        left_out = ("prompt", "metadata", "reward_model")
    else:
        truth = _ground_truth(row.get("reward_model"))
        extra = row.get("extra_info")
        if not (isinstance(truth, dict) and isinstance(extra, dict) and isinstance(extra.get("question"), str)):
            return row
        kept = {name: value for name, value in extra.items() if name not in ("question", "tools_kwargs")}
        row = row | {"question": extra["question"], "extra_info": kept}
    return {name: value for name, value in row.items() if name not in left_out}


def _take(row: dict, names: tuple[str, ...], meaning: str) -> object:
    """Remove and return the first field of `names` in the row. Other fields of `names` stay in the row."""
    for name in names:
        if name in row:
            return row.pop(name)
    raise BadRow(f"has no {meaning}: needs one of {', '.join(names)}, has {', '.join(map(str, row)) or 'nothing'}")


def _messages(value: object) -> list[dict[str, str]]:
    """Return the question as messages: text, or a list of messages. Raises BadRow."""
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
    """Return the accepted answers. Of a worked solution in GSM8K's style, the answer is the text after the last "####".

    >>> _answers(["NYC", "New York"], "answer"), _answers(70, "answer"), _answers("so 2+2=4\\n#### 4", "answer")
    (['NYC', 'New York'], ['70'], ['4'])
    """
    answers = []
    for answer in _accepted(value):
        if isinstance(answer, float) and not math.isfinite(answer):
            answer = None
        if isinstance(answer, float) and answer.is_integer():
            answer = int(answer)  # pandas writes an integer column with gaps as floats
        if not isinstance(answer, str | int | float):
            raise BadRow(f"{field} must be text, a number or a list of them, not {type(answer).__name__}")
        answers.append(f"\n{answer}".rpartition("\n####")[2].strip())  # the marker may also begin the text
    if not answers or not all(answers):
        raise BadRow(f"{field} is blank")
    return answers


def _accepted(value: object) -> list:
    """Return the accepted answers of a field as a list.

    The field may be one answer, a list, a list of texts as JSON (Skywork-OR1), or an object: with `target` (Search-R1),
    with `text` (SQuAD), or with `value` and `aliases` (TriviaQA). Raises BadRow for a list as Python prints it, since
    it would count as one answer.

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
        if isinstance(listed, list) and listed and all(isinstance(answer, str) for answer in listed):
            return listed
    return list(value) if isinstance(value, list | tuple) else [value]


def _plain(value: object) -> object:
    """Return the value in JSON types only, for dumps and for messages between ranks."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | bool | int | float | None) else str(value)


def tokenize_prompts(
    prompts: list[Prompt],
    render: Callable[..., list[int]],
    *,
    max_prompt_tokens: int,
    overlong: Literal["drop", "error"],
    path: str | Path,
) -> list[Prompt]:
    """Return the prompts with `token_ids`. Prompts over `max_prompt_tokens` are left out, and their number is logged.

    `render` gets a prompt's messages, and its tools if it names any. `path` begins the messages about these prompts.
    Raises UserError if `overlong` is "error" and a prompt is too long, and if no prompt remains.
    """

    def with_tokens(prompt: Prompt) -> Prompt:
        tools = () if prompt.tools is None else (prompt.tools,)
        try:
            return replace(prompt, token_ids=tuple(render(prompt.messages, *tools)))
        except UserError as error:
            raise UserError(f"{path}: {prompt.prompt_id}: {error}") from None

    prompts = [with_tokens(prompt) for prompt in prompts]
    kept = [prompt for prompt in prompts if len(prompt.token_ids) <= max_prompt_tokens]
    num_dropped = len(prompts) - len(kept)
    if not num_dropped:
        return kept
    by_length = sorted(prompts, key=lambda prompt: len(prompt.token_ids))
    longest = by_length[-1]
    median = len(by_length[len(prompts) // 2].token_ids)
    problem = (
        f"{path}: {num_dropped} of {len(prompts)} prompts exceed max_prompt_tokens={max_prompt_tokens} "
        f"({longest.prompt_id} has {len(longest.token_ids)}, half of all at least {median})"
    )
    if overlong == "error" or not kept:
        fix = "raise it, or shorten the prompts: data.system_prompt (eval.system_prompt) may be what is long"
        raise UserError(f"{problem}; {fix}")
    logger.warning("%s; they are left out", problem)
    return kept
