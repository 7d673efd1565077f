"""The judge as a reward, before a real HTTP server: beside the rollout, cached, within its limits, never past its
deadline."""

import gc
import json
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from helpers.eval_records import reply
from helpers.judge_server import RIGHT, judges_by_prediction
from helpers.models import build_tiny_tokenizer
from helpers.web_service import half_an_answer, never, says

from arpo.config.evals import TrainingJudgeConfig
from arpo.config.rewards import TrainingRewardConfig
from arpo.engine.team import Team
from arpo.errors import UserError
from arpo.evals.scores import summarize
from arpo.evals.training_judge import TrainingJudge
from arpo.metrics import Metrics, rollout_metrics
from arpo.protocol import Codec, TagsCodec
from arpo.sampling.health import MAX_BAD_BATCHES, ToolHealth
from arpo.sampling.scoring import Scoring
from arpo.trajectory import Group, Prompt, StopReason, Trajectory

PATIENT_S = 120.0  # longer than any of these tests may take


class OneRank:
    """The ranks of a run on one of them, as far as a scoring asks."""

    rank, world_size = 0, 1

    def together(self, make: Callable[[], object]) -> object:
        return make()

    def reduce_metrics(self, metrics: Metrics) -> Metrics:
        return metrics


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
def make_judge(service, tmp_path):
    judges = []

    def make(**options) -> TrainingJudge:
        settings = {"url": service.url, "model": "tester", "deadline_s": PATIENT_S} | options
        judges.append(TrainingJudge(TrainingJudgeConfig(**settings), tmp_path / "judge.sqlite"))
        return judges[-1]

    yield make
    for judge in judges:
        judge.close()


def collected(judge: TrainingJudge, *groups: Group) -> list[tuple[float | None, str]]:
    """Verdicts, and the reasons why there is none."""
    judge.collect(list(groups))
    return [(t.verdict, t.verdict_reason) for g in groups for t in g.trajectories]


def values_of(judge: TrainingJudge, *groups: Group) -> list[float | None]:
    return [value for value, _ in collected(judge, *groups)]


def numbers(judge: TrainingJudge) -> dict[str, float]:
    return {name: n for name, n in judge.end_step().values().items() if n and "seconds" not in name}


def test_right_and_wrong_answers_are_told_apart_and_equal_ones_asked_once(make_judge, service):
    judge = make_judge()
    assert values_of(judge, group("a", "4", "5", "5", ""), group("b", "4")) == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert len(service.requests) == 1 + 3  # the probe; a: 4 and 5; b: 4
    assert numbers(judge) == {"judge/calls": 3}


def test_what_was_judged_is_not_asked_again_in_a_later_step_or_run(make_judge, service):
    first, second = make_judge(), make_judge()
    values_of(first, group("a", "4", "5"))
    first.end_step()
    asked = len(service.requests)
    for judge in (first, second):
        assert values_of(judge, group("a", "5", "4")) == [0.0, 1.0]
        assert numbers(judge) == {"judge/cached": 2}
    assert len(service.requests) == asked


def test_it_works_while_the_rollout_of_others_still_goes_on(make_judge, service):
    judge, one = make_judge(), group("a", "4")
    judge.begin(one, [1.0])
    until = time.monotonic() + PATIENT_S
    while len(service.requests) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert len(service.requests) == 2  # though nobody has waited for it yet
    assert values_of(judge, one, group("b", "5")) == [1.0, 0.0]


def test_a_prompt_that_a_step_meets_twice_is_judged_twice(make_judge):
    """At the border of two epochs, or in training and validation: names of prompts and trajectories repeat."""
    judge, once, again = make_judge(), group("a", "4"), group("a", "5")
    assert (
        values_of(judge, once) == [1.0] and values_of(judge, again) == [0.0] and values_of(judge, once, again) == [1, 0]
    )


def test_a_trajectory_that_an_error_of_ours_ended_is_not_judged(make_judge, service):
    assert (
        collected(make_judge(), group("a", "4", stop=StopReason.ERROR)) == [(None, "")] and len(service.requests) == 1
    )


def test_a_judge_that_never_answers_holds_nothing_up_past_the_deadline(make_judge, service):
    judge = make_judge()  # the probe and the single calls have time
    patient, judge.cfg = judge.cfg, replace(judge.cfg, deadline_s=0.5)
    service.then(never)
    found = collected(judge, *(group(str(i), "4", "5") for i in range(20)))  # or this test would never end
    assert set(found) == {(None, "judge_late")}
    assert numbers(judge) == {"judge/calls": 40, "judge/late": 40}
    service.then(judges_by_prediction)  # and it is asked again in the next step
    judge.cfg = patient
    assert values_of(judge, group("a", "4")) == [1.0]


def test_what_is_under_way_at_the_end_is_broken_off_without_a_word(service, tmp_path, capfd):
    cfg = TrainingJudgeConfig(url=service.url, model="tester", deadline_s=PATIENT_S, max_concurrent=2)
    judge = TrainingJudge(cfg, tmp_path / "judge.sqlite")
    service.then(never)
    judge.begin(group("a", "4", "5", "6"))
    until = time.monotonic() + PATIENT_S
    while len(service.requests) < 2 and time.monotonic() < until:
        time.sleep(0.01)
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
    until = time.monotonic() + PATIENT_S
    while sum(asked.done() for asked in judge._asked.values()) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    judge.cfg = replace(judge.cfg, deadline_s=0.1)
    found = collected(judge, some)
    assert found == [(1.0, ""), (None, "judge_late"), (0.0, "")]


