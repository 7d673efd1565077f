"""The settings of a run and all later changes, as recorded in the run's folder.

runs/NAME/config.yaml      settings at the first step, with digests of all named files; never overwritten
runs/NAME/changes.jsonl    {"step": 40, "changes": {"optim.lr": [1e-06, 5e-07]}}: later changes, with the step
runs/NAME/sessions.jsonl   each start: step, date, commit, versions of packages, and command line
runs/NAME/code/            the user's Python files, and differences from the commit
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any

from arpo.config.bounded import parse_json, read_file, read_yaml
from arpo.config.contents import contents_of, keep_code, provenance
from arpo.config.facts import leaves
from arpo.errors import UserError

CONFIG = "config.yaml"
CHANGES = "changes.jsonl"
SESSIONS = "sessions.jsonl"
CONTENTS = "contents."
"""Prefix of a digest's key. The rest is the key of the option that names the file."""


def settings_of(folder: Path, step: float = inf) -> dict[str, Any]:
    """Return the settings of `step` (default: the newest) in the run's folder, by dotted keys. Raises UserError."""
    try:
        settings = leaves(read_yaml(folder / CONFIG))
        for done_steps, changed in recorded_changes(folder):
            if done_steps < step:
                settings |= {key: now for key, (_, now) in changed.items()}
    except (OSError, AttributeError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{folder}: its settings cannot be read ({reason}); choose another run.name") from None
    return settings


def recorded_changes(folder: Path) -> list[tuple[int, dict[str, tuple[object, object]]]]:
    """Return (number of steps done then, key -> (before, now)) of each start with changed settings, in order."""
    path = folder / CHANGES
    lines = map(parse_json, read_file(path).splitlines() if path.exists() else [])
    return [(line["step"], line["changes"]) for line in lines]


def last_change(folder: Path, prefixes: tuple[str, ...]) -> int:
    """Return the number of steps done when an option with such a beginning was last changed; 0 if none was."""
    steps = [step for step, changed in recorded_changes(folder) if any(key.startswith(prefixes) for key in changed)]
    return steps[-1] if steps else 0


def begun_settings(folder: Path) -> dict[str, Any]:
    """Return `settings_of` a folder, or {} if they cannot be read. Never raises: a resumed run calls `settings_of`
    later, and a new run writes the file anew."""
    try:
        return settings_of(folder)
    except UserError:
        return {}


def changes(folder: Path, cfg: Any) -> dict[str, tuple[object, object]]:
    """Return key -> (before, now) for the values of `cfg` that differ from the run in `folder`, in order.

    Keys missing on one side do not count: they are options of another version of the code. Files are compared by
    contents, under the key contents.OPTION, not by paths. Raises UserError.
    """
    before = settings_of(folder)
    now = json.loads(json.dumps(leaves(cfg)))  # lists instead of tuples, as in the file
    now |= {CONTENTS + key: digest for key, digest in contents_of(cfg).items()}
    same_contents = {
        key.removeprefix(CONTENTS) for key in now if key.startswith(CONTENTS) and now[key] == before.get(key)
    }
    return {
        key: (before[key], value)
        for key, value in now.items()
        if key in before and before[key] != value and key not in same_contents
    }


def record_settings(folder: Path, cfg: Any, step: int) -> None:
    """Record settings and code of a start. For a run with `step` steps done only the changed settings are recorded."""
    if step:
        changed = changes(folder, cfg)
        if changed:
            with (folder / CHANGES).open("a") as file:
                file.write(json.dumps({"step": step, "changes": changed}) + "\n")
    else:
        save_config(cfg, folder / CONFIG, contents_of(cfg))
        (folder / CHANGES).unlink(missing_ok=True)
        (folder / SESSIONS).unlink(missing_ok=True)
    keep_code(folder / "code", cfg)
    with (folder / SESSIONS).open("a") as file:
        file.write(json.dumps({"step": step} | provenance()) + "\n")


def save_config(config: object, path: Path, contents: Mapping[str, str] | None = None) -> None:
    """Write the resolved config as YAML for `load_config`. Readers see the old file or the complete new one.

    The first line names the script. contents: digests of the files named by options, by key.
    """
    import yaml

    head = {"script": config.SCRIPT} if hasattr(config, "SCRIPT") else {}
    if contents:
        head["contents"] = dict(contents)
    plain = json.loads(json.dumps(asdict(config)))  # lists instead of tuples
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(yaml.safe_dump(head | plain, sort_keys=False))
    temporary.replace(path)
