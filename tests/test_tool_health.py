"""When a batch is too damaged by failing tools to be trained on, and when to give up."""

import pytest

from arpo.metrics import ToolHealth
from arpo.trajectory import Group, Prompt, StopReason, Trajectory


def batch(num_failed: int, num_trajectories: int = 100) -> list[Group]:
    """Groups of ten."""
    reasons = [StopReason.ERROR] * num_failed + [StopReason.EOS] * (num_trajectories - num_failed)
    prompt = Prompt("p", messages=[], answers=["1"])
    trajectories = [Trajectory("p", str(i), stop_reason=reason) for i, reason in enumerate(reasons)]
    return [Group(prompt, trajectories[i : i + 10]) for i in range(0, num_trajectories, 10)]


@pytest.mark.parametrize(("num_failed", "trains"), [(0, True), (5, True), (6, False), (100, False)])
def test_more_than_five_percent_of_failed_trajectories_skip_the_update(num_failed, trains):
    health = ToolHealth()
    assert health.may_train(batch(num_failed)) is trains
    assert health.failed_share == num_failed / 100 and not health.must_stop


def test_three_bad_batches_in_a_row_end_the_run():
    health = ToolHealth()
    stops = []
    for num_failed in (20, 20, 0, 20, 20, 34):
        health.may_train(batch(num_failed))
        stops.append(health.must_stop)
    assert stops == [False, False, False, False, False, True]
    assert "34% of the trajectories, in 3 batches in a row" in str(health) and "\n" not in str(health)


def test_trajectories_that_fail_through_their_own_doing_do_not_count():
    health = ToolHealth()
    groups = batch(0)
    for trajectory in groups[0].trajectories:
        trajectory.stop_reason = StopReason.TOOL_LIMIT
    assert health.may_train(groups)


def test_an_empty_batch_is_healthy():
    assert ToolHealth().may_train([])
