"""The viewer in a real browser: what it shows of trees, decisions, texts and tokens."""

import html
import json
import math
import re
from copy import deepcopy
from dataclasses import replace

import pytest
from helpers import viewer_pages
from helpers.browser import needs_browser
from helpers.sample_groups import HOSTILE
from helpers.viewer_pages import READY, ROWS, make_run, page_of, write_page

EMPTY_LISTS = ("turns", "segments", "token_ids", "loss_mask", "rollout_logprobs", "token_chars")
pytestmark = needs_browser


# -- what is shown ---------------------------------------------------------------------------------------------------


def test_the_tree_is_the_tree_of_the_rollout(browser, shown_run, groups):
    browser.open(shown_run / "viewer.html", ready=READY)
    expected = {(t.parent_id, t.trajectory_id) for t in groups[0].trajectories if t.parent_id is not None}
    links = browser.js("[...document.querySelectorAll('[data-link]')].map(link => link.dataset.link)")
    assert len(expected) == 4 and {tuple(link.split(" > ")) for link in links} == expected
    rows = browser.js(f"{ROWS}.map(row => [...row.children].map(cell => cell.textContent))")
    assert {tuple(row) for row in rows} == {
        (t.trajectory_id, f"{t.reward:.2f}", f"{t.advantage:+.2f}", str(len(t.token_ids)))
        for t in groups[0].trajectories
    }
    own_turns = sum(not turn.inherited for t in groups[0].trajectories for turn in t.turns)
    titles = browser.js("[...document.querySelectorAll('#tree title')].map(title => title.textContent)")
    assert sum(title.startswith("turn ") for title in titles) == own_turns  # a shared turn stands in the parent's lane


def test_a_branch_shows_its_decisions_calls_and_rewards_and_dims_what_it_inherited(browser, shown_run, groups):
    branch = next(t for t in groups[0].trajectories if t.parent_id is not None and not t.turns[1].inherited)
    browser.open(shown_run / "viewer.html", f"#0/{branch.trajectory_id}", ready=READY)
    assert browser.js("document.querySelectorAll('.turn.inherited').length") == 1
    shown = browser.text("#text")
    assert f"leaves trajectory {branch.parent_id} at token {branch.fork_at}" in shown
    assert f"trajectory {branch.trajectory_id}" in shown and f"stop {branch.stop_reason}" in shown
    assert f"reward {int(branch.reward)} (format 0.125, accuracy {int(branch.reward)})" in shown
    assert "ok, cached 250 ms" in shown and "timeout 2.5 s" in shown
    drawn = browser.js("document.getElementById('tree').textContent")
    for t in groups[0].trajectories:
        for turn in t.turns:
            if d := turn.decision:  # every decision of the group is on the tree, this branch's own in full
                assert f"{d.probability:.2f} {d.outcome}" in drawn and f"baseline {d.root_entropy:.4f}" in drawn


@pytest.mark.parametrize("probability", [None, 0.125])  # a rule had judged it before, and left budget
def test_a_turn_that_was_chosen_afterwards_shows_its_score_and_rank(browser, tmp_path, groups, probability):
    group = deepcopy(groups[0])
    turns = [turn for t in group.trajectories for turn in t.turns if turn.decision]
    for number, turn in enumerate(turns):
        decision = replace(turn.decision, probability=probability, draw=probability, score=0.2375 + number)
        turn.decision = replace(decision, outcome="branched")
    browser.open(page_of(tmp_path, group), ready=READY)
    drawn = browser.js("document.querySelector('main').textContent")
    for number in range(len(turns)):
        rank = len(turns) - number
        assert f"score {number}.2375, rank {rank}, chosen after all had ended" in drawn
        assert f"◆ {number}.24 #{rank}" in drawn
    assert browser.js("document.querySelector('#signal') !== null") == (probability is not None)  # a P to plot
    assert browser.js("document.getElementById('trend').hidden")  # and no metrics.jsonl with numbers


def test_the_plot_shows_p_over_the_change_of_entropy_of_every_decision(browser, shown_run, groups):
    browser.open(shown_run / "viewer.html", ready=READY)
    plot = browser.js("document.getElementById('signal').outerHTML")
    taken = [[turn.decision for t in g.trajectories for turn in t.turns if turn.decision] for g in groups]
    points = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="([\d.]+)"', plot)
    assert len(points) == sum(map(len, taken)) and len(taken[0]) > 1
    assert [r for _, _, r in points].count("3.5") == len(taken[0])  # those of the group that is shown stand out
    highest = max((d for group in taken for d in group), key=lambda d: d.probability)
    assert float(min(points, key=lambda point: float(point[1]))[1]) == pytest.approx(64 - 56 * highest.probability)
    assert f"P(branch) {highest.probability:g}, draw" in plot


def test_hostile_text_is_shown_and_never_executed(browser, shown_run):
    for address in ("", "#0/0&colour=logprob", "#0/0&find=%3Cimg&compare=1"):
        browser.open(shown_run / "viewer.html", address, ready=READY)
        document = browser.js("document.documentElement.outerHTML")
        assert "<img" not in document and browser.js("document.title") == "branched · step_000010"
        assert document.count(html.escape(HOSTILE, quote=False)) >= 2  # question, tool result; and the model's text
        assert HOSTILE in browser.js("document.querySelector('#turn-0 pre').textContent")


