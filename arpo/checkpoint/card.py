"""The card of a finished model: what it was made from, how, and how good it became. It holds no key and no local path.

Everything is read from the run's folder; a licence is that which the base model's own card names.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from arpo.config.facts import leaves
from arpo.config.sections import OptimConfig
from arpo.errors import UserError
from arpo.evals.about import code_version
from arpo.options import (
    AdvantageConfig,
    BranchingConfig,
    CriticConfig,
    LossConfig,
    RolloutConfig,
    TrainingRewardConfig,
    UpdateConfig,
)

ALWAYS = (
    "rollout.group_size", "rollout.max_response_tokens", "rollout.max_tool_calls", "branching.selector",
    "advantage.kind", "loss.kind", "optim.lr", "data.num_prompts_per_step", "data.max_prompt_tokens",
    "data.num_conversations_per_step", "data.max_tokens", "model.lora_rank", "run.seed", "tools.names", "judge.model",
)  # fmt: skip
"""Settings that a card names whatever they are."""
SECTIONS = {
    "rollout": RolloutConfig(), "branching": BranchingConfig(), "reward": TrainingRewardConfig(),
    "advantage": AdvantageConfig(), "critic": CriticConfig(), "loss": LossConfig(), "update": UpdateConfig(),
    "optim": OptimConfig(),
}  # fmt: skip
"""Sections of which a card names what differs from the defaults of RL."""
METRICS = (
    "reward/mean", "reward/solved_share", "valid/accuracy", "valid/accuracy_low", "valid/accuracy_high", "valid/reward",
    "valid/tool_calls", "response/tokens", "tools/calls_per_trajectory", "loss/nll", "valid/nll",
)  # fmt: skip
"""Metrics of the model, where the run has them; docs/metrics.md defines each."""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
OUR_FOLDERS = ("runs", "models", "data", "configs", ".", "..", "~")
SUFFIXES = (".py", ".yaml", ".json", ".jsonl", ".parquet")
"""Beginnings and ends by which a path of two parts is told from a name on the Hub, though it is not here any more."""
MAX_ANCESTORS = 10


@dataclass(frozen=True)
class Source:
    """A model folder, and the run that made it."""

    folder: Path
    """Holds config.json (adapters: adapter_config.json), weights and tokenizer."""
    run: Path | None
    """None for a folder that no run of ours made."""
    step: int
    """Step of the run after which the model was saved; 0 = unknown."""


def find_source(path: Path) -> Source:
    """Return the model of RUN (its newest export), or of a model folder. Raises UserError where there is none."""
    folder = (path / "hf").resolve() if (path / "hf").exists() else path.resolve()
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise UserError(f"{path}: neither a run with a finished model (hf) nor a model folder (config.json)")
    if not [*folder.glob("*.safetensors")]:
        raise UserError(f"{path}: {folder.name} has no weights (*.safetensors); was the model saved completely?")
    step = re.fullmatch(r"step_(\d+)", folder.parent.name)
    above = folder.parent.parent.parent
    run = above if step and (above / "config.yaml").is_file() else None
    return Source(folder, run, int(step[1]) if run else 0)


def settings_of(run: Path) -> dict[str, Any]:
    """Return the settings under which a run ended, by dotted keys. Raises UserError."""
    try:
        settings = leaves(yaml.safe_load((run / "config.yaml").read_text()))
        changes = run / "changes.jsonl"
        for line in changes.read_text().splitlines() if changes.exists() else ():
            settings |= {key: now for key, (_, now) in json.loads(line)["changes"].items()}
    except (OSError, yaml.YAMLError, AttributeError, ValueError, KeyError) as error:
        raise UserError(f"{run}: its settings cannot be read ({' '.join(str(error).split())[:200]})") from None
    return settings


def base_of(run: Path) -> tuple[str, list[str]]:
    """Return the model that a run began with, and the names of the runs between: an SFT of ours, say.

    The model is a name on the Hub, or the last part of a local path.
    """
    stages: list[str] = []
    path = str(settings_of(run)["model.path"])
    for _ in range(MAX_ANCESTORS):
        if not Path(path).is_dir() or (before := _run_of(Path(path))) is None:
            break
        stages.append(before.name)
        path = str(settings_of(before)["model.path"])
    return path, stages


def _run_of(path: Path) -> Path | None:
    try:
        return find_source(path).run
    except UserError:
        return None


def licence_of(base: str) -> dict[str, str]:
    """Return license, license_name and license_link as far as the card of a model folder, or of a model of the Hub in
    the cache, names them."""
    card = Path(base) / "README.md"
    if not card.is_file() and HUB_NAME.fullmatch(base) and not Path(base).is_dir():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(base, "README.md")
        card = Path(cached) if isinstance(cached, str) else card
    if not card.is_file():
        return {}
    head = re.match(r"---\n(.*?)\n---", card.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    try:
        said = yaml.safe_load(head[1]) if head else {}
    except yaml.YAMLError:
        return {}
    names = ("license", "license_name", "license_link")
    return {name: said[name] for name in names if isinstance(said, dict) and isinstance(said.get(name), str)}


def write_card(source: Source) -> Path:
    """Write README.md into the model's folder and return it; one that is there already stays as it is."""
    path = source.folder / "README.md"
    if not path.exists():
        path.write_text(card_of(source), encoding="utf-8")
    return path


