"""Real processes for tests: several at once, optionally without root's right to write everywhere."""

import multiprocessing
import os
from collections.abc import Callable

fork = multiprocessing.get_context("fork")
NOBODY = 65534


def in_processes(work: Callable[[int], object], count: int = 1, *, as_nobody: bool = False) -> list:
    """`work(0)`, `work(1)`, ... in a process each, begun at the same moment; their results, in order."""
    start, results = fork.Barrier(count), fork.SimpleQueue()

    def body(number: int) -> None:
        try:
            if as_nobody and os.getuid() == 0:
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            start.wait(timeout=300)
            results.put((number, work(number)))
        except BaseException as error:
            results.put((number, error))

    processes = [fork.Process(target=body, args=(number,)) for number in range(count)]
    for process in processes:
        process.start()
    found = dict(results.get() for _ in processes)
    for process in processes:
        process.join(timeout=300)
    for outcome in found.values():
        if isinstance(outcome, BaseException):
            raise outcome
    return [found[number] for number in range(count)]
