"""Records and the claim on a run folder: what survives kill -9, what counts as damage, what may be continued."""

import json
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.eval_records import saved
from helpers.forked import fork
from helpers.scripted_rollout import ANSWER, CALL, call_then_answer, play, prompt

from arpo.config import contents
from arpo.config.contents import NOT_RECORDED
from arpo.errors import UserError
from arpo.evals.records import Record, SetDump, read_records
from arpo.evals.resume import about_run, claim_run, record_session, unfinished
from arpo.log.settings import settings_of
from arpo.start.load import load_config
from arpo.trajectory import Group, StopReason
from evaluate import EvalConfig

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
    t = record.trajectory
    assert t.text == CALL + " <result>\nfound\n</result>" + ANSWER and record.wall_s == 3.5
    assert t.segments == [(CALL, True), (" <result>\nfound\n</result>", False), (ANSWER, True)]
    assert len(t.token_ids) > t.num_sampled_tokens > 0 and t.stop_reason == "eos"
    assert (record.question, record.prompt.answers, record.split) == ("question", ["1"], "level 1")
    assert record.tools == ("search", "python") and record.protocol == "tags"
    [call] = t.tool_calls
    assert (call.tag, call.argument, call.result, call.ok) == ("search", "q", "found", True)


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
        (lambda line: line.replace('"answers": [', '"answers": [1, '), "no trajectory of an evaluation \\(answers is"),
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
    path.write_text(path.read_text().replace('"content": "question"', '"content": "first"'))
    assert [r.question for r in save(tmp_path, 0)] == ["first"] * 4


def test_a_writer_killed_at_any_moment_leaves_whole_trajectories(tmp_path):
    """Real kill -9, five times; each writer goes on where the last one was killed."""

    def write_for_ever() -> None:
        dump, number = SetDump(tmp_path, "gaia", metric="qa", **SETS), len(read_records(tmp_path)) // 4
        while True:
            dump.add(question(number), [0.0] * 4)
            number += 1

    before = 0
    for _ in range(5):
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


def config(folder: Path, *flags: str) -> EvalConfig:
    return load_config(EvalConfig, ["--model.path", str(folder), "--eval.files", "x.jsonl", *flags])


def begin(folder: Path, served: str = "") -> None:
    claim_run(folder, config(folder), served)
    save(folder, 0)


def test_a_run_is_continued_under_the_same_settings_with_more_questions_and_another_judge(tmp_path):
    begin(tmp_path)
    more = "--eval.max_questions", "9", "--eval.benchmarks", "gaia", "--judge.url", "http://host", "--judge.model", "m"
    claim_run(tmp_path, config(tmp_path, *more, "--rollout.dispatch", "pull", "--engine.max_num_seqs", "2"))
    settings = settings_of(tmp_path)
    assert settings["eval.num_samples"] == 1 and settings["judge.model"] == "m"  # for eval.regrade
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--rollout.temperature", "0.5"], r"rollout\.temperature=0\.6, and now it is 0\.5"),
        (["--eval.num_samples", "3"], r"eval\.num_samples=1, and now it is 3"),
        (["--run.seed", "5"], r"run\.seed=0, and now it is 5"),
        (["--engine.quantization", "fp8"], r"engine\.quantization=none, and now it is fp8"),
        (["--engine.dtype", "float32"], r"engine\.dtype=bfloat16, and now it is float32"),
        (["--protocol.format", "hermes"], r"protocol\.format=tags, and now it is hermes"),
        (["--tools.names", "python"], r"tools\.names=\['python', 'search'\], and now it is \['python'\]"),
        (["--model.enable_thinking", "True"], r"model\.enable_thinking=False, and now it is True"),
    ],
)
def test_other_settings_are_refused_with_their_name(tmp_path, flags, words):
    claim_run(tmp_path, config(tmp_path))
    begin(tmp_path)
    before = (tmp_path / "config.yaml").read_bytes()
    with pytest.raises(UserError, match=f"was begun with {words}; choose another run.name"):
        claim_run(tmp_path, config(tmp_path, *flags))
    assert (tmp_path / "config.yaml").read_bytes() == before


def test_another_model_of_the_server_is_refused(tmp_path):
    begin(tmp_path, "policy (step_000100)")
    claim_run(tmp_path, config(tmp_path), "policy (step_000100)")
    with pytest.raises(UserError, match=r"model\.path=policy \(step_000100\), and now it is policy \(step_000200\)"):
        claim_run(tmp_path, config(tmp_path), "policy (step_000200)")


def test_a_folder_without_a_record_may_be_begun_anew(tmp_path):
    claim_run(tmp_path, config(tmp_path))
    claim_run(tmp_path, config(tmp_path, "--run.seed", "5", "--run.resume", "False"))
    assert settings_of(tmp_path)["run.seed"] == 5


def test_a_folder_with_trajectories_but_without_settings_is_refused_in_one_line(tmp_path):
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "step_000100.jsonl.gz").touch()
    with pytest.raises(UserError, match=r"its settings cannot be read .*; choose another run\.name"):
        claim_run(tmp_path, config(tmp_path))