def card_of(source: Source) -> str:
    """Return the text of the card. Raises UserError where the run's settings cannot be read."""
    if source.run is None:
        return _page({"library_name": "transformers", "tags": ["arpo-torch"]}, source.folder.name, ["A model."])
    settings = settings_of(source.run)
    base, stages = base_of(source.run)
    is_rl = "rollout.group_size" in settings
    licence = licence_of(base)
    is_adapter = (source.folder / "adapter_config.json").exists()
    head = {
        **licence,
        **({"base_model": base} if _on_hub(base) else {}),
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["arpo-torch", *(["reinforcement-learning", "tool-use"] if is_rl else ["sft", "tool-use"])],
        "datasets": sorted({name for name in _data_sets(settings).values() if name}),
    }
    shown = base if _on_hub(base) else Path(base).name
    how = _algorithm(settings) if is_rl else "supervised fine-tuning on conversations with tool calls"
    lines = [f"Trained from **{shown}** by {how}, with ARPO-torch (the card: {code_version()}), step {source.step}."]
    lines += [f"Stages before this one: {', '.join(reversed(stages))}."] if stages else []
    lines += [
        "" if licence else f"The licence of {shown} is not known here: look it up before you pass this model on.",
        "", "## Data", "", *[f"- {option}: {value}" for option, value in _data_names(settings).items()],
        "", "## Results", "", *_results(source.run, source.step),
        "", "## Settings", "", "| setting | value |", "|---|---|",
        *[f"| `{key}` | {value} |" for key, value in _chosen(settings).items()],
    ]  # fmt: skip
    return _page(head, source.run.name, lines)


def _page(head: dict[str, Any], title: str, lines: list[str]) -> str:
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines))
    front = yaml.safe_dump({key: value for key, value in head.items() if value}, sort_keys=False)
    return f"---\n{front}---\n\n# {title}\n\n{text}\n"


def _algorithm(settings: dict[str, Any]) -> str:
    selector, kind = settings["branching.selector"], settings["advantage.kind"]
    branching = "without branching" if selector == "none" else f"with branching ({selector})"
    return f"reinforcement learning ({kind} advantages, {settings['loss.kind']} loss) {branching}, tools in the rollout"


def _on_hub(path: str) -> bool:
    owner = path.partition("/")[0]
    is_name = HUB_NAME.fullmatch(path) and owner not in OUR_FOLDERS and Path(path).suffix not in SUFFIXES
    return bool(is_name) and not Path(path).exists()


def _data_sets(settings: dict[str, Any]) -> dict[str, str]:
    """Option -> OWNER/NAME of its data set on the Hub; "" for a file."""
    found = {}
    for option in ("data.train", "data.valid"):
        name = re.split(r"[@:]", str(settings.get(option) or ""))[0]
        found[option] = name if _on_hub(name) else ""
    return found


def _data_names(settings: dict[str, Any]) -> dict[str, str]:
    names = {option: str(settings.get(option) or "") for option in ("data.train", "data.valid")}
    sets = _data_sets(settings)
    return {option: name if sets[option] else Path(name).name for option, name in names.items() if name}


def _results(run: Path, step: int) -> list[str]:
    """Return a table of the last value of each of METRICS up to the step; training's are of that step's batch."""
    last: dict[str, tuple[float, int]] = {}
    file = run / "metrics.jsonl"
    for line in file.read_text().splitlines(keepends=True) if file.exists() else ():
        if line.endswith("\n") and (row := json.loads(line))["step"] <= step:  # a killed run may leave half a line
            last |= {name: (row[name], int(row["step"])) for name in METRICS if name in row}
    rows = [f"| `{name}` | {last[name][0]:.4g} | {last[name][1]} |" for name in METRICS if name in last]
    return ["| metric | value | step |", "|---|---|---|", *rows] if rows else ["The run has logged none."]


def _chosen(settings: dict[str, Any]) -> dict[str, str]:
    """Return the settings to show, in order: ALWAYS, then what differs from a default. No path keeps its folders."""
    shown = {key: settings[key] for key in ALWAYS if settings.get(key) not in (None, "", [])}
    for section, defaults in SECTIONS.items():
        for f in fields(defaults):
            key, default = f"{section}.{f.name}", getattr(defaults, f.name)
            default = list(default) if isinstance(default, tuple) else default
            if key in settings and not _equal(settings[key], default):
                shown.setdefault(key, settings[key])
    return {key: _plain(value) for key, value in shown.items()}


def _equal(a: Any, b: Any) -> bool:
    return math.isclose(a, b) if isinstance(a, float) and isinstance(b, float) else a == b


def _plain(value: Any) -> str:
    """Return a value for a table's cell, with the last parts of paths only."""
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    text = str(value)
    return (text if _on_hub(text) else text.rsplit("/", 1)[-1]).replace("|", "\\|")
