"""Named rewards with weights, and rewards of one's own that are async, batched, or see whole trajectories."""

import asyncio
import threading

import pytest
from helpers.families import codec_of

from arpo.config.rewards import RewardConfig, TrainingRewardConfig
from arpo.errors import UserError
from arpo.protocol import FORMS
from arpo.rewards import load_custom, score_groups
from arpo.rewards.terms import TERMS, TermEvidence, Terms, load_terms, overlong
from arpo.selection import is_dead, trained_on
from arpo.trajectory import Group, Prompt, StopReason, ToolCall, Trajectory, Turn

derive_segments = FORMS["tags"].rules.derive_segments
LOADED = ("search", "python")


def response(answer: str) -> str:
    return rf"<think>t</think><answer>\boxed{{{answer}}}</answer>"


def make_group(answers=("Paris", "London"), num_tokens=(5, 5)) -> Group:
    prompt = Prompt("q-0", [{"role": "user", "content": "?"}], ["Paris"], data_source="hotpotqa", meta={"level": 3})
    trajectories = []
    for i, (answer, count) in enumerate(zip(answers, num_tokens, strict=True)):
        text = response(answer)
        call = ToolCall("search", f"query {i}", f"result {i}", ok=True)
        t = Trajectory("q-0", str(i), [0] * count, [1] * count, [0.0] * count, stop_reason=StopReason.EOS, text=text)
        t.segments, t.turns = derive_segments(text), [Turn(0, 2, 3, tool_calls=[call]), Turn(3, count, count)]
        trajectories.append(t)
    return Group(prompt, trajectories)


def terms_of(*entries: str, buffer_tokens: int = 0) -> Terms:
    return load_terms(TrainingRewardConfig(terms=entries, overlong_buffer_tokens=buffer_tokens), 100)


def scored(group: Group, terms: Terms | None, cfg: RewardConfig | None = None) -> Group:
    score_groups([group], cfg or TrainingRewardConfig(), tools=LOADED, terms=terms)
    return group


# ---- the sum


def test_without_terms_nothing_changes():
    assert load_terms(TrainingRewardConfig(), 100) is None
    one, other = scored(make_group(), None), scored(make_group(), None, RewardConfig())
    assert [vars(t) for t in one.trajectories] == [vars(t) for t in other.trajectories]
    assert one.trajectories[0].reward_parts.keys() == {"format", "accuracy", "tool_bonus"}


def test_the_answer_alone_is_the_built_in_reward_with_its_own_name_beside_its_parts():
    plain, named = scored(make_group(), None), scored(make_group(), terms_of("answer=1"))
    for a, b in zip(plain.trajectories, named.trajectories, strict=True):
        assert (b.reward, b.reward_reason) == (a.reward, a.reward_reason)
        assert b.reward_parts == a.reward_parts | {"answer": a.reward}


def test_the_reward_is_the_weighted_sum_and_the_parts_are_without_weights():
    group = make_group(num_tokens=(90, 5))
    group.trajectories[1].segments = [("cut off", True)]
    scored(group, terms_of("accuracy=1", "format=0.25", "overlong=0.5", buffer_tokens=20))
    good, bad = group.trajectories
    assert good.reward == 1 + 0.25 - 0.5 * 0.5 and good.reward_reason == ""
    assert good.reward_parts == {"format": 1.0, "accuracy": 1.0, "tool_bonus": 0.0, "overlong": -0.5}
    assert bad.reward == 0.0 and bad.reward_reason == "missing_answer"


def test_a_weight_of_0_is_only_logged(tmp_path):
    (tmp_path / "r.py").write_text("def style(trajectory, prompt): return 7.0")
    [t, _] = scored(make_group(), terms_of("answer=1", f"{tmp_path}/r.py:style=0")).trajectories
    assert t.reward == 1.0 and t.reward_parts["style"] == 7.0