@pytest.mark.parametrize(
    "trouble, reason",
    [
        (says("no", 400), "judge_failed"),
        (says(reply("I cannot say.")), "judge_unparsable"),
        (says({"choices": []}, 404), "judge_failed"),
    ],
)
def test_a_judge_that_fails_is_a_count_and_no_end(make_judge, service, trouble, reason):
    judge = make_judge()
    service.then(trouble)
    [found] = collected(judge, group("a", "4"))
    assert found == (None, reason)
    assert numbers(judge) == {"judge/calls": 1, reason.replace("_", "/"): 1}


def test_half_an_answer_is_asked_for_again(make_judge, service):
    judge = make_judge()
    service.then(half_an_answer, says(reply(RIGHT)))
    assert values_of(judge, group("a", "4")) == [1.0] and len(service.requests) == 2


def test_a_judge_that_cannot_be_reached_is_one_line_before_the_run(tmp_path):
    cfg = TrainingJudgeConfig(url="http://127.0.0.1:9", model="m", deadline_s=0.4)
    with pytest.raises(UserError, match=r"^judge\.url: judge: .*; start the judge"):
        TrainingJudge(cfg, tmp_path / "judge.sqlite")


def test_the_key_is_sent_and_is_in_no_message_file_or_number(make_judge, service, monkeypatch, tmp_path):
    judge = make_judge()
    monkeypatch.setenv("JUDGE_API_KEY", "sk-secret")
    service.then(says("no access for sk-secret", 401))
    found = collected(judge, *(group(str(i), "4") for i in range(40)))  # more refusals than a run's key may have
    assert {request.headers["Authorization"] for request in service.requests} == {"Bearer sk-secret"}
    assert {reason for _, reason in found} == {"judge_failed"} and "sk-secret" not in repr(found)
    assert all(b"sk-secret" not in path.read_bytes() for path in tmp_path.glob("judge.sqlite*"))


def test_in_json_the_answer_is_the_last_turns_not_a_box_before_a_call(service, tmp_path):
    cfg = TrainingJudgeConfig(url=service.url, model="tester", deadline_s=PATIENT_S)
    one = group("a", "")
    turns = [(r"\boxed{5}<tool_call>{}</tool_call>", True), ("<tool_response>4</tool_response>", False), ("4 ", True)]
    one.trajectories[0].segments = [*turns, (r"so \boxed{4}", True)]
    judge = TrainingJudge(cfg, tmp_path / "judge.sqlite", form="hermes")
    try:
        assert values_of(judge, one) == [1.0]
    finally:
        judge.close()


# ---- in the scores of a run


def codec() -> Codec:
    return TagsCodec(build_tiny_tokenizer())


@pytest.fixture
def make_scoring(service, tmp_path):
    made = []

    def make(*terms: str, **judge) -> Scoring:
        cfg = TrainingRewardConfig(terms=terms)
        settings = {"url": service.url, "model": "tester", "deadline_s": PATIENT_S} | judge
        made.append(Scoring(cfg, TrainingJudgeConfig(**settings), Team(OneRank()), codec(), 100, folder=tmp_path))
        return made[-1]

    yield make
    for scoring in made:
        scoring.close()


def test_a_verdict_is_a_part_of_the_reward_and_calls_are_counted(make_scoring):
    scoring, one = make_scoring("answer=1", "judge=0.5"), group("a", "4", "5")
    scoring.on_group(one, [1.0, 1.0])
    scoring([one])
    assert [t.reward for t in one.trajectories] == [1.5, 0.0]
    assert one.trajectories[0].reward_parts["judge"] == 1.0
    assert rollout_metrics([one])["reward/judge"] == 0.5
    assert scoring.end_step()["judge/calls"] == 2
    scoring([group("b", "4")])
    assert scoring.end_step()["judge/calls"] == 1


def test_a_reward_without_a_judge_asks_nobody_and_logs_nothing(tmp_path):
    scoring = Scoring(TrainingRewardConfig(), TrainingJudgeConfig(), Team(OneRank()), codec(), 100, folder=tmp_path)
    assert scoring.on_group is None and scoring.end_step() == {}
    scoring([one := group("a", "4")])
    scoring.close()
    assert one.trajectories[0].reward == 1.0 and not list(tmp_path.iterdir())


def test_answers_without_a_verdict_are_a_warning_and_many_of_them_end_the_run(make_scoring, service):
    scoring = make_scoring("judge=1", fallback="drop")
    service.then(judges_by_prediction, says("no", 400))
    health = ToolHealth()
    few = [group("a", "4", "", "")]
    scoring(few)
    service.then(says("no", 400))
    few += [group("b", "4")]
    scoring(few)
    assert health.may_train(few) and "the judge gave no verdict on 25% of the trajectories" in health.warning
    for number in range(MAX_BAD_BATCHES):
        many = [group(f"{number} {i}", "4", "5", "") for i in range(3)]
        scoring(many)
        assert not health.may_train(many, number) and "the judge gave no verdict on 67%" in health.warning
    assert health.must_stop and "the judge gave no verdict on 67% of the trajectories, in 3 batches" in str(health)


def test_a_validation_leaves_out_what_has_no_verdict(make_scoring, service):
    scoring, some = make_scoring("judge=1", fallback="drop"), [group("a", "4"), group("b", "4")]
    scoring(some[:1])
    service.then(says("no", 400))
    scoring(some)
    assert some[1].trajectories[0].reward is None
    assert summarize(some)["reward"] == 1.0 and summarize(some)["questions"] == 1
