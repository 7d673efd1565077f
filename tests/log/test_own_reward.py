"""What a run says under a reward of one's own, and where nothing can be learnt."""

import re
from dataclasses import replace

import pytest

from arpo.branching_signal import BranchingSignal
from arpo.config.rewards import RewardConfig
from arpo.evals.scores import summarize
from arpo.log.step_line import console_text
from arpo.metrics import rollout_metrics
from arpo.options import BranchingConfig
from arpo.rewards import load_custom, score_groups
from arpo.trajectory import Group, Prompt, StopReason, Trajectory, Turn

TIMES = {"time/step": 1.0, "time/rollout": 1.0, "time/update": 1.0}


def scored(tmp_path, returned: str) -> Group:
    """A branch and its parent, scored by a function that returns this."""
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "mine.py").write_text(f"def f(trajectory, prompt): return {returned}")
    parent = Trajectory("p", "0", [1, 2], [1, 1], [0.0, 0.0], stop_reason=StopReason.EOS, turns=[Turn(0), Turn(1)])
    branch = replace(parent, trajectory_id="0.0", parent_id="0", fork_at=1)
    group = Group(Prompt("p", [], ["a"]), [parent, branch, replace(branch, trajectory_id="0.1", token_ids=[1, 3])])
    score_groups([group], RewardConfig(), load_custom("reward.file", f"{tmp_path}/mine.py:f"), tools=())
    return group


def test_a_reward_that_does_not_say_what_is_right_is_not_called_accuracy(tmp_path):
    """0.2 for trying is no solved question, in no number and on no line."""
    group = scored(tmp_path, "0.2")
    values = rollout_metrics([group], {"": "one"}).values() | BranchingSignal(BranchingConfig()).add([group])
    scores = {f"valid/{name}": value for name, value in summarize([group]).items()}
    assert values["reward/positive_share"] == 1.0 and scores["valid/reward"] == pytest.approx(0.2)
    assert "valid/well_formed" not in scores  # nor does it say anything of the format
    assert summarize([scored(tmp_path / "b", "{'score': -1, 'format': 1}")])["well_formed"] == 1.0
    assert not [n for n in values | scores if re.search("accuracy|solved|correct|pass@", n)]
    line = console_text(values | scores | TIMES)
    assert "reward>0 1.00" in line and "valid reward +0.200" in line and "solved" not in line


def test_a_validation_has_the_parts_of_the_reward(tmp_path):
    """lmm-r1 #13 and verl #366 ask for them: of a validation only the total was logged."""
    scores = summarize([scored(tmp_path, "{'score': 0.2, 'accuracy': 1, 'format': 0, 'brevity': 0.5}")])
    assert scores["reward/brevity"] == 0.5 and (scores["accuracy"], scores["well_formed"]) == (1.0, 0.0)
    assert [name for name in scores if name.startswith("reward/")] == ["reward/brevity"]


@pytest.mark.parametrize("accuracy", [0, 1])
def test_a_reward_that_says_what_is_right_is_believed(tmp_path, accuracy):
    group = scored(tmp_path, f"{{'score': 0.2 - {accuracy}, 'accuracy': {accuracy}}}")
    values, scores = rollout_metrics([group], {"": "one"}).values(), summarize([group])
    assert values["reward/solved_share"] == values["accuracy/one"] == scores["accuracy"] == scores["pass@1"] == accuracy
    assert values["response/solved"] == 3 * accuracy and "reward/positive_share" not in values


def test_a_step_of_dead_groups_says_why_it_updates_nothing_unless_it_was_thrown_away(tmp_path):
    values = rollout_metrics([scored(tmp_path, "{'score': -1, 'reason': 'missing_answer'}")]).values()
    values |= TIMES | {"time/update": 0.0}
    reason = "all groups alike (missing_answer 100%), docs/troubleshooting.md#all-groups-are-dead"
    assert f"no policy update: {reason}" in console_text(values)
    line = console_text(values | {"group/not_trained_on": 1.0})
    assert "not trained on, for the reason in the warning above" in line and "groups alike" not in line


def test_branches_that_repeat_their_parent_are_counted(tmp_path):
    assert rollout_metrics([scored(tmp_path, "1.0")]).values()["branching/same_as_parent"] == 0.5


@pytest.mark.parametrize(
    "scores, accuracy, reward, unscored",
    [
        ([1, None, None, None], 0.25, 1.0, 3),  # lm-evaluation-harness #4062: was 1.0
        ([1] * 80 + [0] * 10 + [None] * 10, 0.8, 80 / 90, 10),  # inspect_ai #3707: 0.889
        ([1] * 108 + [0] * 40 + [None] * 24, 108 / 172, 108 / 148, 24),  # Frontier-CS #161: 0.730
        ([1, 0], 0.5, 0.5, None),
    ],
)
def test_a_validation_counts_what_has_no_reward(scores, accuracy, reward, unscored):
    groups = []
    for number, score in enumerate(scores):
        parts = {} if score is None else {"accuracy": float(score)}
        t = Trajectory(str(number), "0", [1], [1], [0.0], reward=score, reward_parts=parts, reward_reason="none")
        groups.append(Group(Prompt(str(number), [], ["a"], ("one", "two")[number % 2]), [t]))
    found = summarize(groups)
    assert (found["questions"], found["reward"], found.get("unscored")) == (len(scores), reward, unscored)
    assert found["accuracy"] == found["pass@1"] == pytest.approx(accuracy)
    by_source = [found[f"accuracy/{name}"] for name in ("one", "two")]
    assert sum(by_source) / 2 == pytest.approx(accuracy)


def test_a_validation_without_any_reward_has_none_and_is_not_the_best(tmp_path):
    t = Trajectory("p", "0", [1], [1], [0.0], reward_reason="judge_failed")
    found = summarize([Group(Prompt("p", [], ["a"]), [t])])
    assert found["unscored"] == 1 and not {"reward", "accuracy"} & found.keys()
    values = {f"valid/{name}": value for name, value in found.items()}
    line = console_text(rollout_metrics([scored(tmp_path, "0.2")]).values() | values | TIMES)
    assert "(1 without a reward)" in line and "valid" not in line.partition("(1")[0]
