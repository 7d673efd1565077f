"""The viewer: what it reads, what it refuses, and what a real browser then shows."""

import gzip
import html
import json
import re
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.browser import dom, needs_browser, section, words
from helpers.sample_groups import sample_groups

from arpo.errors import UserError
from arpo.log import RunLog
from arpo.run_options import RunConfig
from arpo.trajectory import Group
from arpo.viewer import viewer


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    return sample_groups()


@pytest.fixture
def run(tmp_path, groups) -> Path:
    folder = tmp_path / "runs" / "branched"
    log = RunLog(folder, RunConfig(), is_main=True)
    log.trajectories(9, groups[:1])
    log.trajectories(10, groups)
    log.trajectories(20, groups[:1], kind="valid")
    log.close()
    return folder


def read_dump(dump: Path) -> str:
    return gzip.decompress(dump.read_bytes()).decode()


def write_dump(dump: Path, text: str) -> None:
    dump.write_bytes(gzip.compress(text.encode()))


def write_page(run: Path, *flags: str) -> str:
    viewer.main([str(run), *flags])
    return (run / "viewer.html").read_text()


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


# -- what it reads ---------------------------------------------------------------------------------------------------


def test_the_newest_training_dump_is_shown_and_the_path_printed(run, capsys):
    assert data_of(write_page(run))["title"] == "branched · step_000010"
    assert capsys.readouterr().out == f"{run / 'viewer.html'}\n"


def test_a_dump_can_be_chosen_by_step_or_by_path(run, tmp_path):
    assert data_of(write_page(run, "--step", "9"))["title"] == "branched · step_000009"
    valid = run / "trajectories" / "valid_000020.jsonl.gz"
    viewer.main([str(run), "--file", str(valid), "--out", str(tmp_path / "page.html")])
    assert data_of((tmp_path / "page.html").read_text())["title"] == "branched · valid_000020"


def test_a_run_without_training_dumps_shows_its_newest_other_one(run):
    for path in (run / "trajectories").glob("step_*"):
        path.unlink()
    assert viewer.find_dump(run).name == "valid_000020.jsonl.gz"


def test_every_turn_has_its_text_and_its_result_and_the_parents_part_is_marked(run, groups):
    shown = data_of(write_page(run))["groups"][0]["trajectories"]
    for view, trajectory in zip(shown, groups[0].trajectories, strict=True):
        assert "".join(turn["text"] + turn["result_text"] for turn in view["turns"]) == trajectory.text
        inherited = [turn for turn in view["turns"] if turn["inherited"]]
        assert (inherited[-1]["result_end"] if inherited else 0) == trajectory.fork_at


def test_mixed_and_dead_groups_are_told_apart():
    assert viewer.group_summary([1.0, 0.0]) == {"mean_reward": 0.5, "kind": "mixed"}
    assert viewer.group_summary([1.0, 1.0, None]) == {"mean_reward": 1.0, "kind": "dead"}
    assert viewer.group_summary([1.0]) == {"mean_reward": 1.0, "kind": "single"}
    assert viewer.group_summary([None, None]) == {"mean_reward": None, "kind": "dead"}


def test_a_prompt_that_comes_twice_in_a_step_makes_two_groups(tmp_path, groups):
    log = RunLog(tmp_path, RunConfig(), is_main=True)
    log.trajectories(1, [groups[0], groups[0]])
    log.close()
    shown, num_groups = viewer.read_groups(tmp_path / "trajectories" / "step_000001.jsonl.gz", 200)
    assert [len(group["trajectories"]) for group in shown] == [6, 6] and num_groups == 2


def test_a_nan_reward_does_not_break_the_page(run):
    dump = run / "trajectories" / "step_000010.jsonl.gz"
    write_dump(dump, read_dump(dump).replace('"reward": 1.0', '"reward": NaN', 1))
    group = data_of(write_page(run))["groups"][0]
    assert group["trajectories"][0]["reward"] == group["mean_reward"] == "nan"


