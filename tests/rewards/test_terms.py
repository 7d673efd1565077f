"""Named rewards with weights, and rewards of one's own that are async, batched, or see whole trajectories."""

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from helpers.families import codec_of, hermes_codec, opening_template

from arpo.config.rewards import RewardConfig, TrainingRewardConfig
from arpo.errors import UserError
from arpo.protocol import FORMS
from arpo.rewards import load_custom, score_groups
from arpo.rewards.custom import CustomReward
from arpo.rewards.terms import TermEvidence, Terms, load_terms, overlong
from arpo.selection import is_dead, trained_on
from arpo.trajectory import Group, Prompt, StopReason, ToolCall, Trajectory, Turn

derive_segments = FORMS["tags"].rules.derive_segments
LOADED = ("search", "python")


def response(answer: str) -> str:
    return rf"<think>t</think><answer>\boxed{{{answer}}}</answer>"


def make_group(answers=("Paris", "London"), num_tokens=(5, 5)) -> Group:
    meta = {"level": 3, "extra_info": {"index": 3}}
    prompt = Prompt("q-0", [{"role": "user", "content": "?"}], ["Paris"], data_source="hotpotqa", meta=meta)
    trajectories = []
    for i, (answer, count) in enumerate(zip(answers, num_tokens, strict=True)):
        text = response(answer)
        call = ToolCall("search", f"query {i}", f"result {i}", ok=True)
        t = Trajectory("q-0", str(i), [0] * count, [1] * count, [0.0] * count, stop_reason=StopReason.EOS, text=text)
        t.segments, t.turns = derive_segments(text), [Turn(0, 2, 3, tool_calls=[call]), Turn(3, count, count)]
        trajectories.append(t)
    return Group(prompt, trajectories)


@pytest.fixture
def own(tmp_path) -> Callable[..., str]:
    """Writes a file of functions, and returns the address of one of them."""

    def address(source: str, name: str = "f", file: str = "r.py") -> str:
        (tmp_path / file).write_text(source)
        return f"{tmp_path}/{file}:{name}"

    return address


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


def test_a_weight_of_0_is_only_logged(own):
    style = own("def style(trajectory, prompt): return 7.0", "style")
    [t, _] = scored(make_group(), terms_of("answer=1", f"{style}=0")).trajectories
    assert t.reward == 1.0 and t.reward_parts["style"] == 7.0


def test_a_rule_that_nothing_needs_is_not_computed(own, monkeypatch):
    style = own("def style(trajectory, prompt): return 1.0", "style")
    monkeypatch.setattr("arpo.rewards.score_by_rule", None)
    [t, _] = scored(make_group(), terms_of(f"{style}=2")).trajectories
    assert (t.reward, t.reward_parts) == (2.0, {"style": 1.0})


def test_what_a_function_returns_beside_its_score_is_logged_under_its_name(own):
    style = own("def style(a, text, c, d): return {'score': 0.5, 'words': 3, 'reason': 'terse'}", "style")
    [t, _] = scored(make_group(), terms_of("answer=1", f"{style}=1")).trajectories
    assert t.reward == 1.5 and t.reward_reason == "terse"
    assert t.reward_parts["style"] == 0.5 and t.reward_parts["style/words"] == 3.0


@pytest.mark.parametrize("name", ["mean", "answer", "kl_penalty"])
def test_a_function_must_not_have_the_name_of_another_number(own, name):
    address = own(f"def {name}(trajectory, prompt): return 1.0", name)
    with pytest.raises(UserError, match=rf"r\.py:{name} would be logged as reward/{name}, which .* rename"):
        terms_of(f"{address}=1")


def test_two_functions_of_one_name_and_a_missing_file_are_refused(own):
    one, other = (own("def f(trajectory, prompt): return 1.0", file=file) for file in ("a.py", "b.py"))
    with pytest.raises(UserError, match=r"would be logged as reward/f"):
        terms_of(f"{one}=1", f"{other}=1")
    with pytest.raises(UserError, match=r"^reward\.terms=no\.py:f: there is no such file"):
        terms_of("no.py:f=1")


# ---- the overlong penalty


