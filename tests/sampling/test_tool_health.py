"""When a batch is too damaged by failing tools to be trained on, and when to give up. A run: test_search_outage.py."""

import pytest

from arpo.errors import Outage
from arpo.sampling.health import ToolHealth
from arpo.trajectory import Group, Prompt, StopReason, ToolCall, Trajectory, Turn


def batch(num_failed: int, reason: StopReason = StopReason.ERROR) -> list[Group]:
    """A hundred trajectories in groups of ten."""
    reasons = [reason] * num_failed + [StopReason.EOS] * (100 - num_failed)
    prompt = Prompt("p", messages=[], answers=["1"])
    trajectories = [Trajectory("p", str(i), stop_reason=reason) for i, reason in enumerate(reasons)]
    return [Group(prompt, trajectories[i : i + 10]) for i in range(0, 100, 10)]


@pytest.mark.parametrize(
    ("groups", "failed"),
    [
        (batch(0), ""),
        (batch(5), ""),
        (batch(6), "6%"),
        (batch(100), "100%"),
        (batch(10, StopReason.TOOL_LIMIT), ""),  # through their own doing
        ([], ""),
    ],
    ids=["0", "5", "6", "100", "limits", "empty"],
)
def test_more_than_five_percent_of_failed_trajectories_skip_the_update(groups, failed):
    health = ToolHealth()
    verdict = health.judge(groups)
    assert verdict.bad_because == (f"tools failed in {failed} of the trajectories" if failed else "")
    assert verdict.may_train is (failed == "") and not health.must_stop


def test_the_prompts_of_the_bad_batches_that_end_a_run_come_again():
    """8 prompts a step; the one bad batch before the good one was given up, as its run went on."""
    health, places = ToolHealth(), []
    for first, num_failed in zip(range(0, 48, 8), (20, 0, 20, 20, 34), strict=False):
        health.judge(batch(num_failed), first)
        places.append(health.num_drawn_on_resume(first + 8))
    assert places == [8, 16, 24, 32, 16]


# ---- searches for which nothing is recorded


MISS = ToolCall("search", "q", "Error", ok=False, error_kind="not_recorded")
FOUND = ToolCall("search", "q", "text", ok=True, cached=True)
REFUSED = ToolCall("search", "q", "Error", ok=False, error_kind="limit", executed=False)
SILENT = ToolCall("search", "", "Error", ok=False, error_kind="empty_query")
WRONG_CODE = ToolCall("python", "1/0", "ZeroDivisionError", ok=False, error_kind="error")
UNRECORDED_CODE = ToolCall("python", "1", "Error", ok=False, error_kind="not_recorded")


def calls(*made: ToolCall, inherited: tuple[ToolCall, ...] = ()) -> list[Group]:
    """One group, whose one trajectory made these calls after those that it has from its parent."""
    turns = [Turn(0, tool_calls=[call], inherited=True) for call in inherited]
    turns += [Turn(0, tool_calls=[call]) for call in made]
    prompt = Prompt("p", messages=[], answers=["1"])
    return [Group(prompt, [Trajectory("p", "0", turns=turns, stop_reason=StopReason.EOS)])]


@pytest.mark.parametrize(
    ("groups", "missed", "trains"),
    [
        (calls(), "", True),
        (calls(*[FOUND] * 10), "", True),
        (calls(*[MISS] * 2, *[FOUND] * 8), "20.0%", True),  # not more than 20 %
        (calls(*[MISS] * 21, *[FOUND] * 79), "21.0%", False),
        (calls(MISS), "100.0%", False),
        (calls(MISS, MISS, *[FOUND] * 6, *[REFUSED] * 9), "25.0%", False),  # what was not run missed nothing
        (calls(MISS, *[SILENT] * 4), "20.0%", True),
        (calls(*[FOUND] * 4, inherited=(MISS,) * 9), "", True),  # the parent's calls, which count there
        (calls(MISS, *[WRONG_CODE] * 99, FOUND), "50.0%", False),  # of the searches, not of the calls
        (calls(*[WRONG_CODE] * 99), "", True),
        (calls(*[UNRECORDED_CODE] * 99), "", True),
    ],
)  # fmt: skip
def test_more_than_a_fifth_of_searches_without_a_recorded_result_skips_the_update(groups, missed, trains):
    health = ToolHealth()
    verdict = health.judge(groups)
    assert verdict.may_train is trains and not health.must_stop
    said = f"{missed} of the searches are not in the recorded results" if missed else ""
    assert said in verdict.warning and bool(verdict.warning) is bool(missed)
    assert verdict.bad_because == ("" if trains else said)
    assert ("this batch is not trained on" in verdict.warning) is not trains


FEW, MANY, NONE = calls(MISS, *[FOUND] * 9), calls(MISS, FOUND), calls(FOUND)


def test_few_misses_are_said_once_and_every_bad_batch_is_said():
    health, said = ToolHealth(), []
    for groups in (NONE, FEW, FEW, MANY, MANY, FEW, NONE):
        said.append(health.judge(groups).warning)
    assert [bool(text) for text in said] == [False, True, False, True, True, False, False]
    assert "10.0% of the searches" in said[1] and "is trained on it" in said[1]
    assert "50.0% of the searches" in said[3] and "not trained on" in said[3]
    verdict = health.judge(batch(num_failed=34))
    assert "not trained on: tools failed in 34% of the trajectories" in verdict.warning


@pytest.mark.parametrize(
    ("batches", "is_outage", "words"),
    [
        ([batch(20), batch(20), batch(0), batch(20), batch(20), batch(34)], True,
         ["34% of the trajectories, in 3 batches in a row"]),
        # no later start finds more in the recorded results
        ([MANY, MANY, FEW, MANY, batch(20), MANY], False,
         ["50.0% of the searches are not in the recorded results, in 3 batches in a row; ", "a key", "a retriever",
          "a corpus", "run.resume_changed True", "continues from the checkpoint"]),
    ],
    ids=["failures", "misses"],
)  # fmt: skip
def test_three_bad_batches_in_a_row_end_the_run_with_the_reason_and_the_alternatives(batches, is_outage, words):
    health, stops = ToolHealth(), []
    for groups in batches:
        health.judge(groups)
        stops.append(health.must_stop)
    assert stops == [False, False, False, False, False, True]
    error = health.stop_error()
    assert isinstance(error, Outage) is is_outage
    assert all(word in str(error) for word in words) and "\n" not in str(error)
