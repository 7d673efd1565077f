"""Heartbeats between ranks: if a rank is gone, the run ends soon, and a line names the rank.

Once a second every rank writes a heartbeat (a count, the host, the current line of the main thread) into torchrun's
store. A separate thread does this, so a long rollout does not stop the heartbeats. The first rank of each node reads
the heartbeats of all ranks.

* A rank without a heartbeat for `silence_s` (killed, frozen, node or network down) ends the run. A collective would
  wait much longer, since the time limit of a collective must exceed the slowest rollout.
* A failed collective (a connection broke, or a rank did not come) ends the run at once. The heartbeats then show the
  missing rank, or the current line of each rank if all are alive. gloo raises an exception. NCCL's collectives run on
  the GPU, and the main thread waits for the GPU in C. So the watch asks NCCL once a second for failures.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from traceback import walk_tb
from types import CodeType, FrameType, TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from arpo.config.exits import say_at_the_end

BEAT_S = 1.0
DIAGNOSIS_BEATS = 4
"""Number of beats to wait after a connection broke. A rank without a new heartbeat by then is missing."""
PACKAGE = str(Path(__file__).parents[1])


def join(store: dist.Store, rank: int, world_size: int, *, timeout_s: float) -> dist.Store:
    """Return an empty part of `store`, the same part on every rank. Collective. Raises dist.DistError.

    torchrun keeps its store when it restarts the ranks (seen in torch 2.13). An early rank would read the other ranks'
    old addresses there, and fail to connect. So rank 0 invents a name for the new part. Each rank invents a token, and
    rank 0 answers under this token. So no rank can mistake an old answer for a new one.
    """
    token = uuid.uuid4().hex
    deadline = time.monotonic() + timeout_s
    store.set(f"arpo/hello/{rank}", token)
    if rank > 0:
        fresh = dist.PrefixStore(store.get(f"arpo/welcome/{token}").decode(), store)
        fresh.set(f"joined/{rank}", "")
        return fresh
    name = f"arpo/{token}"
    fresh = dist.PrefixStore(name, store)
    absent = list(range(1, world_size))
    while absent := [r for r in absent if not fresh.check([f"joined/{r}"])]:
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"ranks {', '.join(map(str, absent))} did not start within {timeout_s:.0f} s")
        for r in absent:
            if store.check([f"arpo/hello/{r}"]):
                token_of_rank = store.get(f"arpo/hello/{r}").decode()
                store.set(f"arpo/welcome/{token_of_rank}", name)
        time.sleep(0.05)
    return fresh


class Watch:
    """Writes this rank's heartbeats, and ends its process if another rank is gone. Runs from construction to `stop`."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, silence_s: float, limits: str, *, observes: bool):
        """store: a separate connection for the watch, from `join`. limits: the time limits' options, for messages.
        observes: read the other ranks' heartbeats."""
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.silence_s = silence_s
        self.limits = limits
        self.observes = observes
        self.num_heartbeats = 0
        self.num_rounds = 0
        self.failed_at = ""
        self.lost_store = f"the store on the first node ({os.environ['MASTER_ADDR']})"
        self.stopped = threading.Event()
        self.write_heartbeat()
        sys.excepthook = self.report_exception
        self.threads = [threading.Thread(target=body, daemon=True) for body in (self.run, self.guard)]
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """End the watch. All ranks must do this at about the same time: a watching rank would miss their heartbeats."""
        self.stopped.set()
        for thread in self.threads:
            thread.join()
        sys.excepthook = sys.__excepthook__

    def write_heartbeat(self) -> None:
        self.num_heartbeats += 1
        main_frame = sys._current_frames().get(threading.main_thread().ident)
        heartbeat = {
            "count": self.num_heartbeats,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "where": self.failed_at or current_line(main_frame),
        }
        self.store.set(f"heartbeat/{self.rank}", json.dumps(heartbeat))

    def heartbeats(self) -> dict[int, dict]:
        """Return the newest heartbeat of each rank, by rank. Waits for the first heartbeat of each."""
        texts = self.store.multi_get([f"heartbeat/{r}" for r in range(self.world_size)])
        return {r: json.loads(text) for r, text in enumerate(texts)}

    def run(self) -> None:
        """Write and read heartbeats until the watch is stopped."""
        # Silence is counted in our own beats, not in seconds: a rank that was suspended (SIGSTOP, a suspended job)
        # counts no beats meanwhile, and so reports no other rank as silent.
        last: dict[int, dict] = {}
        num_beats_silent = dict.fromkeys(range(self.world_size), 0)
        try:
            while not self.stopped.wait(BEAT_S):
                self.num_rounds += 1
                self.write_heartbeat()
                if not self.observes:
                    continue
                newest = self.heartbeats()
                for r, heartbeat in newest.items():
                    num_beats_silent[r] = num_beats_silent[r] + 1 if heartbeat == last.get(r) else 0
                last = newest
                silent = {r: last[r] for r, n in num_beats_silent.items() if n * BEAT_S > self.silence_s}
                if silent:
                    self.end(f"{describe(silent)}: no sign of life for {self.silence_s:g} s")
        except dist.DistError as error:
            if not self.stopped.is_set():
                self.end(f"{self.lost_store} is gone ({first_words(error)})")

    def guard(self) -> None:
        """End the process if NCCL has failed, or if `run` hangs: without a network, calls to the store never return."""
        num_rounds = 0
        num_beats_stuck = 0
        while not self.stopped.wait(BEAT_S):
            num_beats_stuck = num_beats_stuck + 1 if num_rounds == self.num_rounds else 0
            num_rounds = self.num_rounds
            for nccl in nccl_backends():
                status = nccl.get_error().name
                if status != "SUCCESS":
                    self.diagnose(f"NCCL: {status}")
            if num_beats_stuck * BEAT_S > self.silence_s:
                self.end(f"{self.lost_store} has not answered for {self.silence_s:g} s", alone=True)

    def missing_ranks(self) -> dict[int, dict]:
        """Return the last heartbeats of the ranks without a new one. Waits for DIAGNOSIS_BEATS."""
        before = self.heartbeats()
        time.sleep(DIAGNOSIS_BEATS * BEAT_S)
        now = self.heartbeats()
        return {r: now[r] for r in now if now[r]["count"] == before[r]["count"] and r != self.rank}

    def report_exception(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        """Print one line for a broken connection or a time limit. This is the process's excepthook."""
        if not is_lost_connection(error):
            sys.__excepthook__(kind, error, traceback)
            if self.is_first_to_report():
                say_at_the_end(f"error (rank {self.rank}): {first_words(error) or kind.__name__}", now=False)
            return
        # While torch calls this hook, stderr is a buffer. `end` would exit without flushing it.
        sys.stderr = sys.__stderr__
        # The stack is gone by now, so the line comes from the traceback.
        *_, (last_frame, _) = walk_tb(traceback)
        self.failed_at = current_line(last_frame)
        # torchrun is about to stop this process with SIGTERM. It waits 30 s before it kills.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.diagnose(first_words(error), lambda: sys.__excepthook__(kind, error, traceback))

    def diagnose(self, reason: str, show_error: Callable[[], None] = lambda: None) -> NoReturn:
        """End the process after a failed collective. The line names the missing ranks, or the line of each rank."""
        try:
            missing = self.missing_ranks()
            if missing:
                self.end(f"{describe(missing)} is gone ({reason})")
            show_error()
            positions = "; ".join(describe({r: heartbeat}) for r, heartbeat in self.heartbeats().items())
            self.end(f"the ranks did not meet ({reason}), though all are alive: {positions}")
        except dist.DistError as lost:
            self.end(f"{self.lost_store} is gone ({first_words(lost)})")

    def end(self, reason: str, *, alone: bool = False) -> NoReturn:
        """Print the line and exit at once, since a thread may hang in a collective. alone: do not ask the store."""
        if alone or self.is_first_to_report():
            say_at_the_end(
                f"error (rank {self.rank}): {reason}; limits: {self.limits}. The same command, or torchrun "
                "--max-restarts, continues from the newest checkpoint."
            )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def is_first_to_report(self) -> bool:
        """True if no other rank has reported the end of the run. One line is enough."""
        try:
            return self.store.add("num_reports", 1) == 1
        except dist.DistError:
            return True


def nccl_backends() -> list[Any]:
    """Return the NCCL backend of every process group, including vLLM's groups. torch has no public list of them."""
    cuda = torch.device("cuda")
    groups = list(dist.distributed_c10d._world.pg_map)
    backends = [group._get_backend(cuda) for group in groups if cuda in group._device_types]
    return [backend for backend in backends if backend.name() == "nccl"]  # gloo has a backend for GPUs too


def is_lost_connection(error: BaseException) -> bool:
    """True for an error of the store, NCCL or gloo. gloo's errors are plain RuntimeErrors."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def first_words(error: BaseException) -> str:
    """Return the first sentence of the message. "[/path/pair.cc:537] Read error [10.0.0.2]:59008: Connection reset by
    peer. This is typically ..." -> "Read error [10.0.0.2]:59008: Connection reset by peer"."""
    return re.sub(r"^\[/.*?\] ", "", " ".join(str(error).split())).partition(". ")[0][:200]


def describe(heartbeats: Mapping[int, dict]) -> str:
    template = "rank {} (host {host}, pid {pid}, in {where})"
    return ", ".join(template.format(r, **heartbeat) for r, heartbeat in heartbeats.items())


def current_line(frame: FrameType | None) -> str:
    """Return the innermost line of this package or of the script, from `frame` outwards: "rollout.py:120 step"."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    # A frame of another thread may have ended meanwhile. CPython 3.11 then returns whatever is in its memory now. On a
    # machine with ten times more work than cores this happened, and ended the heartbeat thread.
    while frame is not None and isinstance(frame.f_code, CodeType):
        file = frame.f_code.co_filename
        if file == script or (file.startswith(PACKAGE) and file != __file__):
            return f"{Path(file).name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "no code of ours"
