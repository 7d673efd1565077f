"""A judge as a term of the reward, before a real HTTP server: beside the rollout, cached, within its limits, never past
its deadline."""

import gc
import json

import pytest
from helpers.eval_records import reply
from helpers.judge_server import judges_by_prediction
from helpers.models import build_tiny_tokenizer
from helpers.processes import wait_for
from helpers.web_service import WebService, never, says

from arpo.config.rewards import TrainingRewardConfig
from arpo.engine.team import Team
from arpo.errors import UserError
from arpo.evals.scores import summarize
from arpo.metrics import rollout_metrics
from arpo.protocol import TagsCodec
from arpo.sampling.health import MAX_BAD_BATCHES, ToolHealth
from arpo.sampling.scoring import Scoring
from arpo.selection import trained_on
from arpo.trajectory import Group, Prompt, StopReason, Trajectory
from extras.judge_reward import JudgeReward

PATIENT_S = 120.0  # longer than any of these tests may take


class OneRank:
    """The ranks of a run on one of them, as far as a scoring asks."""

    rank, world_size = 0, 1


def group(name: str, *predictions: str, stop=StopReason.EOS) -> Group:
    """Trajectories that answer so; the right answer is "4"."""
    prompt = Prompt(name, [{"role": "user", "content": f"question {name}"}], ["4"], data_source="gsm8k")
    trajectories = []
    for i, prediction in enumerate(predictions):
        text = rf"<think>t</think><answer>\boxed{{{prediction}}}</answer>" if prediction else "<think>t</think>"
        segments = [(text, True)]
        trajectories.append(Trajectory(name, str(i), [0], [1], [0.0], stop_reason=stop, text=text, segments=segments))
    return Group(prompt, trajectories)


@pytest.fixture
def service(monkeypatch):
    """A judge on loopback, which needs no key."""
    monkeypatch.delenv("JUDGE_API_KEY", raising=False)
    with WebService([judges_by_prediction]) as running:
        yield running


@pytest.fixture
def make_judge(service, tmp_path):
    judges = []

    def make(**options) -> JudgeReward:
        settings = {"deadline_s": PATIENT_S, "fallback": "drop", "cache": str(tmp_path / "judge.sqlite")} | options
        judges.append(JudgeReward(service.url, "tester", **settings))
        judges[-1]._open()
        return judges[-1]

    yield make
    for judge in judges:
        judge.close()


def collected(judge: JudgeReward, *groups: Group) -> list[tuple[float | None, str]]:
    """Scores, and the reasons why there is none."""
    pairs = [(t, g.prompt) for g in groups for t in g.trajectories]
    scores = judge([t for t, _ in pairs], [prompt for _, prompt in pairs])
    return [(score["score"], score.get("reason", "")) for score in scores]


def values_of(judge: JudgeReward, *groups: Group) -> list[float | None]:
    return [value for value, _ in collected(judge, *groups)]


def test_right_and_wrong_answers_are_told_apart_and_each_is_asked_about_once_in_all_steps_and_runs(make_judge, service):
    first, second = make_judge(), make_judge()
    assert values_of(first, group("a", "4", "5", "5", ""), group("b", "4")) == [1.0, 0.0, 0.0, 0.0, 1.0]
    asked = len(service.requests)
    assert asked == 2 + 3  # the probes; a: 4 and 5; b: 4
    for judge in (first, second):
        assert values_of(judge, group("a", "5", "4")) == [0.0, 1.0]
    assert len(service.requests) == asked


def test_it_works_while_the_rollout_of_others_goes_on_and_asks_once_about_a_group_of_a_later_step(make_judge, service):
    """As carried ones are: of the step's own groups alone it is known what they are."""
    judge, later = make_judge(), group("a", "4")
    judge.begin(later)
    wait_for(lambda: len(service.requests) == 2)  # though nobody has waited for it yet
    assert values_of(judge, group("b", "5")) == [0.0] and values_of(judge, later) == [1.0]
    assert len(service.requests) == 1 + 2


def test_a_prompt_that_a_step_meets_twice_is_judged_twice(make_judge):
    """At the border of two epochs, or in training and validation: names of prompts and trajectories repeat."""
    judge, once, again = make_judge(), group("a", "4"), group("a", "5")
    assert values_of(judge, once) == [1.0] and values_of(judge, again) == [0.0]
    assert values_of(judge, once, again) == [1.0, 0.0]


