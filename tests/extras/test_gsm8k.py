"""GSM8K's solutions as trajectories: every call is really run, and what does not add up is left out and counted."""

import asyncio

import pytest
from helpers.files import write_jsonl

from arpo.config.tools import PythonConfig
from arpo.errors import UserError
from arpo.rewards import score
from arpo.tools.python import PythonTool
from extras.llm_demo import gsm8k

WENG = {
    "question": "Weng earns $12 an hour for babysitting. Yesterday, she just did 50 minutes. How much did she earn?",
    "answer": "Weng earns 12/60 = $<<12/60=0.2>>0.2 per minute.\n"
    "In 50 minutes, she earned 0.2 x 50 = $<<0.2*50=10>>10.\n#### 10",
}
TOTAL = {
    "question": "How many?",
    "answer": "First the eggs.\nThere are <<3+4=7>>7 eggs and 10% of 50 = <<50*10%=5>>5 hens\n"
    "So 7 - 5 eggs = <<7-5=2>>2 eggs.\nThat is all.\n#### 2",
}
WRONG = {
    "no annotated line": {"question": "?", "answer": "It is 2 + 2 = 4.\n#### 4"},
    "not plain arithmetic": {"question": "?", "answer": "So <<x=4>>4.\n#### 4"},
    "a result is not the annotation's": {"question": "?", "answer": "So 2+2 = <<2+2=5>>5.\n#### 5"},
    "a call fails": {"question": "?", "answer": "So 4/0 = <<4/0=0>>0.\n#### 0"},
    "the last result is not the answer": {"question": "?", "answer": "So 2+2 = <<2+2=4>>4, twice.\n#### 8"},
    "an annotation without a number": {"question": "?", "answer": "So 2+2 = <<2+2=x>>4.\n#### 4"},
}


@pytest.fixture(scope="module")
def python():
    tool = PythonTool(PythonConfig())
    yield tool
    asyncio.run(tool.aclose())


def test_one_annotated_line_becomes_one_thought_and_one_call_with_the_tools_own_result(python):
    [row], reasons = gsm8k.convert([WENG], python)
    assert not reasons and row["messages"][0] == {"role": "user", "content": WENG["question"]}
    assert row["messages"][1]["content"] == (
        "<think>Weng earns 12/60 per minute.</think><python>print(12/60)</python> <result>\n0.2\n</result>"
        "<think>In 50 minutes, she earned 0.2 x 50.</think><python>print(0.2*50)</python> <result>\n10.0\n</result>"
        "<think>In 50 minutes, she earned 0.2 x 50 = $10.</think><answer>\\boxed{10}</answer>"
    )


def test_a_line_without_annotation_goes_with_the_next_and_several_annotations_are_one_call(python):
    [row], _ = gsm8k.convert([TOTAL], python)
    first, second, last = row["messages"][1]["content"].split("</result>")
    assert first == (
        "<think>First the eggs. There are 3+4 eggs and 10% of 50 hens</think>"
        "<python>print(3+4)\nprint(50*(10/100))</python> <result>\n7\n5.0\n"
    )
    assert second.startswith("<think>So 7 - 5 eggs.</think>")  # "7 - 5 eggs = 2 eggs" has one unit without its value
    assert last == "<think>That is all.</think><answer>\\boxed{2}</answer>"


def test_what_converts_earns_the_full_reward_and_the_others_are_counted_with_their_reasons(python):
    rows, reasons = gsm8k.convert([WENG, TOTAL, *WRONG.values()], python)
    assert reasons == dict.fromkeys(WRONG, 1)
    for row, source in zip(rows, (WENG, TOTAL), strict=True):
        text = row["messages"][1]["content"]
        result = score(text, [gsm8k.final_answer(source)], "gsm8k", tools=("python",), bonus_tools=("python",))
        assert (result.total, result.reason) == (1.1, "")


def test_the_same_seed_gives_the_same_files_and_no_question_is_in_two_of_them(python, tmp_path, monkeypatch):
    three_lines = WENG["answer"].replace("\n####", "\nThat is <<10*1=10>>10.\n####")
    for part, count in {"train": 40, "test": 10}.items():
        rows = [WENG | {"question": f"{part} question {i}?"} for i in range(count)]
        rows += [{"question": f"{part} long question {i}?", "answer": three_lines} for i in range(4)]
        write_jsonl(tmp_path / f"{part}.jsonl", rows)
    monkeypatch.setattr(gsm8k, "NUM_SFT_QUESTIONS", 20)
    monkeypatch.setattr(gsm8k, "NUM_VALID", {"sft": 5, "rl": 5})
    files, reasons = gsm8k.build_data(str(tmp_path), 0, python)
    assert (files, reasons) == gsm8k.build_data(str(tmp_path), 0, python)
    assert files != gsm8k.build_data(str(tmp_path), 1, python)[0]
    assert {name: len(rows) for name, rows in files.items()} == {
        "sft_train": 15, "sft_valid": 5, "rl_train": 15, "rl_valid": 5, "test": 10, "test_long": 4,
    }  # fmt: skip
    rows = [row for part in files.values() for row in part]
    asked = [row["prompt"] if "prompt" in row else row["messages"][0]["content"] for row in rows]
    assert len(asked) == len(set(asked)) == 54
    assert all(row["prompt"].startswith("test q") for row in files["test"])
    assert all(row["prompt"].startswith("test l") and row["num_lines"] == 3 for row in files["test_long"])
    assert files["test"][0] | {"prompt": ""} == {
        "prompt": "", "answer": "10", "data_source": "gsm8k", "tools": ["python"], "num_lines": 2,
    }  # fmt: skip


def test_a_folder_without_gsm8k_or_with_other_rows_is_named(tmp_path):
    with pytest.raises(UserError, match=r"neither train\.jsonl nor train-\*\.parquet"):
        gsm8k.read_questions(str(tmp_path), "train")
    (tmp_path / "train.jsonl").write_text('{"question": "2 + 2?", "answer": "4"}\n')
    with pytest.raises(UserError, match=r"train\.jsonl:1: not a row of GSM8K"):
        gsm8k.read_questions(str(tmp_path), "train")
