"""At 1400 x 900, a laptop's window: what the page is for is in sight, and no label lies on another or is cut off."""

import copy
from dataclasses import replace

import pytest
from helpers.browser import needs_browser
from helpers.fakes import EchoTool
from helpers.scripted_rollout import CODEC, LONG, play
from helpers.viewer_pages import READY, make_run, page_of, write_page

from arpo.options import BranchingConfig
from arpo.tools.base import ToolResult
from arpo.trajectory import Group, Prompt
from extras.viewer import viewer

pytestmark = needs_browser
QUESTION = "Weng earns $12 an hour for babysitting. Yesterday, she just did 50 minutes of it. How much did she earn?"
BOX = "document.querySelector({!r}).getBoundingClientRect().toJSON()"


def calls_three_times(_prompt: str, path: str, turn: int) -> tuple[str, float]:
    if turn < 3:
        return f"<think>step {turn}</think><python>print({turn} * 12)  # {path}</python>", 0.2 + 0.05 * turn
    return "<think>so</think><answer>\\boxed{10 dollars}</answer>", 0.5


@pytest.fixture(scope="module")
def four_turns() -> list[Group]:
    """A group of eight trajectories of four turns."""
    messages = [{"role": "user", "content": QUESTION}]
    prompt = Prompt("p0", messages, ["10"], token_ids=tuple(CODEC.render_prompt(messages)))
    cfg = replace(LONG, max_response_tokens=2400, max_tool_calls=4)
    branching = BranchingConfig(selector="arpo", base=0.5, num_initial_rollouts=4)
    tools = [EchoTool("python", lambda argument: ToolResult("12", ok=True, seconds=0.03))]
    groups = play(calls_three_times, cfg=cfg, branching=branching, tools=tools, prompts=[prompt])
    for k, t in enumerate(groups[0].trajectories):
        t.reward = float(k < 3)
        t.reward_parts = {"accuracy": t.reward}
    return groups


def inside(inner: dict, outer: dict) -> bool:
    is_within = outer["left"] <= inner["left"] and inner["right"] <= outer["right"]
    return is_within and outer["top"] <= inner["top"] and inner["bottom"] <= outer["bottom"]


def test_four_turns_and_their_answers_are_in_sight_and_at_least_seven_rows_of_the_tree(browser, tmp_path, four_turns):
    run = make_run(tmp_path / "run", four_turns)
    write_page(run)
    browser.open(run / "viewer.html", ready=READY)
    pane = browser.js(BOX.format("#tree"))
    answers = browser.js("[...document.querySelectorAll('.outcome')].map(e => e.getBoundingClientRect().toJSON())")
    assert len(answers) == 8 and all(box["right"] <= pane["right"] for box in answers)
    assert browser.js("document.getElementById('tree').scrollWidth <= document.getElementById('tree').clientWidth")
    rows = browser.js("[...document.querySelectorAll('[role=treeitem]')].map(e => e.getBoundingClientRect().toJSON())")
    assert sum(inside(row, pane | {"left": 0}) for row in rows) >= 7
    assert browser.js(BOX.format("header"))["height"] < 80
    assert not browser.js("document.getElementById('trend').open")
    browser.press("t")  # as the keys' list says
    assert browser.js("document.getElementById('trend').open")
    browser.size(1400, 1100)
    browser.open(run / "viewer.html", ready=READY)
    assert browser.js("document.getElementById('trend').open")


def test_the_whole_plot_of_the_decisions_is_in_sight_beside_a_long_question(browser, tmp_path, four_turns):
    groups = copy.deepcopy(four_turns)
    groups[0].prompt.messages[0]["content"] = QUESTION * 12
    page = page_of(tmp_path, *groups)
    browser.open(page, ready=READY)
    pane = browser.js(BOX.format("#about"))
    assert inside(browser.js(BOX.format("#signal")), pane)
    browser.js("document.getElementById('about').scrollTop = 1000")
    assert inside(browser.js(BOX.format("#signal")), pane)
    browser.size(400, 850)
    browser.open(page, ready=READY)
    assert browser.js("document.documentElement.scrollWidth") == 400


@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        ([-0.12, 0.9], ["-0.12", "0.9"]),  # 0 would lie on -0.12, the case of the report
        ([-0.5, 0.5], ["-0.5", "0", "0.5"]),
        ([-0.9, 0.05], ["-0.9", "0.05"]),
        ([-0.9, -0.1], ["-0.9", "0"]),  # the axis always reaches 0
        ([0.1, 0.9], ["0", "0.9"]),
    ],
)
def test_no_two_labels_of_the_plot_lie_on_each_other(browser, tmp_path, four_turns, changes, labels):
    """Charts elsewhere write their least value and 0 on one place: naver/billboard.js#348, chartjs/Chart.js#4757."""
    groups = copy.deepcopy(four_turns)
    turns = [turn for t in groups[0].trajectories for turn in t.turns if turn.decision]
    for k, turn in enumerate(turns):
        turn.decision = replace(turn.decision, root_entropy=1.0, entropy=1.0 + changes[k % 2])
    browser.open(page_of(tmp_path, *groups), ready=READY)
    written = browser.js("""[...document.querySelectorAll("#signal text")].filter(e => e.textContent).map(
      e => [e.textContent, e.getBoundingClientRect().toJSON()])""")
    assert [text for text, _ in written if text not in ("P 1", "ΔH, nats")][1:] == labels
    for i, (text, a) in enumerate(written):
        for other, b in written[i + 1 :]:
            beside = a["right"] < b["left"] or b["right"] < a["left"]
            assert beside or a["bottom"] <= b["top"] or b["bottom"] <= a["top"], (text, other)


def test_beside_another_run_its_name_is_written_out(browser, tmp_path, four_turns, capsys):
    """It was "0 demo...": which of demo_sft and demo_arpo?"""
    run = make_run(tmp_path / "demo_sft", four_turns)
    other = make_run(tmp_path / "demo_arpo_24_steps", four_turns)
    viewer.main([str(run), "--beside", str(other)])
    browser.open(run / "beside_demo_arpo_24_steps.html", ready=READY)
    names = browser.js("""[...document.querySelectorAll("[role=treeitem] b")].map(
      e => [e.textContent, e.scrollWidth <= e.clientWidth])""")
    assert {name for name, _ in names} >= {"0", "0 demo_arpo_24_steps"} and len(names) == 16
    assert [name for name, fits in names if not fits] == []
    assert browser.js("document.title") == "demo_sft · step_000010 beside demo_arpo_24_steps"
