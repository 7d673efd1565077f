"""Evaluation with calls in JSON: the answer is the last turn's, no prompt speaks of tags."""

import pytest
from helpers.edits import ROOT
from helpers.eval_records import record, saved
from helpers.eval_sets import write_sets
from helpers.families import SCHEMAS, hermes_codec, llama_codec
from helpers.sample_groups import group

from arpo.config.named import names_of
from arpo.config.sections import ProtocolConfig
from arpo.errors import UserError
from arpo.evals.benchmarks import BENCHMARKS, read_benchmark
from arpo.evals.grading import grade_records, well_formed
from arpo.protocol import form_of
from arpo.tools import make_codec, system_prompt_for
from extras.llama import LlamaCodec

CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "q"}}\n</tool_call>'
LLAMA_CALL, LLAMA_RESULT = '{"name": "f", "parameters": {}}', ('ipython\n\n"\\boxed{5}"assistant\n\n', False)
RESULT = ("\nuser\n<tool_response>\n\\boxed{5}\n</tool_response>\nassistant\n", False)
LAST = ("<think>\\boxed{6}</think>It is \\boxed{4}.", True)


@pytest.mark.parametrize(
    ("protocol", "segments", "prediction", "is_well_formed"),
    [
        ("hermes", [(f"\\boxed{{5}}? {CALL}", True), RESULT, LAST], "4", True),
        ("hermes", [(f"It is \\boxed{{4}}. {CALL}", True), RESULT, ("so it is.", True)], "", False),
        ("hermes", [(f"It is \\boxed{{4}}. {CALL}", True), RESULT], "", False),
        ("hermes", [("<answer>4</answer>", True)], "4", False),
        (LlamaCodec.format, [(LLAMA_CALL, True), LLAMA_RESULT, LAST], "4", True),
        (LlamaCodec.format, [('{"name": ', True), LLAMA_RESULT, LAST], "4", False),
        (LlamaCodec.format, [(LLAMA_CALL, True), LLAMA_RESULT], "", False),
        (LlamaCodec.format, [('{"name": "f", "parameters": {"x": "\\boxed{4}"}}', True)], "", False),
    ],
)
def test_the_answer_is_looked_for_in_the_last_turn_and_a_call_is_none(protocol, segments, prediction, is_well_formed):
    made = record("".join(text for text, _ in segments), segments=segments, protocol=protocol)
    [grade] = grade_records([made], metric="math")
    assert (grade.prediction, grade.correct) == (prediction, float(prediction == "4"))
    assert well_formed(made) is is_well_formed
    [by_reward] = grade_records([made], metric="reward")
    assert by_reward.scores["well_formed"] == is_well_formed


def test_records_keep_their_protocol(tmp_path):
    assert {r.protocol for r in saved(tmp_path, [group()], "a", "qa", protocol="hermes")} == {"hermes"}


def test_a_record_names_no_code(tmp_path):
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nFORM = None\n")
    with pytest.raises(UserError, match=r"its calls are in the form .*theirs\.py:FORM'; pass it as --protocol\.format"):
        saved(tmp_path, [group()], "a", "qa", protocol=f"{tmp_path}/theirs.py:FORM")
    assert not (tmp_path / "ran").exists()


def test_the_prompts_of_benchmarks_speak_of_no_tags(tmp_path):
    write_sets(tmp_path)
    codec = hermes_codec("qwen3")
    for name, benchmark in BENCHMARKS.items():
        in_json, in_tags = (read_benchmark(name, benchmark, tmp_path, form=form) for form in ("hermes", "tags"))
        for asked, old in zip(in_json, in_tags, strict=True):
            system = asked.messages[0]["content"]
            assert "<" not in system and "\\boxed{}" in system and asked.tools == old.tools
            text = codec.tokenizer.decode(codec.render_prompt(asked.messages, asked.tools))
            assert [s.name for s in SCHEMAS if f'"name": "{s.name}"' in text] == sorted(asked.tools)
    assert "tools" not in system_prompt_for("default", (), form="hermes").lower()


def test_each_form_of_calls_is_a_value_of_the_option_and_its_codec_knows_its_name():
    names = names_of("protocol/__init__", "FORMS")
    assert names == ("tags", "hermes", "xml")
    assert all(form_of(name).codec.format == ProtocolConfig(name).format == name for name in names)


def test_a_codec_is_of_the_form_in_the_options_wherever_its_file_lies_and_gets_our_tools():
    option = f"{ROOT}/extras/llama.py:LLAMA"
    made = make_codec(llama_codec().tokenizer, ProtocolConfig(option), ("search", "python"), enable_thinking=False)
    assert made.format == option and form_of(made.format).codec is type(made)
    tokenizer = hermes_codec("qwen3").tokenizer
    made = make_codec(tokenizer, ProtocolConfig("hermes"), ("search", "python"), enable_thinking=True)
    assert made.format == "hermes" and made.schemas["python"].text_argument == "code" and made.enable_thinking
    made = make_codec(tokenizer, ProtocolConfig(), ("search", "mine"), enable_thinking=False)
    assert made.tools == ("search", "mine")
