"""What a call uses, summed up over its processes: also of those that hide, share or vanish."""

import pytest
from helpers.python_tools import start

from arpo.tools.sandbox.client import Sandbox
from arpo.tools.sandbox.limits import CallLimits
from arpo.tools.sandbox.meter import Process, lost_ticks

BURN_UNSEEN = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(40):
    if os.fork() == 0:
        while time.process_time() < 0.25:
            pass
        os._exit(0)
    try:
        os.wait()
    except ChildProcessError:
        pass
print("10 seconds")
"""
BURN_WAITED_FOR = BURN_UNSEEN.replace("SIG_IGN", "SIG_DFL").replace("range(40)", "range(3)")


def status_of(code: str, limits: CallLimits) -> str:
    start(tier="namespaces").sandbox.close()  # skips where the tier is not to be had
    sandbox = Sandbox(limits, tier="namespaces")
    try:
        return sandbox.run(code).status
    finally:
        sandbox.close()


def test_cpu_time_of_children_that_nobody_waits_for_counts():
    assert status_of(BURN_UNSEEN, CallLimits(wall_s=300.0, cpu_s=2.0)) == "cpu_limit"


def test_cpu_time_of_children_that_are_waited_for_counts_once():
    assert status_of(BURN_WAITED_FOR, CallLimits(wall_s=300.0, cpu_s=1.5)) == "ok"


def process(parent: int, own: int, waited: int = 0, started: int = 1) -> Process:
    return Process(started, parent, own, waited, num_tasks=1)


@pytest.mark.parametrize(
    ("now", "lost"),
    [
        ({2: process(1, 5), 3: process(2, 7), 4: process(3, 9)}, 0),
        ({2: process(1, 5), 3: process(2, 7)}, 9),
        ({2: process(1, 5), 3: process(2, 7, waited=9)}, 0),
        ({2: process(1, 5), 3: process(2, 7, waited=4)}, 5),
        ({2: process(1, 5, waited=16)}, 0),  # 3 has waited for 4, and 2 for 3
        ({2: process(1, 5, waited=7)}, 9),  # 3 has ignored 4
        ({2: process(1, 5)}, 16),
        ({2: process(1, 5), 3: process(2, 7), 4: process(3, 1, started=2)}, 9),  # another one of that number
        ({}, 21),
    ],
)
def test_what_a_vanished_process_has_used_is_lost_unless_an_ancestor_has_taken_it_over(now, lost):
    before = {2: process(1, 5), 3: process(2, 7), 4: process(3, 9)}
    assert lost_ticks(before, now) == lost
