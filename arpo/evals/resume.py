"""Continuing a run folder, which needs the settings with which it was begun.

RUN/trajectories/settings.json     model, seed, samples, rollout, tools; written before the first trajectory
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from arpo.config.bounded import read_json
from arpo.config.contents import weights_digest
from arpo.config.evals import EvalSection
from arpo.config.facts import leaves, sampling_settings
from arpo.config.sections import ModelConfig
from arpo.config.tools import ToolsConfig
from arpo.errors import UserError
from arpo.evals.records import FOLDER, Record
from arpo.options import RolloutConfig
from arpo.trajectory import Prompt

SETTINGS_FILE = "settings.json"


def model_identity(path: str) -> str:
    """Return the path of a model folder with the digest of its weights; a hub name is returned as it is."""
    digest = weights_digest(Path(path))
    return f"{path} {digest}" if digest else path


def what_decides(
    seed: int,
    cfg: EvalSection,
    model: ModelConfig,
    rollout: RolloutConfig,
    tools: ToolsConfig,
    served: str = "",
    form: str = "tags",
) -> dict:
    """Return the settings that must not change within a run. (More questions or benchmarks may be added to it.)

    served: the model that cfg.server says it has. form: protocol.format; runs of a time without it have tags.
    """
    settings = {
        "model": f"server {served}" if cfg.server else model_identity(model.path),
        "enable_thinking": model.enable_thinking,
        "seed": seed,
        "num_samples": cfg.num_samples,
        "system_prompt": cfg.system_prompt,
        "rollout": sampling_settings(rollout),
        "tools": tools.what_decides(),
    }
    return settings if form == "tags" else settings | {"protocol": form}


def claim_run(folder: Path, settings: dict, *, resume: bool) -> None:
    """Write the settings of a new run beside its trajectories, or check that those of a begun run are the same.

    Raises UserError that names the first setting that differs, and for a begun run if `resume` is False.
    """
    path = settings_path(folder)
    settings = json.loads(json.dumps(settings))  # as it will be read back
    if not list(path.parent.glob("*.jsonl*")):  # begun, perhaps, but without a result
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings, indent=1) + "\n")
        return
    if not resume:
        raise UserError(f"{folder} holds an evaluation; choose another run.name, or set run.resume to True")
    before, now = leaves(read_settings(folder)), leaves(settings)
    for name in [*before, *now]:
        if _contents(before.get(name)) != _contents(now.get(name)):
            raise UserError(
                f"{folder} was begun with {name}={before.get(name)}, and now it is {now.get(name)}; "
                "choose another run.name, or delete the folder"
            )


def _contents(value: object) -> object:
    """Return a model folder's digest, which says more than its path; anything else as it is."""
    return value.rpartition(" sha256:")[2] if isinstance(value, str) else value


def settings_path(folder: Path) -> Path:
    """Return where the settings of a run are. Raises UserError for a run of an earlier version of the code."""
    if (folder / "records").is_dir():
        raise UserError(
            f"{folder}/records is of an earlier version, and can only be graded by that; choose another run.name"
        )
    return folder / FOLDER / SETTINGS_FILE


def read_settings(folder: Path) -> dict:
    """Read the settings that `claim_run` wrote. Raises UserError if the folder holds no evaluation."""
    path = settings_path(folder)
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); is {folder} the folder of an evaluation?") from None


def unfinished(name: str, prompts: Sequence[Prompt], num_samples: int, records: Sequence[Record]) -> list[Prompt]:
    """Return the questions of a benchmark that lack samples in the records of a run.

    Raises UserError if a recorded question has changed.
    """
    prompts_by_id = {prompt.prompt_id: prompt for prompt in prompts}
    num_recorded: Counter[str] = Counter()
    for record in records:
        if record.benchmark != name or not (prompt := prompts_by_id.get(record.question_id)):
            continue
        num_recorded[record.question_id] += 1
        if (record.question, record.answers) != (prompt.messages[-1]["content"], prompt.answers):
            reason = f"{prompt.prompt_id} is another question than when the run was begun"
            raise UserError(f"{name} has changed: {reason}; choose another run.name")
    return [prompt for prompt in prompts if num_recorded[prompt.prompt_id] < num_samples]
