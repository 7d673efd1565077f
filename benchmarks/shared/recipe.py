"""Hours and disk of an entire RL run, by formula: steps, validations and saves.

Nothing here was measured on a GPU. The seconds of a step come from cost_model.py.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from arpo.data import read_rows
from arpo.start.memory import BF16, FP32
from benchmarks.shared.cost_model import Workload, rollout_seconds, seconds
from benchmarks.shared.hardware import Hardware
from benchmarks.shared.shapes import Shape

if TYPE_CHECKING:
    from train_rl import RLConfig

DISK_GB_S = 1.0
"""Assumed rate at which all ranks together write a checkpoint."""
STATES = 3
"""Float32 numbers per trained parameter in a checkpoint: the parameter and AdamW's two moments."""
KNOWN_ROWS = {
    "dongguanting/ARPO-RL-Reasoning-10K": 10_000,
    "dongguanting/ARPO-RL-DeepSearch-1K": 1_071,
    "openai/gsm8k:main/train-00000-of-00001.parquet": 7_473,
    "openai/gsm8k:main/test-00000-of-00001.parquet": 1_319,
}
"""File on the Hub -> its rows."""


@dataclass(frozen=True)
class Recipe:
    """A run of train_rl.py, as far as hours and disk depend on it."""

    num_steps: int
    """0 = unknown, because the training file is not there."""
    num_validations: int
    num_valid_prompts: int
    """Questions of one validation; 0 = none, or unknown."""
    num_saves: int
    num_exports: int
    """Saves with a Hugging Face folder."""
    keep_checkpoints: int
    keep_best: bool
    lora_rank: int
    lora_targets: tuple[str, ...]
    critic: bool


@dataclass(frozen=True)
class Hours:
    """Hours of a run, by kind of work."""

    steps: float
    validations: float
    saves: float

    @property
    def total(self) -> float:
        return self.steps + self.validations + self.saves


def recipe_of(cfg: RLConfig) -> Recipe:
    """Return the steps, validations and saves of a config. Raises UserError for a training file that is unreadable.

    >>> recipe_of(load_config(RLConfig, ["configs/qwen3_14b.yaml", "configs/aepo.yaml"])).num_steps  # 5 x (1,071 // 64)
    80
    """
    run = cfg.run
    steps_per_epoch = num_rows(cfg.data.train) // cfg.data.num_prompts_per_step
    num_steps = run.num_steps or run.num_epochs * steps_per_epoch
    num_valid = num_rows(cfg.data.valid)
    if cfg.data.num_valid_prompts:
        num_valid = min(num_valid or cfg.data.num_valid_prompts, cfg.data.num_valid_prompts)
    validates = bool(cfg.data.valid and run.validate_every)
    num_saves = math.ceil(num_steps / run.save_every) if run.save_every else 1
    num_exports = math.ceil(num_saves / run.save_hf_every) if run.save_hf_every else 0
    return Recipe(
        num_steps=num_steps,
        # the first one is before step 1
        num_validations=1 + math.ceil(num_steps / run.validate_every) if validates else 0,
        num_valid_prompts=num_valid if validates else 0,
        num_saves=num_saves,
        num_exports=num_exports,
        keep_checkpoints=run.keep_checkpoints,
        keep_best=run.keep_best and validates and num_exports > 0,
        lora_rank=cfg.model.lora_rank,
        lora_targets=cfg.model.lora_targets,
        critic=cfg.advantage.needs_critic,
    )


def num_rows(name: str) -> int:
    """Return the rows of a file, or of a file on the Hub that we know; 0 if unknown."""
    if name and Path(name).is_file():
        return sum(1 for _ in read_rows(Path(name)))
    return KNOWN_ROWS.get(re.sub("@[^:]*", "", name), 0)  # OWNER/NAME@COMMIT:FILE


def adapter_parameters(shape: Shape, rank: int, targets: tuple[str, ...]) -> int:
    """Return the numbers of LoRA's adapters: rank x (inputs + outputs) for each target matrix of each layer."""
    q = shape.heads * shape.head_dim
    kv = shape.kv_heads * shape.head_dim
    sides = {
        "q_proj": shape.hidden + q,
        "k_proj": shape.hidden + kv,
        "v_proj": shape.hidden + kv,
        "o_proj": q + shape.hidden,
        "gate_proj": shape.hidden + shape.intermediate,
        "up_proj": shape.hidden + shape.intermediate,
        "down_proj": shape.intermediate + shape.hidden,
    }
    return shape.layers * rank * sum(sides.get(target, 0) for target in targets)


def checkpoint_bytes(shape: Shape, recipe: Recipe) -> int:
    """Return the bytes of a checkpoint's state, without its export."""
    trained = shape.parameters
    if recipe.lora_rank:
        trained = adapter_parameters(shape, recipe.lora_rank, recipe.lora_targets)
    # a critic always trains all its weights
    return STATES * FP32 * (trained + recipe.critic * shape.parameters)


def export_bytes(shape: Shape) -> int:
    """Return the bytes of a Hugging Face folder in bfloat16."""
    return BF16 * shape.parameters


def disk_bytes(shape: Shape, recipe: Recipe) -> tuple[int, int]:
    """Return (bytes that stay, bytes at the peak). A save is written before the oldest checkpoint is deleted."""
    export = export_bytes(shape) if recipe.num_exports else 0
    each = checkpoint_bytes(shape, recipe) + export
    # runs/NAME/best is a hard link, and takes space of its own once its checkpoint is deleted
    stays = min(recipe.keep_checkpoints, recipe.num_saves) * each + recipe.keep_best * export
    is_deleted = recipe.num_saves > recipe.keep_checkpoints
    return stays, stays + is_deleted * each


def hours(shape: Shape, work: Workload, recipe: Recipe, hw: Hardware, num_gpus: int) -> Hours:
    """Return the hours of the run. A validation samples one trajectory per question, with the lengths of training."""
    once = replace(work, num_prompts=max(1, recipe.num_valid_prompts), group_size=1)
    validation = rollout_seconds(shape, once, hw, num_gpus)[0] if recipe.num_valid_prompts else 0.0
    saved = recipe.num_saves * checkpoint_bytes(shape, recipe) + recipe.num_exports * export_bytes(shape)
    return Hours(
        steps=recipe.num_steps * seconds(shape, work, hw, num_gpus).step / 3600,
        validations=recipe.num_validations * validation / 3600,
        saves=saved / (DISK_GB_S * 1e9) / 3600,
    )
