"""The processes that tests are run in: what they must show of themselves, and must not share."""

import os
import sys

import pytest
from helpers.ranks import run_ranks, try_script


def left_behind(ranks) -> list[object]:
    """What this process knows of an earlier one like it; and then it leaves something."""
    found = [os.environ.get("LEFT"), getattr(sys, "left", None)]
    os.environ["LEFT"], sys.left = "here", ranks.rank
    return found


def test_no_child_knows_anything_of_another():
    assert run_ranks(1, left_behind) == run_ranks(2, left_behind)[:1] == [[None, None]]


def stumble(ranks) -> None:
    if ranks.rank == 1:
        raise LookupError("no such token")


def test_a_rank_that_fails_shows_its_traceback():
    with pytest.raises(Exception, match=r"(?s)Process 1 terminated.*in stumble\n.*LookupError: no such token"):
        run_ranks(2, stumble)


def test_a_script_that_fails_shows_its_traceback_and_ends_the_ranks_that_wait(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '0':\n    time.sleep(3600)\n1 / 0\n")
    done = try_script(str(script), patience_after_failure_s=0.5)
    assert done.code == 1 and 'script.py", line 4, in <module>\n' in done.output and "ZeroDivisionError" in done.output
