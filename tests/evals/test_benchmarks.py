"""The table of benchmarks: published files and small ones of the same schemas; what is wrong with a file is named."""

import json
from pathlib import Path

import pytest
from helpers.edits import ROOT
from helpers.eval_sets import write_sets
from helpers.families import codec_of
from helpers.files import write_jsonl

from arpo.config.evals import EvalSection
from arpo.config.sections import ProtocolConfig
from arpo.errors import UserError
from arpo.evals.benchmarks import BENCHMARKS, Benchmark, read_benchmark, select
from arpo.evals.prompts import PROMPTS, is_chinese, with_benchmark_prompt
from arpo.evals.question_sets import load_sets
from arpo.protocol.tags import PAPER_TOOLS, reserved_tags
from arpo.rewards.math_answer import math_accuracy
from arpo.tools import make_codec, schema_of_tool, system_prompt_for
from arpo.trajectory import Prompt

PUBLISHED_SETS = ROOT.parent / "shared/data/eval"
ROWS = {
    "2wiki": 200, "SimpleQA": 500, "aime24": 30, "aime25": 30, "bamboogle": 125, "gaia": 103, "gsm8k": 1319, "hle": 500,
    "hotpotqa": 200, "math500": 500, "webwalker": 200, "xbench": 100,
}  # fmt: skip


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return write_sets(tmp_path_factory.mktemp("sets"))


@pytest.mark.parametrize("name", ROWS)
def test_every_published_file_loads_whole(name):
    if not PUBLISHED_SETS.is_dir():
        pytest.skip("the published evaluation files are not beside this checkout")
    prompts = read_benchmark(name, BENCHMARKS[name], PUBLISHED_SETS)
    assert len(prompts) == ROWS[name] and len({p.prompt_id for p in prompts}) == ROWS[name]
    for prompt in prompts:
        assert [m["role"] for m in prompt.messages] == ["system", "user"]
        assert prompt.messages[0]["content"] in {text for text, _ in PROMPTS.values()}
        assert prompt.answers and all(answer.strip() and "####" not in answer for answer in prompt.answers)
    if BENCHMARKS[name].grader == "math":
        assert all(math_accuracy(p.answers[0], p.answers) == 1.0 for p in prompts[:20])
    if BENCHMARKS[name].split:
        assert len({p.meta["split"] for p in prompts}) > 2


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_gives_questions_answers_and_splits(name, data_dir):
    prompts = read_benchmark(name, BENCHMARKS[name], data_dir)
    answers = {"math": ["1"], "qa": ["Ann Lee 0", "A. Lee 0"], "deepsearch": ["Ann Lee"]}[BENCHMARKS[name].family]
    answers = {"aime25": ["7"], "gaia": ["1"], "hle": ["D"], "xbench": ["5月1日"]}.get(name, answers)
    assert prompts[0].answers == answers
    assert prompts[0].meta == {"split": {"math": "Level 2", "gaia": "level 2", "hle": "Math"}.get(name, "")}
    assert [p.prompt_id for p in prompts] == [f"{name}-000000", f"{name}-000001"]
    assert prompts[0].data_source == name and set(prompts[0].tools) == {"python", "search"}
    assert len(read_benchmark(name, BENCHMARKS[name], data_dir, max_questions=1)) == 1


def test_chinese_questions_are_asked_in_chinese_and_others_as_in_training(data_dir, tmp_path):
    def asked(name: str, folder: Path) -> list[str]:
        return [prompt.messages[0]["content"] for prompt in read_benchmark(name, BENCHMARKS[name], folder)]

    (tmp_path / "webwalker").mkdir()
    questions = ("谁主持了会议", "Who was 主持人 of the meeting?")
    write_jsonl(tmp_path / "webwalker/test.jsonl", [{"question": q, "answer": "a"} for q in questions])
    chinese, english = asked("webwalker", tmp_path)
    assert is_chinese(chinese) and english == system_prompt_for("default", PAPER_TOOLS)
    assert asked("xbench", data_dir)[0] == chinese and asked("gaia", data_dir)[0] == english


@pytest.mark.parametrize("kind", PROMPTS)
def test_a_prompt_speaks_of_exactly_the_tools_that_it_offers(kind):
    text, tools = PROMPTS[kind]
    for tag in reserved_tags(PAPER_TOOLS):
        offered = tag in ("think", "answer") or tag in tools or (tag == "result" and tools)
        assert (f"<{tag}>" in text and f"</{tag}>" in text) == bool(offered), tag
    assert "\\boxed{" in text and not any(ord(c) < 32 and c != "\n" for c in text)
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "q"}]
    asked = with_benchmark_prompt(Prompt("p", messages, ["a"]), kind)
    assert asked.tools == tools and [m["content"] for m in asked.messages] == [text, "q"]


