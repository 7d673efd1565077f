"""The settings of a run's folder: a run goes on only under those it was begun with.

    runs/NAME/config.yaml      of its first step; never overwritten
    runs/NAME/changes.jsonl    {"step": 40, "changes": {"optim.lr": [1e-06, 5e-07]}}: what was changed since, and when

Another learning rate, another algorithm or another data file would go on from the checkpoint without a word, and the
curve would be of no experiment at all. What decides only how long, how often, or how fast may change at any time.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import yaml

from arpo.config.checks import leaves
from arpo.config.load import save_config
from arpo.config.sections import RunConfig
from arpo.errors import UserError

CONFIG, CHANGES = "config.yaml", "changes.jsonl"
MAY_CHANGE = (
    *("run.", "engine.", "data.valid", "data.num_valid_prompts"),
    *("model.attention", "model.activation_checkpointing", "model.checkpoint_every_n_layers", "model.compile_"),
    *("model.reshard_after_forward", "model.shard_size", "model.context_parallel", "model.cpu_offload"),
    *(
        "judge.",
        "data.max_tokens_per_microbatch",
        "update.max_tokens_per_microbatch",
        "update.layout",
        "loss.offload_reference",
        "rollout.pull_order",
    ),
)
"""Starts of the keys that decide how long, how often or how fast, but not what is learnt. (Of tools, their section's
`what_decides` says it.)"""
DECIDES = ("run.seed", "run.overlap_validation", "engine.dtype", "engine.quantization", "judge.model", "judge.fallback")
"""Keys that do decide, though their section is named above."""


def may_change(key: str, cfg: Any) -> bool:
    """Return whether a run may go on under another value of this key."""
    if key.startswith("tools."):
        return key != "tools.options" and key not in leaves({"tools": cfg.tools.what_decides()})
    if key == "rollout.dispatch":  # which decides what is drawn in the place of dead groups, but nothing else
        return cfg.advantage.dead_groups != "resample"
    return key.startswith(MAY_CHANGE) and key not in DECIDES


def check_run_folder(run: RunConfig, cfg: Any) -> None:
    """Make the run's folder, and compare the settings of a begun run with `cfg`, before any model is loaded.

    A run is begun once it has a checkpoint. Raises UserError where the folder cannot be written, where the run exists
    and run.resume is False, and, unless run.resume_changed, for the first setting that is another one now.
    """
    folder = Path(run.dir) / run.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{folder}: cannot write the run's folder ({error.strerror}); set run.dir") from None
    if not any(folder.glob("checkpoints/step_*")):
        return
    if not run.resume:
        raise UserError(f"{folder}: run.resume is False but this run exists; choose another run.name")
    for key, (before, now) in changes(folder, cfg).items():
        if not run.resume_changed and not may_change(key, cfg):
            raise UserError(
                f"{folder} was begun with {key}={before}, and now it is {now}; choose another --run.name, or go on "
                "under the new settings with --run.resume_changed True"
            )


def changes(folder: Path, cfg: Any) -> dict[str, tuple[object, object]]:
    """Return (before, now) of the keys of `cfg` whose values are others than those of the run in `folder`, in order.

    A key that one of the two lacks is an option of another version of the code, and says nothing. Raises UserError.
    """
    try:
        before = leaves(yaml.safe_load((folder / CONFIG).read_text()))
        for line in (folder / CHANGES).read_text().splitlines() if (folder / CHANGES).exists() else ():
            before |= {key: now for key, (_, now) in json.loads(line)["changes"].items()}
    except (OSError, yaml.YAMLError, AttributeError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{folder}: its settings cannot be read ({reason}); choose another run.name") from None
    now = json.loads(json.dumps(leaves(cfg)))  # lists instead of tuples, as the file has them
    return {key: (before[key], now[key]) for key in now if key in before and before[key] != now[key]}


def record_settings(folder: Path, cfg: Any, step: int) -> None:
    """Write the settings of a new run, or for one of which `step` steps are done what has changed since."""
    if not step:
        save_config(cfg, folder / CONFIG)
        (folder / CHANGES).unlink(missing_ok=True)
    elif changed := changes(folder, cfg):
        with (folder / CHANGES).open("a") as file:
            file.write(json.dumps({"step": step, "changes": changed}) + "\n")
