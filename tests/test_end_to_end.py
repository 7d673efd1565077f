"""train_rl.main and evaluate.main on CPU with every part real: vLLM, sandbox, search, FSDP2, checkpoints."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

import pytest
from conftest import build_tiny_model

from arpo.log import read_metrics

ROOT = Path(__file__).resolve().parent.parent
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    \"\"\"Share of characters that are the letter e or a: easy to learn, hard to hit by chance.\"\"\"
    return sum(c in "ea" for c in solution_str) / max(len(solution_str), 1)
"""
CONFIG = """
run: {name: rl, num_steps: 12, validate_every: 6, save_every: 2, dump_every: 4, dir: @DIR@/runs}
model: {path: @DIR@/model, compute_dtype: float32, activation_checkpointing: false}
data: {train: @DIR@/train.jsonl, valid: @DIR@/valid.jsonl, num_prompts_per_step: 4, max_prompt_tokens: 64}
engine: {dtype: float32, kv_cache_gib: 0.05, max_num_seqs: 32}
rollout: {group_size: 8, max_response_tokens: 48, max_tool_calls: 2, max_result_tokens: 24, answer_reserve_tokens: 8}
branching: {selector: arpo, num_initial_rollouts: 6, entropy_tokens: 4}
tools:
  search: {backend: local, corpus: @DIR@/corpus.jsonl, mode: live}
reward: {file: @DIR@/reward.py}
update: {num_prompts_per_minibatch: 2, max_tokens_per_microbatch: 256}
optim: {lr: 1.0e-2}
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    build_tiny_model(folder / "model")
    rows = [{"prompt": f"say e {i}", "answer": "e", "data_source": "toy"} for i in range(16)]
    (folder / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "valid.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows[:4]))
    (folder / "corpus.jsonl").write_text('{"title": "e", "text": "eeee"}\n{"title": "a", "text": "aaaa"}\n')
    (folder / "reward.py").write_text(REWARD)
    (folder / "config.yaml").write_text(CONFIG.replace("@DIR@", str(folder)))
    return folder


def launch(script: str, *args: str, ranks: int = 2, **kwargs) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={ranks}",
        script,
        *args,
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **kwargs
    )


def run(script: str, *args: str, ranks: int = 2) -> str:
    process = launch(script, *args, ranks=ranks)
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output[-4000:]
    return output


@pytest.fixture(scope="module")
def trained(world) -> Path:
    run("train_rl.py", str(world / "config.yaml"))
    return world / "runs" / "rl"


@pytest.mark.slow
def test_the_mean_reward_rises(trained):
    rewards = [row["reward/mean"] for row in read_metrics(trained) if row["step"] > 0]
    assert len(rewards) == 12
    assert sum(rewards[-3:]) / 3 > 1.5 * sum(rewards[:3]) / 3, rewards


@pytest.mark.slow
def test_rollout_and_trainer_agree_on_the_logprobs_in_every_step(trained):
    """Only true if weight sync, masks, packing and the engine's logprobs are all right."""
    assert all(row["mismatch/abs"] < 1e-4 for row in read_metrics(trained) if row["step"] > 0)


@pytest.mark.slow
def test_every_logged_metric_is_defined_in_the_readme(trained):
    table = (ROOT / "README.md").read_text().partition("## Metrics")[2].partition("\n## ")[0]
    defined = [name for line in table.splitlines() for name in re.findall(r"`([^`]+)`", line.partition(" | ")[0])]
    logged = {name for row in read_metrics(trained) for name in row} - {"step"}
    assert [name for name in sorted(logged) if not any(fnmatch(name, pattern) for pattern in defined)] == []


@pytest.mark.slow
def test_a_run_leaves_what_the_readme_says(trained):
    names = {p.name for p in trained.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "tb", "trajectories", "checkpoints", "curve.png", "hf"} <= names
    steps = sorted(p.name for p in (trained / "trajectories").iterdir())
    assert steps == ["step_000004.jsonl", "step_000008.jsonl", "step_000012.jsonl",
                     "valid_000000.jsonl", "valid_000006.jsonl", "valid_000012.jsonl"]  # fmt: skip
    checkpoints = sorted(p.name for p in (trained / "checkpoints").glob("step_*"))
    assert checkpoints == ["step_000010", "step_000012"]


@pytest.mark.slow
def test_the_export_is_evaluated_by_the_same_rollout(trained, world):
    run("evaluate.py", "--model.path", str(trained / "hf"), "--eval.files", str(world / "valid.jsonl"),
        "--run.dir", str(world / "runs"), "--eval.num_samples", "2", "--engine.dtype", "float32",
        "--engine.kv_cache_gib", "0.05", "--rollout.max_response_tokens", "48", "--rollout.answer_reserve_tokens", "8",
        "--eval.max_prompt_tokens", "64", "--tools.names", "python",
        "--reward.file", str(world / "reward.py"))  # fmt: skip
    scores = json.loads((world / "runs" / "eval" / "scores.json").read_text())
    assert scores["valid"]["questions"] == 4 and scores["valid"]["accuracy"] > 0.3
    assert "| valid | 4 | 2 |" in (world / "runs" / "eval" / "report.md").read_text()


