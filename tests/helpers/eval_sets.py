"""Small test sets with the schemas of the published files, for tests that must work without those."""

import json
from pathlib import Path

from arpo.evals.benchmarks import BENCHMARKS

_TEXT = {"question": "What is {i} + 1?", "answer": "{j}"}
_ALIASES = {"question": "Who owns otter {i}?", "answer": ["Ann Lee {i}", "A. Lee {i}"]}
SCHEMAS: dict[str, dict] = {
    "aime24": {"id": 60, "problem": "What is {i} + 1?", "solution": "$n = {j}$", "answer": "{j}", "url": "u",
               "question": "What is {i} + 1?"},
    "aime25": {"problem": "What is {i} + 1?", "answer": 7, "id": "0"},
    "math500": _TEXT,
    "gsm8k": {"question": "What is {i} + 1?", "answer": "It is <<{i}+1={j}>>{j}.\n#### {j}", "idx": 0},
    "math": {"problem": "What is {i} + 1?", "level": "Level 2", "type": "Algebra", "solution": "So $\\boxed{{{j}}}$."},
    "hotpotqa": _ALIASES,
    "2wiki": _ALIASES,
    "musique": _ALIASES,
    "bamboogle": _ALIASES,
    "SimpleQA": _ALIASES,
    "webwalker": {"question": "Who chaired meeting {i}?", "answer": "Ann Lee"},
    "gaia": {"id": 1, "task_id": "t", "Question": "Which zip code, {i}?", "answer": "{j}", "Level": 2,
             "Annotator_Metadata": {"Steps": "1. Look."}},
    "hle": {"id": "x", "question": "Which one, {i}?", "answer": "D", "answer_type": "multipleChoice", "rationale": "r",
            "raw_subject": "Logic", "category": "Math", "canary": "c", "has_image": False},
    "xbench": {"question": "第{i}届会议在哪一天召开", "answer": ["5月{j}日"]},
}  # fmt: skip
"""Benchmark -> a row; {i} is its number, {j} the next one."""


def write_sets(folder: Path, num_rows: int = 2) -> Path:
    """DATA_DIR with all benchmarks."""
    assert set(SCHEMAS) == set(BENCHMARKS)
    for name, schema in SCHEMAS.items():
        (folder / name).mkdir(parents=True)
        rows = [{key: _numbered(value, i) for key, value in schema.items()} for i in range(num_rows)]
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (folder / name / "test.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def _numbered(value: object, i: int) -> object:
    if isinstance(value, list):
        return [_numbered(v, i) for v in value]
    return value.format(i=i, j=i + 1) if isinstance(value, str) else value
