"""A kill at a chosen place of a program."""

import functools
import importlib
import itertools
import os
import signal
from collections.abc import Callable

from helpers.ranks import script_on_ranks, wait_for_all


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


def run_until_killed(
    place: tuple[str, int, int], script: str, *argv: str, ranks: int = 2, prepare: Callable[[int], None] | None = None
) -> None:
    """Run a script of which a rank is killed there: `kill_at`'s arguments. Raises AssertionError where none was.

    prepare(rank): called in each process before that.
    """
    prepare_all = functools.partial(_prepare, prepare, place)
    with script_on_ranks(script, *argv, ranks=ranks, prepare=prepare_all) as (processes, output):
        assert wait_for_all(processes, 5) == -signal.SIGKILL, (place, output.read_text()[-2000:])


def _prepare(prepare: Callable[[int], None] | None, place: tuple[str, int, int], rank: int) -> None:
    if prepare:
        prepare(rank)
    kill_at(*place, rank)
