"""The RL files that are copied most, in the forms in which other projects leave them."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.files import write_parquet

from arpo.data import BadRow, load_prompts, parse_prompt, read_rows
from arpo.errors import UserError
from arpo.protocol.tags import parse_row
from arpo.rewards import accuracy_function
from arpo.rewards.math_answer import math_accuracy
from arpo.sft.conversations import read_conversations

CALLING = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
REFUSING = {"role": "assistant", "content": "A", "refusal": "no"}
ASKED = [{"role": "user", "content": "Who wrote it?"}]
EXTRA = {"index": 0, "need_tools_kwargs": True, "question": "who got it?", "split": "train",
         "tools_kwargs": {"search": {"create_kwargs": {"ground_truth": {"target": ["Roentgen"]}}}}}  # fmt: skip
VERL_SEARCH_R1 = {
    "data_source": "searchR1_nq",
    "prompt": [{"role": "system", "content": "You are a helpful and harmless assistant."},
               {"role": "user", "content": "... call <tool_call> query </tool_call> ... Question: who got it?"}],
    "ability": "fact-reasoning",
    "reward_model": {"ground_truth": {"target": ["Wilhelm Conrad Roentgen", "Roentgen"]}, "style": "rule"},
    "extra_info": EXTRA,
    "metadata": None,
}  # fmt: skip
"""A row as examples/data_preprocess/preprocess_search_r1_dataset.py of verl makes it."""


def parsed(row: dict):
    return parse_prompt(row, "p", default_source="s")[0]


@pytest.mark.parametrize(
    ("row", "question", "answers"),
    [
        (VERL_SEARCH_R1, "who got it?", ["Wilhelm Conrad Roentgen", "Roentgen"]),
        ({"prompt": ASKED, "reward_model": {"ground_truth": {"target": "Roentgen"}}}, "Who wrote it?", ["Roentgen"]),
        ({"prompt": ASKED, "reward_model": {"ground_truth": '["34", "35"]'}}, "Who wrote it?", ["34", "35"]),  # Skywork
        ({"prompt": ASKED, "reward_model": {"ground_truth": '["34"]'}}, "Who wrote it?", ["34"]),
        ({"prompt": ASKED, "reward_model": {"ground_truth": "[34, 35]"}}, "Who wrote it?", ["[34, 35]"]),  # an interval
        ({"prompt": ASKED, "reward_model": {"ground_truth": '["a", "b'}}, "Who wrote it?", ['["a", "b']),
        ({"Question": "Q", "Level": "2", "Final answer": "17", "file_name": ""}, "Q", ["17"]),  # GAIA
        ({"question": "Q", "answer": {"value": "NYC", "aliases": ["New York", "NYC"]}}, "Q", ["NYC", "New York"]),
        ({"question": "Q", "answer": {"value": "NYC", "aliases": None}}, "Q", ["NYC"]),
        # the aliases of MuSiQue and of a flat row of TriviaQA (James-RAG-Evol PR 730, llm-foundry 1557)
        ({"question": "Q", "answer": "York", "answer_aliases": ["City of York"]}, "Q", ["York", "City of York"]),
        ({"question": "Q", "answer": "York", "aliases": ["YORK", "York"]}, "Q", ["York", "YORK"]),
        ({"question": "Q", "answer": "York", "answer_aliases": []}, "Q", ["York"]),
        ({"question": "Q", "answers": {"text": ["NYC", "New York"], "answer_start": [3, 9]}}, "Q", ["NYC", "New York"]),
        ({"prompt": [{"role": "developer", "content": "Be brief."}, *ASKED], "answer": "1"}, "Who wrote it?", ["1"]),
        ({"prompt": json.dumps(ASKED), "answer": "1"}, "Who wrote it?", ["1"]),
        ({"prompt": [json.dumps(ASKED[0])], "answer": "1"}, "Who wrote it?", ["1"]),
        # slime's documented row, and a list of its labels
        ({"prompt": [{**ASKED[0], "step_loss_mask": 1}], "label": "34"}, "Who wrote it?", ["34"]),
        ({"prompt": ASKED, "label": ["34", "thirty-four"]}, "Who wrote it?", ["34", "thirty-four"]),
        ({"prompt": ASKED, "answer": "1", "label": "easy"}, "Who wrote it?", ["1"]),
        ({"question": "Q", "answer": "16 - 3 = <<16-3=13>>13.\n#### 1,300"}, "Q", ["1,300"]),  # GSM8K
        ({"question": "Q", "answer": "#### -3"}, "Q", ["-3"]),  # proeval PR 19
        ({"query_id": "769", "query": "Q", "answer": "Ada", "gold_docs": [{"text": "t"}]}, "Q", ["Ada"]),  # BrowseComp+
        ({"prompt": "[1, 2] is what?", "answer": "1"}, "[1, 2] is what?", ["1"]),
        ({"prompt": '[{"a": 1}]', "answer": "1"}, '[{"a": 1}]', ["1"]),
    ],
)  # fmt: skip
def test_a_row_of_another_project_is_read_as_it_is_meant(row, question, answers):
    prompt = parsed(row)
    assert prompt.messages[-1] == {"role": "user", "content": question} and prompt.answers == answers
    assert all(message["role"] in ("system", "user") for message in prompt.messages)


@pytest.mark.parametrize("tools", [["python", "search"], "python, search", '["python", "search"]'])
def test_names_of_tools_are_a_list_also_as_text(tools):
    assert parsed({"prompt": ASKED, "answer": "1", "tools": tools}).tools == ("python", "search")


def test_choices_that_the_question_shows_and_pictures_that_are_none_are_no_matter():
    asked = "Which? A) red B) blue"
    row = {"question": asked, "choices": ["red", "blue"], "options": [], "image": "", "images": None, "answer": "B"}
    assert parsed(row).messages == [{"role": "user", "content": asked}]
    for in_arc in ({"text": ["red", "blue"], "label": ["A", "B"]}, [{"label": "A", "text": "red"}]):
        assert parsed(row | {"choices": in_arc}).messages == [{"role": "user", "content": asked}]


def test_verl_s_copy_of_search_r1_loads_from_parquet_without_its_prompt_and_its_tools(tmp_path):
    [prompt] = load_prompts(write_parquet(tmp_path / "train.parquet", [VERL_SEARCH_R1]))
    assert prompt.messages == [{"role": "user", "content": "who got it?"}] and prompt.data_source == "searchR1_nq"
    assert prompt.meta["extra_info"] == {"index": 0, "need_tools_kwargs": True, "split": "train"}


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"prompt": ASKED, "reward_model": {"ground_truth": {"answer": "x"}}}, "ground_truth must be text"),
        ({"prompt": ASKED, "reward_model": {"style": "rule"}}, "reward_model.ground_truth must be text"),
        ({"prompt": ASKED, "answer": "[]", "tools": 3}, "tools must be a list"),
        # the functions of Salesforce/xlam-function-calling-60k
        ({"query": "Q?", "answers": "[]", "tools": '[{"name": "live_giveaways"}]'}, "must be a list of tool names"),
        ({"query": "Q?", "answers": "[]", "tools": '["python"'}, "tools are not valid JSON"),
        ({"prompt": ASKED, "answer": "['NYC' 'New York']"}, "is a list of Python's"),  # of pandas' to_csv
        ({"prompt": ASKED, "completion": "It is.", "label": True}, "has no answer"),  # KTO's label is no answer
        ({"prompt": ASKED, "label": 2}, "has no answer"),  # nor is the number of a class
        ({"prompt": [*ASKED, CALLING, *ASKED], "answer": "1"}, "calls in fields"),
        ({"prompt": [*ASKED, REFUSING, *ASKED], "answer": "1"}, "'refusal'"),
        ({"prompt": [{"role": ["user"], "content": "A"}], "answer": "1"}, "is unknown"),
        # mtkresearch/MR-Models #15: the answer is a letter, and the question has no choices
        ({"question": "Which?", "choices": ["red", "blue"], "answer": "B"}, "does not show the row's choices; write"),
        ({"question": "Which?", "options": {"A": "red", "B": "blue"}, "answer": "B"}, "not show the row's options"),
        ({"question": "Which?", "choices": {"text": ["red"], "label": ["?"]}, "answer": "A"}, "the row's choices"),
        ({"question": "<image> What is it?", "images": ["a.png"], "answer": "1"}, "the row has images, but the model"),
    ],
)  # fmt: skip
def test_what_would_be_lost_of_a_prompt_is_refused(row, error):
    with pytest.raises(BadRow, match=error):
        parsed(row)


def test_dapo_s_ability_in_capitals_is_math():
    assert accuracy_function(["a word"], "math_dapo", "MATH") is math_accuracy


def test_null_in_a_list_of_a_column_stays_null():
    assert parsed({"question": "q", "answer": "a", "opts": ["x", None], "deep": {"a": [None], "b": None}}).meta == {
        "opts": ["x", None],
        "deep": {"a": [None]},
    }


CALL = {"name": "search", "arguments": {"query": "Paris"}}
TALK = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
        {"role": "tool", "content": "France"}, {"role": "assistant", "content": "France."}]  # fmt: skip


@pytest.mark.parametrize("whole", [True, False])
def test_json_columns_of_datasets_are_what_was_written(tmp_path, whole):
    """trl#5307: datasets >= 4.8 keeps a column, or each item of a list, as Arrow's type JSON."""
    kind = pa.json_() if whole else pa.list_(pa.json_())
    cells = json.dumps(TALK) if whole else [json.dumps(message) for message in TALK]
    storage = pa.string() if whole else pa.list_(pa.string())
    extra = pa.array([json.dumps({"k": [1, None]})], pa.string()).cast(pa.json_())
    columns = {"messages": pa.array([cells], storage).cast(kind), "extra": extra}
    pq.write_table(pa.table(columns | {"answer": ["1"], "prompt": ["q"]}), tmp_path / "a.parquet")
    [(_, conversation)] = read_conversations(tmp_path / "a.parquet", parse=parse_row)
    assert [message["content"] for message in conversation] == [
        "Who wrote it?", "<search> Paris </search>", "France", "France.",
    ]  # fmt: skip
    assert load_prompts(tmp_path / "a.parquet")[0].meta["extra"] == {"k": [1, None]}


