"""What an attack is, and the usual ways to judge how it ended."""

import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from arpo.jail.limits import CallLimits  # noqa: E402
from arpo.jail.wire import Reply  # noqa: E402

LIMITS = CallLimits(wall_s=9.0, cpu_s=2.0, memory_bytes=256 << 20)
"""With time to reach the other limits beside the other attacks, behind whatever else the machine does."""
MARKER = f"86400.{secrets.randbelow(10**9)}"
"""Seconds that a daemon wants to sleep: finds it in the list of processes."""
BOTH = ("namespaces", "landlock")
Check = Callable[[Reply], bool]


@dataclass(frozen=True)
class Attack:
    """`code` finds its victims in WORLD (see world.py)."""

    name: str
    code: str
    check: Check
    tiers: tuple[str, ...] = BOTH


def ended(*statuses: str) -> Check:
    return lambda reply: reply.status in statuses


def raised(error: str) -> Check:
    return lambda reply: reply.status == "error" and error in reply.stderr


def printed(text: str) -> Check:
    return lambda reply: reply.status == "ok" and reply.stdout.strip() == text


STOPPED = ended("timeout", "cpu_limit", "process_limit")
"""Which limit comes first depends on how many share the processor."""
BLOCKED = printed("blocked")
"""For code that uses ATTEMPT: nothing that it attempted worked."""
ATTEMPT = """
import subprocess
reached = []
def attempt(what, action):
    try:
        action()
    except (OSError, ValueError, subprocess.CalledProcessError):
        return
    reached.append(what)
def report():
    print(reached or "blocked")
"""
