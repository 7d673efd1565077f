import json
import math
import mmap
import os
import pty
import re
import statistics
import subprocess
import sys
import termios
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import pytest
import torch
from helpers.edits import ROOT
from helpers.files import read_jsonl
from helpers.forked import fork
from helpers.sample_groups import group
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from arpo.engine import Engine
from arpo.evals.scores import summarize
from arpo.log import LINES_PER_RUN, RunLog, read_metrics
from arpo.log.charts import RL_CHARTS
from arpo.log.machine import memory_metrics, speeds
from arpo.log.metrics_file import MetricsFile
from arpo.metrics import MAX_SOURCES, Metrics, rollout_metrics, source_names
from arpo.trajectory import Group, Prompt, StopReason, Trajectory


@dataclass(frozen=True)
class Config:
    name: str = "x"


def test_a_resumed_run_forgets_what_was_logged_after_its_checkpoint(tmp_path):
    """Small numbers stay what they are (axolotl-ai-cloud/axolotl#3320: losses below 0.00005 were logged as 0)."""
    log = RunLog(tmp_path, Config(), is_main=True)
    for step in (1, 2, 3):
        log.scalars(step, {"reward/mean": float(step), "mismatch/kl": 2.5e-9, "nan": math.nan})
    log.close()
    [row, *_] = read_metrics(tmp_path)
    assert row["mismatch/kl"] == 2.5e-9 and math.isnan(row["nan"])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/me')  # killed in the middle of a line
    log = RunLog(tmp_path, Config(), is_main=True, resume_step=2)
    log.scalars(3, {"reward/mean": 30.0})
    log.close()
    assert [(row["step"], row["reward/mean"]) for row in read_metrics(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_resumed_run_forgets_the_dumps_after_its_checkpoint(tmp_path, capsys):
    """Otherwise the viewer shows steps that the continued run has not done yet."""
    log = RunLog(tmp_path, Config(), is_main=True)
    for step, kind in ((10, "step"), (10, "valid"), (20, "step"), (20, "valid"), (20, "nonfinite")):
        log.trajectories(step, [group()], kind=kind)
    log.close()
    dumps = tmp_path / "trajectories"
    (dumps / "step_000020_mine.jsonl.gz").touch()
    RunLog(tmp_path, Config(), is_main=True, resume_step=15).close()
    names = ["nonfinite_000020", "step_000010", "step_000020_mine", "valid_000010"]
    assert sorted(path.name for path in dumps.iterdir()) == [f"{name}.jsonl.gz" for name in names]
    assert f"{dumps}: removed 2 dumps of steps after 15, which are done again" in capsys.readouterr().out


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew_and_says_where_to_look(tmp_path, capsys):
    """Also what it did before step 1, or its validation would be there twice."""
    for accuracy in (0.25, 0.5):
        log = RunLog(tmp_path, Config(), is_main=True)
        log.scalars(0, {"valid/accuracy": accuracy})
        log.finish()
        assert capsys.readouterr().out == f"tensorboard --logdir {tmp_path}/tb\n"
    assert (tmp_path / "config.yaml").read_text() == "name: x\n"
    assert read_metrics(tmp_path) == [{"step": 0, "valid/accuracy": 0.5}]
    board = EventAccumulator(str(tmp_path / "tb"), size_guidance={"scalars": 0}).Reload()
    assert [(event.step, event.value) for event in board.Scalars("valid/accuracy")] == [(0, 0.5)]


def test_other_ranks_write_and_show_nothing(tmp_path, capsys):
    steps(tmp_path / "run", 10, validates=(5,), is_main=False)
    log = RunLog(tmp_path / "run", Config(), is_main=False)
    log.scalars(1, {"x": 1.0})
    log.line("nothing")
    log.trajectories(1, [])
    log.finish()
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr() == ("", "")


SAYS = """
import logging, sys
from arpo.start.load import load_or_exit, run_or_exit
from arpo.errors import UserError
from arpo.log.run_log import Console
from train_sft import SFTConfig

said = "a service said \\x1b]52;c;ZXZpbA==\\x07\\x9b2J\\r\tfine"
sys.argv[1:] = ["--model.path", "arpo", "--data.train", "data.jsonl"]
load_or_exit(SFTConfig)
logging.getLogger("anybody").warning("%s", said, exc_info=ValueError(said))
Console(is_main=True).line(said)
def fail(_):
    raise UserError(said)
run_or_exit(fail, None)
"""


def test_no_line_holds_what_a_terminal_obeys():
    done = subprocess.run([sys.executable, "-c", SAYS], capture_output=True, text=True, cwd=ROOT)
    said = r"a service said \x1b]52;c;ZXZpbA==\x07\x9b2J\x0d" + "\tfine\n"
    assert (done.stdout, done.stderr, done.returncode) == (said, f"{said}ValueError: {said}error: {said}", 2)


def steps(folder, num_steps: int, *, done: int = 0, validates: tuple[int, ...] = (), is_main: bool = True) -> None:
    """What a training script shows of its steps."""
    log = RunLog(folder, Config(), is_main=is_main)
    progress = log.progress(num_steps, "step", done=done)
    for step in range(done + 1, num_steps + 1):
        with log.progress(8, f"step {step} rollout", is_part=True) as part:
            part.at(8)
        progress.at(step, f"loss {step / 100:.2f}", keep=step in validates)
    progress.close()
    log.close()


def test_a_log_file_gets_a_few_lines_of_a_long_run_with_the_first_the_last_and_every_validation(tmp_path, capsys):
    steps(tmp_path, 1200, validates=(201, 777))
    lines = capsys.readouterr().out.splitlines()
    assert LINES_PER_RUN <= len(lines) <= LINES_PER_RUN + 3 and all("left" in line for line in lines)
    numbers = [int(line.split()[1].partition("/")[0]) for line in lines]
    assert numbers[0] == 1 and numbers[-1] == 1200 and {201, 777} < set(numbers) and numbers == sorted(numbers)
    assert lines[0].startswith("step 1/1200  loss 0.01  ")


def test_a_resumed_run_shows_its_first_step_and_slow_steps_are_shown_every_minute(tmp_path, capsys, monkeypatch):
    steps(tmp_path, 1200, done=900)
    assert capsys.readouterr().out.startswith("step 901/1200  ")
    clock = iter(range(0, 10_000, 30))
    monkeypatch.setattr("arpo.log.run_log.time.monotonic", lambda: float(next(clock)))
    log = RunLog(tmp_path, Config(), is_main=True)
    progress = log.progress(1000, "step")
    for step in range(1, 8):  # half a minute each
        progress.at(step)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == [f"{n}/1000" for n in (1, 3, 5, 7)]


def test_a_terminal_gets_one_updating_line_and_a_line_per_validation(tmp_path):
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))

    def on_the_terminal() -> None:
        for descriptor in (1, 2):
            os.dup2(theirs, descriptor)
        with open(1, "w", closefd=False) as screen, redirect_stdout(screen), redirect_stderr(screen):
            steps(tmp_path, 100, validates=(50,))

    child = fork.Process(target=on_the_terminal)
    child.start()
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:  # the other end is closed
        pass
    text = shown.decode()
    child.join()
    assert child.exitcode == 0, text
    assert text.count(" left") == 1 and "step 50/100  loss 0.50" in text
    last_look = text.rsplit("\r", 2)[1]  # of the bar: what comes after it is the end of its line
    assert "100/100" in last_look and "loss 1.00" in last_look, text


