"""Writes the card (README.md) of an exported model: base model, data and settings, without keys and local paths.

    python -m extras.card runs/NAME/hf                              then: hf upload OWNER/NAME runs/NAME/hf
    python -m extras.card runs/NAME/checkpoints/step_000100 OUT     of an export elsewhere

The card names the base model and licence of the first stage. If a run began with the export of another run (SFT, then
RL from runs/MY_SFT/hf), the settings of the other run lead to its first model.
"""

from __future__ import annotations

import argparse
import re
import shlex
from dataclasses import dataclass, fields, replace
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Any

import yaml

from arpo import options
from arpo.config.exits import exit_with
from arpo.config.named import is_own
from arpo.config.rewards import TrainingRewardConfig
from arpo.config.sections import OptimConfig, UpdateConfig
from arpo.data.hub import hub_name, parse
from arpo.errors import UserError
from arpo.log.settings import CONFIG, settings_of

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

OURS = "arpo-torch"
ALWAYS = ("advantage.kind", "loss.kind", "branching.selector", "rollout.group_size", "optim.lr", "tools.names")
"""Settings always shown on a card."""
SECTIONS = {
    "rollout": options.RolloutConfig(), "branching": options.BranchingConfig(), "advantage": options.AdvantageConfig(),
    "reward": TrainingRewardConfig(), "critic": options.CriticConfig(), "loss": options.LossConfig(),
    "update": UpdateConfig(), "optim": OptimConfig(),
}  # fmt: skip
"""Sections of the config. A card shows their differences from the defaults of RL."""
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
TEMPLATE = """---
{{ card_data }}
---

# {{ model_name }}

Trained from **{{ source }}**{% if base != source %} (itself trained from {{ base }}){% endif %} by {{ how }} with \
tool calls, {{ steps }} steps, with ARPO-torch.
{% if not license %}
The licence of {{ base }} is not known here: look it up before you pass this model on.
{% endif %}
| setting | value |
|---|---|
{% for key, value in settings.items() %}| `{{ key }}` | {{ value }} |
{% endfor %}
To ask it, in a checkout of ARPO-torch (a search that needs a key or a corpus needs its options too):

```bash
{{ ask }}
```
{% if stops %}
Elsewhere: stop it after {{ stops }}, run the call, append ` <result>\\n...\\n</result>`, and let it go on.
{% endif %}"""


def card_of(checkpoint: Path) -> str:
    """Return the card of RUN/checkpoints/step_N. Raises UserError if RUN is not the folder of a run."""
    from huggingface_hub import ModelCard, ModelCardData

    run = checkpoint.resolve().parent.parent
    settings = settings_of(run)
    data = {key: str(settings.get(key) or "") for key in ("data.train", "data.valid")}
    on_hub = {wanted.repo for name in data.values() if (wanted := parse(name))}
    origin = _origin_of(run, settings)
    is_rl = "rollout.group_size" in settings
    head = ModelCardData(
        model_name=run.name,
        license=origin.card.license,
        license_name=origin.card.license_name,
        license_link=origin.card.license_link,
        base_model=origin.base_on_hub,
        datasets=sorted(on_hub) or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[OURS, "tool-use", "reinforcement-learning" if is_rl else "sft"],
    )
    shown = {key: name if parse(name) else PureWindowsPath(name).name for key, name in data.items() if name}
    return str(
        ModelCard.from_template(
            head,
            template_str=TEMPLATE,
            source=origin.source,
            base=origin.base,
            how="reinforcement learning" if is_rl else "supervised fine-tuning",
            steps=checkpoint.name.removeprefix("step_").lstrip("0"),
            settings=shown | _chosen(settings),
            ask=_command(run.name, settings),
            stops=_stops(settings),
        )
    )


@dataclass(frozen=True)
class Origin:
    """The first model of a run, and the base model behind it."""

    source: str
    """Name of the first model of the run: a Hub name, the name of a run, or the last part of a folder's path."""
    base: str
    """Name of the base model. Equal to `source`, unless `source` is the export of a run."""
    base_on_hub: str | None
    """OWNER/NAME of the base model; None for a folder, because a card's metadata must not name a folder."""
    card: ModelCardData
    """Head of the base model's card, with the licence."""


def _origin_of(run: Path, settings: dict[str, Any], seen: tuple[Path, ...] = ()) -> Origin:
    """Return the origin of a run with these settings. `seen`: later runs of the chain, to stop at a circle."""
    source = hub_name(settings["model.path"]).partition("@")[0]
    if cached := re.search(r"models--([^/]+)--([^/]+)/snapshots/", source):  # the Hub's cache
        source = "/".join(cached.groups())
    place = _place_of(source, run, settings)
    card = _head_of(place)
    if not _is_local(source, settings):
        return Origin(source, source, source, card)
    if OURS in (card.tags or ()):
        return Origin(card.model_name, card.base_model or card.model_name, card.base_model, card)
    earlier = _run_that_wrote(Path(place))
    if earlier is None or earlier in (run, *seen):
        name = _last_part(source)
        return Origin(name, name, None, card)
    before = _origin_of(earlier, settings_of(earlier), (run, *seen))
    return replace(before, source=earlier.name)


