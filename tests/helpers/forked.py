"""Real processes for tests: several at once, optionally without root's right to write everywhere."""

import contextlib
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence

fork = multiprocessing.get_context("fork")
NOBODY = 65534
HANG_S = 240.0
"""Then a process that has not ended shows where it is, and ends: one that was forked while another thread held a lock
waits for it for ever."""


@contextlib.contextmanager
def nothing_collected() -> Iterator[None]:
    """Another thread that collects what tests have left may close a database, under SQLite's locks for all of them."""
    gc.disable()
    gc.collect()
    try:
        yield
    finally:
        gc.enable()


def in_processes(work: Callable[[int], object], count: int = 1, *, as_nobody: bool = False) -> list:
    """`work(0)`, `work(1)`, ... in a process each, begun at the same moment; their results, in order."""
    start, pipes = fork.Barrier(count), [fork.Pipe(duplex=False) for _ in range(count)]

    def body(number: int) -> None:
        gc.freeze()  # what the parent left to collect is not ours: a process group joins threads that are not here
        gc.enable()
        faulthandler.dump_traceback_later(HANG_S, exit=True, file=sys.__stderr__)
        try:
            if as_nobody and os.getuid() == 0:
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            start.wait(timeout=HANG_S / 2)
            outcome = work(number)
        except BaseException as error:
            outcome = error
        pipes[number][1].send(outcome)

    processes = [fork.Process(target=body, args=(number,)) for number in range(count)]
    with nothing_collected():
        for process in processes:
            process.start()
    outcomes = []
    for process, (results, _) in zip(processes, pipes, strict=True):
        multiprocessing.connection.wait([results, process.sentinel])
        assert results.poll(), f"{process.name} ended without a result; what it did last may stand above"
        outcomes.append(results.recv())
        process.join()
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def killed(work: Callable[[str, int], None], names: Sequence[str], after_s: float = 0.0) -> set[str]:
    """`work(name, file descriptor)` in a process each, all killed once each has written a line; the whole lines."""
    workers = []
    for name in names:
        reading, writing = os.pipe()
        worker = fork.Process(target=work, args=(name, writing))
        with nothing_collected():
            worker.start()
        os.close(writing)
        workers.append((worker, os.fdopen(reading)))
    lines = [pipe.readline() for _, pipe in workers]  # all are in the middle of it now
    time.sleep(after_s)
    for worker, _ in workers:
        os.kill(worker.pid, signal.SIGKILL)
    for worker, pipe in workers:
        lines += pipe
        pipe.close()
        worker.join(timeout=30)
        assert worker.exitcode == -signal.SIGKILL
    return {line.strip() for line in lines if line.endswith("\n")}
