"""Conversation files of every style, streamed, whole or in parts; what cannot be used is named by its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.families import dialogue
from helpers.files import write_jsonl, write_parquet

from arpo.data import read_rows
from arpo.errors import UserError
from arpo.protocol.tags import parse_row
from arpo.sft.conversations import read_conversations

HERMES = '<tool_call>\n{"name": "search", "arguments": {"query": "Paris"}}\n</tool_call>'


def messages_of(path: Path) -> list[list[dict[str, str]]]:
    return [messages for _, messages in read_conversations(path)]


def sharegpt(*turns: tuple[str, str]) -> dict:
    return {"conversations": [{"from": role, "value": text} for role, text in turns]}


def test_sharegpt_and_openai_conversations_become_the_same_messages(tmp_path):
    turns = sharegpt(("human", "q"), ("gpt", "<search>q</search>"), ("observation", "found"), ("gpt", "a"))
    theirs = turns | {"system": "be brief"}
    openai = dialogue("s:be brief", "u:q", "a:<search>q</search>", "t:found", "a:a")
    (tmp_path / "array.json").write_text(json.dumps([theirs]))
    assert messages_of(write_jsonl(tmp_path / "a.jsonl", [theirs])) == [openai]
    assert messages_of(write_jsonl(tmp_path / "b.jsonl", [{"messages": openai}])) == [openai]
    assert messages_of(write_parquet(tmp_path / "c.parquet", [{"messages": openai}])) == [openai]
    assert messages_of(tmp_path / "array.json") == [openai]


def test_rows_of_trl_and_alpaca_are_conversations(tmp_path):
    """Also where Alpaca's instruction is empty: ms-swift 2766 asks what stands in front of the input then."""
    rows = [
        {"prompt": "q", "completion": "a"},
        {"prompt": dialogue("u:q"), "completion": dialogue("a:a")},
        {"instruction": "q", "input": "", "output": "a"},
        {"instruction": "", "input": "q", "output": "a"},
        {"instruction": "q", "input": "of this", "output": "a"},
    ]
    expected = [dialogue("u:q", "a:a")] * 4 + [dialogue("u:q\n\nof this", "a:a")]
    assert messages_of(write_jsonl(tmp_path / "a.jsonl", rows)) == expected
    assert messages_of(write_parquet(tmp_path / "b.parquet", rows[2:])) == expected[2:]


def test_a_json_call_in_the_text_becomes_a_tag():
    row = sharegpt(("human", f"q {HERMES}"), ("gpt", f"Hm.\n{HERMES}\n"), ("observation", "r"), ("gpt", "ok"))
    assert parse_row(row) == dialogue(f"u:q {HERMES}", "a:Hm.\n<search> Paris </search>", "t:r", "a:ok")


def test_function_calls_of_llama_factory_and_openai_become_tags_behind_their_text(tmp_path):
    call = {"name": "search", "arguments": {"query": "who?"}}
    factory = sharegpt(("human", "q"), ("function_call", json.dumps(call)), ("observation", "found"), ("gpt", "a"))
    # parquet gives both calls both arguments, those of the other as None
    as_text, of_parquet = json.dumps(call["arguments"]), {"query": "who?", "code": None}

    def openai(arguments: object, content: str | None = None) -> dict:
        made = {"id": "1", "type": "function", "function": {**call, "arguments": arguments}}
        called = {"role": "assistant", "content": content, "tool_calls": [made]}
        result = {"role": "tool", "content": "found", "tool_call_id": "1"}
        return {"messages": [*dialogue("u:q"), called, result, *dialogue("a:a")]}

    expected = dialogue("u:q", "a:<search> who? </search>", "t:found", "a:a")
    assert parse_row(factory | {"tools": "[]"}) == parse_row(openai(as_text)) == expected
    assert messages_of(write_parquet(tmp_path / "c.parquet", [openai(of_parquet)])) == [expected]
    assert parse_row(openai(as_text, "<think>x</think>"))[1]["content"] == "<think>x</think><search> who? </search>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "hi"}, "needs a list 'conversations'"),
        ({"prompt": "q", "answer": "a"}, "or prompt and completion, or instruction and output; has prompt, answer"),
        ({"prompt": "q", "completion": 3}, "content of the assistant message must be text, not int"),
        ({"messages": dialogue("u:q")}, "no assistant message"),
        ({"messages": [*dialogue("u:q"), {"role": "assistant", "content": None}]}, "must be text"),
        ({"messages": dialogue("u:q", "a: ")}, "is empty"),
        (sharegpt(("robot", "q")), "from 'robot' is unknown"),
        (sharegpt(("human", "q"), ("observation", "o"), ("gpt", "a")), "tool message must"),
        (sharegpt(("system", "s"), ("gpt", "a")), "first message must be a user's"),
        (sharegpt(("human", "q"), ("gpt", "a"), ("observation", "o")), "last message is a tool result"),
        (sharegpt(("human", "q"), ("function_call", '{"name": "f", "arguments": {"a": "1", "b": "2"}}')), "one arg"),
        (sharegpt(("human", "q"), ("function_call", '{"name": "f", "arguments": "{"}')), "not valid JSON"),
        (sharegpt(("human", "q"), ("function_call", "[1]")), "'name' and 'arguments'"),
        (sharegpt(("human", "q"), ("gpt", "<tool_call>{'name'}</tool_call>")), "<tool_call> is not valid JSON"),
        (sharegpt(("human", "q"), ("gpt", '<tool_call>{"name": "f"}</tool_call> And')), "must end its message"),
        (sharegpt(("human", "q"), ("gpt", "<tool_call>{}")), "must end its message"),
        (sharegpt(("human", "q"), ("gpt", f"{HERMES}\n{HERMES}")), "must end its message"),
        ({"messages": [*dialogue("u:q"), {"role": "assistant", "tool_calls": [{}, {}]}]}, "several"),
    ],
)
def test_bad_conversation_is_named_by_its_line(tmp_path, row, message):
    with pytest.raises(UserError, match=rf"sft\.jsonl:2: .*{message}"):
        messages_of(write_jsonl(tmp_path / "sft.jsonl", [{"messages": dialogue("u:q", "a:a")}, row]))


def numbered(path: Path, rows: list[dict]) -> Path:
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
        return path
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
        return path
    lines = [json.dumps(row) for row in rows]
    lines[3] += "\n\n  \n"  # blank lines are no rows, but they count as lines
    path.write_text("\n".join(lines))  # and the last line has no end
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.json"])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 8, 60])
def test_the_parts_of_a_file_are_the_file(tmp_path, name, num_parts):
    path = numbered(tmp_path / name, [{"n": n, "text": "é" * (n % 5) * 20} for n in range(40)])
    whole = list(read_rows(path))
    assert [row["n"] for _, row in whole] == list(range(40)) and len({place for place, _ in whole}) == 40
    parts = [list(read_rows(path, part=part, num_parts=num_parts)) for part in range(num_parts)]
    assert [row for part in parts for row in part] == whole
    assert max(map(len, parts)) <= 3 + 2 * 40 // num_parts


def test_a_bad_line_has_the_same_number_whoever_reads_it(tmp_path):
    lines = [json.dumps({"n": n}) for n in range(20)]
    lines[16] = "{"
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines) + "\n")
    for num_parts in (1, 2, 5):
        with pytest.raises(UserError, match=r"a\.jsonl:17: not valid JSON"):
            for part in range(num_parts):
                list(read_rows(path, part=part, num_parts=num_parts))