def test_tensorboard_gets_the_reward_first_and_the_histograms(tmp_path):
    log = RunLog(tmp_path, Config(), is_main=True, charts=RL_CHARTS)
    log.scalars(3, {"reward/mean": 0.5}, {"histogram/reward": [0.0, 1.0, 1.0, math.nan], "histogram/empty": []})
    log.close()
    board = EventAccumulator(str(tmp_path / "tb"))
    board.Reload()
    [packed] = board.Tensors("custom_scalars__config__")
    [overview] = Layout.FromString(packed.tensor_proto.string_val[0]).category
    first, second, *_ = overview.chart
    assert (first.title, second.title) == ("reward", "accuracy, also by data source")
    assert any(re.match(tag, "reward/mean") for tag in first.multiline.tag)
    assert not any(re.match(tag, "reward/mean_of_others") for tag in first.multiline.tag)
    [histogram] = board.Histograms("histogram/reward")
    assert (histogram.step, histogram.histogram_value.num, histogram.histogram_value.sum) == (3, 3, 2.0)
    assert board.Tags()["histograms"] == ["histogram/reward"]


def ended(reward: float, stop: StopReason = StopReason.EOS) -> Trajectory:
    return Trajectory("p", "0", stop_reason=stop, reward=reward, reward_parts={"accuracy": reward})


def test_the_spread_of_the_reward_is_that_of_all_ranks_together_and_of_each_group():
    groups = [
        Group(Prompt("p", [], []), [ended(1.0), ended(0.0)]),
        Group(Prompt("q", [], []), [ended(-1.0), ended(-1.0), ended(9.0, StopReason.ERROR)]),
    ]
    of_all, merged = rollout_metrics(groups).values(), Metrics()
    for group_of_rank in groups:
        merged.merge(rollout_metrics([group_of_rank]))
    for values in (of_all, merged.values()):
        assert values["reward/std"] == pytest.approx(statistics.pstdev([1.0, 0.0, -1.0, -1.0]))
        assert values["group/reward_std"] == pytest.approx((0.5 + 0.0) / 2)


