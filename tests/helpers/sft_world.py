"""A model, conversations and the config of a fine-tuning that takes seconds."""

import json
from pathlib import Path

from helpers.models import build_tiny_model

CONFIG = """
run: {name: sft, num_steps: @STEPS@, validate_every: 6, save_every: 4, dir: @DIR@/runs}
model: {path: @DIR@/model, compute_dtype: float32, recompute_every_n_layers: 0}
data: {train: @DIR@/train.jsonl, valid: @DIR@/valid.jsonl, num_conversations_per_step: 6, max_tokens: 256,
       max_tokens_per_microbatch: 256}
optim: {lr: 1.0e-2, schedule: constant, warmup_ratio: 0.0}
"""


def build_sft_world(folder: Path, num_steps: int = 12) -> Path:
    """Write everything that the config needs, and config.yaml itself; returns the folder."""
    build_tiny_model(folder / "model")
    trajectory = "<python>print({0} + 1)</python> <result>\n{1}\n</result><answer>{1}</answer>"
    rows = [
        {"messages": [{"role": "user", "content": f"{n} + 1?"},
                      {"role": "assistant", "content": trajectory.format(n, n + 1)}]} for n in range(10, 40)
    ]  # fmt: skip
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:24]))
    (folder / "valid.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[24:]))
    (folder / "config.yaml").write_text(CONFIG.replace("@DIR@", str(folder)).replace("@STEPS@", str(num_steps)))
    return folder