def test_marks_that_turn_the_direction_are_shown_as_marks(browser, shown_run):
    browser.open(shown_run / "viewer.html", "#1/0", ready=READY)
    for selector in ("#about h2", "#prompt-1 .question"):
        shown = browser.js(f"document.querySelector('{selector}').textContent")
        assert shown == "question 1: ⟨U+202E⟩ltr⟨U+202C⟩ or rtl?"
    texts = "#about h2, .question, #about pre, .body pre"
    assert browser.js(f"[...document.querySelectorAll('{texts}')].every(text => text.dir === 'auto')")


def test_a_cut_is_visible_and_the_totals_count_what_is_shown(browser, shown_run):
    write_page(shown_run, "--max_groups", "2", "--pages", "0")
    browser.open(shown_run / "viewer.html", ready=READY)
    assert "only the first 2 of 3 prompts" in browser.text("#cut")
    assert "2 prompts, 12 trajectories; prompts: 1 mixed, 1 dead, 2 with branches" in browser.text("#totals")
    write_page(shown_run)


@pytest.mark.parametrize("scale", ["turns", "tokens"])
def test_no_label_of_the_tree_reaches_beyond_its_cell(browser, shown_run, scale):
    browser.open(shown_run / "viewer.html", f"#0/0&scale={scale}", ready=READY)
    assert browser.js("document.getElementById('scale').value") == scale
    labels = browser.js("""[...document.querySelectorAll("#tree svg text:not(.soft)")].map(label => {
      const box = label.getBoundingClientRect(), cells = [...document.querySelectorAll(".cell")];
      const inside = cells.map(cell => cell.getBoundingClientRect()).filter(cell => cell.left < box.left
        && cell.top < box.bottom && cell.bottom > box.top && cell.right > box.left);
      return [label.textContent, inside.length === 1 && inside[0].right >= box.right];
    })""")
    assert len(labels) > 20 and [label for label, fits in labels if not fits] == []


# -- tokens ----------------------------------------------------------------------------------------------------------


def test_tokens_are_coloured_by_logprob_with_numbers_and_underlines(browser, tmp_path, groups):
    group = deepcopy(groups[0])
    group.trajectories[0].rollout_logprobs[:3] = [-0.1, -1.5, -4.0]
    browser.open(page_of(tmp_path, group), ready=READY)
    assert browser.js("document.querySelectorAll('.body .token').length") == 0
    browser.choose("#colour", "logprob")
    assert browser.js("document.querySelector('#turn-0 pre').textContent").startswith("<think>")
    shown = "[t.textContent, t.className, t.title, getComputedStyle(t).backgroundColor]"
    tokens = browser.js(f"[...document.querySelectorAll('#turn-0 .token')].slice(0, 3).map(t => {shown})")
    assert [text for text, *_ in tokens] == ["<", "t", "h"]  # a token for each byte
    assert [name.split() for _, name, *_ in tokens] == [["token"], ["token", "some"], ["token", "much"]]
    assert tokens[1][2] == f"token 1: logprob -1.500 (P {math.exp(-1.5):.2f}), entropy 1.000 nats"
    assert len({colour for *_, colour in tokens}) == 3
    legend = "logprob of the token: 0 -5 nats and below; -1 -3 and beyond are underlined"
    assert legend in browser.text("#view").replace("\N{MINUS SIGN}", "-")
    assert browser.js("location.hash").endswith("&colour=logprob")


def test_tokens_are_coloured_by_entropy_where_it_was_measured(browser, shown_run, groups):
    branch = next(t for t in groups[0].trajectories if t.parent_id is not None)
    browser.open(shown_run / "viewer.html", f"#0/{branch.trajectory_id}&colour=entropy", ready=READY)
    for index, turn in enumerate(branch.turns):  # also the part that the parent sampled
        coloured = browser.js(f"document.querySelectorAll('#turn-{index} .token[style]').length")
        assert coloured == min(20, turn.end - turn.start), index
    assert "recorded for the first tokens of each turn only" in browser.text("#view")


@pytest.mark.parametrize("damage", [
    lambda row: row["turns"][0]["tool_calls"][0].update(seconds=math.nan),
    lambda row: row["turns"][0].update(entropy=math.nan),
    lambda row: row.update({name: [] for name in EMPTY_LISTS}, fork_at=0),
    lambda row: row.update(parent_id=row["trajectory_id"], turns=[turn | {"inherited": True} for turn in row["turns"]]),
    lambda row: row.update(messages=[{}], answers=[], question="", trajectory_id=""),
    lambda row: (row["segments"][-1].__setitem__(0, "x" * 3_000_000), row.update(token_chars=[])),
], ids=["NaN seconds", "NaN entropy", "no turns", "its own parent", "empty texts", "a word of 3 MB"])  # fmt: skip
def test_odd_dumps_are_drawn(browser, tmp_path, groups, damage):
    run = make_run(tmp_path / "runs" / "odd", groups)
    dump = run / "trajectories" / "step_000010.jsonl.gz"
    [first, *others] = map(json.loads, viewer_pages.read_dump(dump).splitlines())
    damage(first)
    viewer_pages.write_dump(dump, "".join(json.dumps(row) + "\n" for row in [first, *others]))
    write_page(run, "--pages", "0")
    browser.open(run / "viewer.html", "#0/" + first["trajectory_id"], ready=READY)
    assert browser.text("#title") == "odd · step_000010" and "trajectory" in browser.text("#trajectory h2")
