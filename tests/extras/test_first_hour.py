"""The first GPU hour on a CPU: configs/gsm8k.yaml itself, with a pretrained model of 135M and other sizes.

The model is too small for GSM8K. So 4 of its questions are learnt by heart: SFT shows each answer with a box and
without, and RL, which rewards right boxes only, has to prefer them. This says that the files and the commands of the
README work together and learn. It says nothing of Qwen3-0.6B, of a GPU, or of questions that the model has not seen.
"""

import json
import shutil
from pathlib import Path
from statistics import mean

import pytest
from helpers.files import read_jsonl, write_jsonl
from helpers.pretrained import unpack
from helpers.ranks import ROOT, run_script

from arpo.log import read_metrics
from extras.compare import compare_runs
from extras.llm_demo.gsm8k import final_answer

GSM8K = ROOT.parent / "shared/data/gsm8k/train.jsonl"
RECIPE = str(ROOT / "configs/gsm8k.yaml")
NUM_QUESTIONS = 4
NUM_STEPS = 8
SFT = """
model: {path: @DIR@/model, compute_dtype: float32, recompute_every_n_layers: 0}
protocol: {format: hermes}
data: {train: @DIR@/sft.jsonl, tools: [], system_prompt: default, num_conversations_per_step: 8, max_tokens: 256,
       max_tokens_per_microbatch: 2048}
run: {dir: @DIR@/runs, name: sft, num_steps: 10, validate_every: 0, save_every: 0}
optim: {lr: 2.0e-4}
"""
SIZES = "--engine.kv_cache_gib 0.5 --engine.max_num_seqs 32 --rollout.answer_reserve_tokens 8"
SIZES += " --rollout.max_response_tokens 32"
SIZES += " --model.compute_dtype float32 --engine.dtype float32"  # a CPU without bfloat16 takes a quarter of an hour
RL_SIZES = "--data.num_prompts_per_step 4 --data.max_prompt_tokens 448 --update.max_tokens_per_microbatch 2048"
RL_SIZES += " --update.num_prompts_per_minibatch 2 --model.recompute_every_n_layers 0"
RL_SIZES += " --optim.lr 5e-5"  # 1e-6 learns nothing in so few steps


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A folder with questions.jsonl, rows of GSM8K, and runs/sft, a model that has seen their answers in two forms."""
    if not GSM8K.exists():
        pytest.skip("GSM8K is not here")
    folder = tmp_path_factory.mktemp("first_hour")
    unpack(folder / "model")
    # its own template lists no tools; both are ChatML
    shutil.copy(ROOT / "tests/protocol/chat_templates/qwen3.jinja", folder / "model/chat_template.jinja")
    rows = [row for row in read_jsonl(GSM8K) if len(row["question"]) < 130][:NUM_QUESTIONS]
    write_jsonl(folder / "questions.jsonl", rows)
    conversations = [
        {"messages": [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": text}]}
        for row in rows
        for text in (f"\\boxed{{{final_answer(row)}}}", final_answer(row))
    ]
    write_jsonl(folder / "sft.jsonl", conversations)
    (folder / "sft.yaml").write_text(SFT.replace("@DIR@", str(folder)))
    run_script("train_sft.py", str(folder / "sft.yaml"), ranks=1)
    return folder


def train(world: Path, *flags: str) -> str:
    questions = str(world / "questions.jsonl")
    files = ["--data.train", questions, "--data.valid", questions, "--model.path", str(world / "runs/sft/hf")]
    sizes = [*SIZES.split(), *RL_SIZES.split()]
    return run_script("train_rl.py", RECIPE, *files, *sizes, "--run.dir", str(world / "runs"), *flags, ranks=1)


def evaluate(world: Path, model: str, *flags: str) -> None:
    argv = ["--model.path", str(world / model), "--eval.files", str(world / "questions.jsonl")]
    run_script("evaluate.py", RECIPE, *argv, *SIZES.split(), "--run.dir", str(world / "runs"), *flags, ranks=1)


def test_training_and_the_evaluations_before_and_after_it(world):
    train(world, "--run.num_steps", str(NUM_STEPS), "--run.save_every", str(NUM_STEPS))
    rows = {row["step"]: row for row in read_metrics(world / "runs/gsm8k")}
    assert [step for step, row in rows.items() if "valid/accuracy" in row] == [0, NUM_STEPS]
    rewards = [rows[step]["reward/mean"] for step in range(1, NUM_STEPS + 1)]
    # each step asks all questions; seen: from 0.19 in the first step to 0.8 in the fourth
    assert mean(rewards[-4:]) > mean(rewards[:2]) + 0.1, rewards
    assert rows[NUM_STEPS]["valid/accuracy"] >= rows[0]["valid/accuracy"]
    assert (world / "runs/gsm8k/best").exists()

    evaluate(world, "runs/sft/hf")
    evaluate(world, "runs/gsm8k/hf", "--run.name", "gsm8k-after")
    compare_runs([world / "runs/gsm8k-before", world / "runs/gsm8k-after"])
    [found] = json.loads((world / "runs/gsm8k-after/compare.json").read_text()).values()
    # an evaluation gives what the validation of that step gave, to a question
    of_questions = found["benchmarks"]["questions"]
    assert of_questions["reference"] == pytest.approx(rows[0]["valid/accuracy"], abs=0.3)
    assert of_questions["run"] == pytest.approx(rows[NUM_STEPS]["valid/accuracy"], abs=0.3)


def test_the_second_half_hour_offers_python(world):
    python = "--tools.names python --rollout.max_tool_calls 3 --run.name gsm8k-python"
    sizes = "--run.num_steps 1 --rollout.max_response_tokens 96 --rollout.max_result_tokens 40"
    train(world, *python.split(), *sizes.split())
    [*_, row] = read_metrics(world / "runs/gsm8k-python")
    assert row["step"] == 1 and "tools/all/calls" in row
    [record, *_] = read_jsonl(world / "runs/gsm8k-python/trajectories/step_000001.jsonl.gz")
    assert "Call tools wherever they help." in record["messages"][0]["content"]