@pytest.mark.parametrize(
    "num_tokens, value", [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (130, -1.0)]
)
def test_the_overlong_penalty_is_that_of_dapos_equation_13(num_tokens, value):
    t = Trajectory("p", "0", [0] * num_tokens)
    cfg = TrainingRewardConfig(terms=("overlong=1",), overlong_buffer_tokens=20)
    assert overlong(TermEvidence(t, Prompt("p", [], []), None, 100), cfg) == pytest.approx(value)


# ---- no value, and groups before the scoring

SOME = """
def sure(trajectories, prompts):
    return [{"score": None, "reason": "unsure", "asked": 2} if "London" in t.text else 1.0 for t in trajectories]

def silent(trajectory, prompt):
    return {"score": None}
"""


def test_without_a_value_of_a_function_there_is_no_reward_and_the_trajectory_is_not_trained_on(own):
    group = make_group()
    group.trajectories[1].segments = [("cut off", True)]  # a reason too, but not the one for which there is no reward
    there, gone = scored(group, terms_of("answer=1", f"{own(SOME, 'sure')}=0.5")).trajectories
    assert there.reward == 1.5 and there.reward_reason == ""
    assert gone.reward is None and gone.reward_reason == "unsure" and gone.is_left_out
    assert gone.reward_parts["answer"] == -1.0 and gone.reward_parts["sure/asked"] == 2.0
    assert "sure" not in gone.reward_parts and trained_on(group) == [there] and is_dead(group)


def test_a_function_that_gives_no_value_need_not_say_why(own):
    silent = own(SOME, "silent")
    as_term, alone = scored(make_group(), terms_of(f"{silent}=1")), make_group()
    score_groups([alone], RewardConfig(), load_custom("reward.file", silent), tools=LOADED)
    for t in as_term.trajectories + alone.trajectories:
        assert (t.reward, t.reward_reason, t.is_left_out) == (None, "no_reward", True)


# ---- functions of one's own: async, batched, of texts and of whole trajectories

FUNCTIONS = """
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

def of_text(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": extra_info["index"] + (ground_truth in solution_str), "hit": 1, "reason": "mine"}

async def of_text_async(data_source, solution_str, ground_truth, extra_info):
    return float(ground_truth in solution_str)

def reordered(solution_str, ground_truth, data_source, extra_info):
    return float(ground_truth in solution_str) + 2 * (data_source == "hotpotqa")

async def of_some(solution_str, ground_truth, **others):
    return float(ground_truth in solution_str) + len(others)

class Judge:
    async def __call__(self, trajectory, prompt):
        return await single(trajectory, prompt)

an_object = Judge()
"""


def custom_of(address: str) -> CustomReward:
    return load_custom("reward.file", address)


def rewards_of(custom: CustomReward, group: Group | None = None, *, only_new: bool = False) -> list[float]:
    """The rewards of a group that this function scores."""
    group = group or make_group()
    score_groups([group], RewardConfig(), custom, tools=LOADED, only_new=only_new)
    return [t.reward for t in group.trajectories]


@pytest.mark.parametrize(
    "function, rewards, parts",
    [
        ("single", [5.0, 6.0], {}),
        ("batched", [0.0, 1.0], {"tokens": 5.0}),
        ("batched_async", [0.0, 1.0], {"tokens": 5.0}),
        ("of_text", [4.0, 3.0], {"hit": 1.0}),
        ("of_text_async", [1.0, 0.0], {}),
        ("reordered", [3.0, 2.0], {}),  # verl #3374: names decide, as in verl. By their places it was 0 for all
        ("of_some", [3.0, 2.0], {}),
        ("an_object", [5.0, 6.0], {}),
    ],
)
def test_a_function_may_be_async_and_batched_and_see_everything_in_any_thread(own, function, rewards, parts):
    group, custom = make_group(), custom_of(own(FUNCTIONS, function))
    thread = threading.Thread(target=lambda: score_groups([group], RewardConfig(), custom, tools=LOADED))
    thread.start()
    thread.join(60)
    assert [t.reward for t in group.trajectories] == rewards and group.trajectories[0].reward_parts == parts
    assert group.trajectories[0].reward_reason == ("mine" if function == "of_text" else "")