def test_a_json_column_that_holds_no_json_is_one_line(tmp_path):
    column = pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{"]))
    pq.write_table(pa.table({"messages": column}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: row 0: a value that should be JSON is not"):
        list(read_rows(tmp_path / "a.parquet"))


ROWS = [{"question": f'{n} + "1",\nor é?', "answer": str(n + 1), "tools": "python"} for n in range(7)]


@pytest.mark.parametrize("name", ["q.csv", "q.csv.gz", "q.jsonl.gz", "q.json.gz"])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_csv_and_packed_files_are_read_in_parts_too(tmp_path, name, num_parts):
    if ".csv" in name:
        head, *lines = ["\ufeffquestion,answer,tools,level"] + [
            ",".join('"{}"'.format(cell.replace('"', '""')) for cell in row.values()) + "," for row in ROWS
        ]
        text = "\r\n".join([head, *lines])
    else:
        text = json.dumps(ROWS) if ".json." in name else "".join(json.dumps(row) + "\n" for row in ROWS)
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    parts = [list(read_rows(path, part=part, num_parts=num_parts)) for part in range(num_parts)]
    assert [row for part in parts for _, row in part] == ROWS and all(parts)
    assert len({place for part in parts for place, _ in part}) == 7
    assert load_prompts(path)[6].tools == ("python",)


def test_a_csv_cell_may_hold_the_messages_and_be_long(tmp_path):
    long = [{"role": "user", "content": "word " * 40_000}]
    cell = json.dumps(long).replace('"', '""')
    (tmp_path / "a.csv").write_text(f'prompt,answer\n"{cell}",1\n')
    assert load_prompts(tmp_path / "a.csv")[0].messages == long
