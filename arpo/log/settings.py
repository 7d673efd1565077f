"""The settings that a run was begun with, as its folder records them, and what was changed since.

runs/NAME/config.yaml      of its first step, with digests of the files that it names; never overwritten
runs/NAME/changes.jsonl    {"step": 40, "changes": {"optim.lr": [1e-06, 5e-07]}}: what was changed since, and when
runs/NAME/sessions.jsonl   each start: its step, date, commit, versions of packages, and command line
runs/NAME/code/            the user's own Python files, and what differs from the commit
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from arpo.config.bounded import parse_json, read_file, read_yaml
from arpo.config.contents import contents_of, keep_code, start_of
from arpo.config.facts import leaves
from arpo.errors import UserError

CONFIG = "config.yaml"
CHANGES = "changes.jsonl"
SESSIONS = "sessions.jsonl"
CONTENTS = "contents."
"""What a digest's key has in front of the key of the setting that names the file."""


def settings_of(folder: Path) -> dict[str, Any]:
    """Return the settings of the run in `folder` by dotted keys, as they were changed last. Raises UserError."""
    try:
        settings = leaves(read_yaml(folder / CONFIG))
        for line in read_file(folder / CHANGES).splitlines() if (folder / CHANGES).exists() else ():
            settings |= {key: now for key, (_, now) in parse_json(line)["changes"].items()}
    except (OSError, AttributeError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{folder}: its settings cannot be read ({reason}); choose another run.name") from None
    return settings


def begun_settings(folder: Path) -> dict[str, Any]:
    """Return `settings_of` a folder, and {} where there are none, or they cannot be read: a start that needs them says
    so, another one writes them anew."""
    try:
        return settings_of(folder)
    except UserError:
        return {}


def changes(folder: Path, cfg: Any) -> dict[str, tuple[object, object]]:
    """Return (before, now) of the keys of `cfg` whose values are others than those of the run in `folder`, in order.

    A key that one of the two lacks is an option of another version of the code, and says nothing. Files are compared by
    their contents, under the key contents.OPTION, and not by their paths. Raises UserError.
    """
    before = settings_of(folder)
    now = json.loads(json.dumps(leaves(cfg)))  # lists instead of tuples, as the file has them
    now |= {CONTENTS + key: digest for key, digest in contents_of(cfg).items()}
    same = {key.removeprefix(CONTENTS) for key in now if key.startswith(CONTENTS) and now[key] == before.get(key)}
    return {
        key: (before[key], now[key]) for key in now if key in before and before[key] != now[key] and key not in same
    }


def record_settings(folder: Path, cfg: Any, step: int) -> None:
    """Write the settings of a new run, or what has changed since for one with `step` steps done; and its code."""
    if not step:
        save_config(cfg, folder / CONFIG, contents_of(cfg))
        (folder / CHANGES).unlink(missing_ok=True)
        (folder / SESSIONS).unlink(missing_ok=True)
    elif changed := changes(folder, cfg):
        with (folder / CHANGES).open("a") as file:
            file.write(json.dumps({"step": step, "changes": changed}) + "\n")
    keep_code(folder / "code", cfg)
    with (folder / SESSIONS).open("a") as file:
        file.write(json.dumps({"step": step} | start_of()) + "\n")


def save_config(config: object, path: Path, contents: Mapping[str, str] | None = None) -> None:
    """Write the resolved config, whole or not at all, as YAML that `load_config` reads back; its first line names the
    script. contents: digests of the files that it names, by key."""
    import yaml

    head = {"script": config.SCRIPT} if hasattr(config, "SCRIPT") else {}
    if contents:
        head["contents"] = dict(contents)
    plain = json.loads(json.dumps(asdict(config)))  # lists instead of tuples
    writing = path.with_name(path.name + ".tmp")
    writing.write_text(yaml.safe_dump(head | plain, sort_keys=False))
    writing.replace(path)
