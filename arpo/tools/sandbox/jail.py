"""What host, supervisor and worker need of a jail; namespaces.py, landlock.py and folder.py are the three kinds."""

from __future__ import annotations

from typing import Protocol


class Jail(Protocol):
    """Its constructor is called once, in the host, and raises OSError where the machine does not allow this kind."""

    tier: str
    has_proc: bool
    """Whether /proc shows the processes of a call. Without it nobody can sum up their memory: there may be only one."""

    def fork(self) -> int:
        """In the zygote: fork a supervisor. Whatever it leaves behind must not outlive it."""
        ...

    def open_scratch(self) -> str:
        """In the supervisor: make the folder that the call may write to."""
        ...

    def confine(self, scratch: str) -> None:
        """In the worker, last step before the model's code: give up everything else."""
        ...

    def processes(self, worker: int) -> list[int]:
        """In the supervisor: the processes of the call whose use is to be summed up."""
        ...

    def is_over_quota(self, scratch: str) -> bool:
        """In the supervisor, between polls: whether its files are too many or too large."""
        ...

    def kill(self, worker: int) -> None:
        """In the supervisor: end all processes of the call."""
        ...

    def close_scratch(self, scratch: str) -> None:
        """In the supervisor, after that."""
        ...

    def close(self) -> None:
        """In the zygote, when the trainer is gone."""
        ...
