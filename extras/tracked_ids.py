"""The id of a run at a tracker, kept in RUN/trackers.json: a continued run continues the same run of the tracker.

    {"wandb": "0f3c...", "folder": "my_run"}

The file has the folder's name. In a copy with another name, which continues in another way, the ids are not valid:
otherwise the curves of copy and original would be mixed.
"""

from __future__ import annotations

import json
import uuid

from arpo.log.trackers import TrackedRun

IDS = "trackers.json"


def id_of(run: TrackedRun, tracker: str) -> str:
    """Return the id of the run at the tracker. A new run, or a copy, gets a new id."""
    path = run.folder / IDS
    name = run.folder.resolve().name
    ids = json.loads(path.read_text()) if path.exists() else {}
    if ids.setdefault("folder", name) != name:
        ids = {"folder": name}
    if not run.resume_step or tracker not in ids:
        ids[tracker] = uuid.uuid4().hex[:12]
        path.write_text(json.dumps(ids))
    return ids[tracker]
