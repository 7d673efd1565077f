"""The viewer's pages: what it reads, what it writes and leaves alone, what it refuses."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from itertools import pairwise
from pathlib import Path

import pytest
from helpers.edits import ROOT
from helpers.viewer_pages import data_of, make_run, read_dump, run_data_of, write_dump, write_page

from arpo.config.sections import RunConfig
from arpo.errors import UserError
from arpo.evals.scores import summarize
from arpo.log import RunLog
from extras.viewer import groups as reading
from extras.viewer import seal, viewer
from extras.viewer.trend import CHARTS, MAX_POINTS, read_trend, thinned


@pytest.fixture
def run(tmp_path, groups) -> Path:
    return make_run(tmp_path / "runs" / "branched", groups)


# -- what it reads ---------------------------------------------------------------------------------------------------


def test_the_newest_training_dump_is_shown_or_the_one_that_is_named_and_the_paths_are_printed(run, tmp_path, capsys):
    assert data_of(write_page(run))["title"] == "branched · step_000010"
    pages = [run / "viewer" / f"{name}.html" for name in ("step_000009", "step_000010", "valid_000020")]
    assert capsys.readouterr().out.splitlines() == [*map(str, pages), str(run / "viewer.html")]
    assert data_of(write_page(run, "--step", "9"))["title"] == "branched · step_000009"
    valid = run / "trajectories" / "valid_000020.jsonl.gz"
    viewer.main([str(run), "--file", str(valid), "--out", str(tmp_path / "page.html")])
    assert data_of((tmp_path / "page.html").read_text())["title"] == "branched · valid_000020"
    for path in (run / "trajectories").glob("step_*"):
        path.unlink()
    assert data_of(write_page(run))["title"] == "branched · valid_000020"


def test_every_turn_has_its_texts_and_its_tokens_numbers_and_the_parents_part_is_marked(run, groups):
    shown = data_of(write_page(run))["groups"][0]["trajectories"]
    for view, trajectory in zip(shown, groups[0].trajectories, strict=True):
        assert "".join(turn["text"] + turn["result_text"] for turn in view["turns"]) == trajectory.text
        inherited = [turn for turn in view["turns"] if turn["inherited"]]
        assert (inherited[-1]["result_end"] if inherited else 0) == trajectory.fork_at
        assert not any({"logprobs", "entropies", "chars"} & turn.keys() for turn in inherited)  # its parent has them
        for turn, own in list(zip(view["turns"], trajectory.turns, strict=True))[len(inherited) :]:
            assert turn["logprobs"] == trajectory.rollout_logprobs[own.start : own.end]
            assert len(turn["chars"]) == len(turn["logprobs"]) and sum(turn["chars"]) == len(turn["text"])
            assert turn["entropies"] == own.token_entropies and len(own.token_entropies) == 20


def test_mixed_and_dead_groups_are_told_apart():
    assert reading.group_summary([1.0, 0.0]) == {"mean_reward": 0.5, "kind": "mixed"}
    assert reading.group_summary([1.0, 1.0, None]) == {"mean_reward": 1.0, "kind": "dead"}
    assert reading.group_summary([1.0]) == {"mean_reward": 1.0, "kind": "single"}
    assert reading.group_summary([None, None]) == {"mean_reward": None, "kind": "dead"}


def test_a_prompt_that_comes_twice_in_a_step_makes_two_groups(tmp_path, groups):
    log = RunLog(tmp_path, RunConfig(), is_main=True)
    log.trajectories(1, [groups[0], groups[0]])
    log.close()
    shown, num_groups = reading.read_groups([tmp_path / "trajectories" / "step_000001.jsonl.gz"], None, 200)
    assert [len(group["trajectories"]) for group in shown] == [6, 6] and num_groups == 2


def test_a_nan_reward_does_not_break_the_page(run):
    dump = run / "trajectories" / "step_000010.jsonl.gz"
    write_dump(dump, read_dump(dump).replace('"reward": 1.0', '"reward": NaN', 1))
    group = data_of(write_page(run))["groups"][0]
    assert group["trajectories"][0]["reward"] == group["mean_reward"] == "nan"


def test_the_page_loads_nothing_from_anywhere(run):
    page = write_page(run).replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    without_data = re.sub(r"<script type.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"https?:|\bsrc=|\bhref=|@import|url\(", without_data) and "@@" not in without_data
    assert "default-src 'none'" in without_data and "innerHTML" not in without_data


def test_characters_are_counted_as_a_browser_does():
    assert reading.utf16_counts("a😀b", [1, 0, 1, 1]) == [1, 0, 2, 1]
    assert reading.utf16_counts("<think>😀", [1]) == [2]  # the thought was opened by the prompt
    assert reading.utf16_counts("", []) == []


def test_a_dump_of_an_older_version_has_no_characters_of_tokens(run):
    dump = run / "trajectories" / "step_000010.jsonl.gz"
    rows = [json.loads(line) for line in read_dump(dump).splitlines()]
    for row in rows:
        del row["token_chars"]
        for turn in row["turns"]:
            del turn["token_entropies"]
    write_dump(dump, "".join(json.dumps(row) + "\n" for row in rows))
    turn = data_of(write_page(run))["groups"][0]["trajectories"][0]["turns"][0]
    assert turn["chars"] == turn["entropies"] == [] and turn["text"]


# -- the pages of a run ----------------------------------------------------------------------------------------------


def stamps(run: Path) -> dict[str, tuple[int, int]]:
    """What changes where a page is written; the number of a file alone may come again."""
    stats = {path.stem: path.stat() for path in (run / "viewer").glob("*.html")}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


def test_every_page_leads_to_all_others(run):
    entry = run_data_of(write_page(run))["steps"]
    assert [(one["kind"], one["step"], one["page"], one["shown"]) for one in entry] == [
        ("step", 9, "viewer/step_000009.html", False),
        ("step", 10, "viewer/step_000010.html", True),
        ("valid", 20, "viewer/valid_000020.html", False),
    ]
    older = run_data_of((run / "viewer" / "step_000009.html").read_text())["steps"]
    assert [(one["page"], one["shown"]) for one in older] == [
        ("step_000009.html", True), ("step_000010.html", False), ("valid_000020.html", False),
    ]  # fmt: skip


def test_only_what_changed_is_read_and_written_again(run, groups, monkeypatch):
    first, before = write_page(run), stamps(run)
    with monkeypatch.context() as patch:
        patch.setattr(viewer, "page_of", None)  # which reads the dumps
        assert write_page(run) == first and stamps(run) == before
    log = RunLog(run, RunConfig(), is_main=True, resume_step=20)
    log.trajectories(11, groups[:1])
    log.close()
    data = data_of((run / "viewer" / "step_000009.html").read_text())
    page = write_page(run)
    assert data_of(page)["title"] == "branched · step_000011"
    renewed = (run / "viewer" / "step_000009.html").read_text()
    assert run_data_of(renewed)["steps"][2]["page"] == "step_000011.html" and data_of(renewed) == data
    valid = run / "trajectories" / "valid_000020.jsonl.gz"
    write_dump(valid, read_dump(valid).replace('"question": "', '"question": "new '))
    before = stamps(run)
    write_page(run)
    assert {name for name, stamp in stamps(run).items() if before[name] != stamp} == {"valid_000020"}


def test_a_page_is_written_again_when_it_would_show_more(run):
    write_page(run, "--max_groups", "1")
    write_page(run)
    assert len(data_of((run / "viewer" / "step_000010.html").read_text())["groups"]) == 3


def test_only_the_newest_get_pages_and_those_of_pruned_dumps_stay(run):
    steps = run_data_of(write_page(run, "--pages", "1"))["steps"]
    assert [one["page"] for one in steps] == [None, "viewer/step_000010.html", "viewer/valid_000020.html"]
    (run / "trajectories" / "valid_000020.jsonl.gz").unlink()
    steps = run_data_of(write_page(run, "--pages", "1"))["steps"]
    assert steps[-1] == {"kind": "valid", "step": 20, "page": "viewer/valid_000020.html", "shown": False}


def test_a_page_that_came_with_a_run_is_made_again_or_left_out(run, capsys, monkeypatch, tmp_path):
    write_page(run)
    own, strange = run / "viewer" / "step_000010.html", run / "viewer" / "step_000001.html"
    genuine = own.read_bytes()
    for damage in (
        genuine.replace(b"default-src 'none'", b"default-src *   "),
        genuine.replace(b"</body>", b"<script>evil</script></body>"),
        genuine[:900] + b"<script>evil</script>",
    ):
        own.write_bytes(damage)
        strange.write_bytes(damage)
        (run / "viewer" / "step_000002.html").symlink_to("/dev/zero")
        entry = write_page(run)
        assert own.read_bytes() == genuine and "evil" not in entry
        assert [one["step"] for one in run_data_of(entry)["steps"]] == [9, 10, 20]
        (run / "viewer" / "step_000002.html").unlink()
    assert f"did not write it: {strange} and 1 more; remove" in capsys.readouterr().out
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "of somebody else"))
    seal._key.cache_clear()
    with pytest.raises(TypeError):  # made again
        monkeypatch.setattr(viewer, "page_of", None)
        write_page(run)
    seal._key.cache_clear()


def test_no_page_is_written_through_a_link(run, tmp_path, capsys):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("mine")
    (run / "viewer").symlink_to(victim)
    with pytest.raises(SystemExit):
        viewer.main([str(run)])
    assert "viewer: is a link, to which no page is written; remove it" in capsys.readouterr().err
    (run / "viewer").unlink()
    for name in ("viewer.html", "viewer.html.tmp", "beside_other.html.tmp"):
        (run / name).symlink_to(victim / "file")
    write_page(run)
    beside = ["--beside", str(run / "trajectories" / "step_000010.jsonl.gz"), "--out", str(run / "beside_other.html")]
    viewer.main([str(run), *beside])
    assert (victim / "file").read_text() == "mine" and [path.name for path in victim.iterdir()] == ["file"]


def test_no_pages_but_the_one_asked_for(run, tmp_path):
    assert [one["page"] for one in run_data_of(write_page(run, "--pages", "0"))["steps"]] == [None] * 3
    viewer.main([str(run), "--out", str(tmp_path / "page.html")])
    assert not (run / "viewer").exists()
    write_page(run)
    viewer.main([str(run), "--out", str(tmp_path / "page.html")])
    steps = run_data_of((tmp_path / "page.html").read_text())["steps"]
    assert steps[0]["page"] == "runs/branched/viewer/step_000009.html" and (tmp_path / steps[0]["page"]).exists()


def test_a_damaged_dump_beside_the_one_asked_for_is_left_out_with_a_warning(run, capsys):
    damaged = run / "trajectories" / "step_000009.jsonl.gz"
    write_dump(damaged, "{}\n")
    steps = run_data_of(write_page(run))["steps"]
    assert [one["page"] is None for one in steps] == [True, False, False]
    assert f"warning: left out: {damaged}:1: not a trajectory" in capsys.readouterr().out


@pytest.mark.parametrize("depth", [300, 900, 980])
def test_a_dump_that_is_nested_almost_too_deep_to_be_read_is_one_line(run, depth):
    dump = run / "trajectories" / "step_000009.jsonl.gz"
    row = json.loads(read_dump(dump).splitlines()[0])
    deep = "[" * depth + "]" * depth
    write_dump(dump, json.dumps(row | {"answers": ["deep"]}).replace('["deep"]', deep) + "\n")
    try:
        viewer.main([str(run), "--step", "9"])
    except SystemExit as end:
        assert end.code == 2


def test_a_report_is_linked_where_there_is_one(run):
    assert run_data_of(write_page(run))["reports"] == []
    for place in ("report.md", "eval/report.md"):
        (run / place).parent.mkdir(exist_ok=True)
        (run / place).touch()
    assert run_data_of(write_page(run))["reports"] == ["report.md", "eval/report.md"]
    page = (run / "viewer" / "step_000009.html").read_text()
    assert run_data_of(page)["reports"] == ["../report.md", "../eval/report.md"]


# -- the numbers over the steps --------------------------------------------------------------------------------------


def test_the_trend_has_the_runs_numbers(run):
    [chart] = run_data_of(write_page(run))["trend"]
    assert chart["title"] == "reward" and [line["label"] for line in chart["lines"]] == ["training", "validation"]
    points = [line["points"] for line in chart["lines"]]
    assert points == [[[step, step / 10] for step in range(1, 11)], [[5, 0.5], [10, 0.5]]]


def test_a_line_that_is_being_written_is_not_read_and_a_broken_one_is_named(run):
    metrics = run / "metrics.jsonl"
    whole = read_trend(run)
    metrics.write_text(metrics.read_text() + '{"step": 11, "rew')
    assert read_trend(run) == whole
    for broken in ('{"step": 11, "rew', "[]", '{"reward/mean": 1.0}'):
        metrics.write_text(broken + "\n")
        with pytest.raises(UserError, match=r"metrics\.jsonl:1: not a line of metrics; drop the line"):
            read_trend(run)
    metrics.unlink()
    assert read_trend(run) == []


def test_a_long_run_is_thinned_evenly_and_keeps_its_newest_step():
    points = [(step, 0.0) for step in range(1, 1201)]
    thin = thinned(points)
    assert len(thin) <= MAX_POINTS and thin[-1] == points[-1] and {b[0] - a[0] for a, b in pairwise(thin)} == {3}
    assert thinned(points[:7]) == points[:7] and thinned([]) == []


def test_the_charts_show_metrics_that_there_are(groups):
    table = (ROOT / "docs" / "metrics.md").read_text().replace("tools/*/", "tools/all/")
    valid = {f"valid/{name}" for name in summarize(deepcopy(groups))}
    for _, names in CHARTS:
        for name in names:
            assert name in valid or f"`{name}`" in table, name


# -- what it refuses -------------------------------------------------------------------------------------------------


def test_a_missing_run_is_one_line_and_code_2():
    command = [sys.executable, "-m", "extras.viewer", "runs/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
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
        ([run, "--pages", -1], "--pages -1: must be at least 0"),
        ([run, "--out", tmp_path / "no" / "page.html"], "page.html: cannot write the page"),
    ]:
        with pytest.raises(SystemExit) as stop:
            viewer.main(list(map(str, argv)))
        error = capsys.readouterr().err
        assert stop.value.code == 2 and message in error and error.count("\n") == 1


def put(line: str, path: tuple, value: object) -> str:
    """The line with another value there."""
    row = part = json.loads(line)
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return json.dumps(row)


def places(tree: object, path: tuple = ()) -> Iterator[tuple]:
    """The paths of what stands in a line, of a list's entries only the first one's. Messages and a tool's `info` may
    have anything in them."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree[:1]) if isinstance(tree, list) else ()
    for key, child in children:
        yield (*path, key)
        if key != "messages":
            yield from places(child, (*path, key))


