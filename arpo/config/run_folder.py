"""The settings of a run's folder: a run goes on only under those it was begun with.

    runs/NAME/config.yaml      of its first step, with digests of the files that it names; never overwritten
    runs/NAME/changes.jsonl    {"step": 40, "changes": {"optim.lr": [1e-06, 5e-07]}}: what was changed since, and when
    runs/NAME/sessions.jsonl   each start: its step, date, commit, versions of packages, and command line
    runs/NAME/code/            the user's own Python files, and what differs from the commit
    runs/NAME/.lock            process and host that write to it; the system frees it when the process is gone

Under another algorithm or another data file the curve would be of no experiment at all. What decides only how long, how
often, or how fast may change at any time.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, TypeVar

from arpo.config.bounded import parse_json, read_file, read_yaml
from arpo.config.contents import contents_of, keep_code, start_of
from arpo.config.facts import leaves, may_change
from arpo.config.model_folder import check_model_folder
from arpo.config.sections import RunConfig
from arpo.data.hub import hub_name, model_folder, pin
from arpo.errors import UserError

C = TypeVar("C")
CONFIG, CHANGES, SESSIONS, LOCK = "config.yaml", "changes.jsonl", "sessions.jsonl", ".lock"
MODELS = ("model.path", "critic.path", "loss.reference")
"""Options that name a model."""
CONTENTS = "contents."
"""What a digest's key has in front of the key of the setting that names the file."""
_locks: list[IO[str]] = []
"""Those that this process holds: closing the file would give the lock back."""


def claim_folder(folder: Path, script: str) -> None:
    """Make a run's folder, and hold its lock until this process ends. Only rank 0 locks it.

    Raises UserError where the folder cannot be written, another process writes to it, or another script has begun it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            lock = (folder / LOCK).open("a+")
    except OSError as error:
        raise UserError(f"{folder}: cannot write the run's folder ({error.strerror}); set run.dir") from None
    if os.environ.get("RANK", "0") == "0":
        _hold(lock)
    owner = begun_settings(folder).get("script", script)
    if owner != script:
        raise UserError(f"{folder} is a run of {owner}.py, and this is {script}.py; choose another --run.name")


def _hold(file: IO[str]) -> None:
    """Lock a file for this process: no child inherits the lock, and it ends with its holder. Raises UserError."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            print(f"warning: {file.name}: cannot be locked ({error.strerror}); a second run would not be noticed")
            return
        file.seek(0)
        folder, holder = Path(file.name).parent, file.read(200).strip() or "another process"
        raise UserError(f"{folder} is being written by {holder}; stop that, or choose another --run.name") from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    _locks.append(file)


def check_run_folder(run: RunConfig, cfg: Any) -> None:
    """Claim the run's folder, and compare the settings of a run that has a checkpoint with `cfg`.

    Raises UserError where the folder cannot be had, where the run exists and run.resume is False, and, unless
    run.resume_changed, for the first setting that is another one now.
    """
    folder = run.folder
    claim_folder(folder, cfg.SCRIPT)
    if not any(folder.glob("checkpoints/step_*")):
        return
    if not run.resume:
        raise UserError(f"{folder}: run.resume is False but this run exists; choose another run.name")
    if run.resume_changed:
        return
    for key, (before, now) in changes(folder, cfg).items():
        option = key.removeprefix(CONTENTS)
        difference = f"{key}={before}, and now it is {now}"
        if option != key:
            difference = f"other contents of {option}={leaves(cfg)[option]} ({before}, and now {now})"
        elif may_change(key, cfg):
            continue
        raise UserError(
            f"{folder} was begun with {difference}; choose another --run.name, or go on under the new settings with "
            "--run.resume_changed True"
        )


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


def pin_config(cfg: C) -> C:
    """Return a script's config with all data sets of the Hub fetched, and their names pinned. Raises UserError.

    A run that was begun goes on with the commit that it was begun with, unless the name has a revision.
    """
    begun = begun_settings(Path(cfg.run.dir) / cfg.run.name)
    for name in ("train", "valid"):
        if file := getattr(getattr(cfg, "data", None), name, ""):
            pinned = pin(f"data.{name}", file, str(begun.get(f"data.{name}", "")))
            cfg = replace(cfg, data=replace(cfg.data, **{name: pinned}))
    if hasattr(cfg, "eval"):
        files = tuple(pin("eval.files", file) for file in cfg.eval.files)
        cfg = replace(cfg, eval=replace(cfg.eval, files=files))
    return cfg


def pin_models(cfg: C) -> C:
    """Return a script's config with the folder in the cache for each model of the Hub, so that trainer, engine and
    export have one commit. Raises UserError.

    A run that was begun goes on with its commit. Its name alone is kept where an earlier version recorded that.
    """
    evaluation, begun = getattr(cfg, "eval", None), begun_settings(Path(cfg.run.dir) / cfg.run.name)
    if evaluation and evaluation.regrade:
        return cfg
    for option in MODELS:
        section, field = option.split(".")
        name, before = getattr(getattr(cfg, section, None), field, ""), str(begun.get(option, ""))
        if not name or Path(name).is_dir():
            continue
        folder = model_folder(name, option=option, begun=before, weights=not (evaluation and evaluation.server))
        check_model_folder(str(folder), max_model_len=getattr(cfg, "max_model_len", 0), option=option)
        if os.environ.get("RANK", "0") == "0":
            print(f"{option}: {hub_name(str(folder))}, in {folder}", flush=True)
        if before != name:
            cfg = replace(cfg, **{section: replace(getattr(cfg, section), **{field: str(folder)})})
    return cfg