def test_only_new_trajectories_are_scored_where_that_is_asked_for(own):
    """A function that gave no reward is not asked again (huggingface/trl#2737 asks for None as an answer)."""
    function = "def f(d, text, truth, e): return {'score': 7.0 if truth in text else None}"
    custom, group = custom_of(own(function)), make_group()
    group.trajectories[0].reward = 5.0
    for _ in range(2):
        assert rewards_of(custom, group, only_new=True) == [5.0, None]
        group.prompt.answers[0] = "London"  # now the function would give it one


def test_async_functions_run_at_the_same_time_and_always_on_one_loop(own):
    custom = custom_of(own("""
import asyncio

loops, waiting, all_there = set(), 0, asyncio.Event()

async def f(trajectory, prompt):
    global waiting
    loops.add(asyncio.get_running_loop())
    waiting += 1
    if waiting == 2:
        all_there.set()
    await asyncio.wait_for(all_there.wait(), 60)  # one after the other, they would never all be there
    return len(loops)
"""))  # fmt: skip
    for _ in range(2):
        assert rewards_of(custom) == [1.0, 1.0]


def test_at_most_so_many_calls_are_under_way(own):
    custom = custom_of(own("""
import asyncio

running = most = 0

async def f(trajectory, prompt):
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(0)
    running -= 1
    return most
"""))  # fmt: skip
    assert max(rewards_of(custom, make_group(answers=["x"] * 200, num_tokens=[5] * 200))) == 64


def test_a_function_of_batches_is_not_called_where_there_is_nothing_to_score(own):
    address = own("def f(trajectories, prompts): raise ValueError('mean of an empty list')")
    score_groups([], RewardConfig(), custom_of(address), tools=LOADED)
    score_groups([], TrainingRewardConfig(), tools=LOADED, terms=terms_of(f"{address}=1"))
    scored_already = make_group()
    for t in scored_already.trajectories:
        t.reward = 1.0
    rewards_of(custom_of(address), scored_already, only_new=True)


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


def test_an_object_hears_of_a_group_before_it_scores_it(own):
    group, early = make_group(), custom_of(own(EARLY, "early"))
    assert early.has_begin and not custom_of(own(EARLY, "late")).has_begin
    early.begin(group)
    assert rewards_of(early, group) == [1.0, 1.0]
    with pytest.raises(UserError, match=r"r\.py: broken failed on prompt q-0 \(KeyError: 'x', in line \d+ of r\.py\)"):
        custom_of(own(EARLY, "broken")).begin(group)


# ---- functions that fail

IN_A_GROUP = """import asyncio
async def fail(): raise KeyError('x')
async def f(trajectory, prompt):
    async with asyncio.TaskGroup() as group: group.create_task(fail())
"""
NO_NUMBER = r"r\.py: f: prompt q-0, trajectory 0: the returned score is None; it must be a number"


@pytest.mark.parametrize(
    "source, words",
    [
        ("def f(d, s, g, e): return 1 / 0", r"r\.py: f failed on prompt q-0, trajectory 0 \(ZeroDivisionError"),
        ("def f(d, s, g, e): raise SystemExit(3)", r"r\.py: f failed on prompt q-0, trajectory 0 \(SystemExit: 3"),
        ("async def f(d, s, g, e): exit(3)", r"r\.py: f failed on prompt q-0, trajectory . \(SystemExit: 3"),
        ("async def f(trajectory, prompt): raise KeyError('x')", r"f failed on prompt q-0, trajectory 0 \(KeyError"),
        # awslabs/agentcore-rl-toolkit PR 25
        ("import asyncio\nasync def f(trajectory, prompt): raise asyncio.CancelledError",
         r"f failed on prompt q-0, trajectory . \(RuntimeError: a CancelledError, which a library raised"),
        # epam/statgpt-backend #453: the text of a group of errors was given as the reason
        (IN_A_GROUP, r"f failed on prompt q-0, trajectory . \(KeyError: 'x', in line 2 of r\.py\)"),
        ("def f(trajectories, prompts): raise KeyError('x')", r"r\.py: f failed on 2 samples from prompt q-0"),
        ("async def f(trajectories, prompts): return 1.0", r"f failed on 2 samples .*TypeError"),
        ("def f(d, s, g, e): return None", NO_NUMBER),
        ("async def f(trajectory, prompt): return None", NO_NUMBER),
        ("def f(d, s, g, e): return float('nan')", "must be finite"),
        ("def f(d, s, g, e): return {'reward': 1}", "has no 'score'"),
        ("exit(3)", r"cannot be imported \(SystemExit: 3"),
        ("def g(d, s, g, e): return 1.0", "does not define"),
        # other forms, which are found as it is loaded
        ("async def f(a, b): return 1.0",
         r"f takes \(a, b\); .* or \(trajectory, prompt\) or \(trajectories, prompts\)"),
        ("def f(solution, truth): return 1.0", r"f takes \(solution, truth\); it must take \(data_source, "),
        ("def f(): return 1.0", r"f takes \(nothing\); it must take"),
        ("def f(solution_str, data_source, truth, e): return 1.0", r"f takes \(solution_str, data_source, truth, "),
        ("def f(completions, **options): return [1.0]", r"f takes \(completions, options\); it must take"),
        ("def f(a, b, c, d, e): return 1.0", r"f takes \(a, b, c, d, e\); it must take"),
        ("def f(trajectory, prompts): return 1.0", r"f takes \(trajectory, prompts\); .* or \(trajectory, prompt\) or"),
    ],
)  # fmt: skip
def test_a_function_that_fails_or_is_of_another_form_is_one_line_with_file_and_sample(own, source, words):
    with pytest.raises(UserError, match=words) as error:
        rewards_of(custom_of(own(source)))
    assert "\n" not in str(error.value)