def test_a_rule_that_nothing_needs_is_not_computed(tmp_path, monkeypatch):
    (tmp_path / "r.py").write_text("def style(trajectory, prompt): return 1.0")
    monkeypatch.setattr("arpo.rewards.score_by_rule", None)
    [t, _] = scored(make_group(), terms_of(f"{tmp_path}/r.py:style=2")).trajectories
    assert (t.reward, t.reward_parts) == (2.0, {"style": 1.0})


def test_what_a_function_returns_beside_its_score_is_logged_under_its_name(tmp_path):
    (tmp_path / "r.py").write_text("def style(a, text, c, d): return {'score': 0.5, 'words': 3, 'reason': 'terse'}")
    [t, _] = scored(make_group(), terms_of("answer=1", f"{tmp_path}/r.py:style=1")).trajectories
    assert t.reward == 1.5 and t.reward_reason == "terse"
    assert t.reward_parts["style"] == 0.5 and t.reward_parts["style/words"] == 3.0


@pytest.mark.parametrize("name", ["mean", "answer", "kl_penalty"])
def test_a_function_must_not_have_the_name_of_another_number(tmp_path, name):
    (tmp_path / "r.py").write_text(f"def {name}(trajectory, prompt): return 1.0")
    with pytest.raises(UserError, match=rf"r\.py:{name} would be logged as reward/{name}, which .* rename"):
        terms_of(f"{tmp_path}/r.py:{name}=1")


def test_two_functions_of_one_name_and_a_missing_file_are_refused(tmp_path):
    for file in ("a.py", "b.py"):
        (tmp_path / file).write_text("def f(trajectory, prompt): return 1.0")
    with pytest.raises(UserError, match=r"would be logged as reward/f"):
        terms_of(f"{tmp_path}/a.py:f=1", f"{tmp_path}/b.py:f=1")
    with pytest.raises(UserError, match=r"^reward\.terms=no\.py:f: there is no such file"):
        terms_of("no.py:f=1")


# ---- the overlong penalty


@pytest.mark.parametrize(
    "num_tokens, value", [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (130, -1.0)]
)
def test_the_overlong_penalty_is_that_of_dapo(num_tokens, value):
    def equation_13(n: int, longest: int, buffer: int) -> float:
        if n <= longest - buffer:
            return 0.0
        return (longest - buffer - n) / buffer if n <= longest else -1.0

    t = Trajectory("p", "0", [0] * num_tokens)
    cfg = TrainingRewardConfig(terms=("overlong=1",), overlong_buffer_tokens=20)
    found = overlong(TermEvidence(t, Prompt("p", [], []), None, 100), cfg)
    assert found == pytest.approx(value) and found == pytest.approx(equation_13(num_tokens, 100, 20))


# ---- no value, and groups before the scoring

SOME = """
def sure(trajectories, prompts):
    return [{"score": None, "reason": "unsure", "asked": 2} if "London" in t.text else 1.0 for t in trajectories]

def silent(trajectory, prompt):
    return {"score": None}
"""


def test_without_a_value_of_a_function_there_is_no_reward_and_the_trajectory_is_not_trained_on(tmp_path):
    (tmp_path / "r.py").write_text(SOME)
    group = scored(make_group(), terms_of("answer=1", f"{tmp_path}/r.py:sure=0.5"))
    there, gone = group.trajectories
    assert there.reward == 1.5 and there.reward_reason == ""
    assert gone.reward is None and gone.reward_reason == "unsure" and gone.is_left_out
    assert gone.reward_parts["answer"] == 0.0 and gone.reward_parts["sure/asked"] == 2.0
    assert "sure" not in gone.reward_parts and trained_on(group) == [there] and is_dead(group)


def test_a_function_that_gives_no_value_need_not_say_why(tmp_path):
    (tmp_path / "r.py").write_text(SOME)
    as_term, alone = scored(make_group(), terms_of(f"{tmp_path}/r.py:silent=1")), make_group()
    score_groups([alone], RewardConfig(), load_custom("reward.file", f"{tmp_path}/r.py:silent"), tools=LOADED)
    for t in as_term.trajectories + alone.trajectories:
        assert (t.reward, t.reward_reason, t.is_left_out) == (None, "no_reward", True)