def test_names_families_and_all_choose_benchmarks(data_dir):
    assert list(select(("all",), data_dir)[0]) == list(BENCHMARKS)
    assert list(select(("math",), data_dir)[0]) == ["aime24", "aime25", "math500", "gsm8k", "math"]
    assert list(select(("MATH",), data_dir)[0]) == ["math"]
    assert list(select(("gaia", "gsm8k"), data_dir)[0]) == ["gsm8k", "gaia"]
    assert select((), data_dir) == ({}, [])
    assert len(BENCHMARKS) == 14 and {b.family for b in BENCHMARKS.values()} == {"math", "qa", "deepsearch"}


def test_a_family_leaves_out_absent_sets_and_says_so_but_a_named_one_must_be_there(tmp_path):
    write_sets(tmp_path)
    (tmp_path / "musique" / "test.jsonl").unlink()
    chosen, absent = select(("qa",), tmp_path)
    assert absent == ["musique"] and "musique" not in chosen and "2wiki" in chosen
    with pytest.raises(UserError, match=r"musique needs .*musique/test\.jsonl, which is not there"):
        select(("qa", "musique"), tmp_path)
    with pytest.raises(UserError, match=r"nowhere has none of aime24.*set eval\.data_dir"):
        select(("all",), tmp_path / "nowhere")


@pytest.mark.parametrize(
    "word, meant", [("gaai", "gaia"), ("simpleqa", "SimpleQA"), ("deep_search", "deepsearch"), ("AIME24", "aime24")]
)
def test_an_unknown_benchmark_is_an_error_that_suggests_the_right_one(word, meant, data_dir):
    with pytest.raises(UserError, match=f"unknown benchmark '{word}'; did you mean '{meant}'?"):
        select(("gaia", word), data_dir)


GOOD = {"2wiki": '{"question": "q", "answer": "a"}', "math": r'{"problem": "p", "solution": "\\boxed{3}", "level": ""}'}


@pytest.mark.parametrize(
    "name, line, words",
    [
        ("2wiki", '{"question": "q"}', "has no answer"),
        ("2wiki", '{"answer": "a"}', "has no question"),
        ("2wiki", '{"question": "q", "answer": ""}', "answer is blank"),
        ("2wiki", '{"question": 3, "answer": "a"}', "the question must be text"),
        ("2wiki", '{"question": "q", "ans', "not valid JSON"),
        ("2wiki", "[]", "must be a JSON object"),
        ("math", GOOD["math"].replace("3}", "3"), "answer"),
    ],
)
def test_one_bad_row_of_a_published_set_is_an_error_with_file_line_and_field(name, line, words, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "test.jsonl").write_text("\n".join([GOOD[name]] * 200 + [line, GOOD[name]]))
    with pytest.raises(UserError, match=rf"{name}/test\.jsonl:201: .*{words}"):
        read_benchmark(name, BENCHMARKS[name], tmp_path)


def test_a_benchmark_is_added_by_one_entry(tmp_path):
    entry = Benchmark("qa", grader="qa", prompt="search", question="q", answer="gold", split="year")
    (tmp_path / "mine").mkdir()
    row = {"q": "Who?", "gold": ["Ann", "A."], "year": 2024, "question": "other"}
    (tmp_path / "mine" / "test.jsonl").write_text(json.dumps(row))
    [prompt] = read_benchmark("mine", entry, tmp_path)
    assert prompt.messages[-1]["content"] == "Who?" and prompt.answers == ["Ann", "A."]
    assert prompt.meta == {"split": "year 2024"} and prompt.tools == ("search",)


def test_a_file_of_several_sources_is_reported_by_source(tmp_path, caplog):
    rows = [{"question": "q?", "answer": "a", "data_source": source} for source in ("nq", "popqa", "nq")]
    mixed, plain = write_jsonl(tmp_path / "mixed.jsonl", rows), write_jsonl(tmp_path / "plain.jsonl", rows[:1])
    cfg = EvalSection(files=(str(mixed), str(plain)))
    sets, _ = load_sets(cfg, codec_of("qwen2_5"), {})
    assert not caplog.records
    assert [[prompt.meta for prompt in one.prompts] for one in sets] == [
        [{"split": "nq"}, {"split": "popqa"}, {"split": "nq"}], [{}],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "form", "setting", "is_told"),
    [
        ("qwen2_5", "tags", "keep", True),
        ("qwen2_5", "tags", "search", True),
        ("qwen2_5", "tags", "math", False),
        ("qwen2_5", "tags", "default", False),
        ("qwen3", "hermes", "keep", False),  # the template lists the loaded tools
    ],
)
def test_a_tool_that_is_explained_but_not_loaded_is_told(data_dir, caplog, family, form, setting, is_told):
    cfg = EvalSection(benchmarks=("gsm8k",), data_dir=str(data_dir), system_prompt=setting)
    codec = make_codec(codec_of(family).tokenizer, ProtocolConfig(format=form), ["python"], enable_thinking=False)
    load_sets(cfg, codec, {"python": schema_of_tool("python")})
    told = "the system prompts explain search, and tools.names lacks it; load it, or set eval.system_prompt"
    assert [record.getMessage().startswith(told) for record in caplog.records] == [True] * is_told