def test_a_trajectory_that_an_error_of_ours_ended_is_not_judged(make_judge, service):
    judge, cut_off = make_judge(), group("a", "4", stop=StopReason.ERROR)
    judge.begin(cut_off)
    assert values_of(judge, cut_off) == [None] and len(service.requests) == 1


def test_a_judge_that_never_answers_holds_nothing_up_past_the_deadline(make_judge, service):
    judge = make_judge()  # the probe and the single calls have time
    judge.deadline_s = 0.5
    service.then(never)
    found = collected(judge, *(group(str(i), "4", "5") for i in range(20)))  # or this test would never end
    assert set(found) == {(None, "judge_late")}
    service.then(judges_by_prediction)  # and it is asked again in the next step
    judge.deadline_s = PATIENT_S
    assert values_of(judge, group("a", "4"), group("0", "4")) == [1.0, 1.0]


def test_what_is_under_way_at_the_end_is_broken_off_without_a_word(make_judge, service, capfd):
    judge = make_judge(max_concurrent=2)
    service.then(never)
    judge.begin(group("a", "4", "5", "6"))
    wait_for(lambda: len(service.requests) == 2)
    judge.close()
    gc.collect()  # of a task that is left asyncio says so when it goes
    assert len(service.requests) == 2 and capfd.readouterr().err == ""


def test_what_is_done_before_the_deadline_counts_and_the_rest_is_late(make_judge, service):
    async def hangs_on_five(request):
        prompt = json.loads(await request.read())["messages"][0]["content"]
        return await (never if "<prediction>\n5\n" in prompt else judges_by_prediction)(request)

    judge, some = make_judge(), group("a", "4", "5", "6")
    service.then(hangs_on_five)
    judge.begin(some)
    wait_for(lambda: sum(asked.done() for asked in judge._asked.values()) == 2)
    judge.deadline_s = 0.1
    assert collected(judge, some) == [(1.0, ""), (None, "judge_late"), (0.0, "")]


def test_a_reply_that_is_no_verdict_is_a_reason_and_no_end(make_judge, service):
    judge = make_judge()
    service.then(says(reply("I cannot say.")))
    assert collected(judge, group("a", "4")) == [(None, "judge_unparsable")]


def test_the_key_is_sent_and_is_in_no_reason_or_file(make_judge, service, monkeypatch, tmp_path):
    judge = make_judge()
    monkeypatch.setenv("JUDGE_API_KEY", "sk-secret")
    service.then(says("no access for sk-secret", 401))
    found = collected(judge, *(group(str(i), "4") for i in range(40)))  # more refusals than a run's key may have
    assert {request.headers["Authorization"] for request in service.requests} == {"Bearer sk-secret"}
    assert {reason for _, reason in found} == {"judge_failed"} and "sk-secret" not in repr(found)
    assert all(b"sk-secret" not in path.read_bytes() for path in tmp_path.glob("judge.sqlite*"))


def test_in_json_the_answer_is_the_last_turns_not_a_box_before_a_call(make_judge):
    one = group("a", "")
    turns = [(r"\boxed{5}<tool_call>{}</tool_call>", True), ("<tool_response>4</tool_response>", False), ("4 ", True)]
    one.trajectories[0].segments = [*turns, (r"so \boxed{4}", True)]
    assert values_of(make_judge(form="hermes"), one) == [1.0]


@pytest.mark.parametrize("wrong", [{"fallback": "zero"}, {"deadline_s": 0.0}])
def test_settings_that_cannot_work_are_refused(wrong):
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}="):
        JudgeReward("http://host:8001", "m", **wrong)


# ---- what stands in for a verdict


def test_the_rule_stands_in_for_few_verdicts_and_for_many_nothing_does(make_judge, service):
    judge = make_judge(fallback="rule")
    service.then(judges_by_prediction, says("no", 400))
    assert collected(judge, group("a", "4")) == [(1.0, "")]
    service.then(says("no", 400))
    assert collected(judge, group("a", "4", ""), group("b", "4")) == [(1.0, ""), (0.0, ""), (1.0, "judge_failed")]
    assert collected(judge, group("c", "5", "4", "")) == [(None, "judge_failed"), (None, "judge_failed"), (0.0, "")]
    assert collected(judge, group("d", "5", "")) == [(0.0, "judge_failed"), (0.0, "")]  # wrong by rule too


# ---- in the scores of a run


MINE = """
from extras.judge_reward import JudgeReward
judge = JudgeReward({url!r}, "tester", deadline_s={deadline_s}, fallback="drop", cache={cache!r})
"""


