"""What the jail of <python> needs to keep a notebook: one supervisor serves many cells, and copies of its worker.

    client.py  the trainer's end of a session
    family.py  S, the supervisor of sessions that were forked from one another; `serve`
    waiting.py what S asks about a worker between two cells
    worker.py  W, the process that runs their cells; `serve_cells`

The jail's host imports this folder before it is jailed, as `notebook_jail`, because CallLimits.sessions names it. So
the last three, which run there, import `jail` and the standard library, and nothing of `arpo`.
"""

from __future__ import annotations

GREET, COPY = b"\0greet", b"\0copy"
"""Requests that are no code, which has no zero bytes: say when the session is there; make a copy that serves the socket
that comes next. Any other block is a cell, so a session answers a single call as an ordinary supervisor does."""
