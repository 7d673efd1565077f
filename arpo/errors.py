"""Bad input: one line that names the file, the field and the fix, and exit code 2."""

from __future__ import annotations

import os
import sys
import time
from typing import NoReturn


class UserError(Exception):
    """Bad input. The message is one line that names the file, the field and the fix."""


def require(ok: object, message: str) -> None:
    """Raises ValueError with the message unless `ok`: how a config's `__post_init__` refuses what cannot work."""
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
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(10)
        print(f"error (rank {rank}): {error}", file=sys.stderr)
    sys.exit(2)
