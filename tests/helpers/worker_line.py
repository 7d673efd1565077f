"""The line between a worker of xdist and its controller, which ends when no process has it open any more."""

import os
from functools import partial

import pytest


def close_line_in_forks(config: pytest.Config) -> None:
    """Whatever this worker forks has no part in its line. (What it starts with exec never has.)

    A fork that outlived a worker that was killed would keep the line open, and the controller would wait for that
    worker until the fork ends: for ever, where the fork hangs. So it sees at once that the worker is gone.
    """
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor":
            line, null = plugin.channel.gateway._io, os.open(os.devnull, os.O_RDWR)
            replace = partial(replace_descriptors, null, [line.infile.fileno(), line.outfile.fileno()])
            os.register_at_fork(after_in_child=replace)


def replace_descriptors(null: int, descriptors: list[int]) -> None:
    for descriptor in descriptors:  # not closed: another file would get the number
        os.dup2(null, descriptor, inheritable=False)
