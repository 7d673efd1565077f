"""The Python for the host (the trainer's, or one named by the user), and the folders of its packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .host import ENVIRONMENT

PACKAGE_PARENT = str(Path(__file__).resolve().parents[1])
"""Folder on the host's sys.path during the import of this package as `jail`."""
OLDEST = (3, 9)
ANSWER_TIMEOUT_S = 60.0
# Even very old Pythons can run this. The user then reads "is Python 3.6", and not a syntax error.
_ASK = """
import json, sys
facts = {"version": list(sys.version_info[:3]), "path": sys.path, "prefixes": [sys.prefix, sys.exec_prefix]}
if sys.version_info >= OLDEST:
    sys.path.insert(0, sys.argv[1])
    try:
        import jail.host
    except BaseException as error:
        facts["error"] = type(error).__name__ + ": " + str(error)
print(json.dumps(facts))
""".replace("OLDEST", str(OLDEST))


@dataclass(frozen=True)
class Interpreter:
    executable: str
    version: str
    import_paths: tuple[str, ...]
    """Folders of installed packages, not all of sys.path: an editable install would show the repository."""
    prefixes: tuple[str, ...]


def own_interpreter() -> Interpreter:
    return _interpreter(sys.executable, sys.version_info[:3], sys.path, [sys.prefix, sys.exec_prefix])


def named_interpreter(executable: str) -> Interpreter:
    """Return the Python of another environment. Raises ValueError with the reason if this Python cannot run a host."""
    path = os.path.abspath(os.path.expanduser(executable))  # unresolved: the link's folder is the venv
    if not os.path.isfile(path):
        raise ValueError("there is no such file; name the environment's bin/python")
    command = [path, "-s", "-B", "-c", _ASK, PACKAGE_PARENT]  # with site: its .pth files may add folders of packages
    try:
        done = subprocess.run(
            command, env=ENVIRONMENT, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWER_TIMEOUT_S
        )
        facts = json.loads(done.stdout)
        version = tuple(facts["version"])
    except (OSError, subprocess.SubprocessError, ValueError, TypeError, KeyError) as error:
        reason = error.strerror if isinstance(error, OSError) else type(error).__name__
        raise ValueError(f"does not answer as a Python does ({reason}); name the environment's bin/python") from None
    if version < OLDEST:
        needs, has = (".".join(map(str, numbers)) for numbers in (OLDEST, version))
        raise ValueError(f"is Python {has}; name one of at least {needs}")
    if "error" in facts:
        raise ValueError(f"cannot run the sandbox ({facts['error']}); name another Python")
    return _interpreter(path, version, facts["path"], facts["prefixes"])


def _interpreter(executable: str, version: tuple[int, ...], path: list[str], prefixes: list[str]) -> Interpreter:
    installed = [p for p in path if Path(p).name in ("site-packages", "dist-packages") and os.path.isdir(p)]
    return Interpreter(executable, ".".join(map(str, version)), tuple(installed), tuple(prefixes))
