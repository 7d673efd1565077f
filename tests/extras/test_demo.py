"""The offline demo: an honest world, a mediocre demonstrator, files that depend on the seed alone."""

import asyncio
import json
import random

import pytest
from helpers.python_tools import run

from arpo.config.tools import PythonConfig, SearchConfig
from arpo.errors import UserError
from arpo.rewards import score
from arpo.tools.python import PythonTool
from arpo.tools.search import SearchTool
from extras.demo import build as demo
from extras.demo import report as demo_report
from extras.demo.world import Demonstrator, World, evaluate, python_result


@pytest.fixture(scope="module")
def world() -> World:
    return World(0)


@pytest.fixture(scope="module")
def demonstrator(corpus) -> Demonstrator:
    return demo.searching_demonstrator(corpus)


def ask(tool, arguments: list[str]) -> list[str]:
    """The tool's texts, in order."""
    results = run(tool, *arguments)
    asyncio.run(tool.aclose())
    return [result.text for result in results]


def test_every_fact_is_found_by_its_own_query_and_only_by_search(world, corpus):
    facts = random.Random(1).sample(sorted(world.facts.items()), 200)
    tool = SearchTool(SearchConfig(backend="local", corpus=str(corpus), top_k=1, mode="live"))
    found = ask(tool, [f"{attribute} of {entity}" for (attribute, entity), _ in facts])
    assert found == [f"Page 1: {attribute} of {entity} is {value}" for (attribute, entity), value in facts]


def test_held_out_entities_never_occur_in_training_files(world):
    rng, test_names = random.Random(2), set(world.entities["test"])
    assert len(test_names) == 80 and not test_names & set(world.entities["train"])
    for _ in range(500):
        question = world.question(rng, "train")
        assert not {question.entity, world.facts.get(("owner", question.entity))} & test_names


def test_answers_are_what_the_facts_say(world):
    rng = random.Random(3)
    for _ in range(200):
        q = world.question(rng, "test")
        if q.family == "calc":
            assert q.answer == str(eval(q.expression))
        else:
            entity = world.facts["owner", q.entity] if q.family in ("hop", "long") else q.entity
            value = int(world.facts[q.attribute, entity])
            assert q.answer == str(q.factor * value if q.factor else value)


def test_the_demonstrators_python_is_the_tools_python():
    """Its results are worked out without a sandbox; they must be the bytes that the policy will read."""
    codes = ["print(39*58+77)", "print(12*34)", "print(3-99)", "print(age)"]
    assert ask(PythonTool(PythonConfig()), codes) == [python_result(code) for code in codes]


def test_arithmetic_and_nothing_else_is_evaluated():
    assert evaluate("39*58+77") == 2339
    for text in ("__import__('os')", "2**9", "1/2", "'a'*3"):
        with pytest.raises(TypeError):
            evaluate(text)


def test_the_demonstrator_is_mediocre(world, demonstrator):
    """It is right in about a third of all cases: enough to imitate, and RL has something to find."""
    rng = random.Random(4)
    results = []
    for _ in range(1500):
        question = world.question(rng, "train")
        results.append(score(demonstrator.trajectory(question, rng), [question.answer], "demo"))
    accuracy = sum(r.parts.get("accuracy", 0.0) for r in results) / len(results)
    well_formed = sum(r.total >= 0 for r in results) / len(results)
    assert 0.25 < accuracy < 0.42 and 0.85 < well_formed < 0.97


def test_the_same_seed_gives_the_same_data_and_no_test_question_is_trained_on(world, demonstrator, monkeypatch):
    monkeypatch.setattr(demo, "NUM_TRACES", {"sft_train": 1000, "sft_valid": 100})
    files = demo.build_data(world, demonstrator, 0)
    assert files == demo.build_data(World(0), demonstrator, 0) != demo.build_data(world, demonstrator, 1)
    trained = {row["messages"][0]["content"] for name in ("sft_train", "sft_valid") for row in files[name]}
    trained |= {row["prompt"] for row in files["rl_train"]}
    asked = [row["prompt"] for name in ("rl_valid", "test") for row in files[name]]
    assert not trained & set(asked) and len(asked) == len(set(asked)) == 500


def test_a_number_has_the_same_tokens_wherever_it_stands_and_tags_are_one_token(world, demonstrator):
    tokenizer = demo.build_tokenizer(world, demonstrator, 0)
    inside = tokenizer("print(17*482)", add_special_tokens=False)["input_ids"]
    alone = tokenizer("482", add_special_tokens=False)["input_ids"]
    assert inside[-1 - len(alone) : -1] == alone
    for text in ("<python>", "</search>", "<result>", "\\boxed{", "<|im_end|>"):
        assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) == 1
    text = "what is 37 times the height of the owner of Silver Otter? <think>ü</think>"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_the_report_shows_before_and_after_and_names_what_is_missing(tmp_path):
    with pytest.raises(UserError, match=r"demo_eval_sft/scores\.json: no such file; run `make demo`"):
        demo_report.report([tmp_path])
    for (folder, questions), accuracy in zip(demo_report.DEMO.evaluations.values(), (0.3, 0.9, 0.0), strict=True):
        scores = tmp_path / folder / "scores.json"
        scores.parent.mkdir(exist_ok=True)
        row = {"accuracy": accuracy, "accuracy_low": accuracy, "accuracy_high": accuracy, "tool_calls": 1.5}
        others = json.loads(scores.read_text()) if scores.exists() else {}
        scores.write_text(json.dumps(others | {questions: row}))
    text = demo_report.report([tmp_path])
    assert "| after RL | 0.900 [0.900, 0.900] | 1.50 |" in text
    assert "| after RL, tools muted | 0.000 [0.000, 0.000] | 1.50 |" in text
    for name in ("demo_eval_arpo", "demo_arpo"):
        assert f"\npython -m extras.viewer {tmp_path / name} " in text
    assert f"{tmp_path / 'demo_eval_arpo' / 'report.md'}\n" in text and f"\ntensorboard --logdir {tmp_path}" in text
