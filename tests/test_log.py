import json
from dataclasses import dataclass

from helpers.sample_groups import group

from arpo.log import RunLog, read_metrics
from arpo.metrics import rollout_metrics
from arpo.trajectory import Metrics


@dataclass(frozen=True)
class Config:
    name: str = "x"


def test_a_resumed_run_forgets_what_was_logged_after_its_checkpoint(tmp_path):
    log = RunLog(tmp_path, Config(), is_main=True)
    for step in (1, 2, 3):
        log.scalars(step, {"reward/mean": float(step)})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/me')  # killed in the middle of a line
    log = RunLog(tmp_path, Config(), is_main=True, resume_step=2)
    log.scalars(3, {"reward/mean": 30.0})
    log.close()
    assert [(row["step"], row["reward/mean"]) for row in read_metrics(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_config_and_hyperparameters_are_written(tmp_path):
    RunLog(tmp_path, Config(), is_main=True).close()
    assert (tmp_path / "config.yaml").read_text() == "name: x\n"
    assert list((tmp_path / "tb").iterdir())


def test_other_ranks_write_nothing(tmp_path):
    log = RunLog(tmp_path / "run", Config(), is_main=False)
    log.scalars(1, {"x": 1.0})
    log.line("nothing")
    log.trajectories(1, [])
    assert log.curve(["x"]) is None and not (tmp_path / "run").exists()


def test_curve_is_a_png(tmp_path):
    log = RunLog(tmp_path, Config(), is_main=True)
    log.scalars(1, {"reward/mean": 0.1})
    log.scalars(2, {"reward/mean": 0.3})
    assert log.curve(["reward/mean", "absent"]).read_bytes().startswith(b"\x89PNG")


def test_rollout_metrics_count_inherited_calls_apart_from_executed_ones():
    values = rollout_metrics([group()]).values()
    assert values["tools/all/calls"] == values["tools/search/calls"] == 1 and values["tools/inherited"] == 1
    assert values["tools/calls_per_trajectory"] == 1.0
    assert values["tokens/sampled"] == 3 + 1


def test_rollout_metrics_tell_entropy_before_from_after_tools_and_count_decisions():
    values = rollout_metrics([group()]).values()
    assert values["entropy/root"] == 0.2 and values["entropy/after_tool"] == 0.45
    assert values["branching/branched"] == 1 and values["branching/branches_per_prompt"] == 1
    assert values["group/mixed_share"] == 1.0
    assert values["reward_reason/ok"] == values["reward_reason/missing_answer"] == 1


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


def test_trajectory_dump_holds_everything(tmp_path):
    log = RunLog(tmp_path, Config(), is_main=True)
    log.trajectories(7, [group()])
    rows = [json.loads(line) for line in (tmp_path / "trajectories" / "step_000007.jsonl").read_text().splitlines()]
    assert [r["trajectory_id"] for r in rows] == ["0", "0.0"] and rows[1]["parent_id"] == "0"
    assert rows[0]["turns"][1]["decision"]["outcome"] == "branched" and rows[0]["question"] == "q"
