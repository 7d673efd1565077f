"""Notebooks for the jail of <python>: one supervisor serves many cells, and copies of the worker.

    client.py  the trainer's end of a session
    family.py  S, the supervisor of a session and of all sessions forked from it; `serve`
    waiting.py checks made by S on a worker between two cells
    worker.py  W, the process that runs the cells; `serve_cells`

The jail's host imports this folder as `notebook_jail` before the host itself is jailed, because CallLimits.sessions
names the folder. The last three modules run there. So they import only `jail` and the standard library, not `arpo`.
"""

from __future__ import annotations

GREET = b"\0greet"
COPY = b"\0copy"
"""Two requests without code: "say when the session is ready", and "make a copy, and serve the next socket with it".
Both have a zero byte, and code never has one. Any other block is a cell, so a session answers a single call just like
an ordinary supervisor."""
