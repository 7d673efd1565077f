"""The id of a run at a tracker, kept in RUN/trackers.json: a continued run continues the same run of the tracker."""

from __future__ import annotations

import json
import uuid

from arpo.log.trackers import TrackedRun

IDS = "trackers.json"


def id_of(run: TrackedRun, tracker: str) -> str:
    """Return the id of the run at the tracker. A new run gets a new id."""
    path = run.folder / IDS
    ids = json.loads(path.read_text()) if path.exists() else {}
    if not run.resume_step or tracker not in ids:
        ids[tracker] = uuid.uuid4().hex[:12]
        path.write_text(json.dumps(ids))
    return ids[tracker]
