"""Bad input is answered with one line that names the file, the field and the fix, and with exit code 2."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn


class UserError(Exception):
    """Bad input. The message is one line that names the file, the field and the fix."""


class PrintableRecord(logging.LogRecord):
    """A line of the log, ours or a library's."""

    def getMessage(self) -> str:
        return printable(super().getMessage())


def printable(text: str) -> str:
    r"""Return a text that a terminal shows and does not obey: with control characters, but for tabs and line breaks,
    written out ("\x1b"). What strangers' services and files say is part of our lines."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)


def require(ok: object, message: str) -> None:
    """Raise ValueError with the message unless `ok`; for the `__post_init__` of a config."""
    if not ok:
        raise ValueError(message)


def exit_with(error: UserError) -> NoReturn:
    """Print the one line (once, from rank 0 where it can) and leave with code 2, which no launcher should retry.

    What is wrong is mostly wrong on every rank. Then rank 0 says so, and torchrun ends the others while they wait here;
    a rank that is still there afterwards is alone with its error, and must say it itself.
    """
    line = printable(f"error: {error}")
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:
        print(line, file=sys.stderr)
        if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            # torchrun's own report comes last on the screen, and ends with this in the place of a traceback.
            info = {"py_callstack": line, "timestamp": str(int(time.time()))}
            Path(file).write_text(json.dumps({"message": {"message": line, "extraInfo": info}}))
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a training rank has a handler, which would only note it
        time.sleep(10)
        print(line.replace("error", f"error (rank {rank})", 1), file=sys.stderr)
    sys.exit(2)
