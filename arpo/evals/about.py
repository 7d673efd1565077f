"""What a report says of its run besides scores: the settings as they are, and when and by which code it was made.

    RUN/sessions.jsonl     {"date": "2026-01-31 09:00 UTC", "code": "commit 12ab34c", "max_prompt_tokens": 2048, ...}

A line per start of evaluate.py that had something to sample.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from arpo.config.bounded import parse_json, read_file
from arpo.config.contents import NOT_RECORDED, start_of
from arpo.config.facts import leaves
from arpo.errors import UserError

SESSIONS_FILE = "sessions.jsonl"


@dataclass(frozen=True)
class Session:
    """One start of evaluate.py."""

    date: str
    """UTC, to the minute."""
    code: str
    """`code_version` then."""
    max_prompt_tokens: int
    """eval.max_prompt_tokens, which more questions may be asked under than before."""
    overlong: dict[str, int]
    """Set -> number of its questions that were left out because their prompts are too long."""
    versions: dict[str, str] = field(default_factory=dict)
    """Package -> its version."""
    command: list[str] = field(default_factory=list)


def record_session(folder: Path, max_prompt_tokens: int, overlong: Mapping[str, int]) -> None:
    """Append a session that begins now to the run's file."""
    session = Session(**start_of(), max_prompt_tokens=max_prompt_tokens, overlong=dict(overlong))
    with (folder / SESSIONS_FILE).open("a") as file:
        file.write(json.dumps(asdict(session)) + "\n")


def read_sessions(folder: Path) -> list[Session]:
    """Return all sessions; [] without a file. Raises UserError for a damaged one."""
    path = folder / SESSIONS_FILE
    if not path.exists():
        return []
    try:
        return [Session(**parse_json(line)) for line in read_file(path).splitlines()]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({' '.join(str(error).split())}); delete the file") from None


def left_out(sessions: Sequence[Session]) -> dict[str, int]:
    """Set -> number of its questions that were left out, by the last session that asked it."""
    return {name: number for session in sessions for name, number in session.overlong.items()}


def settings_rows(settings: Mapping[str, Any], sessions: Sequence[Session], judge: str) -> list[list[str]]:
    """Return (name, value) of what a reader needs to repeat the run.

    settings: those that the run's trajectories were made under (resume.py); judge: name of the judge's model, or "".
    """
    dates = sessions[0].date if sessions else NOT_RECORDED
    if len(sessions) > 1:
        dates += f" to {sessions[-1].date} ({len(sessions)} starts)"
    code = ", then ".join(dict.fromkeys(session.code for session in sessions)) or NOT_RECORDED
    values = {"model": settings["model"], "date": dates, "code": code} | leaves(settings)
    if sessions:
        values["max_prompt_tokens"] = sessions[-1].max_prompt_tokens
    values["judge"] = judge or "none"
    return [[name, _words(value)] for name, value in values.items() if value not in ("", None)]


def _words(value: object) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
