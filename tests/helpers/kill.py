"""A kill at a chosen place of a program."""

import functools
import importlib
import itertools
import os
import signal


def kill_at(place: str, call: int, victim: int, rank: int) -> None:
    """Have the victim killed just before that call of a function, MODULE:NAME or MODULE:CLASS.NAME."""
    if rank != victim:
        return
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    original, numbers = getattr(owner, name), itertools.count(1)

    def counted(*args, **kwargs):
        if next(numbers) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, counted)
