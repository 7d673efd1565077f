"""The names that an option may take, where they are the keys of a dict of functions (losses, branching rules, ...).

They are read from the source, because the modules themselves import torch, and a misspelt name must be reported before
that takes its seconds. So a new function needs no second place in which its name is listed.
"""

from __future__ import annotations

import ast
import difflib
from functools import cache
from pathlib import Path


@cache
def names_of(module: str, dict_name: str) -> tuple[str, ...]:
    """Keys of a dict literal at the top level of a module of this package, in order; LookupError where there is none.

    names_of("losses", "TOKEN_LOSSES") -> ("ppo", "gspo", "cispo", "reinforce")
    """
    source = Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py").read_text()
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(t, ast.Name) and t.id == dict_name for t in targets) and isinstance(node.value, ast.Dict):
            return tuple(ast.literal_eval(key) for key in node.value.keys)
    raise LookupError(f"arpo/{module}.py assigns no dict literal to {dict_name}")


def check_name(option: str, value: str, module: str, dict_name: str, *also: str) -> None:
    """Raise ValueError unless `value` is a key of that dict or one of `also`; the message suggests the closest name."""
    known = (*names_of(module, dict_name), *also)
    if value not in known:
        close = difflib.get_close_matches(value, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"{option}={value!r} is unknown; {hint}use one of {', '.join(known)}")