def test_resume_false_refuses_a_folder_with_records(tmp_path):
    begin(tmp_path)
    with pytest.raises(UserError, match="holds an evaluation; choose another"):
        claim_run(tmp_path, config(tmp_path, "--run.resume", "False"))


def test_other_weights_in_the_same_folder_are_another_model_and_a_copy_is_not(tmp_path):
    weights, run = bytearray(os.urandom(20_000_000)), tmp_path / "run"
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(weights)
    run.mkdir()
    claim_run(run, config(tmp_path / "a"))
    save(run, 0)
    claim_run(run, config(tmp_path / "b"))
    for place in (10, len(weights) // 2, len(weights) - 1):  # training changes weights all over the file
        changed = bytearray(weights)
        for i in range(max(0, place - 400_000), min(len(weights), place + 400_000), 1000):
            changed[i] ^= 1
        (tmp_path / "b" / "model.safetensors").write_bytes(changed)
        with pytest.raises(UserError, match=r"contents\.model\.path=sha256:.*, and now it is sha256:"):
            claim_run(run, config(tmp_path / "b"))


# ---- what is on record of its starts


def test_a_run_says_what_it_was_made_with_and_what_the_last_start_that_asked_a_set_left_out(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    claim_run(tmp_path, config(tmp_path))
    for commit, left_out in (("1", {"gaia": 3, "hle": 1}), ("1", {"gaia": 0}), ("2", {})):
        monkeypatch.setattr(contents, "_git", lambda *_, commit=commit: f"{commit}\n")
        record_session(tmp_path, left_out)
    about, overlong = about_run(tmp_path)
    assert overlong == {"gaia": 0, "hle": 1}
    minute = r"\d{4}-\d\d-\d\d \d\d:\d\d UTC"
    assert re.fullmatch(rf"Model: {tmp_path} sha256:\w+\. Begun: {minute}\. Code: commit 1, then commit 2\. .*", about)
    lines = [json.loads(line) for line in (tmp_path / "sessions.jsonl").read_text().splitlines()]
    assert lines[0].keys() == {"date", "code", "versions", "command", "overlong"} and len(lines) == 3


def test_what_is_not_known_is_not_made_up(tmp_path):
    """A folder whose sessions.jsonl is gone; the model is the server's."""
    claim_run(tmp_path, config(tmp_path), "policy (step_000100)")
    about, overlong = about_run(tmp_path)
    assert not overlong
    assert about.startswith(f"Model: policy (step_000100). Begun: {NOT_RECORDED}. Code: {NOT_RECORDED}.")


@pytest.mark.parametrize("line", ["{", "[]", '{"date": "x"}', '{"date": "", "code": "", "overlong": 1}'])
def test_a_damaged_file_of_starts_is_named(tmp_path, line):
    (tmp_path / "sessions.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=r"sessions\.jsonl: cannot be read .*; delete the file"):
        about_run(tmp_path)


# ---- what is left to ask


def test_only_questions_without_all_their_samples_are_asked_again(tmp_path):
    asked = [replace(prompt(), prompt_id=f"gaia-{i:06d}") for i in range(4)]
    records = save(tmp_path, 0, 1, 2)
    others = [replace(r, benchmark="other", prompt=replace(r.prompt, answers=["?"])) for r in records[4:8]]
    records = [*records[:4], *others, *records[8:11]]  # killed between two lines
    assert [p.prompt_id[-1] for p in unfinished("gaia", asked, 4, records)] == ["1", "2", "3"]


def test_a_sample_that_an_outage_cut_off_is_asked_again_and_the_next_one_takes_its_place(tmp_path):
    """NVIDIA-NeMo/Evaluator#1155: samples that an outage cut off counted as wrong answers."""
    group = question(0)
    failed = [
        replace(t, stop_reason=StopReason.ERROR, text="") if i % 2 else t for i, t in enumerate(group.trajectories)
    ]
    records = saved(tmp_path, [replace(group, trajectories=failed)], "gaia", "qa")
    asked = [replace(prompt(), prompt_id="gaia-000000")]
    assert [r.has_failed for r in records] == [False, True] * 2 and unfinished("gaia", asked, 4, records) == asked
    others = [replace(t, text="other") for t in group.trajectories]
    records = saved(tmp_path, [replace(group, trajectories=others)], "gaia", "qa")
    assert samples_of(records) == [(0, sample) for sample in range(4)] and not unfinished("gaia", asked, 4, records)
    assert [r.trajectory.text == "other" for r in records] == [False, True] * 2
    assert saved(tmp_path, [replace(group, trajectories=failed)], "gaia", "qa") == records


def test_a_test_set_that_has_changed_is_refused(tmp_path):
    changed = replace(prompt(), prompt_id="gaia-000000", answers=["2"])
    with pytest.raises(UserError, match="gaia has changed: gaia-000000 is another question"):
        unfinished("gaia", [changed], 4, save(tmp_path, 0))
