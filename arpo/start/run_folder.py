"""Checks a run's folder before a start. Only one process writes to a folder, and a run keeps its first settings.

    runs/NAME/.lock            process and host that write to the folder; the system frees it when the process ends
    runs/NAME/config.yaml ...  the settings of the first start (arpo/log/settings.py)

A learning curve is meaningless if the algorithm or the data changed in the middle of the run. Settings that decide only
how long, how often, or how fast may change at any time.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from arpo.config.facts import leaves, may_change
from arpo.config.sections import RunConfig
from arpo.errors import UserError
from arpo.log.settings import CONTENTS, begun_settings, changes

LOCK = ".lock"
STEP_SIZES = ("data.num_prompts_per_step", "data.num_conversations_per_step")
_locks: list[IO[str]] = []
"""Lock files of this process. The files stay open, because closing a file would give the lock back."""


def claim_folder(folder: Path, script: str) -> None:
    """Make a run's folder. Rank 0 locks the folder until this process ends.

    Raises UserError if the folder cannot be written, if another process writes to the folder, or if another script made
    the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            lock = (folder / LOCK).open("a+")
    except OSError as error:
        raise UserError(f"{folder}: cannot write the run's folder ({error.strerror}); set run.dir") from None
    if os.environ.get("RANK", "0") == "0":
        _lock(lock)
    owner = begun_settings(folder).get("script", script)
    if owner != script:
        raise UserError(f"{folder} is a run of {owner}.py, and this is {script}.py; choose another --run.name")


def _lock(file: IO[str]) -> None:
    """Lock a file until this process ends. No child process inherits the lock. Raises UserError."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            print(f"warning: {file.name}: cannot be locked ({error.strerror}); a second run would not be noticed")
            return
        file.seek(0)
        folder = Path(file.name).parent
        holder = file.read(200).strip() or "another process"
        raise UserError(f"{folder} is being written by {holder}; stop that, or choose another --run.name") from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    _locks.append(file)


def check_run_folder(run: RunConfig, cfg: Any) -> None:
    """Claim the run's folder. If the run has a checkpoint, compare the settings of the run with the settings in `cfg`.

    Raises UserError if the folder cannot be claimed, or if the run exists and run.resume is False. Unless
    run.resume_changed is True, the function also raises UserError for the first changed setting that decides the result
    of training. A changed size of a step (STEP_SIZES) needs run.num_steps.
    """
    folder = run.folder
    claim_folder(folder, cfg.SCRIPT)
    if not any(folder.glob("checkpoints/step_*")):
        return
    if not run.resume:
        raise UserError(f"{folder}: run.resume is False but this run exists; choose another run.name")
    changed = changes(folder, cfg)
    for key in STEP_SIZES:
        if key in changed and run.resume_changed and not run.num_steps:
            before, now = changed[key]
            raise UserError(
                f"{folder} was begun with {key}={before}, and now it is {now}: run.num_epochs would count the steps "
                "done as steps of the new size; set run.num_steps, the number of all steps, with those done"
            )
    if run.resume_changed:
        return
    for key, (before, now) in changed.items():
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
