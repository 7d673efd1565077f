"""Hours and disk of an entire run: what scaling.py says of it, against public reports of disks that were full.

Each case names the project and the number of the report.
"""

import json
from dataclasses import replace

import pytest
from helpers.edits import ROOT

from benchmarks import scaling
from benchmarks.shared import cost_model, recipe
from benchmarks.shared.hardware import HARDWARE
from benchmarks.shared.recipe import Recipe, recipe_of
from benchmarks.shared.shapes import MODELS, OTHER_MODELS

CONFIGS = ROOT / "configs"
NODE = HARDWARE["8xH100-80GB"]
RUN = Recipe(
    num_steps=100,
    num_validations=0,
    num_valid_prompts=0,
    num_saves=5,
    num_exports=5,
    keep_checkpoints=2,
    keep_best=False,
    lora_rank=0,
    lora_targets=(),
    critic=False,
)


def recipe_of_files(*names: str, flags: str = "") -> Recipe:
    return recipe_of(scaling.load_rl([*(str(CONFIGS / f"{name}.yaml") for name in names), *flags.split()]))


def test_a_checkpoint_of_4b_takes_the_fifty_gigabytes_that_were_reported():
    """radixark/miles #2537: "12 bytes/param ≈ 48 GB on top of the bf16 weights"; its guide had asked for 200 GB."""
    shape = OTHER_MODELS["Qwen3-4B"]
    assert recipe.checkpoint_bytes(shape, RUN) / 1e9 == pytest.approx(48, abs=0.5)
    assert recipe.export_bytes(shape) / 1e9 == pytest.approx(8, abs=0.1)


def test_the_peak_holds_one_checkpoint_more_than_stay():
    """RWKV-infctx-trainer #27: "( checkpoints + 1 ) * model size"; prime-rl #791: deleted only after the new one is
    written. Agent-RL/ReCall #61: 2.8 TB were not enough, because all checkpoints stayed."""
    shape = MODELS["Qwen3-14B"]
    each = recipe.checkpoint_bytes(shape, RUN) + recipe.export_bytes(shape)
    for number in (5, 500):
        assert recipe.disk_bytes(shape, replace(RUN, num_saves=number, num_exports=number)) == (2 * each, 3 * each)
    assert recipe.disk_bytes(shape, replace(RUN, num_saves=2, num_exports=2)) == (2 * each, 2 * each)
    assert recipe.disk_bytes(shape, replace(RUN, num_saves=1, num_exports=1)) == (each, each)
    export = recipe.export_bytes(shape)
    assert recipe.disk_bytes(shape, replace(RUN, keep_best=True)) == (2 * each + export, 3 * each + export)


def test_lora_saves_its_adapters_only_and_a_critic_is_saved_too():
    """mlfoundations/open_lm #154 asks to know the size before the first save: of all parts of the checkpoint."""
    shape = MODELS["Qwen2.5-3B"]
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    lora = replace(RUN, lora_rank=32, lora_targets=targets)
    # 36 layers x 32 x (4,096 + 2 x 2,304 + 4,096 + 3 x 13,056) numbers
    numbers = 36 * 32 * (4096 + 2 * 2304 + 4096 + 3 * 13_056)
    assert recipe.checkpoint_bytes(shape, lora) == 12 * numbers
    full = recipe.checkpoint_bytes(shape, RUN)
    assert recipe.checkpoint_bytes(shape, replace(RUN, critic=True)) == 2 * full
    assert recipe.checkpoint_bytes(shape, replace(lora, critic=True)) == 12 * numbers + full


def test_a_recipe_has_the_steps_validations_and_saves_of_its_files():
    deep = recipe_of_files("qwen3_14b", "aepo")
    assert (deep.num_steps, deep.num_saves, deep.num_exports, deep.num_validations) == (80, 4, 4, 0)
    assert recipe_of_files("qwen2.5_7b", "arpo").num_steps == 156
    gsm8k = recipe_of_files("gsm8k")
    assert (gsm8k.num_steps, gsm8k.num_saves) == (70, 7)
    assert (gsm8k.num_validations, gsm8k.num_valid_prompts) == (8, 1319)  # step 0 too
    flags = "--run.num_steps 45 --run.save_every 20 --run.save_hf_every 2 --data.num_valid_prompts 200"
    short = recipe_of_files("gsm8k", flags=flags)
    assert (short.num_validations, short.num_valid_prompts) == (6, 200)  # steps 0, 10, ..., 40, 45
    assert (short.num_saves, short.num_exports) == (3, 2)  # steps 20, 40, 45; exports of 40 and 45
    epoch = recipe_of_files("gsm8k", flags="--run.num_steps 0 --run.num_epochs 1 --data.valid=")
    assert epoch.num_steps == 233  # as the published run
    assert epoch.num_validations == 0 and not epoch.keep_best
    pinned = "--data.train openai/gsm8k@abc:main/train-00000-of-00001.parquet --run.num_steps 0 --run.num_epochs 1"
    assert recipe_of_files("gsm8k", flags=pinned).num_steps == 233


def test_the_rows_of_a_file_that_is_there_are_counted(tmp_path):
    file = tmp_path / "my.jsonl"
    file.write_text("".join(json.dumps({"question": "1+1?", "answer": 2}) + "\n" for _ in range(70)))
    flags = f"--data.train {file} --run.num_steps 0 --run.num_epochs 3"
    assert recipe_of_files("gsm8k", flags=flags).num_steps == 3 * (70 // 32)
    assert recipe_of_files("gsm8k", flags="--data.train absent.jsonl --run.num_steps 0").num_steps == 0


def test_hours_are_steps_and_validations_and_saves():
    """tinker-cookbook #778: a tutorial's stage had ~630 steps, 15 hours, and nobody had said so."""
    shape, work = MODELS["Qwen3-8B"], cost_model.Workload()
    step = cost_model.seconds(shape, work, NODE, 8).step
    alone = recipe.hours(shape, work, RUN, NODE, 8)
    assert alone.steps == pytest.approx(100 * step / 3600)
    saved = 5 * (recipe.checkpoint_bytes(shape, RUN) + recipe.export_bytes(shape))
    assert (alone.validations, alone.saves) == (0, pytest.approx(saved / 1e9 / 3600))
    watched = recipe.hours(shape, work, replace(RUN, num_validations=4, num_valid_prompts=2048), NODE, 8)
    # 2,048 questions, one trajectory each, are as many trajectories as a step's 128 x 16; their prompts are not shared
    rollout = cost_model.rollout_seconds(shape, work, NODE, 8)[0]
    assert watched.validations == pytest.approx(4 * rollout / 3600, rel=0.1)
    assert watched.total == watched.steps + watched.validations + watched.saves


def test_scaling_prints_the_run_and_takes_the_flags_of_the_command(capsys):
    argv = ["--quick", "--hardware", "1xRTX4090-24GB", "--nodes", "1", "--config", str(CONFIGS / "gsm8k.yaml")]
    scaling.main([*argv, "--model.lora_rank", "32", "--run.num_steps", "110"])
    lora = capsys.readouterr().out
    assert "| 1 | 110: " in lora and "0.2 GB of state" in lora
    scaling.main([*argv, "--data.train", "my.jsonl", "--run.num_steps=0"])
    assert "hours: unknown, because data.train is not here; pass --run.num_steps N" in capsys.readouterr().out
