"""The trainer's side: start a host in the best available tier, test the jail, and replace a lost host."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from . import wire
from .cgroup import HostFolder, find_parent
from .host_process import HostProcess, SandboxUnavailable, Tier
from .interpreter import Interpreter
from .limits import CallLimits
from .selftest import leaks_of

ISOLATING: tuple[Tier, ...] = ("namespaces", "landlock")
"""Tiers with isolation, best first."""
GRACE_S = 10.0
"""Seconds of silence until a host counts as stuck, at the start of a call or after its wall limit."""
PATIENCE_S = (0.1, 1.0, 5.0, 0.0)
"""Seconds to wait for the host's end after each failed try of a call. The processes of a dying host end one by one, so
its calls may fail before the host itself is gone. Repeating a call is safe: jailed code has no effect outside."""
LIMITS = {
    "namespaces": "exact limits: wall time, files, processes, each one's memory and CPU time; polled: their sums",
    "one process": "exact limits: wall time, files, threads, memory, CPU time",
    "landlock": "exact limits: wall time, memory, CPU time; polled: files and threads",
    "none": "exact limits: wall time, the first process's memory and CPU time; polled: its files and threads",
}
"""Each tier's limits in words, logged at the start. "one process": namespaces without a /proc. A call may exceed a
polled limit for one poll interval (50 ms)."""
LIMITS_OF_CGROUPS = {
    "namespaces": "exact limits: wall time, files, processes, memory of all (by cgroup); polled: CPU time (by cgroup)",
    "one process": LIMITS["one process"],
    "landlock": "exact limits: wall time, threads, memory (by cgroup), CPU time; polled: files",
    "none": "exact limits: wall time, processes, memory of all (by cgroup); polled: files, CPU time (by cgroup)",
}
"""The same if each call has a cgroup. A cgroup counts all memory and all CPU time."""
NOT_HELD = {
    "namespaces": "not held: locks of the system's files, by which calls at the same time may signal to each other",
    "landlock": "not held: which files exist, their sizes and times; locks, by which calls may signal to each other",
}
"""Known holes of the isolating tiers, logged in the same line."""
logger = logging.getLogger(__name__)
T = TypeVar("T")


class Sandbox:
    """Runs code in forks of one jailed host process. Thread-safe."""

    def __init__(
        self,
        limits: CallLimits,
        *,
        interpreter: Interpreter | None = None,
        tier: Tier | None = None,
        allow_unsafe: bool = False,
        grace_s: float = GRACE_S,
        cgroup: str = "auto",
    ):
        """Start the host in `tier`, or in the best tier of this machine. Raises SandboxUnavailable.

        `cgroup`: see PythonConfig.
        """
        self.limits = limits
        self.interpreter = interpreter
        self.grace_s = grace_s
        self.num_restarts = 0
        self._lock = threading.Lock()
        self._closed = False
        self._has_started = False
        self._removals: list[threading.Thread] = []
        """Threads that remove the files of lost hosts."""
        self._cgroup = cgroup
        self.no_cgroup = "switched off" if cgroup == "none" else ""
        """Reason for a missing cgroup; "" = the host has a cgroup, or has not tried yet."""
        reasons: list[str] = []
        for candidate in (tier,) if tier else (*ISOLATING, "none") if allow_unsafe else ISOLATING:
            try:
                self.host, self.tier = self._start(candidate), candidate
                break
            except SandboxUnavailable as error:
                reasons.append(f"{candidate}: {error}")
        else:
            raise SandboxUnavailable("; ".join(reasons))
        self._has_started = True
        self._announce(reasons)

    def _start(self, tier: Tier) -> HostProcess:
        """Start a host, in a cgroup if possible. Later hosts get a cgroup only if the first host had a cgroup."""
        if self.no_cgroup:
            return self._start_in(tier, None)
        try:
            return self._start_in(tier, HostFolder(find_parent(self._cgroup)))
        except (OSError, ValueError, SandboxUnavailable) as error:
            if self._cgroup != "auto" or self._has_started:
                raise SandboxUnavailable(f"cgroup: {error}") from error
            host = self._start_in(tier, None)  # raises if the cgroup was not to blame
            self.no_cgroup = str(error)
            return host

    def _start_in(self, tier: Tier, cgroup: HostFolder | None) -> HostProcess:
        """Start a host and test its jail. Users trust a jail, so a leaking jail is worse than no jail."""
        host = HostProcess(tier, self.limits, self.interpreter, cgroup)
        if tier == "none":
            return host
        try:
            leaks = leaks_of(lambda probe: host.call(probe, self.limits.wall_s, self.grace_s))
        except (OSError, EOFError, ValueError) as error:
            leaks = [f"no answer ({type(error).__name__}: {error})"]
        if leaks:
            host.kill()
            host.remove_files()
            raise SandboxUnavailable(f"the jail failed its self-test: {', '.join(leaks)}")
        return host

    def run(self, code: str) -> wire.Reply:
        """Run code, and wait for the end. Never raises.

        A call that fails repeatedly, and not because of its code, has the status sandbox_error.
        """
        return self.attempt(lambda host: host.call(code, self.limits.wall_s, self.grace_s))

    def attempt(self, action: Callable[[HostProcess], T]) -> T | wire.Reply:
        """Call the action with the host; with a new host if the old one is lost. Return the value or a sandbox_error.

        Never raises.
        """
        error: Exception | None = None
        for patience_s in PATIENCE_S:
            host = self.host
            try:
                return action(host)
            except (OSError, EOFError, ValueError) as caught:
                error = caught
            if self._closed:
                break
            # If only the connection ended, the supervisor died or a fork failed: try again. If the host has ended or
            # sends nothing, replace it, once for all callers.
            if isinstance(error, TimeoutError) or host.is_gone(patience_s):
                try:
                    self._replace(host)
                except SandboxUnavailable as unavailable:
                    error = unavailable
        return wire.Reply("sandbox_error", stderr=f"{type(error).__name__}: {error}")

    def _replace(self, lost: HostProcess) -> None:
        with self._lock:
            if self.host is not lost or self._closed:
                return
            lost.kill()
            self.host = self._start(self.tier)  # always in the announced tier
            self.num_restarts += 1
            # in a thread, since the calls need not wait for this
            removal = threading.Thread(target=lost.remove_files, name="arpo-python-remove")
            removal.start()
            self._removals = [thread for thread in self._removals if thread.is_alive()] + [removal]
        logger.warning("python tool: the sandbox host was lost and has been replaced (%d so far)", self.num_restarts)

    def close(self) -> None:
        """End the host and all calls."""
        self._closed = True
        with self._lock:
            self.host.kill()
            self.host.remove_files()
            for removal in self._removals:
                removal.join()

    def _announce(self, refused: list[str]) -> None:
        """Log the tier in one line. The line is a warning for every tier but the best."""
        lacks = {
            "none": "NO isolation, model-written code runs as this user",
            "landlock": "sandboxed by Landlock and seccomp, without namespaces",
            "namespaces": "sandboxed by namespaces and seccomp; without /proc, code may not start processes",
        }[self.tier]
        table = LIMITS if self.no_cgroup else LIMITS_OF_CGROUPS
        limits = table[self.tier if self.host.has_proc else "one process"]
        limits = "; ".join(filter(None, (limits, NOT_HELD.get(self.tier))))
        limits += f"; no cgroup: {self.no_cgroup}" if self.no_cgroup else ""
        if self.tier != "namespaces" or not self.host.has_proc:
            logger.warning("python tool: %s%s; %s", lacks, f" ({'; '.join(refused)})" if refused else "", limits)
        else:
            logger.info("python tool: sandboxed by namespaces and seccomp; %s", limits)
