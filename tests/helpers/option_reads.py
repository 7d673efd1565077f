"""The options that a run really reads: to do something with the value, not to check, compare or store it."""

import os
import sys
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_type_hints

LOOK_AT_ALL = ("arpo.config.facts", "arpo.config.flags", "arpo.config.foreign", "arpo.start.", "arpo.log.settings")
"""Modules that read all options alike."""


def sections_of(root: type, prefix: str = "") -> list[tuple[str, type]]:
    """(key with a dot at its end, class) of each section of a config, and of the sections in it."""
    found = []
    for name, kind in get_type_hints(root).items():
        if is_dataclass(kind):
            found += [(f"{prefix}{name}.", kind), *sections_of(kind, f"{prefix}{name}.")]
    return found


def record_reads(root: type, file: Path, rank: int) -> None:
    """From now on append to `file` each key that this process reads. A `prepare` of `script_on_ranks`."""
    keys: set[str] = set()

    def read(section: object, name: str, prefix: str) -> object:
        key = f"{prefix}{name}"
        if key not in keys and not name.startswith("_"):
            caller = sys._getframe(2)
            module = caller.f_globals["__name__"]
            is_ours = module == "__main__" or (module.startswith("arpo.") and not module.startswith(LOOK_AT_ALL))
            # Methods like __eq__ compare all fields, and __post_init__ checks them.
            if is_ours and not caller.f_code.co_name.startswith("__"):
                keys.add(key)
                descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                os.write(descriptor, f"{key}\n".encode())
                os.close(descriptor)
        return object.__getattribute__(section, name)

    for prefix, kind in sections_of(root):
        kind.__getattribute__ = lambda section, name, prefix=prefix: read(section, name, prefix)
