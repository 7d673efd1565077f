"""What a page shows at a glance: what was called and answered, which branch repeats, where the policy was unsure."""

import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers.browser import needs_browser
from helpers.edits import ROOT
from helpers.viewer_pages import READY, page_of, run_data_of

from arpo.errors import UserError
from arpo.trajectory import Group
from extras.viewer.growing import FIRST, growing

LABELS = "[...document.querySelectorAll('#tree svg text')].map(label => label.textContent)"


def repeating(group: Group) -> tuple[Group, str]:
    """The group, whose first branch has its parent's text; the branch's id."""
    group = deepcopy(group)
    branch = next(t for t in group.trajectories if t.parent_id is not None)
    parent = next(t for t in group.trajectories if t.trajectory_id == branch.parent_id)
    num_inherited = sum(turn.inherited for turn in branch.turns)
    for name in ("token_ids", "loss_mask", "rollout_logprobs", "text", "segments", "token_chars"):
        setattr(branch, name, deepcopy(getattr(parent, name)))
    branch.turns = [replace(turn, inherited=i < num_inherited, decision=None) for i, turn in enumerate(parent.turns)]
    return group, branch.trajectory_id


ENTROPIES = [{"entropy/root": 0.5}, {"entropy/root": 0.125, "entropy/after_tool": 0.25}]
"""Of the steps. Twice the highest has the strongest colour."""


def test_all_pages_of_a_run_have_one_scale_of_entropies(tmp_path, groups):
    page_of(tmp_path, groups[0], metrics=ENTROPIES)
    pages = [tmp_path / "viewer.html", *(tmp_path / "viewer").glob("*.html")]
    assert [run_data_of(page.read_text())["entropy"] for page in pages] == [1.0] * 3


@needs_browser
def test_boxes_say_what_was_called_and_rows_end_with_the_answer(browser, tmp_path, groups):
    group = deepcopy(groups[0])
    wrong = next(t for t in group.trajectories if not t.reward)
    wrong.reward_reason = "several_answers"
    browser.open(page_of(tmp_path / "run", group, metrics=ENTROPIES), ready=READY)
    drawn = browser.js(LABELS)
    own_calls = [call for t in group.trajectories for call in t.own_tool_calls]
    assert len(own_calls) > 4 and {call.argument for call in own_calls} <= set(drawn)
    answers = [label for label in drawn if label[0] in "✓✗"]
    assert len(answers) == len(group.trajectories) and answers.count("✓ 1") >= 1
    assert sum(label[0] == "✓" for label in answers) == sum(t.reward > 0 for t in group.trajectories) == 3
    assert "several_answers" in drawn
    assert "0 1 nats or more" in browser.text("#about")
    for t in group.trajectories:
        t.reward_parts = {}  # so nothing calls an answer right or wrong
    browser.open(page_of(tmp_path / "unmarked", group), ready=READY)
    drawn = browser.js(LABELS)
    assert not [label for label in drawn if label[0] in "✓✗"] and "1" in drawn


@needs_browser
def test_the_slowest_calls_bar_is_as_long_as_its_cell_and_the_others_are_in_proportion(browser, tmp_path, groups):
    group, took, expected = deepcopy(groups[0]), {0: 1.0, 1: 0.25, 2: 0.5}, []  # seconds of a call in that turn
    for t in group.trajectories:
        for k, turn in enumerate(t.turns):
            t.turns[k] = replace(turn, tool_calls=[replace(call, seconds=took[k]) for call in turn.tool_calls])
            if turn.tool_calls and not turn.inherited:
                expected.append(took[k])
    browser.open(page_of(tmp_path, group), ready=READY)
    widths = browser.js("[...document.querySelectorAll('#tree .waited')].map(bar => Number(bar.getAttribute('width')))")
    assert len(set(expected)) > 1
    assert sorted(width / max(widths) for width in widths) == pytest.approx(sorted(expected))
    cell = browser.js("Number(document.querySelector('#tree .cell.tool').getAttribute('width'))")
    assert max(widths) == pytest.approx(cell - 4) and "tool time to 1.0 s" in browser.text("#about")


