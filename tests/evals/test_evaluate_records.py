"""Records and the claim on a run folder: what survives kill -9, what counts as damage, what may be continued."""

import json
import os
import signal
import time
from dataclasses import replace

import pytest
from helpers.forked import fork
from helpers.scripted_rollout import ANSWER, CALL, call_then_answer, play, prompt

from arpo.config.evals import EvalSection
from arpo.config.sections import ModelConfig
from arpo.config.tools import SearchConfig, ToolsConfig
from arpo.errors import UserError
from arpo.evals.records import Record, append_records, group_records, read_records
from arpo.evals.resume import claim_run, model_identity, read_settings, unfinished, what_decides
from arpo.options import RolloutConfig

[GROUP] = play(call_then_answer)
RECORDS = group_records(GROUP, "gaia", "qa", [1.0, 2.0, 3.0, 4.00049])


def question(number: int) -> list[Record]:
    return [replace(record, question_id=f"gaia-{number:06d}") for record in RECORDS]


def test_a_record_holds_what_grading_and_reports_need():
    record = RECORDS[3]
    assert (record.benchmark, record.question_id, record.sample, record.metric) == ("gaia", "p0", 3, "qa")
    assert record.text == CALL + " <result>\nfound\n</result>" + ANSWER and record.wall_s == 4.0
    assert record.segments == [[CALL, True], [" <result>\nfound\n</result>", False], [ANSWER, True]]
    assert record.num_tokens > record.num_sampled_tokens > 0 and record.stop_reason == "eos"
    [call] = record.tool_calls
    assert {"tag": "search", "argument": "q", "result": "found", "ok": True}.items() <= call.items()
    assert {"seconds", "error_kind", "cached"} <= set(call)


def test_records_come_back_as_they_were_in_order_from_all_files_of_a_folder(tmp_path):
    append_records(tmp_path / "gaia.rank1.jsonl", question(1))
    append_records(tmp_path / "gaia.jsonl", question(2))
    append_records(tmp_path / "gaia.jsonl", question(0))
    (tmp_path / "settings.json").write_text("{}")
    assert read_records(tmp_path) == question(0) + question(1) + question(2)
    assert read_records(tmp_path / "gaia.jsonl") == question(0) + question(2)


@pytest.mark.parametrize("num_bytes", [0, 1, 100, 70_000])
def test_half_a_line_of_a_killed_run_is_dropped_and_then_overwritten(tmp_path, num_bytes):
    path = tmp_path / "gaia.jsonl"
    append_records(path, question(0))
    whole = path.read_bytes()
    path.write_bytes(whole + (b'{"text": "' + b"x" * 100_000)[:num_bytes])
    assert read_records(path) == question(0)
    append_records(path, question(1))
    assert path.read_bytes().startswith(whole) and read_records(path) == question(0) + question(1)


def test_a_file_of_nothing_but_half_a_line_is_begun_anew(tmp_path):
    path = tmp_path / "gaia.jsonl"
    path.write_bytes(b'{"benchm')
    assert read_records(path) == []
    append_records(path, question(0))
    assert read_records(path) == question(0)


@pytest.mark.parametrize(
    "line, words",
    [
        ("{half", "not valid JSON"),
        ("[1]", "must be a JSON object"),
        (json.dumps(vars(RECORDS[0]) | {"wall_s": None}), "field 'wall_s' is missing or of the wrong kind"),
        (json.dumps({k: v for k, v in vars(RECORDS[0]).items() if k != "answers"}), "field 'answers' is missing"),
    ],
)
def test_other_damage_is_an_error_with_file_and_line(tmp_path, line, words):
    path = tmp_path / "gaia.jsonl"
    append_records(path, question(0))
    path.write_text(line + "\n" + path.read_text())
    with pytest.raises(UserError, match=rf"gaia\.jsonl:1: {words}"):
        read_records(tmp_path)


def test_a_trajectory_that_was_saved_twice_counts_once(tmp_path):
    append_records(tmp_path / "gaia.jsonl", [replace(r, text="first") for r in question(0)])
    append_records(tmp_path / "gaia.rank1.jsonl", question(0))
    assert [r.text for r in read_records(tmp_path)] == ["first"] * 4


