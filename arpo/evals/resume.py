"""Resume an evaluation in the same run folder with the same settings, and record each start.

RUN/config.yaml        the settings, with digests of all named files (log/settings.py)
RUN/sessions.jsonl     each start with questions to sample: date, code, command, and numbers of overlong questions
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from arpo.config.bounded import parse_json, read_file
from arpo.config.contents import NOT_RECORDED, contents_of, provenance
from arpo.config.facts import decides_sampling
from arpo.errors import UserError
from arpo.evals.records import FOLDER, Record
from arpo.log.settings import CONFIG, CONTENTS, SESSIONS, changes, save_config, settings_of
from arpo.trajectory import Prompt

FIXED_OPTIONS = (
    "run.seed",
    "model.path",
    "model.enable_thinking",
    "eval.num_samples",
    "eval.system_prompt",
    "engine.",
    "rollout.",
    "protocol.",
    "tools.",
)
"""Options and sections that must not change within a run. (More questions or benchmarks may be added.)"""
SERVED = "eval.server"
"""Key of the served model's name, among the digests."""


def claim_run(folder: Path, cfg: Any, served: str = "") -> None:
    """Write the settings of a run into its folder. served: name of the server's model.

    Raises UserError if the folder holds an evaluation with other settings; the message names the first one that
    differs. Raises UserError for any evaluation if `run.resume` is False.
    """
    if any((folder / FOLDER).glob("*.jsonl*")):
        if not cfg.run.resume:
            raise UserError(f"{folder} holds an evaluation; choose another run.name, or set run.resume to True")
        changed = changes(folder, cfg)
        served_before = settings_of(folder).get(CONTENTS + SERVED, "")
        if served_before != served:
            changed = {"model.path": (served_before, served)} | changed
        for key, (before, now) in changed.items():
            option = key.removeprefix(CONTENTS)
            if option.startswith(FIXED_OPTIONS) and decides_sampling(option, cfg):
                raise UserError(
                    f"{folder} was begun with {key}={before}, and now it is {now}; choose another run.name, or delete "
                    "the folder"
                )
    folder.mkdir(parents=True, exist_ok=True)
    save_config(cfg, folder / CONFIG, contents_of(cfg) | ({SERVED: served} if served else {}))


def unfinished(name: str, prompts: Sequence[Prompt], num_samples: int, records: Sequence[Record]) -> list[Prompt]:
    """Return the questions of a benchmark with fewer than `num_samples` records without an infrastructure error.

    Raises UserError if a recorded question has changed.
    """
    prompts_by_id = {prompt.prompt_id: prompt for prompt in prompts}
    num_recorded: Counter[str] = Counter()
    for record in records:
        prompt = prompts_by_id.get(record.question_id)
        if record.benchmark != name or prompt is None:
            continue
        num_recorded[record.question_id] += not record.has_failed
        if (record.question, record.prompt.answers) != (prompt.messages[-1]["content"], prompt.answers):
            reason = f"{prompt.prompt_id} is another question than when the run was begun"
            raise UserError(f"{name} has changed: {reason}; choose another run.name")
    return [prompt for prompt in prompts if num_recorded[prompt.prompt_id] < num_samples]


# ---- the starts


def record_session(folder: Path, overlong: Mapping[str, int]) -> None:
    """Append a start, with the time now. overlong: question set -> number of its questions with too long prompts."""
    with (folder / SESSIONS).open("a") as file:
        file.write(json.dumps(provenance() | {"overlong": dict(overlong)}) + "\n")


def about_run(folder: Path) -> tuple[str, dict[str, int]]:
    """Return a line with model, date, code and settings of a run, and its numbers of overlong questions by set.

    The number for a set is from its newest start. Raises UserError for a damaged file, or a folder without an
    evaluation.
    """
    path = folder / SESSIONS
    overlong: dict[str, int] = {}
    codes: list[str] = []
    date = NOT_RECORDED
    try:
        for line in read_file(path).splitlines() if path.exists() else []:
            session = parse_json(line)
            overlong = overlong | session["overlong"]
            codes.append(session["code"])
            if len(codes) == 1:
                date = session["date"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: cannot be read ({' '.join(str(error).split())}); delete the file") from None
    code = ", then ".join(dict.fromkeys(codes)) or NOT_RECORDED
    settings = settings_of(folder)
    digest = settings.get(f"{CONTENTS}model.path")
    model = settings.get(CONTENTS + SERVED) or " ".join(filter(None, [settings.get("model.path"), digest]))
    return f"Model: {model}. Begun: {date}. Code: {code}. All settings: {CONFIG}.", overlong