def test_each_data_source_has_its_accuracy_and_rare_ones_share_one():
    prompts = [Prompt(f"{n}", [], [], data_source=f"set {n:02}") for n in range(20)]
    names = source_names([*prompts, *prompts[19:]])  # the last is the most frequent
    assert names["set 19"] == "set_19" and names["set 00"] == "set_00" and len(set(names.values())) == MAX_SOURCES + 1
    assert [source for source, name in names.items() if name == "other"] == [f"set {n}" for n in range(15, 19)]
    right, wrong = ([ended(reward)] for reward in (1.0, 0.0))
    groups = [Group(prompts[0], right), Group(prompts[17], right), Group(prompts[18], wrong)]
    values = rollout_metrics(groups, names).values()
    found = {name: value for name, value in values.items() if name.startswith("accuracy/")}
    assert found == {"accuracy/set_00": 1, "accuracy/other": 0.5}
    similar = [Prompt(source, [], [], data_source=source) for source in ("NQ (open)", "NQ [open]", "other")]
    assert source_names(similar) == {"NQ (open)": "NQ_open_", "NQ [open]": "NQ_open_2", "other": "other_2"}
    assert source_names(prompts[:1] * 5) == {}  # all of one source: reward/accuracy says it
    assert summarize(groups)["accuracy/set_17"] == 1.0 and "accuracy/set_00" not in summarize(groups[:1])


def test_the_speed_is_that_of_one_rank_and_absent_where_nothing_was_trained():
    values = {"tokens/sampled": 1200, "time/rollout": 3.0, "tokens/trained": 800, "time/update": 2.0}
    assert speeds(values, 4) == {"tokens/sampled_per_second": 100.0, "tokens/trained_per_second": 100.0}
    untrained = {"tokens/sampled": 10, "time/rollout": 1.0, "time/update": 0.1}
    assert speeds(untrained, 1) == {"tokens/sampled_per_second": 10.0}


def test_a_ranks_memory_is_what_the_system_says_of_its_process():
    before = memory_metrics(torch.device("cpu")).values()
    held = mmap.mmap(-1, 2**28)  # not from malloc, which may have kept as much
    for start in range(0, len(held), mmap.PAGESIZE):
        held[start] = 1
    after = memory_metrics(torch.device("cpu")).values()
    assert after.keys() == {"memory/host_gib"}
    assert after["memory/host_gib"] - before["memory/host_gib"] == pytest.approx(len(held) / 2**30, abs=0.05)


def test_the_peak_of_a_gpu_leaves_out_what_vllm_holds(monkeypatch):
    """vllm-project/vllm 33625: torch counts vLLM's memory also while vLLM sleeps, so an 80 GiB card held 95."""
    from vllm.device_allocator import AllocationData, cumem

    pool = cumem.CuMemAllocator()
    pool.pointer_to_data = {
        1: AllocationData((0, 15 * 2**30, 1, 0), "weights", is_asleep=True),
        2: AllocationData((0, 40 * 2**30, 2, 0), "kv_cache"),
    }
    monkeypatch.setattr(cumem, "cumem_available", True)
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", pool)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 95 * 2**30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * 2**30, 80 * 2**30))
    engine = object.__new__(Engine)
    engine.device = torch.device("cuda", 0)
    values = memory_metrics(engine.device, engine.pool_bytes).values()
    assert values["memory/gpu_peak_gib"] == 40 and values["memory/gpu_used_gib"] == 70
    engine.device = torch.device("cpu")
    assert engine.pool_bytes == 0


def test_rollout_metrics_count_inherited_calls_apart_decisions_and_entropy_before_and_after_tools():
    values = rollout_metrics([group()]).values()
    assert values["tools/all/calls"] == values["tools/search/calls"] == 1 and values["tools/inherited"] == 1
    assert values["tools/calls_per_trajectory"] == 1.0
    assert values["tokens/sampled"] == 3 + 1
    assert values["entropy/root"] == 0.2 and values["entropy/after_tool"] == 0.45
    assert values["branching/branched"] == 1 and values["branching/branches_per_prompt"] == 1
    assert values["group/mixed_share"] == 1.0
    assert values["reward_reason/ok"] == values["reward_reason/missing_answer"] == 1


