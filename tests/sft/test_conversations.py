"""Conversation files of every style, streamed, whole or in parts; what cannot be used is named by its line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.files import write_jsonl, write_parquet

from arpo.data import BadRow, read_rows
from arpo.errors import UserError
from arpo.protocol.tags import parse_row
from arpo.sft.conversations import read_conversations

ROOT = Path(__file__).resolve().parents[2]
GOOD = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
SHAREGPT = {
    "system": "be brief",
    "conversations": [
        {"from": "human", "value": "q"},
        {"from": "gpt", "value": "<search>q</search>"},
        {"from": "observation", "value": "found"},
        {"from": "gpt", "value": "a"},
    ],
}


def messages_of(path: Path) -> list[list[dict[str, str]]]:
    return [messages for _, messages in read_conversations(path)]


def test_sharegpt_and_openai_conversations_become_the_same_messages(tmp_path):
    roles = {"human": "user", "gpt": "assistant", "observation": "tool"}
    openai = {
        "messages": [{"role": "system", "content": "be brief"}]
        + [{"role": roles[m["from"]], "content": m["value"]} for m in SHAREGPT["conversations"]]
    }
    (tmp_path / "array.json").write_text(json.dumps([SHAREGPT]))
    expected = [openai["messages"]]
    assert messages_of(write_jsonl(tmp_path / "a.jsonl", [SHAREGPT])) == expected
    assert messages_of(write_jsonl(tmp_path / "b.jsonl", [openai])) == expected
    assert messages_of(write_parquet(tmp_path / "c.parquet", [openai])) == expected
    assert messages_of(tmp_path / "array.json") == expected


HERMES = '<tool_call>\n{"name": "search", "arguments": {"query": "Paris"}}\n</tool_call>'


def test_rows_of_trl_and_alpaca_are_conversations(tmp_path):
    asked, said = [{"role": "user", "content": "q"}], [{"role": "assistant", "content": "a"}]
    rows = [
        {"prompt": "q", "completion": "a"},
        {"prompt": asked, "completion": said},
        {"instruction": "q", "input": "", "output": "a"},
        {"instruction": "q", "input": "of this", "output": "a"},
    ]
    expected = [[*asked, *said]] * 3 + [[{"role": "user", "content": "q\n\nof this"}, *said]]
    assert messages_of(write_jsonl(tmp_path / "a.jsonl", rows)) == expected
    assert messages_of(write_parquet(tmp_path / "b.parquet", rows[2:])) == expected[2:]
    with pytest.raises(UserError, match=r"c\.jsonl:1: content of the assistant message must be text, not int"):
        messages_of(write_jsonl(tmp_path / "c.jsonl", [{"prompt": "q", "completion": 3}]))


def test_a_json_call_in_the_text_becomes_a_tag():
    row = conversation(("human", f"q {HERMES}"), ("gpt", f"Hm.\n{HERMES}\n"), ("observation", "r"), ("gpt", "ok"))
    assert [m["content"] for m in parse_row(row)] == [
        f"q {HERMES}",
        "Hm.\n<search> Paris </search>",
        "r",
        "ok",
    ]


def test_function_calls_of_llama_factory_and_openai_become_tags(tmp_path):
    call = {"name": "search", "arguments": {"query": "who?"}}
    factory = {
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": "found"},
            {"from": "gpt", "value": "a"},
        ],
        "tools": "[]",
    }
    openai_call = {"id": "1", "type": "function", "function": {**call, "arguments": json.dumps(call["arguments"])}}
    openai = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [openai_call]},
            {"role": "tool", "content": "found", "tool_call_id": "1"},
            {"role": "assistant", "content": "a"},
        ]
    }
    tags = json.loads(json.dumps(factory))
    tags["conversations"][1]["value"] = "<search> who? </search>"
    two = json.loads(json.dumps(openai))  # parquet gives both calls both arguments, those of the other as None
    two["messages"][1]["tool_calls"][0]["function"]["arguments"] = {"query": "who?", "code": None}
    expected = parse_row(tags)
    assert [m["content"] for m in expected] == ["q", "<search> who? </search>", "found", "a"]
    assert parse_row(factory) == parse_row(openai) == expected
    assert messages_of(write_parquet(tmp_path / "c.parquet", [two])) == [expected]


def test_text_before_a_call_is_kept():
    call = {"function": {"name": "python", "arguments": {"code": "1+1"}}}
    row = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "<think>x</think>", "tool_calls": [call]},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "2"},
        ]
    }
    assert parse_row(row)[1]["content"] == "<think>x</think><python> 1+1 </python>"


def conversation(*turns: tuple[str, str]) -> dict:
    return {"conversations": [{"from": role, "value": text} for role, text in turns]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "hi"}, "needs a list 'conversations'"),
        ({"prompt": "q", "answer": "a"}, "needs a list 'conversations'"),
        ({"messages": [{"role": "user", "content": "q"}]}, "no assistant message"),
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": None}]}, "must be text"),
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": " "}]}, "is empty"),
        (conversation(("robot", "q")), "from 'robot' is unknown"),
        (conversation(("human", "q"), ("observation", "o"), ("gpt", "a")), "tool message must"),
        (conversation(("system", "s"), ("gpt", "a")), "first message must be a user's"),
        (conversation(("human", "q"), ("gpt", "a"), ("observation", "o")), "last message is a tool result"),
        (
            conversation(("human", "q"), ("function_call", '{"name": "f", "arguments": {"a": "1", "b": "2"}}')),
            "one arg",
        ),
        (conversation(("human", "q"), ("function_call", '{"name": "f", "arguments": "{"}')), "not valid JSON"),
        (conversation(("human", "q"), ("function_call", "[1]")), "'name' and 'arguments'"),
        (conversation(("human", "q"), ("gpt", "<tool_call>{'name'}</tool_call>")), "<tool_call> is not valid JSON"),
        (conversation(("human", "q"), ("gpt", '<tool_call>{"name": "f"}</tool_call> And')), "must end its message"),
        (conversation(("human", "q"), ("gpt", "<tool_call>{}")), "must end its message"),
        (conversation(("human", "q"), ("gpt", f"{HERMES}\n{HERMES}")), "must end its message"),
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [{}, {}]}]}, "several"),
    ],
)
def test_bad_conversation_is_named_by_its_line(tmp_path, row, message):
    with pytest.raises(UserError, match=rf"sft\.jsonl:2: .*{message}"):
        messages_of(write_jsonl(tmp_path / "sft.jsonl", [GOOD, row]))
    with pytest.raises(BadRow, match=message):
        parse_row(row)


# ---- parts of a file


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


@pytest.mark.slow
def test_a_file_of_300_mb_is_read_in_little_memory(tmp_path):
    path = tmp_path / "big.jsonl"
    line = json.dumps(conversation(("human", "q" * 100), ("gpt", "a" * 900))) + "\n"
    with path.open("w") as file:
        for _ in range(300_000_000 // len(line) // 1000):
            file.write(line * 1000)
    code = (
        "import resource, sys\n"
        "from arpo.sft.conversations import read_conversations\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "num_rows = sum(1 for _ in read_conversations(sys.argv[1], part=1, num_parts=2))\n"
        "print(num_rows, peak() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    num_rows, growth_kib = map(int, done.stdout.split())
    assert num_rows == pytest.approx(150_000_000 // len(line), abs=1000)
    assert growth_kib < 20_000