def test_each_built_in_term_has_one_line():
    assert list(TERMS) == ["answer", "format", "accuracy", "tool_bonus", "overlong"]


# ---- functions of one's own: async, batched, of whole trajectories

WHOLE = """
import asyncio

async def single(trajectory, prompt):
    await asyncio.sleep(0)
    [call] = trajectory.tool_calls
    return prompt.meta["level"] + len(trajectory.turns) + float(call.result == "result 1")

def batched(trajectories, prompts):
    assert len(trajectories) == len(prompts)
    return [{"score": float(t.tool_calls[0].argument[-1]), "tokens": len(t.token_ids)} for t in trajectories]

async def batched_async(trajectories, prompts):
    await asyncio.sleep(0)
    return batched(trajectories, prompts)

async def old_form(data_source, solution_str, ground_truth, extra_info):
    return float(ground_truth in solution_str)

class Judge:
    async def __call__(self, trajectory, prompt):
        return await single(trajectory, prompt)

an_object = Judge()
"""


@pytest.mark.parametrize(
    "function, rewards, parts",
    [
        ("single", [5.0, 6.0], {}),
        ("batched", [0.0, 1.0], {"tokens": 5.0}),
        ("batched_async", [0.0, 1.0], {"tokens": 5.0}),
        ("old_form", [1.0, 0.0], {}),
        ("an_object", [5.0, 6.0], {}),
    ],
)
def test_a_function_may_be_async_and_batched_and_see_everything(tmp_path, function, rewards, parts):
    (tmp_path / "r.py").write_text(WHOLE)
    group, custom = make_group(), load_custom("reward.file", f"{tmp_path}/r.py:{function}")
    score_groups([group], RewardConfig(), custom, tools=LOADED)
    assert [t.reward for t in group.trajectories] == rewards and group.trajectories[0].reward_parts == parts


def test_async_functions_run_at_the_same_time_and_always_on_one_loop(tmp_path):
    (tmp_path / "r.py").write_text(
        "import asyncio\nloops, waiting, all_there = set(), 0, asyncio.Event()\n"
        "async def f(trajectory, prompt):\n"
        "    global waiting\n"
        "    loops.add(asyncio.get_running_loop())\n"
        "    waiting += 1\n"
        "    if waiting == 2: all_there.set()\n"
        "    await asyncio.wait_for(all_there.wait(), 60)\n"  # one after the other, they would never all be there
        "    return len(loops)\n"
    )
    custom = load_custom("reward.file", f"{tmp_path}/r.py:f")
    for _ in range(2):
        group = make_group()
        score_groups([group], RewardConfig(), custom, tools=LOADED)
        assert [t.reward for t in group.trajectories] == [1.0, 1.0]


def test_a_function_of_batches_is_not_called_where_there_is_nothing_to_score(tmp_path):
    (tmp_path / "r.py").write_text("def f(trajectories, prompts): raise ValueError('mean of an empty list')")
    custom = load_custom("reward.file", f"{tmp_path}/r.py:f")
    score_groups([], RewardConfig(), custom, tools=LOADED)
    score_groups([], TrainingRewardConfig(), tools=LOADED, terms=terms_of(f"{tmp_path}/r.py:f=1"))
    scored_already = make_group()
    for t in scored_already.trajectories:
        t.reward = 1.0
    score_groups([scored_already], RewardConfig(), custom, tools=LOADED, only_new=True)


EARLY = """
class Early:
    def __init__(self):
        self.begun = []

    def begin(self, group):
        self.begun.append(group.prompt.prompt_id)

    def __call__(self, trajectory, prompt):
        return float(prompt.prompt_id in self.begun)

class Broken(Early):
    def begin(self, group):
        raise KeyError("x")

early, broken = Early(), Broken()

def late(trajectory, prompt):
    return 0.0
"""