STUCK = """
import sys, threading, time
from arpo.config import exits
from arpo.rewards.custom import load_custom, _call
exits.SAY_AFTER_S, exits.GIVE_UP_S = 0.2, float(sys.argv[2])
if "stop" in sys.argv:
    exits.asked_to_stop.set()
_call(load_custom("reward.file", sys.argv[1]), [("prompt q", (1, 2, 3, 4))])
"""


@pytest.mark.parametrize("kind, args", [("", ("0.5",)), ("async ", ("0.5",)), ("", ("600", "stop"))])
def test_a_function_that_does_not_return_is_named_and_ends_the_run(own, kind, args):
    """After a limit, or where the run was asked to stop."""
    address = own(f"import time\n{kind}def f(a, b, c, d): time.sleep(600)")
    done = subprocess.run([sys.executable, "-c", STUCK, address, *args], capture_output=True, text=True, timeout=100)
    place = address.replace(":f", ": f")
    named, last = done.stderr.splitlines()
    assert named.startswith(f"{place} on prompt q has not returned for 0.2 s; the run ends if it")
    assert last.startswith(f"error: {place} on prompt q has not returned for ") and done.returncode == 2


# ---- the trial on an invented trajectory


@pytest.mark.parametrize(
    "source, words",
    [
        ("def f(a, b, c, d): return d['level']", r"failed on prompt q, trajectory invented, before.*KeyError: 'level'"),
        ("async def f(trajectory, prompt): return trajectory.no_such", r"invented, before the run.*no_such"),
        ("def f(a, b, c, d): return float('nan')", "the returned score is nan; it must be finite"),
        ("def f(trajectories, prompts): return []", "returned 0 scores for 2 samples"),
    ],
)
def test_a_function_is_tried_before_anything_is_sampled(own, source, words):
    with pytest.raises(UserError, match=words):
        custom_of(own(source)).try_on(Prompt("q", [], ["4"], meta={"extra_info": {}}), codec_of("qwen2_5"))


TRIED = """
from arpo.rewards import score

def f(trajectory, prompt):
    if trajectory.stop_reason == "length":
        return 0.0
    result = score(trajectory.text, ["4"], "math", segments=trajectory.segments, form=prompt.meta["form"])
    assert result.total == 1.0 and trajectory.turns[-1].end == len(trajectory.token_ids), (result, trajectory)
    trajectory.check()
    return result.total
"""


@pytest.mark.parametrize("opens_think", [False, True])
@pytest.mark.parametrize("make_codec", [codec_of, hermes_codec])
def test_a_trial_gets_the_rows_own_fields_and_a_well_formed_answer_in_the_protocols_form(own, make_codec, opens_think):
    codec = make_codec("qwen2_5", **({"chat_template": opening_template()} if opens_think else {}))
    assert bool(codec._opened) == opens_think
    custom_of(own(TRIED)).try_on(Prompt("q", [], ["4"], meta={"form": codec.format}), codec)
