"""Sums over the processes of a call: also over those that hide, share or vanish."""

from contextlib import closing

import pytest
from helpers.python_tools import burning_children, start

from arpo.jail.client import Sandbox
from arpo.jail.limits import CallLimits
from arpo.jail.meter import Process, lost_ticks


def status_of(code: str, limits: CallLimits) -> str:
    start(tier="namespaces").sandbox.close()  # skips where the tier is not to be had
    with closing(Sandbox(limits, tier="namespaces")) as sandbox:
        return sandbox.run(code).status


def test_cpu_time_of_children_that_nobody_waits_for_counts():
    assert status_of(burning_children(40, cpu_s=0.25), CallLimits(wall_s=300.0, cpu_s=2.0)) == "cpu_limit"


def test_cpu_time_of_children_that_are_waited_for_counts_once():
    assert status_of(burning_children(3, cpu_s=0.25, are_waited_for=True), CallLimits(wall_s=300.0, cpu_s=1.5)) == "ok"


def process(parent: int, own: int, waited: int = 0, started: int = 1) -> Process:
    return Process(started, parent, own + waited, waited, num_tasks=1)


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
