"""Signs of life between ranks: a peer that is gone ends the run in time, and one line says which it was.

Every rank writes a sign (a count, its host, the line at which its main thread is) into torchrun's store once a second,
from a thread of its own, so that it gives signs during a long rollout too. The first rank of each node reads them all.

* A process without a sign for `silence_s` (killed, frozen, its node or network down) ends the run. A collective would
  wait much longer for it, because its time limit must exceed the slowest rollout.
* A collective that fails, because a connection broke or one rank did not come, ends the run at once. Then the signs
  tell who is missing, or, if all are alive, at which line each of them is. gloo raises an exception. NCCL's collectives
  run on the GPU, where the main thread waits for them in C: there the watch asks once a second whether one has failed.
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
"""Number of beats to wait after a connection broke; a rank without a new sign by then is the one that is missing."""
PACKAGE = str(Path(__file__).parents[1])


def join(store: dist.Store, rank: int, world_size: int, *, timeout_s: float) -> dist.Store:
    """Return a part of `store` that nobody has written to, the same on every rank. Collective. Raises dist.DistError.

    torchrun keeps its store when it restarts the ranks (seen in torch 2.13). A rank that is back before the others
    would find their old addresses there, and fail to connect. So rank 0 makes up a name for the new part, and hands it
    to each rank under a word that this rank has just made up: an old answer cannot be mistaken for a new one.
    """
    word, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s
    store.set(f"arpo/hello/{rank}", word)
    if rank > 0:
        fresh = dist.PrefixStore(store.get(f"arpo/welcome/{word}").decode(), store)
        fresh.set(f"joined/{rank}", "")
        return fresh
    name = f"arpo/{word}"
    fresh = dist.PrefixStore(name, store)
    absent = list(range(1, world_size))
    while absent := [r for r in absent if not fresh.check([f"joined/{r}"])]:
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"ranks {', '.join(map(str, absent))} did not start within {timeout_s:.0f} s")
        for r in absent:
            if store.check([f"arpo/hello/{r}"]):
                store.set(f"arpo/welcome/{store.get(f'arpo/hello/{r}').decode()}", name)
        time.sleep(0.05)
    return fresh


class Watch:
    """Gives this rank's signs, and ends its process when another rank is gone. Runs from construction to `stop`."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, silence_s: float, limits: str, *, observes: bool):
        """store: a connection of the watch's own, from `join`. observes: read the other ranks' signs."""
        self.store, self.rank, self.world_size, self.observes = store, rank, world_size, observes
        self.silence_s, self.limits = silence_s, limits
        self.num_signs = self.num_rounds = 0
        self.failed_at = ""
        self.lost_store = f"the store on the first node ({os.environ['MASTER_ADDR']})"
        self.stopped = threading.Event()
        self.give_sign()
        sys.excepthook = self.explain
        self.threads = [threading.Thread(target=body, daemon=True) for body in (self.run, self.guard)]
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """End the watch. All ranks do so at about the same time: a rank that went on would miss the others' signs."""
        self.stopped.set()
        for thread in self.threads:
            thread.join()
        sys.excepthook = sys.__excepthook__

    def give_sign(self) -> None:
        self.num_signs += 1
        sign = {"count": self.num_signs, "host": socket.gethostname(), "pid": os.getpid()}
        sign["where"] = self.failed_at or where(sys._current_frames().get(threading.main_thread().ident))
        self.store.set(f"sign/{self.rank}", json.dumps(sign))

    def signs(self) -> dict[int, dict]:
        """Return the newest sign of life of each rank, by rank; wait for the first one of each."""
        texts = self.store.multi_get([f"sign/{r}" for r in range(self.world_size)])
        return {r: json.loads(text) for r, text in enumerate(texts)}

    def run(self) -> None:
        # Silence is counted in beats of one's own: who was frozen himself (SIGSTOP, a suspended job) accuses nobody.
        last, num_beats_silent = {}, dict.fromkeys(range(self.world_size), 0)
        try:
            while not self.stopped.wait(BEAT_S):
                self.num_rounds += 1
                self.give_sign()
                if not self.observes:
                    continue
                signs = self.signs()
                for r, sign in signs.items():
                    num_beats_silent[r] = num_beats_silent[r] + 1 if sign == last.get(r) else 0
                last = signs
                silent = {r: last[r] for r, n in num_beats_silent.items() if n * BEAT_S > self.silence_s}
                if silent:
                    self.end(f"{describe(silent)}: no sign of life for {self.silence_s:g} s")
        except dist.DistError as error:
            if not self.stopped.is_set():
                self.end(f"{self.lost_store} is gone ({first_words(error)})")

    def guard(self) -> None:
        """End the process if NCCL has failed, or `run` hangs: when the way to the store is cut nothing comes back."""
        num_rounds, num_beats_stuck = 0, 0
        while not self.stopped.wait(BEAT_S):
            num_beats_stuck = num_beats_stuck + 1 if num_rounds == self.num_rounds else 0
            num_rounds = self.num_rounds
            if failed := [name for nccl in nccl_backends() if (name := nccl.get_error().name) != "SUCCESS"]:
                self.diagnose(f"NCCL: {failed[0]}")
            if num_beats_stuck * BEAT_S > self.silence_s:
                self.end(f"{self.lost_store} has not answered for {self.silence_s:g} s", alone=True)

    def missing(self) -> dict[int, dict]:
        """Return the last signs of the ranks that give no new one."""
        before = self.signs()
        time.sleep(DIAGNOSIS_BEATS * BEAT_S)
        return {r: sign for r, sign in self.signs().items() if sign["count"] == before[r]["count"] and r != self.rank}

    def explain(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Print one line for the error of a broken connection or a time limit. This is the process's excepthook."""
        if not is_lost_connection(error):
            sys.__excepthook__(kind, error, traceback)
            if self.is_first_to_tell():
                say_at_the_end(f"error (rank {self.rank}): {first_words(error) or kind.__name__}", now=False)
            return
        sys.stderr = sys.__stderr__  # torch calls this hook with a buffer in its place, which `end` would never empty
        self.failed_at = where([frame for frame, _ in walk_tb(traceback)][-1])  # the stack itself is gone by now
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun is about to stop this process; it waits 30 s for it
        self.diagnose(first_words(error), lambda: sys.__excepthook__(kind, error, traceback))

    def diagnose(self, reason: str, show_error: Callable[[], None] = lambda: None) -> NoReturn:
        """End the process after a collective has failed, with a line that says who is missing or where all stand."""
        try:
            if missing := self.missing():
                self.end(f"{describe(missing)} is gone ({reason})")
            show_error()
            stands = "; ".join(describe({r: sign}) for r, sign in self.signs().items())
            self.end(f"the ranks did not meet ({reason}), though all are alive: {stands}")
        except dist.DistError as lost:
            self.end(f"{self.lost_store} is gone ({first_words(lost)})")

    def end(self, what: str, *, alone: bool = False) -> NoReturn:
        """Print the line and exit at once: a thread may hang in a collective. alone: the store cannot be asked."""
        if alone or self.is_first_to_tell():
            say_at_the_end(
                f"error (rank {self.rank}): {what}; limits: {self.limits}. The same command, or torchrun "
                "--max-restarts, continues from the newest checkpoint."
            )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def is_first_to_tell(self) -> bool:
        """Return whether no other rank has said why the run ends: one line is enough, not one from each survivor."""
        try:
            return self.store.add("told", 1) == 1
        except dist.DistError:
            return True


def nccl_backends() -> list[Any]:
    """Return NCCL's part of every process group, also of those that vLLM has made. torch has no public list of them."""
    cuda, groups = torch.device("cuda"), list(dist.distributed_c10d._world.pg_map)
    backends = [group._get_backend(cuda) for group in groups if cuda in group._device_types]
    return [backend for backend in backends if backend.name() == "nccl"]  # gloo too has a part for the GPU


def is_lost_connection(error: BaseException) -> bool:
    """Return whether the error is about a peer: of the store, NCCL or gloo, whose errors have no type of their own."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def first_words(error: BaseException) -> str:
    """Return the first sentence of the message. "[/path/pair.cc:537] Read error [10.0.0.2]:59008: Connection reset by
    peer. This is typically ..." -> "Read error [10.0.0.2]:59008: Connection reset by peer"."""
    return re.sub(r"^\[/.*?\] ", "", " ".join(str(error).split())).partition(". ")[0][:200]


def describe(signs: Mapping[int, dict]) -> str:
    one = "rank {} (host {host}, pid {pid}, in {where})"
    return ", ".join(one.format(r, **sign) for r, sign in signs.items())


def where(frame: FrameType | None) -> str:
    """Return the innermost line of our own code, from `frame` outwards: "rollout.py:120 step"."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    # Of another thread a frame may have ended meanwhile, and CPython 3.11 then shows what lies in its memory now: this
    # happened, on a machine with ten times more work than cores, and ended the thread that gives the signs.
    while frame is not None and isinstance(frame.f_code, CodeType):
        file = frame.f_code.co_filename
        if file == script or (file.startswith(PACKAGE) and file != __file__):
            return f"{Path(file).name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "no code of ours"