def _place_of(source: str, run: Path, settings: dict[str, Any]) -> str:
    """Return the path of a model's folder. A relative path is tried from here, then from the folder of the start."""
    run_dir = Path(settings.get("run.dir") or "")
    if Path(source).is_dir() or run_dir.is_absolute() or len(run_dir.parts) >= len(run.parents):
        return source
    started_in = run.parents[len(run_dir.parts)]  # run = started_in / run.dir / run.name
    return str(started_in / source) if (started_in / source).is_dir() else source


def _run_that_wrote(folder: Path) -> Path | None:
    """Return the run of an export: RUN/hf, RUN/best, RUN/checkpoints/step_N/hf -> RUN. None for other folders."""
    if not folder.is_dir():
        return None
    for above in list(folder.resolve().parents)[:3]:
        if (above / CONFIG).is_file():
            return above
    return None


def _is_local(source: str, settings: dict[str, Any]) -> bool:
    """Return whether a model was a folder, here or on the machine of the run (the settings have a digest then)."""
    return "contents.model.path" in settings or Path(source).is_dir() or not _HUB_NAME.fullmatch(source)


def _last_part(path: str) -> str:
    return Path(path).resolve().name if Path(path).is_dir() else PureWindowsPath(path).name  # which knows / too


def _form(settings: dict[str, Any]) -> str:
    return settings.get("protocol.format", "tags")


def _tools(settings: dict[str, Any]) -> list[str]:
    return [_plain(name) for name in settings.get("tools.names") or settings.get("data.tools") or ()]


def _stops(settings: dict[str, Any]) -> str:
    """Return the stop strings for a server; "" for calls in JSON or XML, or with tags of a custom file."""
    tools = _tools(settings)
    if _form(settings) != "tags" or any(map(is_own, tools)):
        return ""
    return " or ".join(f"`</{tool}>`" for tool in tools)


def _command(name: str, settings: dict[str, Any]) -> str:
    """Return the command to ask the model, with the format, tools and prompt of the training."""
    words = ["python", "-m", "extras.ask", "--model.path", f"OWNER/{name}"]
    words += ["--protocol.format", _plain(_form(settings))]
    words += ["--tools.names", *_tools(settings)]
    if (prompt := settings.get("data.system_prompt", "keep")) not in ("keep", "none", ""):
        words += ["--eval.system_prompt", prompt]
    return shlex.join(words)


def _head_of(source: str) -> ModelCardData:
    """Return the head of a model's card, from a model folder or from the local cache of the Hub."""
    from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache

    try:
        card = f"{source}/README.md" if Path(source).is_dir() else try_to_load_from_cache(source, "README.md")
        if isinstance(card, str):
            return ModelCard(Path(card).read_text(encoding="utf-8")).data
    except (OSError, ValueError, yaml.YAMLError):
        pass  # no card, or no readable card
    return ModelCardData()


def _chosen(settings: dict[str, Any]) -> dict[str, str]:
    """Return the settings to show, in order: ALWAYS, then differences from defaults. Paths lose their folders."""
    shown = {key: settings[key] for key in ALWAYS if settings.get(key)}
    for section, defaults in SECTIONS.items():
        for f in fields(defaults):
            key = f"{section}.{f.name}"
            default = getattr(defaults, f.name)
            if key in settings and settings[key] != (list(default) if isinstance(default, tuple) else default):
                shown.setdefault(key, settings[key])
    return {key: ", ".join(map(_plain, value)) if isinstance(value, list) else _plain(value)
            for key, value in shown.items()}  # fmt: skip


def _plain(value: Any) -> str:
    return str(value).rsplit("/", 1)[-1].replace("|", "\\|")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m extras.card", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="RUN/hf, or RUN/checkpoints/step_000100")
    parser.add_argument("out", type=Path, nargs="?", help="the export, where it is not the checkpoint's own")
    args = parser.parse_args()
    given = args.checkpoint.resolve()
    checkpoint = given.parent if given.name == "hf" else given
    card = (args.out or checkpoint / "hf") / "README.md"
    try:
        card.write_text(card_of(checkpoint), encoding="utf-8")
    except UserError as error:
        exit_with(error)
    except OSError as error:
        exit_with(UserError(f"{card}: cannot be written ({error.strerror}); name the folder of the export"))
    print(card)


if __name__ == "__main__":
    main()
