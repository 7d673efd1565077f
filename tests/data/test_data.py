"""Question files and the order over prompts."""

from __future__ import annotations

import gzip
import json
import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.edits import ROOT
from helpers.files import write_jsonl, write_parquet
from helpers.orders import indices

from arpo.data import PromptOrder, load_prompts, tokenize_prompts
from arpo.errors import UserError
from arpo.rewards import accuracy_function

SHARED = ROOT.parent / "shared/data"
needs_published_files = pytest.mark.skipif(not SHARED.is_dir(), reason="the published data files are not here")


def published_row(answer: str | None = "Paris", system: str = "Answer in \x08oxed{}.") -> dict:
    return {
        "data_source": "DR_grpo_mix",
        "prompt": [{"role": "system", "content": system}, {"role": "user", "content": "Capital of France?"}],
        "ability": "qa",
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": 7, "split": "train"},
        "metadata": None,
    }


def test_published_schema_is_read_and_its_damaged_box_repaired_and_logged_once(tmp_path, caplog):
    path = write_parquet(tmp_path / "rl.parquet", [published_row()] * 5)
    with caplog.at_level(logging.WARNING, "arpo"):
        prompts = load_prompts(path)
    assert prompts[0].messages[0]["content"] == r"Answer in \boxed{}."
    assert prompts[0].answers == ["Paris"] and prompts[0].data_source == "DR_grpo_mix"
    assert prompts[0].meta == {"ability": "qa", "extra_info": {"index": 7, "split": "train"}}
    assert [r.getMessage() for r in caplog.records if "5 of 5" in r.getMessage()] and len(caplog.records) == 1


def test_simple_schema_takes_text_or_messages_and_one_answer_or_many(tmp_path):
    messages = [{"role": "user", "content": "1 + 1?"}]
    rows = [
        {"prompt": "Where?", "answer": ["NYC", "New York"], "data_source": "demo", "tools": ["search"]},
        {"prompt": messages, "answer": 2, "tools": "python, search", "ability": "math"},
    ]
    where, two = load_prompts(write_jsonl(tmp_path / "q.jsonl", rows))
    assert where.messages == [{"role": "user", "content": "Where?"}] and where.answers == ["NYC", "New York"]
    assert where.tools == ("search",) and where.data_source == "demo"
    assert two.messages == messages and two.answers == ["2"] and two.tools == ("python", "search")
    assert two.meta == {"ability": "math"} and two.data_source == "q"


def test_leftover_fields_stay_as_plain_json_types(tmp_path):
    row = {"Question": "?", "answer": "4", "Level": 2, "extra": {"a": [1, None]}}
    [prompt] = load_prompts(write_jsonl(tmp_path / "test.jsonl", [row]))
    assert prompt.meta["Level"] == 2 and json.loads(json.dumps(prompt.meta)) == prompt.meta
    assert prompt.data_source == tmp_path.name, "test.jsonl is named by its folder"


@pytest.mark.parametrize("before", ["", "\n", "\r\n \t"])
@pytest.mark.parametrize("name", ["q.jsonl", "q.json"])
def test_a_mark_of_the_byte_order_and_blanks_are_no_part_of_the_text(tmp_path, name, before):
    """morluto/flameox#462: an array after a line break had no rows."""
    row = '{"prompt": "a", "answer": 1}'
    text = f"[\n{row}\n]" if name == "q.json" else f"{row}\n"
    (tmp_path / name).write_text(before + text, encoding="utf-8-sig")
    assert load_prompts(tmp_path / name)[0].answers == ["1"]


def test_few_bad_rows_are_skipped_with_their_row_and_keep_the_ids_of_the_others(tmp_path, caplog):
    path = write_parquet(tmp_path / "rl.parquet", [published_row(answer) for answer in ("a", None, " ", "b")])
    with caplog.at_level(logging.WARNING, "arpo"):
        prompts = load_prompts(path)
    assert [p.prompt_id for p in prompts] == ["rl-000000", "rl-000003"]
    assert "row 1" in caplog.text and "row 2" in caplog.text and "reward_model.ground_truth" in caplog.text


