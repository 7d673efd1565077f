"""A function of the user's is tried on a dump, with the checks of a training."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.edits import write_own_file
from helpers.sample_groups import sample_groups

from arpo.errors import UserError
from arpo.log.dumps import DumpWriter

ROOT = Path(__file__).resolve().parents[2]
report = importlib.import_module("extras.try").report  # `try` is no name that an import statement takes


@pytest.fixture(scope="module")
def dump(tmp_path_factory) -> Path:
    """Three groups of six: two roots, whose two searches end in a result and an error, and their branches."""
    run = tmp_path_factory.mktemp("run")
    (run / "config.yaml").write_text("branching: {base: 0.25, selector: gone.py:f}\nadvantage: {normalize: none}\n")
    writer = DumpWriter(run / "trajectories")
    writer.write(10, sample_groups(), "step")
    writer.close()
    return run / "trajectories" / "step_000010.jsonl.gz"


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Makes FILE.py:f of a source, in a file of its own."""
    monkeypatch.chdir(tmp_path)
    names = (f"mine{number}.py" for number in range(100))

    def write(source: str) -> str:
        name = next(names)
        (tmp_path / name).write_text(source)
        return f"{name}:f"

    return write


def test_what_the_docs_show_runs_over_a_dump(dump, tmp_path):
    rules, advantage = write_own_file("A branching rule", tmp_path), write_own_file("An advantage", tmp_path)
    rewards = write_own_file("A reward", tmp_path)
    spikes, errors, forks = (report(f"{rules}:{name}", dump) for name in ("spikes", "after_errors", "middle"))
    assert spikes[0].endswith(f"as branching.selector on {dump}: 3 prompts, 18 trajectories")
    # Turns of 20 entropies each. After the first result all are above the root's, P = 2 * base; after the second none.
    assert spikes[1] == "judged 18 results: P 0 to 0.5, mean 0.1667; 0 at 12, 1 at 0"
    assert "after calls that failed: 12, mean P 1.000" in errors
    assert "after calls that succeeded: 6, mean P 0.000" in errors
    assert "the run itself: 12 branched, 6 no_budget" in errors
    assert forks[1] == "chose 6 forks of 12 that it was asked for; fresh roots would be the rest"
    assert "turns that are sampled anew: turn 1: 6" in forks
    few = report(f"{rules}:middle", dump, budget=1)
    assert "chose 3 forks of 3 that it was asked for; fresh roots would be the rest" in few
    [_, told, first, *_] = report(f"{advantage}:rloo", dump)
    assert told.startswith("advantages of 18 trajectories: -0.6 to 0.6, mean ") and "1 -> 0.6" in first
    told = report(f"{rewards}:useful_searches", dump)
    assert told[2] == "scores of 18 trajectories: 0 to 0, mean 0" and "other than the dump's reward: 3 of 18" in told


def test_a_credit_shares_the_advantages_of_the_dump(own, dump):
    ones = "{t.trajectory_id: [1] * len(t.token_ids) for t in group.trajectories}"
    name = own(f"def f(group, cfg): return {ones}")
    told = report(name, dump)
    assert told[0].startswith(f"{name} as advantage.tree on ")
    assert ": 1 to 1, mean 1" in told[1] and told[2].endswith("than the trajectory's advantage at 100%")


@pytest.mark.parametrize(
    "source, option, words",
    [
        ("def f(evidence, cfg): return evidence.entropy * 2", "", "P(branch) is 4; it must be from 0 to 1"),
        ("def f(evidence, cfg): return evidence.rewards[:1]", "", "the advantages are 1 numbers; they must be 18"),
        ("def f(group, cfg): return {t.trajectory_id: [1.0] * 3 for t in group.trajectories}", "", "are 3 numbers"),
        ("def f(group, budget, cfg, rng): return [group]", "", "it must be a Fork"),
        ("def f(trajectory, prompt): return float('nan')", "", "the returned score is nan"),
        ("def f(a, b, c, d): return {'score': 1, 'x': [2]}", "", "the part 'x' is [2] (list)"),
        ("def f(a, b, c, d): return d['level']", "", "KeyError: 'level', in line 1 of mine0.py"),
        ("def f(evidence, cfg): return 0.5", "", "takes (evidence, cfg), as several do; say --as "),
        ("def f(evidence, cfg): return 0.5", "advantage.kind", "the advantages are 0.5; they must be 18 numbers"),
        ("def f(x): return 0.5", "", "takes (x); it must take (data_source, solution_str"),
        ("f = 3", "", "is no function"),
    ],
)
def test_what_a_training_would_refuse_is_the_same_one_line(own, dump, source, option, words):
    name = own(source)
    with pytest.raises(UserError) as caught:
        report(name, dump, option)
    assert words in str(caught.value) and name.partition(":")[0] in str(caught.value) and "\n" not in str(caught.value)


def test_a_function_is_told_by_what_it_looks_at_or_its_types(own, dump):
    for source, option in (
        ("def f(evidence, cfg): return float(evidence.turn > 1)", "branching.selector"),
        ("def f(evidence: 'Evidence', cfg): return 0.5", "branching.selector"),
        ("from arpo.advantages import GroupEvidence\ndef f(e: GroupEvidence, c): return [0] * 18", "advantage.kind"),
        ("def f(e, c): return e.rewards", "advantage.kind"),
        ("def f(group, cfg): return {t.trajectory_id: [0] * len(t.token_ids) for t in group.trajectories}",
         "advantage.tree"),
        ("def f(group, budget, cfg, rng, scale=2): return []", "branching.selector"),
        ("async def f(trajectories, prompts): return [1] * len(prompts)", "reward.file"),
    ):  # fmt: skip
        name = own(source)
        assert report(name, dump)[0].startswith(f"{name} as {option} on ")


def test_the_command_is_one_line_where_something_is_wrong(own, dump, tmp_path):
    name = own("def f(evidence, cfg): return 3 * (evidence.turn > 0)")
    done = subprocess.run(
        [sys.executable, "-m", "extras.try", name, str(dump)],
        capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: ") and "P(branch) is 3" in done.stderr
    (tmp_path / "empty.jsonl").write_text("")
    for file, words in (("empty.jsonl", "the dump is empty"), ("no.jsonl", "cannot read the")):
        with pytest.raises(UserError, match=words):
            report(name, tmp_path / file)
