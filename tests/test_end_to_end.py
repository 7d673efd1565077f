"""train_rl.py and evaluate.py on CPU with every part real: vLLM, sandbox, search, FSDP2, checkpoints.

One run shows that a policy learns, and whatever else can be read off it; a second one has every other part switched on.
"""

import json
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
from helpers.files import read_jsonl
from helpers.ranks import ROOT, run_script, try_script
from helpers.toy_run import build_toy_world
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from arpo.evals.records import read_records
from arpo.log import read_metrics
from arpo.log.charts import RL_CHARTS

EVALUATION = {
    "run.dir": "@DIR@/runs", "eval.files": "@DIR@/valid.jsonl", "eval.max_prompt_tokens": "64", "tools.names": "python",
    "rollout.max_response_tokens": "48", "rollout.answer_reserve_tokens": "8", "engine.dtype": "float32",
    "engine.kv_cache_gib": "0.05", "reward.file": "@DIR@/reward.py",
}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return build_toy_world(tmp_path_factory.mktemp("world"))


def steps_of(run: Path) -> list[dict[str, float]]:
    """The metrics of its training steps."""
    return [row for row in read_metrics(run) if row["step"] > 0]


def evaluate(world: Path, name: str, model: Path, *flags: str) -> Path:
    """Evaluate an export on the validation prompts; returns the run folder."""
    settings = [part for key, value in EVALUATION.items() for part in (f"--{key}", value.replace("@DIR@", str(world)))]
    run_script("evaluate.py", "--model.path", str(model), "--run.name", name, *settings, *flags)
    return world / "runs" / name


# ---- one run that learns


@pytest.fixture(scope="module")
def trained(world) -> Path:
    run_script("train_rl.py", str(world / "config.yaml"), "--tools.names", "python", "search")
    return world / "runs" / "rl"


def test_the_mean_reward_rises(trained):
    rewards = [row["reward/mean"] for row in steps_of(trained)]
    assert len(rewards) == 12
    assert sum(rewards[-3:]) / 3 > 1.5 * sum(rewards[:3]) / 3, rewards


def test_rollout_and_trainer_agree_on_the_logprobs_in_every_step(trained):
    """Only true if weight sync, masks, packing and the engine's logprobs are all right."""
    assert all(row["mismatch/abs"] < 1e-4 for row in steps_of(trained))


def test_every_logged_metric_is_defined_in_the_docs(trained):
    table = (ROOT / "docs" / "metrics.md").read_text()
    defined = [name for line in table.splitlines() for name in re.findall(r"`([^`]+)`", line.partition(" | ")[0])]
    logged = {name for row in read_metrics(trained) for name in row} - {"step"}
    assert [name for name in sorted(logged) if not any(fnmatch(name, pattern) for pattern in defined)] == []


def test_tensorboard_begins_with_charts_of_what_the_run_logged_and_has_histograms(trained):
    board = EventAccumulator(str(trained / "tb"), size_guidance={"histograms": 0})  # 0: all of them
    board.Reload()
    logged = board.Tags()["scalars"]
    empty = [title for title, tags in RL_CHARTS.items() if not any(re.fullmatch(t, n) for t in tags for n in logged)]
    assert empty == ["accuracy, also by data source"]  # the run's reward does not say what is right
    histograms = {name: board.Histograms(name) for name in board.Tags()["histograms"]}
    assert list(histograms) == ["histogram/reward", "histogram/response_tokens", "histogram/delta_entropy"]
    assert [event.histogram_value.num for event in histograms["histogram/reward"]] == [4 * 8] * 12
    for row, event in zip(steps_of(trained), histograms["histogram/reward"], strict=True):
        assert row["reward/mean"] == pytest.approx(event.histogram_value.sum / 32)
        variance = event.histogram_value.sum_squares / 32 - (event.histogram_value.sum / 32) ** 2
        assert row["reward/std"] == pytest.approx(variance**0.5, abs=1e-6) and row["group/reward_std"] > 0
        assert 0.1 < row["memory/host_gib"] < 64
        speed = row["tokens/sampled"] / row["time/rollout"] / 2  # ranks
        assert row["tokens/sampled_per_second"] == pytest.approx(speed, rel=1e-4)


