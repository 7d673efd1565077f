"""The viewer of an evaluation: a page for each set of questions, with the grades in the place of the rewards."""

import json
from copy import deepcopy
from pathlib import Path

import pytest
from helpers.browser import needs_browser
from helpers.eval_records import saved
from helpers.sample_groups import HOSTILE
from helpers.viewer_pages import READY, data_of, run_data_of, write_page

from arpo.evals.records import Grade, grades_path, write_grades
from arpo.trajectory import StopReason
from extras.viewer import viewer


@pytest.fixture
def run(tmp_path, groups) -> Path:
    """Two processes have sampled of gaia; one of the trajectories is graded, by a judge."""
    run = tmp_path / "runs" / "eval"
    saved(run, groups[:1], "gaia", "qa")
    saved(run, groups[1:], "gaia", "qa")
    saved(run, groups[:1], "own_12", "reward")
    grade = Grade(
        "p0", 1, {"f1": 0.25, "em": 0.0}, 0.5, "judge", "judge_unparsable", f"maybe {HOSTILE}", f"Hm. {HOSTILE}"
    )
    write_grades(grades_path(run, "gaia"), [grade])
    return run


def test_each_set_has_a_page_with_all_whole_lines_that_its_processes_sampled(run, groups):
    shown = run_data_of(write_page(run))["steps"]
    assert [(one["kind"], one["step"], one["page"]) for one in shown] == [
        ("gaia", None, "viewer/gaia.html"), ("own_12", None, "viewer/own_12.html"),
    ]  # fmt: skip
    data = data_of((run / "viewer" / "gaia.html").read_text())
    assert data["title"] == "eval · gaia"
    assert [group["prompt_id"] for group in data["groups"]] == [group.prompt.prompt_id for group in groups]
    write_page(run)
    assert run_data_of((run / "viewer" / "own_12.html").read_text())["steps"][1]["shown"]
    with (run / "trajectories" / "gaia.0.jsonl").open("ab") as file:
        file.write(b'{"prompt_id": "p')  # the run goes on, or was killed
    page = write_page(run, "--file", str(run / "trajectories" / "gaia.1.jsonl"))  # which stands for all of the set
    assert data_of(page)["title"] == "eval · gaia" and len(data_of(page)["groups"]) == 3


def test_grades_stand_in_the_place_of_the_rewards_and_a_new_grade_makes_a_new_page(run, groups):
    write_page(run)
    shown = data_of((run / "viewer" / "gaia.html").read_text())["groups"][0]["trajectories"]
    own, graded = shown[:2]
    assert own["reward"] == groups[0].trajectories[0].reward and own["grade"] is None
    assert (graded["reward"], graded["reward_parts"]) == (0.5, {"f1": 0.25, "em": 0.0})
    assert graded["reward_reason"] == "judge_unparsable" and graded["grade"]["judge_reply"] == f"Hm. {HOSTILE}"
    write_grades(grades_path(run, "gaia"), [Grade("p0", 1, {}, 1.0, "f1", "")])
    write_page(run)
    regraded = data_of((run / "viewer" / "gaia.html").read_text())["groups"][0]["trajectories"][1]
    assert regraded["reward"] == 1.0


def test_a_trajectory_that_an_outage_cut_off_has_not_the_grade_of_the_one_that_replaced_it(run, groups):
    group = deepcopy(groups[0])
    group.trajectories[1].stop_reason = StopReason.ERROR
    saved(run, [group, groups[0]], "own_12", "qa")
    write_grades(grades_path(run, "own_12"), [Grade("p0", 1, {}, 0.75, "f1", "")])
    write_page(run)
    first, failed, again = data_of((run / "viewer" / "own_12.html").read_text())["groups"]
    assert [one["trajectories"][1]["grade"] is None for one in (first, failed, again)] == [False, True, False]


def test_no_name_of_a_set_ends_the_script_that_it_stands_in(run, groups):
    saved(run, groups[:1], "<script><!--", "qa")
    page = write_page(run)
    assert "<script><!--" not in page and run_data_of(page)["steps"][0]["kind"] == "<script><!--"
    assert json.dumps(data_of(page)).count(json.dumps(HOSTILE)[1:-1]) > 2  # which is in the packed part only


@needs_browser
def test_answer_and_judge_are_shown_and_never_executed(browser, run, groups):
    write_page(run)
    graded = groups[0].trajectories[1].trajectory_id
    browser.open(run / "viewer" / "gaia.html", f"#0/{graded}", ready=READY)
    assert f"answer maybe {HOSTILE}" in browser.text("#trajectory") and "graded by judge" in browser.text("#trajectory")
    assert f"Hm. {HOSTILE}" in browser.js("document.querySelector('#text details').textContent")
    assert browser.js("document.querySelectorAll('img').length") == 0
    assert browser.js("document.getElementById('step').selectedOptions[0].text") == "gaia"
    browser.click("#next")
    browser.wait("document.title === 'eval · own_12'")


def test_two_runs_stand_beside_each_other_question_by_question(run, groups, tmp_path, capsys):
    sft = tmp_path / "runs" / "sft"
    saved(sft, groups[1:], "gaia", "qa")
    viewer.main([str(run), "--beside", str(sft)])
    page = Path(capsys.readouterr().out.strip())
    assert page == run / "beside_sft.html"
    alone, both, _ = data_of(page.read_text())["groups"]
    own = [t.trajectory_id for t in groups[1].trajectories]
    assert [t["trajectory_id"] for t in alone["trajectories"]] == [t.trajectory_id for t in groups[0].trajectories]
    assert [t["trajectory_id"] for t in both["trajectories"]] == own + [f"{name} sft" for name in own]
    parents = {t["trajectory_id"]: t["parent_id"] for t in both["trajectories"]}
    assert {f"{parent} sft" for t in groups[1].trajectories if (parent := t.parent_id)} <= set(parents.values())
    alike = data_of(write_page(run, "--file", str(run / "trajectories" / "gaia.1.jsonl")))["groups"][1]
    assert both["mean_reward"] == alike["mean_reward"]


def test_a_file_can_stand_beside_and_what_has_none_of_the_questions_is_one_line(run, groups, tmp_path, capsys):
    sft = tmp_path / "runs" / "sft"
    saved(sft, groups[1:], "other", "qa")
    viewer.main([str(run), "--beside", str(sft / "trajectories" / "other.0.jsonl")])
    assert (run / "beside_other.html").exists()
    for path, words in (
        (sft, f"{sft}: no dump own_12; it has other; name one by its file"),
        (sft / "trajectories" / "other.0.jsonl", "other: has none of these prompts"),
    ):
        with pytest.raises(SystemExit):
            viewer.main([str(run), "--file", str(run / "trajectories" / "own_12.0.jsonl"), "--beside", str(path)])
        assert words in capsys.readouterr().err
