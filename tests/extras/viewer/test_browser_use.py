"""The viewer in a real browser: what clicks and keys do, what a screen reader is told, how it looks on a phone."""

import json
from copy import deepcopy

import pytest
from helpers.browser import needs_browser
from helpers.devtools import Browser
from helpers.viewer_pages import READY, ROWS, make_run, page_of, write_page

pytestmark = needs_browser


def selected(browser: Browser) -> str:
    return browser.js("document.querySelector('.row.selected b').textContent")


def visible_prompts(browser: Browser) -> list[int]:
    return browser.js("[...document.querySelectorAll('.prompt')].flatMap((p, i) => p.hidden ? [] : [i])")


# -- choosing --------------------------------------------------------------------------------------------------------


def test_filters_work_alone_and_together_and_the_address_keeps_them(browser, shown_run):
    browser.open(shown_run / "viewer.html", ready=READY)
    options = browser.js(
        "['stop', 'reason', 'tool'].map(id => [...document.getElementById(id).options].map(o => o.text))"
    )
    assert options[0] == ["any stop", "eos (17)", "length (1)"]
    assert options[1] == ["any reason", "ok (17)", "missing_answer (1)"]
    assert options[2] == ["any tool calls", "failed search (18)", "failed search: timeout (18)"]
    browser.choose("#stop", "length")
    assert visible_prompts(browser) == [1] and selected(browser) == "0"
    assert browser.text("#count") == "1 of 3 prompts, 1 trajectories"
    dim = browser.js(f"{ROWS}.map(row => row.classList.contains('dim'))")
    assert dim.count(False) == 1 and len(dim) == 6
    browser.choose("#reason", "ok")  # no trajectory has both
    assert visible_prompts(browser) == []
    browser.choose("#reason", "missing_answer")
    browser.choose("#tool", "search: timeout")
    assert visible_prompts(browser) == [1]
    address = browser.js("location.hash")
    browser.open(shown_run / "viewer.html", address, ready=READY)
    assert visible_prompts(browser) == [1] and browser.js("document.getElementById('tool').value") == "search: timeout"
    browser.click("#clear")
    assert visible_prompts(browser) == [0, 1, 2] and browser.js("location.hash") == "#1/0"
    for control, value, left in [("find", "QUESTION 2", [2]), ("kind", "mixed", [0]), ("high", "0.2", [1, 2])]:
        browser.choose(f"#{control}", value)
        assert visible_prompts(browser) == left, control
        browser.choose(f"#{control}", "")


def test_two_trajectories_are_compared_from_where_they_differ(browser, shown_run, groups):
    branch = next(t for t in groups[0].trajectories if t.parent_id is not None)
    parent = next(t for t in groups[0].trajectories if t.trajectory_id == branch.parent_id)
    browser.open(shown_run / "viewer.html", f"#0/{branch.trajectory_id}", ready=READY)
    browser.choose("#compare", parent.trajectory_id)
    fork = sum(turn.inherited for turn in branch.turns)
    texts = [next(t for t, by_model in x.segments[2 * fork :]) for x in (branch, parent)]
    at = next(i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b)
    assert f"differs from character {at} of turn {fork} on" in browser.text("#difference")
    marked = browser.js("[...document.querySelectorAll('#difference mark')].map(mark => mark.textContent)")
    assert marked == [text[at : at + 600] for text in texts]


# -- the run's other steps -------------------------------------------------------------------------------------------


def test_prompts_are_sorted_and_the_keys_follow_the_order(browser, shown_run):
    browser.open(shown_run / "viewer.html", ready=READY)
    order = "[...document.querySelectorAll('.prompt')].map(p => [p.id, Number(p.querySelector('b').lastChild.data)])"
    browser.choose("#sort", "best")
    rewards = [reward for _, reward in browser.js(order)]
    assert rewards == sorted(rewards, reverse=True)
    browser.choose("#sort", "worst")
    found = browser.js(order)
    assert [reward for _, reward in found] == sorted(rewards)
    browser.open(shown_run / "viewer.html", browser.js("location.hash"), ready=READY)
    assert browser.js(order) == found  # the address keeps it
    chosen = "document.querySelector('.prompt.selected').id"
    browser.press("ArrowUp", "ArrowUp", "ArrowUp")
    walked = [browser.js(chosen)]
    for _ in range(2):
        browser.press("ArrowDown")
        walked.append(browser.js(chosen))
    assert walked == [name for name, _ in found]
    browser.click("#clear")
    assert [name for name, _ in browser.js(order)] == ["prompt-0", "prompt-1", "prompt-2"]