def test_the_page_loads_nothing_from_anywhere(run):
    page = write_page(run).replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    without_data = re.sub(r"<script type.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"https?:|\bsrc=|\bhref=|@import|url\(", without_data)
    assert "default-src 'none'" in without_data and "innerHTML" not in without_data


# -- what it refuses -------------------------------------------------------------------------------------------------


def test_a_missing_run_is_one_line_and_code_2():
    command = [sys.executable, "-m", "arpo.viewer", "runs/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    assert done.returncode == 2 and done.stderr == "error: runs/nowhere: no such run folder; pass runs/NAME\n"


def test_bad_choices_of_a_dump_say_what_there_is(run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.jsonl").touch()
    for argv, message in [
        ([run, "--step", 7], "--step 7 was not dumped; there are dumps 9, 10;"),
        ([tmp_path / "empty"], "no trajectory dumps"),
        ([run, "--file", tmp_path / "absent.jsonl"], "absent.jsonl: cannot read the dump (No such file"),
        ([run, "--file", tmp_path / "empty.jsonl"], "empty.jsonl: the dump is empty"),
        ([run, "--max_groups", 0], "--max_groups 0: must be at least 1"),
        ([run, "--out", tmp_path / "no" / "page.html"], "page.html: cannot write the page"),
    ]:
        with pytest.raises(SystemExit) as stop:
            viewer.main(list(map(str, argv)))
        error = capsys.readouterr().err
        assert stop.value.code == 2 and message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line[:200],  # a killed run leaves half a line
        lambda line: "[1, 2]",
        lambda line: line.replace('"question"', '"query"'),
        lambda line: line.replace('"probability"', '"chance"').replace('"start"', '"begin"'),
        lambda line: line.replace('"loss_mask": [', '"loss_mask": [1, '),
        lambda line: line.replace('"segments": [', '"segments": [["more", true], '),
        lambda line: line.replace('"reward": 1.0', '"reward": "good"'),
    ],
)
def test_a_malformed_line_is_named(run, damage):
    dump = run / "trajectories" / "step_000010.jsonl.gz"
    lines = read_dump(dump).splitlines()
    lines[1] = damage(lines[1])
    write_dump(dump, "\n".join(lines) + "\n")
    with pytest.raises(UserError, match=r"step_000010\.jsonl\.gz:2: not a trajectory") as error:
        viewer.read_groups(dump, 200)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("damage", [lambda data: data[:-20], lambda data: b"x" + data[1:], lambda data: b""])
def test_a_damaged_dump_is_named(run, damage):
    dump = run / "trajectories" / "step_000010.jsonl.gz"
    dump.write_bytes(damage(dump.read_bytes()))
    with pytest.raises(UserError, match=r"step_000010\.jsonl\.gz: (cannot read the dump \(.+\)|the dump is empty)"):
        viewer.read_groups(dump, 200)


def test_a_dump_without_compression_is_shown_too(run):
    dump = run / "trajectories" / "step_000010.jsonl.gz"
    dump.with_suffix("").write_text(read_dump(dump))
    dump.unlink()
    page = data_of(write_page(run))
    assert page["title"] == "branched · step_000010" and page["groups"][0]["messages"][-1]["role"] == "user"


# -- what a browser shows --------------------------------------------------------------------------------------------


@needs_browser
def test_the_tree_in_the_browser_is_the_tree_of_the_rollout(run, groups, tmp_path):
    write_page(run)
    document = dom(run / "viewer.html", tmp_path / "profile")
    expected = {(t.parent_id, t.trajectory_id) for t in groups[0].trajectories if t.parent_id is not None}
    assert len(expected) == 4
    assert {tuple(html.unescape(link).split(" > ")) for link in re.findall(r'data-link="(.*?)"', document)} == expected
    rows = re.findall(r'<div class="row (?:selected)?"[^>]*><b[^>]*>(.*?)</b>(.*?)</div>', document)
    by_id = {t.trajectory_id: t for t in groups[0].trajectories}
    assert {id for id, _ in rows} == set(by_id)
    for id, numbers in rows:
        t = by_id[id]
        assert words(numbers) == f"{t.reward:.2f} {t.advantage:+.2f} {len(t.token_ids)}"
    own_turns = sum(not turn.inherited for t in groups[0].trajectories for turn in t.turns)
    assert document.count("<title>turn ") == own_turns  # a shared turn is drawn once, in the parent's lane


@needs_browser
def test_a_branch_shows_its_decisions_calls_and_rewards_and_dims_what_it_inherited(run, groups, tmp_path):
    branch = next(t for t in groups[0].trajectories if t.parent_id is not None and not t.turns[1].inherited)
    write_page(run)
    document = dom(run / "viewer.html", tmp_path / "profile", f"#0/{branch.trajectory_id}")
    shown = words(section(document, "text"))
    assert document.count('class="turn inherited"') == sum(turn.inherited for turn in branch.turns) == 1
    assert f"leaves trajectory {branch.parent_id} at token {branch.fork_at}" in words(document)
    assert f"trajectory {branch.trajectory_id}" in shown
    text = words(document)
    assert f"reward {int(branch.reward)} (format 0.125, accuracy {int(branch.reward)})" in text
    assert "ok, cached 250 ms" in text and "timeout 2.5 s" in text and f"stop {branch.stop_reason}" in text
    for t in groups[0].trajectories:
        for turn in t.turns:
            if d := turn.decision:  # every decision of the group is on the tree, this branch's own in full
                assert f"{d.probability:.2f} {d.outcome}" in text
                assert f"baseline {d.root_entropy:.4f}" in text


@needs_browser
def test_a_turn_that_was_chosen_afterwards_shows_its_score(run, groups, tmp_path):
    group = deepcopy(groups[0])
    turns = [turn for t in group.trajectories for turn in t.turns if turn.decision]
    for turn in turns:
        turn.decision = replace(turn.decision, probability=None, draw=None, score=0.2375)
    log = RunLog(run, RunConfig(), is_main=True)
    log.trajectories(30, [group])
    log.close()
    write_page(run)
    document = dom(run / "viewer.html", tmp_path / "profile")
    text = words(document)
    assert text.count("score 0.2375, chosen after all had ended") >= len(turns) > 0 and "0.24 branched" in text
    assert '<svg id="signal"' not in document  # there is no P to plot


@needs_browser
def test_the_plot_shows_p_over_the_change_of_entropy_of_every_decision(run, groups, tmp_path):
    write_page(run)
    plot = section(dom(run / "viewer.html", tmp_path / "profile"), "signal")
    taken = [[turn.decision for t in g.trajectories for turn in t.turns if turn.decision] for g in groups]
    points = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="([\d.]+)"', plot)
    assert len(points) == sum(map(len, taken)) and len(taken[0]) > 1
    assert [r for _, _, r in points].count("3.5") == len(taken[0])  # those of the group that is shown stand out
    highest = max((d for group in taken for d in group), key=lambda d: d.probability)
    assert float(min(points, key=lambda point: float(point[1]))[1]) == pytest.approx(64 - 56 * highest.probability)
    assert f"P(branch) {highest.probability:g}, draw" in words(plot)


@needs_browser
def test_hostile_text_is_shown_and_never_executed(run, tmp_path):
    write_page(run)
    document = dom(run / "viewer.html", tmp_path / "profile")
    assert "<img" not in document and "<title>branched · step_000010</title>" in document
    assert document.count(html.escape("</script><img src=x onerror=", quote=False)) >= 3  # question, text, tool result


@needs_browser
def test_the_arrow_keys_walk_through_prompts_and_trajectories(run, groups, tmp_path):
    write_page(run)
    document = dom(run / "viewer.html", tmp_path / "profile", keys=("ArrowDown", "ArrowDown", "ArrowUp", "ArrowRight"))
    assert "question 1" in words(section(document, "about"))
    second = re.findall(r'<div class="row (?:selected)?"[^>]*><b[^>]*>(.*?)</b>', document)[1]
    assert re.search(r'<div class="row selected"[^>]*><b[^>]*>(.*?)</b>', document)[1] == second
    assert f"trajectory {second}" in words(document)


@needs_browser
def test_a_cut_is_visible_and_the_totals_count_what_is_shown(run, tmp_path):
    write_page(run, "--max_groups", "2")
    document = dom(run / "viewer.html", tmp_path / "profile")
    assert "only the first 2 of 3 prompts" in words(section(document, "cut"))
    assert "2 prompts, 12 trajectories; prompts: 1 mixed, 1 dead, 2 with branches" in words(section(document, "totals"))
