"""Bad input is answered with one line that names the file, the field and the fix, and with exit code 2."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn


class UserError(Exception):
    """Bad input. The message is one line that names the file, the field and the fix."""


def require(ok: object, message: str) -> None:
    """Raise ValueError with the message unless `ok`; for the `__post_init__` of a config."""
    if not ok:
        raise ValueError(message)


def exit_with(error: UserError) -> NoReturn:
    """Print the one line (once, from rank 0 where it can) and leave with code 2, which no launcher should retry.

    What is wrong is mostly wrong on every rank. Then rank 0 says so, and torchrun ends the others while they wait here;
    a rank that is still there afterwards is alone with its error, and must say it itself.
    """
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:
        print(f"error: {error}", file=sys.stderr)
        if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            # torchrun's own report comes last on the screen, and ends with this in the place of a traceback.
            info = {"py_callstack": f"error: {error}", "timestamp": str(int(time.time()))}
            Path(file).write_text(json.dumps({"message": {"message": f"error: {error}", "extraInfo": info}}))
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a training rank has a handler, which would only note it
        time.sleep(10)
        print(f"error (rank {rank}): {error}", file=sys.stderr)
    sys.exit(2)