def test_the_step_picker_leads_to_other_steps_and_keeps_the_filters(browser, shown_run):
    browser.open(shown_run / "viewer.html", "#2/0&colour=logprob&find=question", ready=READY)
    assert browser.js("document.getElementById('step').selectedOptions[0].text") == "training step 10"
    browser.click("#previous")
    browser.wait(f"document.title.endsWith('step_000009') && {READY}")
    assert browser.js("document.getElementById('previous').disabled")
    assert browser.js("location.hash") == "#0/0&find=question&colour=logprob"
    browser.press("n")
    browser.wait(f"document.title.endsWith('step_000010') && {READY}")
    valid = browser.js("[...document.getElementById('step').options].find(o => o.text === 'validation step 20').value")
    browser.choose("#step", valid)
    browser.wait(f"document.title.endsWith('valid_000020') && {READY}")


def test_the_charts_mark_this_step_and_lead_to_the_nearest_dumped_one(browser, shown_run):
    browser.size(1400, 1100)  # of a lower window the tree gets the room
    browser.open(shown_run / "viewer.html", ready=READY)
    assert browser.text("#charts figcaption") == "reward"
    words = browser.js("document.querySelector('#charts svg').getAttribute('aria-label')")
    assert words == "reward: training 0.1 at step 1 to 1 at step 10; validation 0.5 at step 5 to 0.5 at step 10"
    here = browser.js("document.querySelector('#charts .here').getAttribute('d')")
    axis_end = browser.js("document.querySelector('#charts .axis').getAttribute('d')").rpartition("H")[2]
    assert here.startswith(f"M{axis_end} ")  # step 10 is the last
    box = browser.js("document.querySelector('#charts svg').getBoundingClientRect().toJSON()")
    browser.click_at(box["x"] + box["width"] / 3, box["y"] + box["height"] / 2)
    browser.wait(f"document.title.endsWith('step_000009') && {READY}")


def test_a_step_without_a_page_says_so_and_the_report_is_a_click_away(browser, tmp_path, groups):
    run = make_run(tmp_path / "run", groups)
    (run / "report.md").write_text("# the report")
    write_page(run, "--pages", "1")
    browser.open(run / "viewer.html", ready=READY)
    option = "document.getElementById('step').options[0]"
    assert browser.js(f"{option}.text") == "training step 9 (no page: raise --pages)"
    assert browser.js(f"{option}.disabled && document.getElementById('previous').disabled")
    browser.click("#links a")
    browser.wait("document.body.innerText.includes('the report')")


# -- keyboard and screen readers -------------------------------------------------------------------------------------


def test_arrows_walk_through_prompts_and_trajectories_and_enter_and_escape_from_panel_to_panel(browser, shown_run):
    browser.open(shown_run / "viewer.html", ready=READY)
    focused = "document.activeElement.id"
    browser.js("document.getElementById('prompts').focus()")
    browser.press("ArrowDown")
    assert "question 1" in browser.text("#about")
    browser.press("Enter")
    assert browser.js(focused) == "rows"
    browser.press("ArrowDown")  # in the tree: to the next trajectory, and the focus stays
    order = browser.js(f"{ROWS}.map(row => row.id)")
    assert browser.js(focused) == "rows" and f"row-{selected(browser)}" == order[1]
    assert browser.js("document.getElementById('rows').getAttribute('aria-activedescendant')") == order[1]
    browser.press("Enter")
    assert browser.js(focused) == "text"
    browser.press("ArrowDown")  # in the text: scrolls
    assert "question 1" in browser.text("#about") and f"row-{selected(browser)}" == order[1]
    browser.press("Escape", "Escape")
    assert browser.js(focused) == "prompts"
    browser.press("ArrowRight")
    assert f"row-{selected(browser)}" == order[2] and f"trajectory {selected(browser)}" in browser.text("#text")
    assert browser.js("location.hash") == f"#1/{selected(browser)}"


def test_every_control_is_reached_with_tab_and_shows_it(browser, shown_run):
    browser.open(shown_run / "viewer.html", ready=READY)
    reached = []
    for _ in range(40):
        browser.press("Tab")
        reached.append(browser.js("document.activeElement.id || document.activeElement.tagName"))
        if reached[-1] != "BODY":
            assert browser.js("getComputedStyle(document.activeElement).outlineStyle") != "none", reached[-1]
    filters = ["find", "kind", "stop", "reason", "tool", "low", "high", "sort"]
    assert {"previous", "step", "A", "keys", "SUMMARY", *filters, "prompts", "scale", "rows"} <= set(reached)
    assert {"text", "colour", "compare"} <= set(reached)


def test_a_question_mark_shows_the_keys_and_escape_closes_them(browser, shown_run):
    browser.open(shown_run / "viewer.html", ready=READY)
    assert not browser.js("document.getElementById('trend').open")
    browser.press("?")
    assert browser.js("document.getElementById('help').open") and "previous, next trajectory" in browser.text("#help")
    browser.press("ArrowDown", "Escape")
    assert not browser.js("document.getElementById('help').open") and "question 0" in browser.text("#about")
    browser.press("c", "t", "/")
    assert browser.js("document.getElementById('colour').value") == "logprob"
    assert browser.js("document.getElementById('trend').open")
    assert browser.js("document.activeElement.id") == "find"
    browser.press("c")  # now it is a letter
    assert browser.js("document.getElementById('find').value") == "c"


