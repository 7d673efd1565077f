"""Continuing a run folder, which needs the settings with which it was begun; and what is on record of its starts.

RUN/config.yaml        the settings, with digests of the files that they name (log/settings.py)
RUN/sessions.jsonl     each start that had something to sample: date, code, command, and what was left out
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from arpo.config.bounded import parse_json, read_file
from arpo.config.contents import NOT_RECORDED, contents_of, start_of
from arpo.config.facts import decides_sampling
from arpo.errors import UserError
from arpo.evals.records import FOLDER, Record
from arpo.log.settings import CONFIG, CONTENTS, SESSIONS, changes, save_config, settings_of
from arpo.trajectory import Prompt

DECIDES = (
    "run.seed", "model.path", "model.enable_thinking", "eval.num_samples", "eval.system_prompt", "rollout.",
    "protocol.", "tools.",
)  # fmt: skip
"""Settings and sections that must not change within a run. (More questions or benchmarks may be added to it.)"""
SERVED = "eval.server"
"""The key that the name of a server's model stands under, among the digests."""


def claim_run(folder: Path, cfg: Any, served: str = "") -> None:
    """Write the settings of a run; `served`: the server's model. Raises UserError that names the first setting in which
    it differs from what was begun there, and for anything begun if `run.resume` is False."""
    if any((folder / FOLDER).glob("*.jsonl*")):
        if not cfg.run.resume:
            raise UserError(f"{folder} holds an evaluation; choose another run.name, or set run.resume to True")
        differing = changes(folder, cfg)
        if (before := settings_of(folder).get(CONTENTS + SERVED, "")) != served:
            differing = {"model.path": (before, served)} | differing
        for key, (before, now) in differing.items():
            option = key.removeprefix(CONTENTS)
            if option.startswith(DECIDES) and decides_sampling(option, cfg):
                raise UserError(
                    f"{folder} was begun with {key}={before}, and now it is {now}; choose another run.name, or delete "
                    "the folder"
                )
    folder.mkdir(parents=True, exist_ok=True)
    save_config(cfg, folder / CONFIG, contents_of(cfg) | ({SERVED: served} if served else {}))


def unfinished(name: str, prompts: Sequence[Prompt], num_samples: int, records: Sequence[Record]) -> list[Prompt]:
    """Return the questions of a benchmark that lack samples in the records of a run. Raises UserError if a recorded
    question has changed."""
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


# ---- the starts


def record_session(folder: Path, overlong: Mapping[str, int]) -> None:
    """Append a start that begins now; `overlong`: set -> number of its questions whose prompts are too long."""
    with (folder / SESSIONS).open("a") as file:
        file.write(json.dumps(start_of() | {"overlong": dict(overlong)}) + "\n")


def about_run(folder: Path) -> tuple[str, dict[str, int]]:
    """Return a line that says what a run was made with, and the number of questions that its last start left out, by
    set. Raises UserError for a damaged file, or a folder that holds no evaluation."""
    path = folder / SESSIONS
    overlong: dict[str, int] = {}
    codes, date = [], NOT_RECORDED
    try:
        for line in reversed(read_file(path).splitlines() if path.exists() else []):
            session = parse_json(line)
            overlong = session["overlong"] | overlong
            codes, date = [session["code"], *codes], session["date"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: cannot be read ({' '.join(str(error).split())}); delete the file") from None
    settings, code = settings_of(folder), ", then ".join(dict.fromkeys(codes)) or NOT_RECORDED
    digest = settings.get(f"{CONTENTS}model.path")
    model = settings.get(CONTENTS + SERVED) or " ".join(filter(None, [settings.get("model.path"), digest]))
    return f"Model: {model}. Begun: {date}. Code: {code}. All settings: {CONFIG}.", overlong
