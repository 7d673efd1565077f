"""The facts beside the scores of a report: the model, the settings, when and by which code the run was made, and links.

    RUN/sessions.jsonl     {"date": "2026-01-31 09:00 UTC", "code": "commit 12ab34c", "overlong": {"gaia": 3}}

A line per start of evaluate.py that had something to sample. What an earlier version of the code did not write down is
"not recorded" in the report.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from arpo.errors import UserError

SESSIONS_FILE, VIEWER_PAGE = "sessions.jsonl", "viewer.html"
NOT_RECORDED = "not recorded"
"""Value of a setting that an earlier version of the code did not write down."""
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Session:
    """One start of evaluate.py."""

    date: str
    """UTC, to the minute."""
    code: str
    """`code_version` then."""
    overlong: dict[str, int]
    """Set -> number of its questions that were left out because their prompts are too long."""


def code_version() -> str:
    """Return the commit of a checkout, with "-dirty" where files were changed, or the installed package's version."""
    if (ROOT / ".git").exists():
        ask = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--tags"]
        try:
            answer = subprocess.run(ask, capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):  # no git here, or a file system that does not answer
            answer = None
        if answer and answer.returncode == 0:
            return f"commit {answer.stdout.strip()}"
    try:
        return f"arpo-torch {importlib.metadata.version('arpo-torch')}"
    except importlib.metadata.PackageNotFoundError:
        return NOT_RECORDED


def record_session(folder: Path, overlong: Mapping[str, int]) -> None:
    """Append a session that begins now to the run's file."""
    session = Session(datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), code_version(), dict(overlong))
    with (folder / SESSIONS_FILE).open("a") as file:
        file.write(json.dumps(asdict(session)) + "\n")


def read_sessions(folder: Path) -> list[Session]:
    """Return all sessions; [] of a run by an earlier version of the code. Raises UserError for a damaged file."""
    path = folder / SESSIONS_FILE
    if not path.exists():
        return []
    try:
        return [Session(**json.loads(line)) for line in path.read_text().splitlines()]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({' '.join(str(error).split())}); delete the file") from None


@dataclass(frozen=True)
class About:
    """Facts about a run that its report shows beside the scores: the model, the settings, what was left out."""

    title: str
    """Name of the model."""
    settings: tuple[tuple[str, str], ...]
    """(name, value) of what a reader needs to repeat the run, the most important first."""
    overlong: dict[str, int]
    """Set -> number of its questions that were left out, by the last session that asked it."""
    links: tuple[tuple[str, str], ...]
    """(words, relative address) of other pages about the run or its model."""


def read_about(folder: Path, settings: Mapping[str, Any], judge: str) -> About:
    """Return what is known of the run in `folder`. Raises UserError for a damaged file.

    settings: those that the run's records were made under (resume.py); judge: name of the judge's model, or "".
    """
    sessions, title = read_sessions(folder), model_name(settings)
    rows = settings_rows(settings, sessions, read_config(folder), judge)
    overlong = {name: count for session in sessions for name, count in session.overlong.items()}
    return About(title, rows, overlong, viewer_links(folder, title))


def model_name(settings: Mapping[str, Any]) -> str:
    """Return the model of a run's settings as a title: its path or hub name, or the name that a server gives it.

    "models/x sha256:1f" -> "models/x"; "server Qwen (/models/x)" -> "Qwen"; "server " (of an earlier version)
    """
    model = settings["model"].strip()
    if model == "server":
        return f"a server's model ({NOT_RECORDED})"
    if model.startswith("server "):
        return model.removeprefix("server ").partition(" (")[0]
    return model.partition(" sha256:")[0]


def settings_rows(
    settings: Mapping[str, Any], sessions: Sequence[Session], config: Mapping[str, Any], judge: str
) -> tuple[tuple[str, str], ...]:
    """Return the rows of `About.settings`; config: the run's config.yaml, where there is one."""
    rollout, tools = settings.get("rollout", {}), settings.get("tools", {})
    dates, codes = [s.date for s in sessions], list(dict.fromkeys(s.code for s in sessions))
    dates = [dates[0], *([f"{dates[-1]} ({len(dates)} starts)"] if len(dates) > 1 else [])] if dates else []
    by_tool = [
        limit
        for limit in rollout.get("max_calls_per_tool", [])
        if limit.partition("=")[0] in tools.get("names", []) or tools.get("mcp")  # whose tools' names are not kept
    ]
    calls = [str(rollout.get("max_tool_calls", "")), *by_tool]
    values = {
        "model": settings["model"],
        "date": " to ".join(dates),
        "code": ", then ".join(codes),
        "samples per question": settings.get("num_samples"),
        "temperature": rollout.get("temperature"),
        "top-p": rollout.get("top_p"),
        "seed": settings.get("seed"),
        "longest prompt": tokens((config.get("eval") or {}).get("max_prompt_tokens")),
        "longest response": tokens(rollout.get("max_response_tokens")),
        "most tool calls": ", ".join(filter(None, calls)),
        "longest tool result": tokens(rollout.get("max_result_tokens")),
        "system prompt": settings.get("system_prompt"),
        "thinking switch": settings.get("enable_thinking"),
        "tools": ", ".join(tools["names"]) or "none" if "names" in tools else None,
    }
    values |= {f"tool {name}": options(tools[name]) for name in tools.get("names", []) if tools.get(name)}
    values |= {f"MCP server {number}": options(server) for number, server in enumerate(tools.get("mcp", []), 1)}
    values["judge"] = judge or "none"
    return tuple((name, NOT_RECORDED if value in (None, "") else str(value)) for name, value in values.items())


def tokens(number: int | None) -> str:
    return "" if number is None else f"{number:,} tokens"


def options(section: Mapping[str, Any]) -> str:
    """{"backend": "local", "url": "", "top_k": 5} -> "backend local, top_k 5": those that are set."""
    return ", ".join(f"{name} {value}" for name, value in section.items() if value not in ("", None, 0, False, []))


def read_config(folder: Path) -> dict:
    """Return the config.yaml of a run; {} where it has none that can be read."""
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}


def viewer_links(folder: Path, model: str) -> tuple[tuple[str, str], ...]:
    """Return (words, relative address) of the viewer's pages that are there: the run's own, and its model's training.

    A training exports its model to RUN/hf and RUN/checkpoints/step_000100/hf; an ablation evaluates into RUN/eval.
    """
    above = [path for path in Path(model).parents if path.name][:3]
    places = {"branch trees of this run": [folder], "branch trees of the model's training": [folder.parent, *above]}
    found: dict[Path, str] = {}
    for words, candidates in places.items():
        for place in candidates:
            if (page := (place / VIEWER_PAGE).resolve()).exists() and page not in found:
                found[page] = words
    return tuple((words, quote(os.path.relpath(page, folder.resolve()))) for page, words in found.items())