def test_a_malformed_line_is_named_also_with_one_value_of_another_type_wherever_it_stands(run):
    dump = run / "trajectories" / "step_000010.jsonl.gz"
    good = next(line for line in read_dump(dump).splitlines() if json.loads(line)["turns"][1]["decision"])
    odd = [path for path in places(json.loads(good)) if path[-1] != "info"]
    assert ("turns", 0, "tool_calls", 0, "argument") in odd
    odd += [("turns", 1, "decision"), ("turns", 1, "decision", "draw")]
    wrong = {("fork_at",): 1 << 40, ("turns", 0, "end"): -1, ("turns", 0, "start"): True, ("messages",): None}
    for line in [
        good[:200],  # a killed run leaves half a line
        "[1, 2]",
        good.replace('"question"', '"query"'),
        good.replace('"probability"', '"chance"'),
        good.replace('"loss_mask": [', '"loss_mask": [1, '),
        good.replace('"segments": [', '"segments": [["more", true], '),
        *(put(good, path, value) for path, value in wrong.items()),
        *(put(good, path, {"odd": [None]}) for path in odd),
    ]:
        assert line != good
        write_dump(dump, f"{good}\n{line}\n")
        with pytest.raises(UserError, match=r"step_000010\.jsonl\.gz:2: not a trajectory") as error:
            reading.read_groups([dump], None, 200)
        assert "\n" not in str(error.value), line
