"""A chat template is a program of the model folder's: rendered first in a process of its own, with limits on time and
memory, since nothing would stop it in ours.

This file is that process's program too, and imports nothing of the package, so that it starts in a fifth of a second.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import resource
import subprocess
import sys
from functools import cache
from itertools import product

CPU_S, MEMORY_BYTES = 5, 1 << 30
WALL_S = 120.0
TOO_MUCH_MEMORY = 3
_QUESTION = {"role": "user", "content": "question"}
_TOOL = {"type": "function", "function": {"name": "a", "description": "", "parameters": {"type": "object"}}}
_CALL = {"type": "function", "function": {"name": "a", "arguments": {}}}
CONVERSATIONS = (
    [_QUESTION],
    [{"role": "system", "content": "rule"}, _QUESTION, {"role": "assistant", "content": "answer"}, _QUESTION],
    [_QUESTION, {"role": "assistant", "content": "", "tool_calls": [_CALL]}, {"role": "tool", "content": "result"}],
)


@cache
def excess_of(template: str) -> str:
    """Return what of its limits rendering a template exceeds, in words; "" for nothing."""
    environment = {"PATH": os.defpath, "LANG": "C.UTF-8"}
    command = [sys.executable, "-I", __file__]
    try:
        done = subprocess.run(
            command, input=json.dumps(template), text=True, capture_output=True, env=environment, timeout=WALL_S
        )
    except subprocess.TimeoutExpired:
        return f"{WALL_S:g} s"
    if done.returncode > 0 and done.returncode != TOO_MUCH_MEMORY:
        raise RuntimeError(f"chat templates cannot be tried: {done.stderr.strip()[-300:]}")
    return {0: "", TOO_MUCH_MEMORY: f"{MEMORY_BYTES >> 30} GiB"}.get(done.returncode, f"{CPU_S} s of CPU time")


def render_all(template: str) -> None:
    """Render conversations as transformers does. What a template refuses or gets wrong shows at its use."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise ValueError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, **options: json.dumps(value)
    environment.globals |= {"raise_exception": refuse, "strftime_now": datetime.datetime.now().strftime}
    template = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)  # marks of transformers' own
    for messages, tools in product(CONVERSATIONS, (None, [_TOOL])):
        told = {"messages": messages, "tools": tools, "add_generation_prompt": True, "eos_token": "", "bos_token": ""}
        try:
            environment.from_string(template).render(told)
        except MemoryError:
            sys.exit(TOO_MUCH_MEMORY)
        except Exception as error:
            print(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    render_all(json.load(sys.stdin))
