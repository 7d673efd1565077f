"""The jail of a child process for parsing untrusted text (web pages, answers of a policy, chat templates).

Hostile code runs there only through a hole in a parser. The code then runs without keys, network and
children. It cannot write files, and can read only the interpreter.
"""

from __future__ import annotations

import contextlib
import os
import sys

from . import landlock, seccomp
from . import syscalls as kernel
from .host import visible_paths


def confine_parser() -> list[str]:
    """Confine this process for good, as far as the machine allows. Return the walls: "landlock", "seccomp"."""
    holds = []
    with contextlib.suppress(OSError):  # a kernel or a container without Landlock
        landlock.restrict_files([*visible_paths([sys.prefix, sys.exec_prefix]), *landlock.READABLE_FILES])
        holds.append("landlock")
    with contextlib.suppress(OSError):  # an unknown machine
        filter_program = seccomp.program(allow_children=False, only_pid=os.getpid())
        kernel.drop_capabilities()
        seccomp.install(filter_program)
        holds.append("seccomp")
    return holds
