"""The real launcher: as a user starts it, or forked, for tests that start it often."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch.distributed.run
from helpers.ranks import ROOT, ensure_server

TWO_RANKS = ("--standalone", "--nproc_per_node=2")
TORCHRUNS_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
CLONE_NEWNET = 0x40000000


def torchrun(script: str, *args: str, within: Sequence[str] = ()) -> subprocess.Popen:
    """A script on two ranks, in a process group of its own. `within`: what the command begins with."""
    launcher = [sys.executable, "-m", "torch.distributed.run", *TWO_RANKS]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*within, *launcher, script, *args], cwd=ROOT, start_new_session=True, **output)


class ForkedTorchrun:
    """torchrun as a fork of the server of ranks (helpers/ranks.py), whose ranks are forks of it: nobody imports torch.

    It is torchrun's own `main` with its own flags for that. What a test wants of a subprocess.Popen is here, too.

    command: the script and its arguments. options: torchrun's. env: variables beside those of the server.
    namespace: a network namespace's name, or "".
    """

    def __init__(
        self, *command: str, options: Sequence[str] = TWO_RANKS, env: dict[str, str] | None = None, namespace: str = ""
    ) -> None:
        ensure_server()
        context = multiprocessing.get_context("forkserver")
        self._output, writing = context.Pipe(duplex=False)
        self._process = context.Process(target=_torchrun, args=(command, options, env or {}, namespace, writing))
        self._process.start()
        writing.close()
        self.pid = self._process.pid
        atexit.register(self.kill)  # of a test that has failed; multiprocessing would wait for it

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def workers(self) -> list[int]:
        """Process ids of its ranks."""
        children = [file.read_text().split() for file in Path(f"/proc/{self.pid}/task").glob("*/children")]
        return [int(child) for of_thread in children for child in of_thread]

    def communicate(self, timeout: float) -> str:
        """What it and all whom it began have written, once the last of them has ended."""
        deadline, parts = time.monotonic() + timeout, []
        while not parts or parts[-1]:
            ready = multiprocessing.connection.wait([self._output], max(deadline - time.monotonic(), 0))
            assert ready, f"torchrun and its ranks have not ended: {b''.join(parts).decode(errors='replace')[-3000:]}"
            parts.append(os.read(self._output.fileno(), 1 << 16))
        self._process.join()
        return b"".join(parts).decode(errors="replace")

    def kill(self) -> None:
        """End it and its ranks, where it still runs."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self._process.join()
        self._output.close()


def _torchrun(
    command: Sequence[str], options: Sequence[str], env: dict[str, str], namespace: str, output: Connection
) -> None:
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    if namespace:
        with open(f"/run/netns/{namespace}") as file:
            assert ctypes.CDLL(None).setns(file.fileno(), CLONE_NEWNET) == 0
    os.environ.update(env)
    os.chdir(ROOT)
    torch.distributed.run.main(["--run-path", "--start-method=fork", *options, __file__, *command])


if __name__ == "__main__":
    # A rank of ForkedTorchrun is a script as another one, without torchrun's handlers, and an exception ends it, which
    # torchrun would catch for a report of its own.
    for number in TORCHRUNS_SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    sys.argv = sys.argv[1:]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
