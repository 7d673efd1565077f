"""The interface of a jail for host, supervisor and worker; namespaces.py, landlock.py and folder.py implement it."""

from __future__ import annotations

from typing import Protocol


class Jail(Protocol):
    """Its constructor is called once, in the host, and raises OSError where the machine does not allow this kind."""

    tier: str
    has_proc: bool
    """Whether /proc shows the processes of a call. Without it nobody can sum up their memory: there may be only one."""

    def fork(self) -> int:
        """Fork a supervisor (called in the zygote). Whatever it leaves behind must not outlive it."""
        ...

    def open_scratch(self) -> str:
        """Make the folder that the call may write to (called in the supervisor)."""
        ...

    def confine(self, scratch: str) -> None:
        """Give up everything else (called in the worker, as the last step before the model's code)."""
        ...

    def processes(self, worker: int) -> list[int]:
        """Return the processes of the call whose use is summed up (called in the supervisor)."""
        ...

    def is_over_quota(self, scratch: str) -> bool:
        """Return whether the call's files are too many or too large (called in the supervisor, between polls)."""
        ...

    def kill(self, worker: int) -> None:
        """End all processes of the call (called in the supervisor)."""
        ...

    def close_scratch(self, scratch: str) -> None:
        """Remove the folder (called in the supervisor, after `kill`)."""
        ...

    def close(self) -> None:
        """Clean up when the trainer is gone (called in the zygote)."""
        ...