@needs_browser
def test_a_branch_that_repeats_its_parent_is_grey_and_says_so(browser, tmp_path, groups):
    group, branch = repeating(groups[0])
    browser.open(page_of(tmp_path, group), ready=READY)
    dim = browser.js("[...document.querySelectorAll('.row.dim')].map(row => row.id)")
    assert dim == [f"row-{branch}"] and browser.js("document.querySelectorAll('#tree svg .dim').length") == 1
    parent = next(t.parent_id for t in group.trajectories if t.trajectory_id == branch)
    assert browser.js(LABELS).count(f"same text as {parent}") == 1


@needs_browser
def test_a_page_opens_on_the_mixed_group_with_most_branches_that_are_none_of_its_parents(browser, tmp_path, groups):
    roots = deepcopy(groups[0])
    roots.prompt = replace(roots.prompt, prompt_id="roots")
    roots.trajectories = [t for t in roots.trajectories if t.parent_id is None]
    roots.trajectories[1].reward = -1.0
    for t in roots.trajectories:
        t.prompt_id = "roots"
    browser.open(page_of(tmp_path, groups[1], roots, groups[0]), ready=READY)
    assert browser.js("location.hash").startswith("#2/")


@needs_browser
def test_the_entropy_along_a_trajectory_has_results_as_bands_and_decisions_as_marks(browser, shown_run, groups):
    branch = next(t for t in groups[0].trajectories if t.parent_id is not None and len(t.turns) > 2)
    browser.open(shown_run / "viewer.html", f"#0/{branch.trajectory_id}", ready=READY)
    assert browser.js("document.querySelectorAll('#track .bars[d]').length") >= len(branch.turns)  # inherited ones too
    assert browser.js("document.querySelectorAll('#track path.entropy').length") == len(branch.turns)
    bands = browser.js("[...document.querySelectorAll('#track rect')].map(band => Number(band.getAttribute('width')))")
    results = [turn.result_end - turn.end for turn in branch.turns if turn.result_end > turn.end]
    assert [band / bands[0] for band in bands] == pytest.approx([tokens / results[0] for tokens in results])
    marks = browser.js("[...document.querySelectorAll('#track svg text')].map(mark => mark.textContent)")
    assert marks and any(mark.startswith("◆") and mark.endswith("left") for mark in marks)


@needs_browser
def test_a_tree_for_a_picture_stands_alone(browser, shown_run):
    browser.open(shown_run / "viewer.html", "#0/0&poster", ready=READY)
    shown = "name => document.querySelector(name).getBoundingClientRect().height > 0"
    assert browser.js(f"['header', 'nav', '#text', '#tree', '#about h2'].map({shown})") == [False] * 3 + [True] * 2


@needs_browser
def test_a_growing_tree_shows_each_turn_after_those_before_it(shown_run, groups):
    drawn = growing(shown_run / "viewer.html", 0)
    root, shown = ElementTree.fromstring(drawn), "{http://www.w3.org/2000/svg}"
    cells = [cell for cell in root.iter(f"{shown}rect") if " cell" in cell.get("class")]
    cells = [cell for cell in cells if "tool" not in cell.get("class")]
    assert len(cells) == sum(not turn.inherited for t in groups[0].trajectories for turn in t.turns)
    columns = sorted({(float(cell.get("x")), int(cell.get("class").split()[0][3:])) for cell in cells})
    assert len(columns) > 1 and columns == sorted(columns, key=lambda column: column[1])
    starts = [float(start) for start in re.findall(r"0%, ([\d.]+)% { opacity: 0; }", drawn)]
    assert starts == sorted(set(starts)) and len(starts) > columns[-1][1] - FIRST
    animated = {int(number) for number in re.findall(r"animation-name: at-(\d+)", drawn)}
    first_turn = columns[0][1]  # it is there from the start: no second begins with an empty box
    assert first_turn not in animated and min(animated) == FIRST and starts[0] > 0
    animated = re.findall(r"animation-name: at-(\d+)", (ROOT / "docs" / "tree.svg").read_text())
    assert int(animated[0]) == FIRST
    with pytest.raises(UserError, match="no tree on it; name a page that arpo-view wrote"):
        growing(Path(__file__), 0)
