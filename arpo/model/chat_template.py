"""A chat template is a program from the model folder. In this process nothing would stop a bad template, so a child
process renders the template first, with limits on time and memory."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from arpo.jail.child import Child, ChildDied

CPU_S = 5.0
WALL_S = 120.0
MEMORY_BYTES = 1 << 30


@cache
def excess_of(template: str) -> str:
    """Return the limit that rendering the template exceeds, in words ("5 s of CPU time"); "" if it exceeds none."""
    program = Path(__file__).with_name("template_trial.py")
    child = Child(program, memory_bytes=MEMORY_BYTES, cpu_s=CPU_S, wall_s=WALL_S)
    try:
        return "" if child.ask(template) else f"{MEMORY_BYTES >> 30} GiB"
    except ChildDied as died:
        return str(died)
    finally:
        child.close()
