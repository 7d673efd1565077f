"""Bad input is answered with one line that names the file, the field and the fix, and with exit code 2.

The names that an option may take are often the keys of a dict of functions (losses, branching rules, ...). `names_of`
reads them from the source, because those modules import torch, and a misspelt name must be reported before that takes
its seconds. So a new function needs no second place in which its name is listed.
"""

from __future__ import annotations

import ast
import difflib
import json
import os
import signal
import sys
import time
from functools import cache
from pathlib import Path
from typing import NoReturn


class UserError(Exception):
    """Bad input. The message is one line that names the file, the field and the fix."""


def require(ok: object, message: str) -> None:
    """Raise ValueError with the message unless `ok`; for the `__post_init__` of a config."""
    if not ok:
        raise ValueError(message)


@cache
def names_of(module: str, name: str) -> tuple[str, ...]:
    """Return the keys of a dict literal, or the entries of a set literal, at the top level of a module of this package.

    They come in order; LookupError where there is no such literal.
    names_of("losses", "TOKEN_LOSSES") -> ("ppo", "gspo", "cispo", "reinforce")
    """
    source = Path(__file__).parent.joinpath(f"{module}.py").read_text()
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(t, ast.Name) and t.id == name for t in targets) and isinstance(
            node.value, ast.Dict | ast.Set
        ):
            entries = node.value.keys if isinstance(node.value, ast.Dict) else node.value.elts
            return tuple(ast.literal_eval(entry) for entry in entries)
    raise LookupError(f"arpo/{module}.py assigns no dict or set literal to {name}")


def check_name(option: str, value: str, module: str, dict_name: str, *also: str) -> None:
    """Raise ValueError unless `value` is a key of that dict or one of `also`; the message suggests the closest name."""
    known = (*names_of(module, dict_name), *also)
    if value not in known:
        close = difflib.get_close_matches(value, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"{option}={value!r} is unknown; {hint}use one of {', '.join(known)}")


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
