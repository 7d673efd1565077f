"""Records and the claim on a run folder: what survives kill -9, what counts as damage, what may be continued."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.eval_records import saved
from helpers.forked import fork
from helpers.scripted_rollout import ANSWER, CALL, call_then_answer, play, prompt

from arpo.config.evals import EvalSection
from arpo.config.sections import ModelConfig
from arpo.config.tools import SearchConfig, ToolsConfig
from arpo.errors import UserError
from arpo.evals.records import Record, SetDump, read_records
from arpo.evals.resume import claim_run, model_identity, read_settings, unfinished, what_decides
from arpo.options import RolloutConfig
from arpo.trajectory import Group, ToolCall

[GROUP] = play(call_then_answer)
SETS = {"tools": ("search", "python"), "protocol": "tags"}


def question(number: int) -> Group:
    """A finished group of a question of its own."""
    name = f"gaia-{number:06d}"
    trajectories = [replace(t, prompt_id=name) for t in GROUP.trajectories]
    return Group(replace(GROUP.prompt, prompt_id=name, meta={"split": "level 1"}), trajectories)


def save(run: Path, *numbers: int) -> list[Record]:
    return saved(run, [question(number) for number in numbers], "gaia", "qa")


def samples_of(records: list[Record]) -> list[tuple[int, int]]:
    return [(int(r.question_id[-6:]), r.sample) for r in records]


def test_a_record_holds_what_grading_and_reports_need(tmp_path):
    record = save(tmp_path, 7)[3]
    assert (record.benchmark, record.question_id, record.sample, record.metric) == ("gaia", "gaia-000007", 3, "qa")
    assert record.text == CALL + " <result>\nfound\n</result>" + ANSWER and record.wall_s == 3.5
    assert record.segments == [(CALL, True), (" <result>\nfound\n</result>", False), (ANSWER, True)]
    assert record.num_tokens > record.num_sampled_tokens > 0 and record.stop_reason == "eos"
    assert (record.question, record.answers, record.split) == ("question", ["1"], "level 1")
    assert record.tools == ("search", "python") and record.protocol == "tags"
    [call] = record.tool_calls
    assert isinstance(call, ToolCall) and (call.tag, call.argument, call.result, call.ok) == (
        "search",
        "q",
        "found",
        True,
    )


def test_records_come_back_in_order_from_the_files_of_all_processes(tmp_path):
    for numbers in [(1,), (2, 0)]:
        save(tmp_path, *numbers)
    assert samples_of(read_records(tmp_path)) == [(q, sample) for q in (0, 1, 2) for sample in range(4)]
    names = sorted(path.name for path in (tmp_path / "trajectories").iterdir())
    assert names == ["gaia.0.jsonl", "gaia.1.jsonl"]


@pytest.mark.parametrize("num_bytes", [0, 1, 100, 1000])
def test_half_a_line_of_a_killed_run_is_passed_over_and_its_file_left_alone(tmp_path, num_bytes):
    save(tmp_path, 0)
    path = tmp_path / "trajectories" / "gaia.0.jsonl"
    torn = path.read_bytes() + path.read_bytes()[:num_bytes]
    path.write_bytes(torn)
    assert samples_of(read_records(tmp_path)) == [(0, sample) for sample in range(4)]
    assert samples_of(save(tmp_path, 1))[4:] == [(1, sample) for sample in range(4)]
    assert path.read_bytes() == torn


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda line: "{half", "not a trajectory \\(JSONDecodeError"),
        (lambda line: "[1]", "not a trajectory \\("),
        (lambda line: line.replace('"loss_mask": [', '"loss_mask": [1, '), "not a trajectory \\(AssertionError"),
        (lambda line: line.replace('"answers"', '"anwsers"'), "no trajectory of an evaluation \\('answers' is missing"),
    ],
)
def test_other_damage_is_an_error_with_file_and_line(tmp_path, damage, words):
    save(tmp_path, 0)
    path = tmp_path / "trajectories" / "gaia.0.jsonl"
    first, rest = path.read_text().split("\n", 1)
    path.write_text(damage(first) + "\n" + rest)
    with pytest.raises(UserError, match=rf"gaia\.0\.jsonl:1: {words}"):
        read_records(tmp_path)


def test_a_trajectory_that_was_saved_twice_counts_once(tmp_path):
    save(tmp_path, 0)
    path = tmp_path / "trajectories" / "gaia.0.jsonl"
    path.write_text(path.read_text().replace('"question": "question"', '"question": "first"'))
    assert [r.question for r in save(tmp_path, 0)] == ["first"] * 4


def test_a_writer_killed_at_any_moment_leaves_whole_trajectories(tmp_path):
    """Real kill -9, ten times; each writer goes on where the last one was killed."""

    def write_for_ever() -> None:
        dump, number = SetDump(tmp_path, "gaia", metric="qa", **SETS), len(read_records(tmp_path)) // 4
        while True:
            dump.add(question(number), [0.0] * 4)
            number += 1

    before = 0
    for _ in range(10):
        writer = fork.Process(target=write_for_ever)
        writer.start()
        deadline = time.monotonic() + 60
        while (num := len(read_records(tmp_path))) <= before:
            assert writer.is_alive() and time.monotonic() < deadline
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        before = num
        found = samples_of(read_records(tmp_path))
        assert found == [(i, sample) for i in range(-(-len(found) // 4)) for sample in range(4)][: len(found)]


# ---- the claim on a folder


def settings(folder, **changes) -> dict:
    cfg = replace(EvalSection(files=("x.jsonl",)), **changes.pop("eval", {}))
    rollout = replace(RolloutConfig(), **changes.pop("rollout", {}))
    tools = ToolsConfig(search=SearchConfig(**changes.pop("search", {})))
    return what_decides(changes.pop("seed", 0), cfg, ModelConfig(path=str(folder)), rollout, tools)


def test_a_run_is_continued_under_the_same_settings_with_more_questions(tmp_path):
    claim_run(tmp_path, settings(tmp_path), resume=True)
    save(tmp_path, 0)
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
    save(tmp_path, 0)
    with pytest.raises(UserError, match=f"was begun with {words}; choose another run.name"):
        claim_run(tmp_path, settings(tmp_path, **changes), resume=True)


def test_a_folder_without_a_record_may_be_begun_anew(tmp_path):
    claim_run(tmp_path, settings(tmp_path), resume=True)
    claim_run(tmp_path, settings(tmp_path, seed=5), resume=False)
    assert read_settings(tmp_path)["seed"] == 5


def test_a_folder_of_an_earlier_version_and_one_of_a_training_are_refused_in_one_line(tmp_path):
    (tmp_path / "old" / "records").mkdir(parents=True)
    for use in (
        lambda: claim_run(tmp_path / "old", settings(tmp_path), resume=True),
        lambda: read_settings(tmp_path / "old"),
    ):
        with pytest.raises(UserError, match=r"old/records is of an earlier version, .*; choose another run\.name$"):
            use()
    (tmp_path / "rl" / "trajectories").mkdir(parents=True)
    (tmp_path / "rl" / "trajectories" / "step_000100.jsonl.gz").touch()
    with pytest.raises(UserError, match=r"is .*/rl the folder of an evaluation\?"):
        claim_run(tmp_path / "rl", settings(tmp_path), resume=True)


def test_resume_false_refuses_a_folder_with_records(tmp_path):
    claim_run(tmp_path, settings(tmp_path), resume=True)
    save(tmp_path, 0)
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


def test_only_questions_without_all_their_samples_are_asked_again(tmp_path):
    asked = [replace(prompt(), prompt_id=f"gaia-{i:06d}") for i in range(4)]
    records = save(tmp_path, 0, 1, 2)
    others = [replace(r, benchmark="other", question="?") for r in records[4:8]]
    records = [*records[:4], *others, *records[8:11]]  # killed between two lines
    assert [p.prompt_id[-1] for p in unfinished("gaia", asked, 4, records)] == ["1", "2", "3"]


def test_a_test_set_that_has_changed_is_refused(tmp_path):
    changed = replace(prompt(), prompt_id="gaia-000000", answers=["2"])
    with pytest.raises(UserError, match="gaia has changed: gaia-000000 is another question"):
        unfinished("gaia", [changed], 4, save(tmp_path, 0))