@pytest.mark.slow
def test_adapters_learn_too_and_sampler_and_trainer_agree_on_them(world):
    run("train_rl.py", str(world / "config.yaml"), "--run.name", "lora", "--model.lora_rank", "8")
    rows = [row for row in read_metrics(world / "runs" / "lora") if row["step"] > 0]
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-3:]) / 3 > 1.3 * sum(rewards[:3]) / 3, rewards
    assert all(row["mismatch/abs"] < 1e-4 for row in rows)


@pytest.mark.slow
def test_two_ranks_train_with_one_engine_between_them_and_count_every_trajectory_once(world):
    run("train_rl.py", str(world / "config.yaml"), "--run.name", "team", "--engine.tensor_parallel", "2",
        "--run.num_steps", "2", "--run.dump_every", "1", "--run.validate_every", "2")  # fmt: skip
    folder = world / "runs" / "team"
    rows = [row for row in read_metrics(folder) if row["step"] > 0]
    assert len(rows) == 2
    for row in rows:
        assert row["mismatch/abs"] < 1e-4
        dump = folder / "trajectories" / f"step_{row['step']:06d}.jsonl"
        records = [json.loads(line) for line in dump.read_text().splitlines()]
        assert len(records) == len({(r["prompt_id"], r["trajectory_id"]) for r in records}) == 4 * 8
        assert row["reward/mean"] == pytest.approx(sum(r["reward"] for r in records) / len(records))
    assert len((folder / "trajectories" / "valid_000002.jsonl").read_text().splitlines()) == 4

    run("evaluate.py", "--model.path", str(folder / "hf"), "--eval.files", str(world / "valid.jsonl"),
        "--run.dir", str(world / "runs"), "--run.name", "team_eval", "--engine.tensor_parallel", "2",
        "--engine.dtype", "float32", "--engine.kv_cache_gib", "0.05", "--rollout.max_response_tokens", "48",
        "--rollout.answer_reserve_tokens", "8", "--eval.max_prompt_tokens", "64", "--tools.names", "python",
        "--reward.file", str(world / "reward.py"))  # fmt: skip
    files = list((world / "runs" / "team_eval" / "records").glob("*.jsonl"))
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(records) == len({r["question_id"] for r in records}) == 4


@pytest.mark.slow
def test_a_killed_run_continues_exactly_where_it_was(trained, world):
    """Killed (-9, all processes) after a checkpoint; the resumed steps equal those of the undisturbed run."""
    process = launch("train_rl.py", str(world / "config.yaml"), "--run.name", "killed", start_new_session=True)
    metrics = world / "runs" / "killed" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and '"step": 5' in metrics.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    output = run("train_rl.py", str(world / "config.yaml"), "--run.name", "killed")
    assert "from step 4" in output
    names = ("reward/mean", "optim/grad_norm", "loss/policy", "loss/entropy", "tools/all/calls")
    whole, resumed = read_metrics(trained), read_metrics(world / "runs" / "killed")
    assert [row["step"] for row in whole] == [row["step"] for row in resumed]
    for a, b in zip(whole, resumed, strict=True):
        assert {n: a[n] for n in names if n in a} == {n: b[n] for n in names if n in b}, a["step"]


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--data.train", "nowhere.parquet"], ["nowhere.parquet"]),
        (["--model.path", "/nonexistent"], ["model.path", "/nonexistent"]),
        (["--data.num_prompts_per_step", "3", "--update.num_prompts_per_minibatch", "3"], ["per_step", "2 ranks"]),
        (["--data.max_prompt_tokens", "4"], ["max_prompt_tokens"]),
        (["--branching.num_initial_rollouts", "9"], ["num_initial_rollouts", "group_size=8"]),
        (["--branching.bas", "0.1"], ["did you mean 'branching.base'"]),
        (["--engine.tensor_parallel", "4"], ["engine.tensor_parallel=4", "2 ranks of a node"]),
        (["--rollout.max_response_tokens", "500", "--update.max_tokens_per_microbatch", "999"], ["max_position_emb"]),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_from_rank_0_and_exit_code_2(world, flags, words):
    output, _ = launch("train_rl.py", str(world / "config.yaml"), *flags).communicate(timeout=400)
    lines = [line for line in output.splitlines() if line.startswith("error")]
    assert len(lines) == 1 and lines[0].startswith("error: ") and all(word in lines[0] for word in words), output
    assert "exitcode  : 2" in output  # torchrun's report of the ranks; its own code is 1


def test_a_model_folder_without_weights_is_named(world, tmp_path):
    build_tiny_model(tmp_path / "empty", weights=False)
    process = launch("train_rl.py", str(world / "config.yaml"), "--model.path", str(tmp_path / "empty"), ranks=1)
    output, _ = process.communicate(timeout=400)
    assert f"model.path={tmp_path}/empty: no weights" in output