def test_what_failed_through_us_is_in_no_reward_metric():
    """Three trajectories that an outage ended (reward -1, unfinished) and one with reward 0: no group is mixed."""
    prompt = Prompt("p", messages=[], answers=["1"])
    broken = [
        Trajectory("p", str(i), stop_reason=StopReason.ERROR, reward=-1.0, reward_parts={"format": 0.0})
        for i in range(3)
    ]
    sound = Trajectory("p", "3", stop_reason=StopReason.EOS, reward=0.0, reward_parts={"format": 1.0})
    values = rollout_metrics([Group(prompt, [*broken, sound])]).values()
    assert (values["reward/mean"], values["reward/format"], values["group/mixed_share"]) == (0.0, 1.0, 0.0)
    assert [name for name in values if name.startswith("reward_reason/")] == ["reward_reason/ok"]
    assert values["response/stop_error"] == 0.75
    assert "reward/mean" not in rollout_metrics([Group(prompt, broken)]).values()


def test_metrics_merge_by_their_declared_reduction():
    a, b = Metrics(), Metrics()
    a.mean("m", 1.0, weight=3)
    b.mean("m", 0.0, weight=1)
    a.sum("s", 2)
    b.sum("s", 3)
    a.max("x", -5)
    b.max("x", -7)
    a.merge(b)
    assert a.values() == {"m": 0.75, "s": 5.0, "x": -5.0}


@pytest.mark.parametrize("values", [(math.nan, 4.0), (4.0, math.nan), (0.1315, 0.7556, math.nan, 0.5328)])
def test_a_maximum_with_nan_is_nan_in_any_order(values):
    """The values of facebookincubator/velox#8690 and arrayfire/arrayfire#860."""
    metrics = Metrics()
    for value in values:
        metrics.max("x", value)
    assert math.isnan(metrics["x"])


def test_a_dump_holds_everything_and_only_the_newest_of_each_kind_stay_whole(tmp_path):
    log = RunLog(tmp_path, Config(), is_main=True, keep_dumps=2)
    copy = tmp_path / "trajectories" / "step_000001_mine.jsonl.gz"
    copy.parent.mkdir()
    copy.touch()
    for step in (1, 2, 3):
        log.trajectories(step, [group()])
    log.trajectories(3, [group()], kind="valid")
    log.close()
    names = sorted(path.name for path in copy.parent.iterdir() if path != copy)
    assert copy.exists() and names == ["step_000002.jsonl.gz", "step_000003.jsonl.gz", "valid_000003.jsonl.gz"]
    rows = read_jsonl(tmp_path / "trajectories" / "step_000003.jsonl.gz")
    assert [r["trajectory_id"] for r in rows] == ["0", "0.0"] and rows[1]["parent_id"] == "0"
    assert rows[0]["turns"][1]["decision"]["outcome"] == "branched" and rows[0]["question"] == "q"
    assert rows[0]["messages"] == group().prompt.messages and rows[0]["data_source"] == group().prompt.data_source


def test_a_dump_that_cannot_be_written_is_said_with_the_next_one_and_counted(tmp_path, capsys):
    log = RunLog(tmp_path, Config(), is_main=True, trackers=())
    (tmp_path / "trajectories").write_text("a file in the way")
    log.trajectories(1, [group()])
    log.trajectories(2, [group()])
    log.scalars(2, {"reward/mean": 0.0})
    log.close()
    told = capsys.readouterr().out.splitlines()
    words = "trajectories: cannot write the trajectory dump (File exists); free some space"
    assert len(told) == 2 and all(words in line for line in told)
    assert [row["log/lost_dumps"] for row in read_metrics(tmp_path)] == [1]


@pytest.mark.parametrize(
    ("damage", "left", "said"),
    [
        (lambda lines: [lines[0], b"\0" * 50 + b"\n", *lines[2:]], [1, 3], "1 steps before 4 have no numbers, 2 first"),
        (lambda lines: [*lines[:1], b"[1]\n", b'{"x": 1}\n', *lines[1:]], [1, 2, 3], ""),
        (lambda lines: [lines[0], lines[1][:9]], [1], "2 steps before 4 have no numbers, 2 first"),
        (lambda lines: [], [], "3 steps before 4 have no numbers, 1 first"),
    ],
)
def test_a_run_goes_on_with_the_lines_that_a_power_loss_has_left_and_says_what_is_missing(
    tmp_path, caplog, damage, left, said
):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "x": step}).encode() + b"\n" for step in (1, 2, 3, 4)]
    path.write_bytes(b"".join(damage(lines)))
    assert MetricsFile(path, 3).write({"step": 4, "x": 40}) == ""
    assert [row["step"] for row in read_metrics(tmp_path)] == [*left, 4]
    assert said in caplog.text and bool(said) == bool(caplog.records)