def test_a_run_leaves_what_the_docs_say(trained):
    names = {p.name for p in trained.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "tb", "trajectories", "checkpoints", "hf"} <= names
    steps = sorted(p.name for p in (trained / "trajectories").iterdir())
    assert steps == ["step_000004.jsonl.gz", "step_000008.jsonl.gz", "step_000012.jsonl.gz",
                     "valid_000000.jsonl.gz", "valid_000006.jsonl.gz", "valid_000012.jsonl.gz"]  # fmt: skip
    checkpoints = sorted(p.name for p in (trained / "checkpoints").glob("step_*"))
    assert checkpoints == ["step_000010", "step_000012"]


def test_the_export_is_evaluated_by_the_same_rollout(trained, world):
    run = evaluate(world, "eval", trained / "hf", "--eval.num_samples", "2")
    scores = json.loads((run / "scores.json").read_text())
    assert not (run / "metrics.jsonl").exists() and not (run / "tb").exists()  # which would be empty
    assert scores["valid"]["questions"] == 4 and scores["valid"]["accuracy"] > 0.3
    assert "| valid | 4 | 2 |" in (run / "report.md").read_text()


# ---- one run with adapters, and with one engine for both ranks


@pytest.fixture(scope="module")
def adapted(world) -> Path:
    run_script("train_rl.py", str(world / "config.yaml"), "--run.name", "adapted", "--model.lora_rank", "8",
               "--optim.lr", "2e-2", "--engine.tensor_parallel", "2", "--run.dump_every", "1",
               "--run.num_steps", "9", "--run.validate_every", "9")  # fmt: skip
    return world / "runs" / "adapted"


@pytest.mark.slow
def test_adapters_learn_too_and_sampler_and_trainer_agree_on_them(adapted):
    rows = steps_of(adapted)
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-3:]) / 3 > 1.3 * sum(rewards[:3]) / 3, rewards
    assert all(row["mismatch/abs"] < 1e-4 for row in rows)


@pytest.mark.slow
def test_two_ranks_with_one_engine_between_them_count_every_trajectory_once(adapted):
    rows = steps_of(adapted)
    assert len(rows) == 9
    for row in rows:
        records = read_jsonl(adapted / "trajectories" / f"step_{row['step']:06d}.jsonl.gz")
        assert len(records) == len({(r["prompt_id"], r["trajectory_id"]) for r in records}) == 4 * 8
        assert row["reward/mean"] == pytest.approx(sum(r["reward"] for r in records) / len(records))
    assert len(read_jsonl(adapted / "trajectories" / "valid_000009.jsonl.gz")) == 4


@pytest.mark.slow
def test_two_ranks_with_one_engine_between_them_evaluate_every_question_once(adapted, world):
    run = evaluate(world, "adapted_eval", adapted / "hf", "--engine.tensor_parallel", "2")
    records = read_records(run)
    assert len(records) == len({record.question_id for record in records}) == 4


# ---- bad input


@pytest.mark.parametrize(
    "ranks, flags, words",
    [
        (1, ["--data.train", "nowhere.parquet"], ["nowhere.parquet"]),
        (2, ["--data.num_prompts_per_step", "3", "--update.num_prompts_per_minibatch", "3"], ["per_step", "2 ranks"]),
        (2, ["--data.max_prompt_tokens", "4"], ["max_prompt_tokens"]),
        (2, ["--engine.tensor_parallel", "4"], ["engine.tensor_parallel=4", "2 ranks of a node"]),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_from_rank_0_and_exit_code_2(world, ranks, flags, words):
    done = try_script("train_rl.py", str(world / "config.yaml"), "--run.name", "bad", *flags, ranks=ranks)
    lines = [line for line in done.output.splitlines() if line.startswith("error")]
    assert done.code == 2 and len(lines) == 1, done.output
    assert lines[0].startswith("error: ") and all(word in lines[0] for word in words), lines[0]
    assert "Traceback" not in done.output