def test_a_writer_killed_at_any_moment_leaves_whole_groups(tmp_path):
    """Real kill -9, ten times; each writer goes on where the last one was killed."""

    def write_for_ever() -> None:
        number = len(read_records(path)) // 4 if path.exists() else 0
        while True:
            append_records(path, question(number))
            number += 1

    path, before = tmp_path / "gaia.jsonl", 0
    for _ in range(10):
        writer = fork.Process(target=write_for_ever)
        writer.start()
        deadline = time.monotonic() + 60
        while (num := len(read_records(path)) if path.exists() else 0) <= before:
            assert writer.is_alive() and time.monotonic() < deadline
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        before = num
        found = read_records(path)
        assert found == [r for i in range(-(-len(found) // 4)) for r in question(i)][: len(found)]


# ---- the claim on a folder


def settings(folder, **changes) -> dict:
    cfg = replace(EvalSection(files=("x.jsonl",)), **changes.pop("eval", {}))
    rollout = replace(RolloutConfig(), **changes.pop("rollout", {}))
    tools = ToolsConfig(search=SearchConfig(**changes.pop("search", {})))
    return what_decides(changes.pop("seed", 0), cfg, ModelConfig(path=str(folder)), rollout, tools)


def test_a_run_is_continued_under_the_same_settings_with_more_questions(tmp_path):
    claim_run(tmp_path, settings(tmp_path), resume=True)
    append_records(tmp_path / "records" / "gaia.jsonl", question(0))
    claim_run(tmp_path, settings(tmp_path, eval={"max_questions": 9, "benchmarks": ("gaia",)}), resume=True)
    assert read_settings(tmp_path)["num_samples"] == 1


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"rollout": {"temperature": 0.5}}, r"rollout\.temperature=1\.0, and now it is 0\.5"),
        ({"eval": {"num_samples": 3}}, "num_samples=1, and now it is 3"),
        ({"seed": 5}, "seed=0, and now it is 5"),
        ({"search": {"location": "cn"}}, r"tools\.search\.location=, and now it is cn"),
        ({"search": {"summarizer_model": "small"}}, r"tools\.search\.summarizer_model=, and now it is small"),
    ],
)
def test_other_settings_are_refused_with_their_name(tmp_path, changes, words):
    claim_run(tmp_path, settings(tmp_path), resume=True)
    claim_run(tmp_path, settings(tmp_path), resume=True)
    append_records(tmp_path / "records" / "gaia.jsonl", question(0))
    with pytest.raises(UserError, match=f"was begun with {words}; choose another run.name"):
        claim_run(tmp_path, settings(tmp_path, **changes), resume=True)


def test_a_folder_without_a_record_may_be_begun_anew(tmp_path):
    claim_run(tmp_path, settings(tmp_path), resume=True)
    claim_run(tmp_path, settings(tmp_path, seed=5), resume=False)
    assert read_settings(tmp_path)["seed"] == 5


def test_resume_false_refuses_a_folder_with_records(tmp_path):
    claim_run(tmp_path, settings(tmp_path), resume=True)
    append_records(tmp_path / "records" / "gaia.jsonl", question(0))
    with pytest.raises(UserError, match="holds an evaluation; choose another"):
        claim_run(tmp_path, settings(tmp_path), resume=False)


def test_other_weights_in_the_same_folder_are_another_model_and_a_copy_is_not(tmp_path):
    weights = bytearray(os.urandom(20_000_000))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(weights)
    digest = model_identity(str(tmp_path / "a")).split()[1]
    assert model_identity(str(tmp_path / "b")).split()[1] == digest
    for place in (10, len(weights) // 2, len(weights) - 1):  # training changes weights all over the file
        for i in range(max(0, place - 400_000), min(len(weights), place + 400_000), 1000):
            weights[i] ^= 1
        (tmp_path / "b" / "model.safetensors").write_bytes(weights)
        assert model_identity(str(tmp_path / "b")).split()[1] != digest
    assert model_identity("Qwen/Qwen2.5-7B-Instruct") == "Qwen/Qwen2.5-7B-Instruct"


def test_only_questions_without_all_their_samples_are_asked_again():
    asked = [replace(prompt(), prompt_id=f"gaia-{i:06d}") for i in range(4)]
    others = [replace(r, benchmark="other", question="?") for r in question(1)]
    records = [*question(0), *others, *question(2)[:3]]  # killed between two lines
    assert [p.prompt_id[-1] for p in unfinished("gaia", asked, 4, records)] == ["1", "2", "3"]


def test_a_test_set_that_has_changed_is_refused():
    changed = replace(prompt(), prompt_id="gaia-000000", answers=["2"])
    with pytest.raises(UserError, match="gaia has changed: gaia-000000 is another question"):
        unfinished("gaia", [changed], 4, question(0))