@pytest.fixture
def make_scoring(service, tmp_path):
    made = []

    def make(*terms: str, url: str = "", deadline_s: float = PATIENT_S) -> Scoring:
        file = tmp_path / "mine.py"
        file.write_text(MINE.format(url=url or service.url, deadline_s=deadline_s, cache=str(tmp_path / "j.sqlite")))
        cfg = TrainingRewardConfig(terms=tuple(term.replace("judge", f"{file}:judge") for term in terms))
        made.append(Scoring(cfg, Team(OneRank()), TagsCodec(build_tiny_tokenizer()), 100))
        return made[-1]

    yield make
    for scoring in made:
        for custom in scoring.functions:
            custom.function.close()


def test_a_verdict_is_a_part_of_the_reward_and_asked_for_while_the_rollout_goes_on(make_scoring, service):
    scoring, one = make_scoring("answer=1", "judge=0.5"), group("a", "4", "5")
    scoring.try_on(group("b", "4").prompt)
    num_asked = len(service.requests)
    scoring.on_group(one, [1.0, 1.0])
    wait_for(lambda: len(service.requests) == num_asked + 2)
    scoring([one])
    assert [t.reward for t in one.trajectories] == [1.5, 0.0] and len(service.requests) == num_asked + 2
    assert one.trajectories[0].reward_parts["judge"] == 1.0
    values = rollout_metrics([one]).values()
    assert (values["reward/judge"], values["reward/judge/no_verdict"]) == (0.5, 0.0)
    assert values["reward/judge/seconds"] > 0


def test_a_group_that_is_scored_already_does_not_begin_again(make_scoring, monkeypatch):
    """Under branching.until_mixed the rollout scores a group before it is finished."""
    scoring, scored, new = make_scoring("judge=1"), group("a", "4", "5"), group("b", "4", "5")
    scoring([scored])
    scored.trajectories[0].reward, scored.trajectories[0].reward_reason = None, "judge_failed"
    begun = []
    monkeypatch.setattr(scoring.functions[0].function, "begin", begun.append)
    for one in (scored, new):
        scoring.on_group(one, [1.0, 1.0])
    assert begun == [new]


@pytest.mark.parametrize(
    "url, answer, code, words",
    [
        ("http://127.0.0.1:9", judges_by_prediction, 75, r"judge\.url: judge: .*; start the judge"),
        ("", says("who are you?", 401), 2, r"judge\.url: the service refuses access; set JUDGE_API_KEY \(HTTP 401\)"),
    ],
    ids=["not there", "a wrong key"],
)
def test_a_judge_that_cannot_be_asked_is_one_line_before_the_run(make_scoring, service, url, answer, code, words):
    service.then(answer)
    scoring = make_scoring("judge=1", url=url, deadline_s=PATIENT_S if not url else 0.4)
    with pytest.raises(UserError, match=rf"mine\.py: judge failed on .*{words}") as error:
        scoring.try_on(group("a", "4").prompt)
    assert error.value.exit_code == code and "\n" not in str(error.value)


def test_answers_without_a_verdict_are_not_trained_on_and_many_of_them_end_the_run(make_scoring, service):
    scoring, health, few = make_scoring("judge=1"), ToolHealth(), [group("a", "4", "", "")]
    scoring(few)
    service.then(says("no", 400))
    few += [group("b", "4")]
    scoring(few)
    assert health.judge(few).may_train and trained_on(few[1]) == [] and len(trained_on(few[0])) == 3
    assert rollout_metrics(few).values()["reward_reason/judge_failed"] == 1
    for number in range(MAX_BAD_BATCHES):
        many = [group(f"{number} {i}", "4", "5", "") for i in range(3)]
        scoring(many)
        assert "not trained on: 67% of the trajectories have no reward" in health.judge(many, number).warning
    assert health.must_stop and "67% of the trajectories have no reward, in 3 batches" in str(health.stop_error())


def test_a_validation_counts_what_has_no_verdict(make_scoring, service):
    scoring, some = make_scoring("judge=1"), [group("a", "4"), group("b", "4")]
    scoring(some[:1])
    service.then(says("no", 400))
    scoring(some)
    assert some[1].trajectories[0].reward is None
    scores = summarize(some)
    assert (scores["reward"], scores["questions"], scores["accuracy"], scores["unscored"]) == (1.0, 2, 0.5, 1)