def test_an_object_hears_of_a_group_before_it_scores_it(tmp_path):
    (tmp_path / "r.py").write_text(EARLY)
    group, early = make_group(), load_custom("reward.terms", f"{tmp_path}/r.py:early")
    assert early.has_begin and not load_custom("reward.terms", f"{tmp_path}/r.py:late").has_begin
    early.begin(group)
    score_groups([group], RewardConfig(), early, tools=LOADED)
    assert [t.reward for t in group.trajectories] == [1.0, 1.0]
    with pytest.raises(UserError, match=r"r\.py: broken failed on prompt q-0 \(KeyError: 'x', in line \d+ of r\.py\)"):
        load_custom("reward.terms", f"{tmp_path}/r.py:broken").begin(group)


def test_at_most_so_many_calls_are_under_way(tmp_path):
    (tmp_path / "r.py").write_text(
        "import asyncio\nrunning = most = 0\n"
        "async def f(trajectory, prompt):\n"
        "    global running, most\n"
        "    running += 1\n"
        "    most = max(most, running)\n"
        "    await asyncio.sleep(0)\n"
        "    running -= 1\n"
        "    return most\n"
    )
    group = make_group(answers=["x"] * 200, num_tokens=[5] * 200)
    score_groups([group], RewardConfig(), load_custom("reward.file", f"{tmp_path}/r.py:f"), tools=LOADED)
    assert max(t.reward for t in group.trajectories) == 64


@pytest.mark.parametrize(
    "source, words",
    [
        ("async def f(trajectory, prompt): raise KeyError('x')", r"f failed on prompt q-0, trajectory 0 \(KeyError"),
        ("async def f(trajectories, prompts): return [1.0]", r"returned 1 scores for 2 samples"),
        ("async def f(trajectories, prompts): return 1.0", r"f failed on 2 samples .*TypeError"),
        (
            "async def f(trajectory, prompt): return None",
            r"prompt q-0, trajectory 0: the returned score is None; it must be a number",
        ),
    ],
)
def test_an_async_function_that_fails_is_one_line(tmp_path, source, words):
    (tmp_path / "r.py").write_text(source)
    with pytest.raises(UserError, match=words):
        scored(make_group(), terms_of(f"{tmp_path}/r.py:f=1"))


@pytest.mark.parametrize(
    "source, words",
    [
        ("def f(samples): return 1.0", r"takes \(samples\); it must take \(data_source, "),
        ("def f(trajectory, prompts): return 1.0", r"takes \(trajectory, prompts\); .* or \(trajectory, prompt\) or"),
        ("async def f(trajectory, prompt, level): return 1.0", r"takes \(trajectory, prompt, level\)"),
    ],
)
def test_a_wrong_signature_is_found_before_a_model_is_loaded(tmp_path, source, words):
    (tmp_path / "r.py").write_text(source)
    with pytest.raises(UserError, match=words):
        load_custom("reward.file", f"{tmp_path}/r.py:f")


@pytest.mark.parametrize(
    "source, words",
    [
        ("async def f(trajectory, prompt): return trajectory.no_such", r"invented, before the run.*no_such"),
        ("def f(trajectories, prompts): return []", "returned 0 scores for 2 samples"),
    ],
)
def test_a_function_of_whole_trajectories_is_tried_on_an_invented_one(tmp_path, source, words):
    (tmp_path / "r.py").write_text(source)
    with pytest.raises(UserError, match=words):
        load_custom("reward.file", f"{tmp_path}/r.py:f").try_on(Prompt("q", [], ["4"]), codec_of("qwen2_5"))
    (tmp_path / "s.py").write_text("def f(trajectory, prompt): return trajectory.turns[-1].end + len(trajectory.text)")
    load_custom("reward.file", f"{tmp_path}/s.py:f").try_on(Prompt("q", [], ["4"]), codec_of("qwen2_5"))


def test_an_async_function_works_in_any_thread(tmp_path):
    (tmp_path / "r.py").write_text(WHOLE)
    group, custom = make_group(), load_custom("reward.file", f"{tmp_path}/r.py:single")
    thread = threading.Thread(target=lambda: score_groups([group], RewardConfig(), custom, tools=LOADED))
    thread.start()
    thread.join(60)
    assert [t.reward for t in group.trajectories] == [5.0, 6.0]
    assert asyncio.iscoroutinefunction(custom.function)