def test_a_screen_reader_is_told_roles_names_and_what_is_selected(browser, shown_run, groups):
    branch = next(t for t in groups[0].trajectories if t.parent_id is not None)
    browser.open(shown_run / "viewer.html", f"#0/{branch.trajectory_id}&colour=logprob", ready=READY)
    nodes = browser.accessible()
    named = {role: [n["name"] for n in nodes if n["role"] == role] for role in {n["role"] for n in nodes}}
    assert {"banner", "main", "navigation", "search", "status"} <= named.keys()
    assert named["navigation"] == ["prompts"] and named["region"] == ["prompt", "branch tree", "trajectory"]
    for role in ("button", "combobox", "textbox", "searchbox", "spinbutton", "link", "listbox", "tree", "image"):
        assert all(named.get(role, [])), (role, named.get(role))
    options = [n for n in nodes if n["role"] == "option" and "mean reward" in n["name"]]
    assert len(options) == 3 and [n["selected"] for n in options] == [True, False, False]
    items = [n for n in nodes if n["role"] == "treeitem"]
    assert len(items) == 6
    for t in groups[0].trajectories:
        [item] = [n for n in items if n["name"].startswith(f"trajectory {t.trajectory_id}, reward {t.reward:.2f}, ")]
        assert item["level"] == t.trajectory_id.count(".") + 1 and item["selected"] == (t is branch)
        has_children = any(other.parent_id == t.trajectory_id for other in groups[0].trajectories)
        assert item.get("expanded", False) == has_children
    assert browser.js("document.documentElement.lang") == "en"
    assert {"turn 0", f"trajectory {branch.trajectory_id}"} <= {name.strip() for name in named["heading"]}


# -- sizes and colours -----------------------------------------------------------------------------------------------


def test_a_phone_has_one_column_with_folded_filters_and_a_desk_two(browser, shown_run):
    places = "['nav', 'main'].map(tag => document.querySelector(tag).getBoundingClientRect().left)"
    folded = "!document.getElementById('filters').open"
    browser.open(shown_run / "viewer.html", ready=READY)
    nav, main = browser.js(places)
    assert main > nav and browser.js("document.documentElement.scrollHeight") == 900  # the page itself does not scroll
    assert not browser.js(folded)
    browser.size(390, 850)
    browser.open(shown_run / "viewer.html", ready=READY)
    assert browser.js(places) == [0, 0] and browser.js("document.documentElement.scrollWidth") == 390
    assert browser.js("scrollY") == 0 and not browser.js("document.getElementById('trend').open") and browser.js(folded)
    assert browser.js("document.querySelector('#tree > svg').getBoundingClientRect().left") < 130
    browser.click("#prompt-2")
    assert "question 2" in browser.text("#about")
    assert browser.js("document.getElementById('about').getBoundingClientRect().top") < 100  # and it comes into sight


CONTRAST = """selector => [...document.querySelectorAll(selector)].filter(e => e.textContent.trim()).map(e => {
  const pen = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const behind = [];
  for (let node = e; node; node = node.parentElement) behind.unshift(getComputedStyle(node).backgroundColor);
  const light = colours => {
    pen.fillStyle = "white";
    for (const colour of colours) { pen.fillRect(0, 0, 1, 1); pen.fillStyle = colour; }
    pen.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...pen.getImageData(0, 0, 1, 1).data].map(c => c / 255)
      .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const [a, b] = [light(behind), light([...behind, getComputedStyle(e).color])].sort((x, y) => y - x);
  return [e.textContent.slice(0, 40), (a + 0.05) / (b + 0.05)];
})"""


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_is_readable_in_light_and_dark(browser, tmp_path, groups, dark):
    group = deepcopy(groups[0])
    group.trajectories[0].rollout_logprobs[:12] = [-0.5 * i for i in range(12)]
    page = page_of(tmp_path, group, metrics=[{"reward/mean": 0.5, "valid/reward": 0.25}] * 2)
    browser.size(1400, 900, dark=dark)
    branch = next(t.trajectory_id for t in group.trajectories if t.parent_id == "0")
    everything = ".token, .soft, .good, .bad, .warn, .kind, .chip, .key, h1, h2, pre, a, summary, button, figcaption"
    for trajectory in ("0", branch):  # the branch has turns that it took over
        browser.open(page, f"#0/{trajectory}&colour=logprob&compare=1", ready=READY)
        measured = browser.js(f"({CONTRAST})({json.dumps(everything)})")
        assert len(measured) > 100
        assert [(text, round(ratio, 2)) for text, ratio in measured if ratio < 4.5] == []