def test_many_bad_rows_stop_with_the_first_one_named(tmp_path):
    rows = [{"question": "?", "answer": "1"}] * 100 + [{"question": "?", "answer": None}] * 4
    with pytest.raises(UserError, match=r"q\.jsonl:101: answer must be text.*4 of 104 rows"):
        load_prompts(write_jsonl(tmp_path / "q.jsonl", rows))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "cannot read the file"),
        ("empty.jsonl", b"", "is empty"),
        ("blank.jsonl", b"\n\n", "no rows"),
        ("cut.jsonl", b'{"question": "a", "answer": "b"}\n{"question": "a", "ans', r"cut\.jsonl:2: not valid JSON"),
        ("latin.jsonl", b'{"question": "\xe9", "answer": "b"}', "not UTF-8"),
        ("list.jsonl", b"[1]\n", r":1: must be a JSON object"),
        ("array.json", b'[{"question": "a"', r":1: not valid JSON"),
        ("table.xlsx", b"question,answer", "unknown file type"),
        ("table.csv", b'question,answer\na,b\n"a', r":2: not valid csv"),
        ("short.csv", b"question,answer\na\n", r":2: has not the 2 columns"),
        ("long.csv", b"question,answer\na,b,c\n", r":2: has not the 2 columns"),
        # the second value would silently replace the first (cpython 61739, arnio PR 1780)
        ("twice.csv", b"question,answer,answer\na,b,c\n", r"twice\.csv: two columns are called 'answer'; rename"),
        (
            "twice.jsonl",
            b'{"question": "a", "answer": "4", "answer": "5"}\n',
            r"twice\.jsonl:1: .*'answer' stands there twice",
        ),
        ("twice.json", b'[{"question": "a", "answer": {"value": "4", "value": "5"}}]', r"'value' stands there twice"),
        ("cut.jsonl.gz", gzip.compress(b'{"question": "a", "answer": "b"}', mtime=0)[:-9], "not a whole gzip file"),
        ("plain.jsonl.gz", b'{"question": "a", "answer": "b"}', "not a whole gzip file"),
        ("rl.parquet.gz", b"PAR1", "unknown file type"),
        ("rl.parquet", b"PAR1 garbage", "not a readable parquet file"),
        ("fields.jsonl", b'{"text": "a", "answer": "b"}', r":1: has no question: needs one of prompt, .*has text"),
        ("answer.jsonl", b'{"question": "a", "label": 1}', r":1: has no answer"),
        ("nan.jsonl", b'{"question": "a", "answer": NaN}', r":1: answer must be text"),
        ("role.jsonl", b'{"prompt": [{"role": "bot", "content": "a"}], "answer": "b"}', "role 'bot' is unknown"),
        ("tools.jsonl", b'{"prompt": "a", "answer": "b", "tools": {"python": 1}}', "tools must be a list"),
    ],
)
def test_bad_file_is_one_line_that_names_it(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        load_prompts(tmp_path / name)
    assert name in str(error.value) and "\n" not in str(error.value)


def test_a_number_of_32_bits_has_the_digits_that_were_written(tmp_path):
    """polars 15176: 132.04 came back as 132.039993; as an answer, 0.1 would be graded as wrong."""
    table = {"question": ["a", "b"], "answer": pa.array([0.1, 3], pa.float32())}
    table["level"] = pa.array([[132.04], [0.5]], pa.list_(pa.float16()))
    pq.write_table(pa.table(table), tmp_path / "q.parquet")
    prompts = load_prompts(tmp_path / "q.parquet")
    assert [prompt.answers for prompt in prompts] == [["0.1"], ["3"]]
    assert prompts[0].meta["level"] == [132.0] and prompts[1].meta["level"] == [0.5]


def test_corrupt_parquet_page_is_a_user_error(tmp_path):
    path = write_parquet(tmp_path / "rl.parquet", [published_row(system=f"{i} {'x' * 50}") for i in range(200)])
    data = bytearray(path.read_bytes())
    data[4:2000] = b"\xff" * 1996
    path.write_bytes(data)
    with pytest.raises(UserError, match="not a readable parquet file"):
        load_prompts(path)


@needs_published_files
@pytest.mark.parametrize(
    ("name", "num_prompts"),
    [("train_10k", 9999), ("valid", 180), ("hard_search_1k", 1071), ("gaia_test", 103), ("hle_test", 100)],
)
def test_published_rl_files_load_repaired(name, num_prompts):
    prompts = load_prompts(SHARED / "rl" / f"{name}.parquet")
    assert len(prompts) == num_prompts
    assert all("\x08" not in m["content"] for p in prompts for m in p.messages)
    assert all(r"\boxed{}" in p.messages[0]["content"] and p.messages[-1]["role"] == "user" for p in prompts)


@needs_published_files
@pytest.mark.parametrize("path", sorted((SHARED / "eval").glob("*/test.jsonl")), ids=lambda path: path.parent.name)
def test_published_evaluation_files_load_without_a_bad_row(path, caplog):
    prompts = load_prompts(path)
    assert len(prompts) == len(path.read_text().splitlines()) and not caplog.records
    assert {p.data_source for p in prompts} == {path.parent.name}


def test_overlong_prompts_are_dropped_and_counted_or_refused(tmp_path, caplog):
    prompts = load_prompts(write_jsonl(tmp_path / "q.jsonl", [{"question": "x" * n, "answer": "1"} for n in (3, 9)]))

    def render(messages):
        return list(messages[0]["content"].encode())

    with caplog.at_level(logging.WARNING, "arpo"):
        [kept] = tokenize_prompts(prompts, render, max_prompt_tokens=5, overlong="drop", path="q.jsonl")
    assert kept.token_ids == (120, 120, 120) and "1 of 2 prompts exceed" in caplog.text
    with pytest.raises(UserError, match=r"1 of 2 prompts exceed .*q-000001 has 9"):
        tokenize_prompts(prompts, render, max_prompt_tokens=5, overlong="error", path="q.jsonl")
    with pytest.raises(UserError, match="2 of 2"):
        tokenize_prompts(prompts, render, max_prompt_tokens=1, overlong="drop", path="q.jsonl")


def test_draws_of_any_size_follow_the_order_of_epoch_and_seed():
    order = PromptOrder(num_prompts=10, num_per_step=3, seed=0, option="data.n")  # 9 prompts an epoch
    assert order.draw(6, 3) == (indices(order, 2), 9)
    epoch = indices(order, 0) + indices(order, 1) + indices(order, 2)
    assert order.draw(1, 2) == (epoch[1:3], 3) and order.draw(3, 1) == (epoch[3:4], 4)
    # one prompt is left of the first epoch: too few for two, so they are the second epoch's first
    assert order.draw(8, 2) == (indices(order, 3)[:2], 11) and order.draw(8, 1) == (epoch[8:], 9)
    assert len({tuple(indices(order, 3 * epoch)) for epoch in range(5)}) == 5
    assert indices(order, 0) != indices(PromptOrder(10, 3, seed=4, option="data.n"), 0)
    with pytest.raises(UserError, match=r"3 usable rows of data.train are fewer than data.n=4"):
        PromptOrder(num_prompts=3, num_per_step=4, seed=0, option="data.n")


def test_a_queue_begins_as_a_draw_goes_on_over_epochs_and_holds_no_prompt_twice():
    order = PromptOrder(num_prompts=10, num_per_step=3, seed=0, option="data.n")  # 9 prompts an epoch
    first, second = ([i for step in range(3) for i in indices(order, 3 * epoch + step)] for epoch in (0, 1))
    assert order.queue(3, 2) == list(zip(first[3:5], (4, 5), strict=True))
    assert order.queue(8, 2) == list(zip(second[:2], (10, 11), strict=True))  # as `draw`
    queue = order.queue(5, 9)
    assert queue[:4] == list(zip(first[5:], (6, 7, 8, 9), strict=True))
    later = [(i, 10 + number) for number, i in enumerate(second[:5]) if i not in first[5:]]
    assert queue[4:] == later and len(later) < 5


def test_search_r1s_rows_are_their_question_without_its_instructions_and_an_exact_match_is_their_reward(tmp_path):
    """Rows as qa_search_train_merge.py of Search-R1 writes them, with FlashRAG's fields."""
    rows = [
        {
            "id": f"train_{i}", "question": "who is it?", "golden_answers": ["Ada Lovelace", "Lovelace"],
            "metadata": {"context": ["a page"]}, "data_source": source, "ability": "fact-reasoning",
            "prompt": [{"role": "user", "content": "After <information>, <answer>. Question: who is it?"}],
            "reward_model": {"style": "rule", "ground_truth": {"target": ["Ada Lovelace", "Lovelace"]}},
            "extra_info": {"index": i, "split": "train"},
        }
        for i, source in enumerate(("nq", "hotpotqa"))
    ]  # fmt: skip
    prompts = load_prompts(write_parquet(tmp_path / "train.parquet", rows))
    assert [p.messages for p in prompts] == [[{"role": "user", "content": "who is it?"}]] * 2
    assert [p.data_source for p in prompts] == ["nq", "hotpotqa"]
    assert all(p.answers == ["Ada Lovelace", "Lovelace"] for p in prompts)
    assert "metadata" not in prompts[0].meta
    for prompt in prompts:
        measure = accuracy_function(prompt.answers, prompt.data_source, prompt.meta["ability"])
        assert [measure(text, prompt.answers) for text in ("the lovelace", "Ada, Countess of Lovelace")] == [1.0, 0.0]
