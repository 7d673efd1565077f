"""The program of the child process that renders a chat template for the first time (arpo/jail/child.py)."""

from __future__ import annotations

import datetime
import json
import re
from itertools import product

QUESTION = {"role": "user", "content": "question"}
TOOL = {"type": "function", "function": {"name": "a", "description": "", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "a", "arguments": {}}}
CONVERSATIONS = (
    [QUESTION],
    [{"role": "system", "content": "rule"}, QUESTION, {"role": "assistant", "content": "answer"}, QUESTION],
    [QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "result"}],
)
GENERATION_MARKS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""Tags that only transformers knows."""


def prepare() -> None:
    answer("")  # imports all that there is to import


def answer(template: str) -> bool:
    """Render conversations as transformers does. Return False if the memory does not suffice.

    Only the memory is tried here, under the child's limits. A template that refuses one of these conversations may be
    right for the run's own. Its other errors show when the run renders its conversations.
    """
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise ValueError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, **options: json.dumps(value)
    environment.globals |= {"raise_exception": refuse, "strftime_now": datetime.datetime.now().strftime}
    template = GENERATION_MARKS.sub("", template)
    for messages, tools in product(CONVERSATIONS, (None, [TOOL])):
        told = {"messages": messages, "tools": tools, "add_generation_prompt": True, "eos_token": "", "bos_token": ""}
        try:
            environment.from_string(template).render(told)
        except MemoryError:
            return False
        except Exception:  # of any kind: the template is a program of a stranger
            continue
    return True
