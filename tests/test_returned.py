"""What a function of the user's returns is checked at the door, whatever option names it: one line, before anything is
trained on it. The kinds are of public reports, which the cases name."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.fakes import EchoTool
from helpers.ranks import try_script
from helpers.sample_groups import group as branched_group
from helpers.scripted_rollout import CODEC, SHORT, play
from helpers.toy_run import build_toy_world

from arpo.advantages import assign_advantages, token_advantages
from arpo.batch import MicroBatch
from arpo.config.named import find
from arpo.config.returned import checked_number, checked_numbers, shown, whole_text
from arpo.config.rewards import RewardConfig
from arpo.data.order import add_groups, make_order
from arpo.errors import UserError
from arpo.options import AdvantageConfig, BranchingConfig, LossConfig, RolloutConfig, is_retrospective
from arpo.protocol import form_of
from arpo.retrospective import chosen_forks
from arpo.rewards import load_custom, score_groups
from arpo.start.trial import made_up_group, try_context, try_functions
from arpo.tools.base import ToolResult
from arpo.trajectory import Group, Prompt, Trajectory

IMPORTS = """import math, random
import numpy as np
import torch
from arpo.data import PromptOrder
from arpo.losses import TokenLosses
from arpo.retrospective import Fork"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Makes FILE.py:f of a source, in a file of its own."""
    monkeypatch.chdir(tmp_path)
    files = iter(range(100))

    def write(source: str) -> str:
        file = tmp_path / f"mine{next(files)}.py"
        file.write_text(f"{IMPORTS}\n{source}\n")
        return f"{file.name}:f"

    return write


# ---- numbers


@pytest.mark.parametrize(
    "value",
    [1, True, 1.0, np.float32(1), np.int64(1), np.bool_(True), np.array([1.0]), torch.tensor(1), torch.ones(1, 1)],
)
def test_a_number_of_any_library_is_a_number(value):
    assert checked_number(value, "x") == 1.0 and type(checked_number(value, "x")) is float
    assert checked_number(torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True), "x") == 0.5


@pytest.mark.parametrize(
    "value, words",
    [
        (None, "x is None; it must be a number"),
        ("1", "x is '1'; it must be a number"),
        (b"1", "x is b'1' (bytes); it must be a number"),
        ([1.0], r"x is [1.0] (list); it must be a number"),  # trl #6533
        (torch.ones(2), "x is tensor([1., 1.]) (Tensor); it must be a number"),
        (1j, "x is 1j (complex); it must be a number"),
        (float("nan"), "x is nan; it must be finite"),  # trl #4501
        (np.float32("inf"), "x is inf; it must be finite"),
        (10**400, "it must be a number"),
        (1.5, "x is 1.5; it must be from 0 to 1"),
    ],
)
def test_what_is_no_number_is_one_line(value, words):
    with pytest.raises(UserError) as caught:
        checked_number(value, "x", 0, 1)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_arrays_of_any_library_are_arrays_of_their_length():
    for values in ([1, 2], (1.0, 2.0), np.array([1, 2], dtype=np.float32), torch.tensor([1, 2], dtype=torch.bfloat16)):
        assert checked_numbers(values, "x", 2).tolist() == [1.0, 2.0]
    for values, words in (
        ([1, 2, 3], "x are 3 numbers; they must be 2 numbers"),
        (np.ones((2, 1)), r"x are of the shape \(2, 1\)"),  # trl PR #3577: a column broadcasts
        (1.0, r"x are 1\.0; they must be 2 numbers"),
        ([1.0, float("nan")], r"x hold nan \(at 1 of 2\)"),
        ({"a": 1}, r"x are \{'a': 1\} \(dict\); they must be 2 numbers"),
    ):
        with pytest.raises(UserError, match=words):
            checked_numbers(values, "x", 2)


def test_what_is_shown_is_one_line_of_the_users_value():
    class Odd:
        def __repr__(self):
            raise RuntimeError

    assert shown("a\nb") == "'a\\nb'" and len(shown("x" * 10_000)) < 100
    assert shown(Odd()) == "(RuntimeError in its repr) (Odd)"
    assert whole_text("\ud83d\ude00 \udcff") == "😀 �"  # agent-zero #1773


# ---- functions that are called on a made-up group

RULE, FORKS = "def f(evidence, cfg): return ", "def f(group, budget, cfg, rng): return "
CREDIT, LOSS = "def f(group, cfg): return ", "def f(i, c): return "
REFUSED = {  # option -> (source, what is said)
    "branching.selector": [
        (RULE + "2.0", "P(branch) is 2; it must be from 0 to 1"),
        (RULE + "None", "P(branch) is None; it must be a number"),
        (RULE + "math.nan", "P(branch) is nan; it must be finite"),
        (RULE + "evidence.logs", "failed (AttributeError: 'Evidence' object has no attribute 'logs', in line 7 of"),
        (FORKS + "None", "the returned value is None; it must be a list"),
        (FORKS + "[('0', 1)]", "an entry of the returned list is ('0', 1) (tuple); it must be a Fork"),
        (FORKS + "[Fork('9', 1)]", "there is no trajectory '9' to fork; there are 0, 1"),
        (FORKS + "[Fork('0', 2)]", "the turn is 2; it must be from 0 to 1"),
        (FORKS + "[Fork('0', -1)]", "the turn is -1; it must be from 0 to 1"),
        (FORKS + "[Fork('0', 0.5)]", "the turn is 0.5; it must be an integer"),
        (FORKS + "[Fork('0', 1, math.inf)]", "at turn 1, the score is inf; it must be finite"),
        (FORKS + "[Fork('0', 1, group.trajectories[0].reward)]", "NaN: logprobs of results, rewards) is nan"),
        (
            FORKS + "[Fork('0', 1, -sum(group.trajectories[0].rollout_logprobs))]",
            "NaN: logprobs of results, rewards) is nan",
        ),
    ],
    "advantage.kind": [
        (RULE + "evidence.rewards[:-1]", "the advantages are 2 numbers; they must be 3 numbers"),  # vime #312
        (RULE + "evidence.rewards[:, None]", "of the shape (3, 1); they must be 3 numbers"),
        (RULE + "[1.0]", "the advantages are 1 numbers; they must be 3 numbers"),  # trl #6533
        (RULE + "evidence.rewards / 0", "the advantages hold inf (at 0 of 3); all must be finite"),
        (RULE + "None", "the advantages are None; they must be 3 numbers"),
        (RULE + "{}['x']", "failed (KeyError: 'x', in line 7 of"),
    ],
    "advantage.tree": [  # the first two trained silently: tokens without a number had the advantage 0
        (CREDIT + "{t.trajectory_id: np.ones(3) for t in group.trajectories}", "are 3 numbers; they must be 12"),
        (CREDIT + "{t.trajectory_id: np.ones(12 - t.fork_at) for t in group.trajectories}", "0.0 are 4 numbers"),
        (CREDIT + "{'0': np.zeros(12)}", "has nothing for '0.0'; it must have '0', '0.0', '1'"),
        (CREDIT + "[np.zeros(12)] * 3", "it must be a dict"),
        (CREDIT + "{t.trajectory_id: [math.nan] * 12 for t in group.trajectories}", "hold nan (at 0 of 12)"),
        (CREDIT + "{t.trajectory_id: t.rollout_logprobs for t in group.trajectories}", "hold nan (at 4 of 12)"),
    ],
    "loss.kind": [
        (LOSS + "i.logprobs", "the returned value is tensor("),
        (LOSS + "TokenLosses(i.logprobs.mean(), i.logprobs)", "TokenLosses.losses has the shape ()"),
        (LOSS + "TokenLosses(i.logprobs.sum(-1), i.logprobs)", "losses has the shape (2,); it must have (2, 4)"),
        (LOSS + "TokenLosses(i.logprobs, i.logprobs, {'a': 1})", "metrics['a'] is 1; it must be a tensor"),
        (LOSS + "TokenLosses((-i.mask.float()).log() * i.logprobs, i.logprobs)", "the loss is not finite"),
        (LOSS + "TokenLosses(i.logprobs.detach(), i.logprobs)", "the loss has no gradient"),
        (LOSS + "TokenLosses((i.logprobs - i.logprobs).abs().sqrt(), i.logprobs)", "the gradient is not finite"),
        ("def f(inputs): return 1", "failed (TypeError"),
    ],
    "loss.aggregation": [
        ("def f(l, mask): return l.sum(), mask.sum()", "the rows' sums has the shape (); it must have (2,)"),
        ("def f(losses, mask): return losses.sum(-1)", "the returned value is tensor("),
    ],
    "loss.kl_estimator": [
        ("def f(difference): return difference.mean()", "the KL has the shape (); it must have (2, 4)"),
        ("def f(difference): return (-difference - 9).log()", "the KL is not finite"),
    ],
    "loss.rollout_correction": [
        ("def f(log_weights, mask): return log_weights", "must be a tuple"),
        (
            "f = (lambda w, m: w.sum(), lambda w, c: (w, {}))",
            "combined log weights has the shape (); it must have (2, 4) or (2, 1)",
        ),
        ("f = (lambda w, m: w, lambda w, c: w)", "the bounded weights is"),
        ("f = (lambda w, m: w, lambda w, c: (w / 0, {}))", "the weights is not finite"),
    ],
}


@pytest.mark.parametrize("option, source, words", [(o, *case) for o, cases in REFUSED.items() for case in cases])
def test_a_function_that_returns_what_cannot_be_used_is_one_line_before_the_run(own, option, source, words):
    name = own(source)
    section, _, field = option.partition(".")
    cfgs = {"branching": BranchingConfig(), "advantage": AdvantageConfig(), "loss": LossConfig(kl_coefficient=0.1)}
    cfgs[section] = replace(cfgs[section], **{field: name})
    with pytest.raises(UserError) as caught:
        try_functions(*cfgs.values())
    assert str(caught.value).startswith(f"{option}={name}") and words in str(caught.value), str(caught.value)


def test_an_advantage_may_read_parts_of_a_reward_that_nobody_knows_before_the_run(own):
    """GDPO (trl #4785, verl #5503): the trial failed with a KeyError, because its rewards had one part."""
    name = own("def f(evidence, cfg): return torch.tensor([t.reward_parts['my_part'] for t in evidence.trajectories])")
    try_functions(BranchingConfig(), AdvantageConfig(kind=name), LossConfig())


def test_a_loss_is_tried_as_a_rank_without_rows_computes_it(own):
    """A rank with fewer rows than the others computes rows without a loss token. TRL #6439 had to add the same case."""
    name = own("def f(i, cfg): return TokenLosses(-i.logprobs * i.logprobs[i.mask].max(), i.logprobs)")
    with pytest.raises(
        UserError, match=r"^loss\.kind=mine0\.py:f failed \(RuntimeError: max\(\): Expected reduction dim"
    ):
        try_functions(BranchingConfig(), AdvantageConfig(), LossConfig(kind=name))
    name = own("def f(i, cfg): return TokenLosses(-i.logprobs / i.logprobs[i.mask].mean(), i.logprobs)")
    with pytest.raises(
        UserError, match=r"mine1\.py:f .*: for rows without a loss token the loss, or its gradient, is not"
    ):
        try_functions(BranchingConfig(), AdvantageConfig(), LossConfig(kind=name))


def test_a_loss_is_tried_without_a_reference_if_the_run_has_none(own):
    """On-policy distillation (verl #4897): the loss failed after the first rollout."""
    name = own("def f(i, cfg): return TokenLosses(i.logprobs - i.ref_logprobs, i.logprobs)")
    with pytest.raises(UserError, match=r"^loss\.kind=mine0\.py:f failed \(TypeError"):
        try_functions(BranchingConfig(), AdvantageConfig(), LossConfig(kind=name))
    try_functions(BranchingConfig(), AdvantageConfig(), LossConfig(kind=name, kl_coefficient=1e-9))


# ---- selectors


def test_a_selector_sees_nan_where_there_is_nothing_yet_and_changes_nothing(own):
    name = own(
        "def f(group, budget, cfg, rng):\n"
        "    for t in group.trajectories:\n"
        "        assert math.isnan(t.reward) and not t.reward_parts and t.is_solved is None\n"
        "        unknown = [math.isnan(lp) for lp in t.rollout_logprobs]\n"
        "        assert unknown == [not mask for mask in t.loss_mask]\n"
        "        t.rollout_logprobs.clear()\n"
        "    return [Fork('0', np.int64(1), np.float32(0.5)), Fork('1', True)] * 9"
    )
    group = made_up_group()
    roots = Group(group.prompt, [t for t in group.trajectories if t.parent_id is None])
    before = [t.to_dict() | {"rollout_logprobs": list(t.rollout_logprobs)} for t in roots.trajectories]
    forks = chosen_forks(roots, 2, BranchingConfig(selector=name), random.Random(0))
    assert forks == [("0", 1, 0.5), ("1", 1, None)] and [t.to_dict() for t in roots.trajectories] == before


@pytest.mark.parametrize(
    "source, is_late",
    [
        ("def f(group, budget, cfg, rng, weight=0.05): return []", True),
        ("def f(group, budget, cfg, rng, *, weight=0.05): return []", True),
        ("def f(evidence, cfg, weight=0.05, *rest): return 0.5", False),
        ("def f(evidence, cfg=None): return 0.5", False),
    ],
)
def test_a_further_parameter_with_a_default_is_fine(own, source, is_late):
    name = own(source)
    assert is_retrospective(name) == is_late
    try_functions(BranchingConfig(selector=name), AdvantageConfig(), LossConfig())
    for worse in (source.replace("weight=0.05", "weight"), source.replace("cfg=None", "cfg, more")):
        if worse != source:
            with pytest.raises(UserError, match=r"takes \(.*\); it must be a function of \(evidence, cfg\) or \(group"):
                BranchingConfig(selector=own(worse))


def test_a_rule_sees_the_calls_their_results_and_whether_they_failed(own, tmp_path):
    """Branch after an error: the first rule that everybody writes. Of two calls of root 0 the second fails."""
    name = own(
        "seen = []\n\n\ndef f(evidence, cfg):\n"
        "    seen.append([(c.tag, c.argument, c.result, c.ok, c.error_kind) for c in evidence.calls])\n"
        "    return any(not call.ok for call in evidence.calls)"
    )

    def search(argument):
        if argument == "1":
            return ToolResult("Error: no", ok=False, error_kind="timeout")
        return ToolResult(f"it is {argument}", ok=True)

    cfg = BranchingConfig(selector=name, num_initial_rollouts=1)
    [group] = play(
        lambda _prompt, _path, turn: f"<search>{turn}</search>" if turn < 2 else "done",
        cfg=replace(SHORT, group_size=2), branching=cfg, tools=[EchoTool("search", search)],
    )  # fmt: skip
    assert [t.trajectory_id for t in group.trajectories] == ["0", "0.0"] and group.trajectories[1].turns[1].inherited
    seen = find("branching.selector", name, {}).__globals__["seen"]
    assert seen == [[("search", "0", "it is 0", True, None)], [("search", "1", "Error: no", False, "timeout")]]


# ---- advantages and credits


def test_what_is_of_the_right_form_is_taken_as_it_is(own):
    kind = own("def f(evidence, cfg): return (evidence.rewards - 0.5).to(torch.bfloat16)")
    tree = own(
        "def f(group, cfg): return {t.trajectory_id: [t.advantage] * len(t.token_ids) for t in group.trajectories}"
    )
    cfg, group = AdvantageConfig(kind=kind, tree=tree), branched_group()
    assign_advantages([group], cfg)
    assert [t.advantage for t in group.trajectories] == [0.5, -1.5]
    assert {n: v.tolist() for n, v in token_advantages(group, tree, cfg).items()} == {"0": [0.5] * 4, "0.0": [-1.5] * 3}


def test_a_loss_token_without_an_advantage_is_no_number():
    class Two:
        loss_mask, row_ids = torch.tensor([[1, 1, 0, 1]]), [0]

    assert MicroBatch.rows_to_tensor(Two, [np.full(4, 0.5)]).tolist() == [[0.5, 0.5, 0.0, 0.5]]
    assert MicroBatch.rows_to_tensor(Two, [np.full(3, 0.5)])[0, 3].isnan()


# ---- rewards

REWARDS = [
    ("{'score': 1.0, 'accuracy': math.nan}", "the part 'accuracy' is nan; it must be finite"),  # trl #4501, PR #6055
    ("{'score': 1.0, 'style': math.inf}", "the part 'style' is inf; it must be finite"),
    ("{'score': 1.0, 'mean': 5.0}", "the part 'mean' would be logged as another number's name; rename it"),
    ("{'score': 1.0, 'kl_penalty': 0}", "the part 'kl_penalty' would be logged as another number's name"),
    ("{'score': 1.0, 'accuracy': 2}", "the part 'accuracy' is 2; it must be from 0 to 1"),
    ("{'score': 1.0, 'steps': [1, 2]}", "the part 'steps' is [1, 2] (list); it must be a number"),
    ("{'score': '1.0'}", "the returned score is '1.0'; it must be a number"),
    ("torch.tensor([0.5, 0.5])", "the returned score is tensor([0.5000, 0.5000]) (Tensor)"),
]


def scored(name: str) -> Trajectory:
    group = branched_group()
    for t in group.trajectories:
        t.reward, t.reward_parts, t.reward_reason = None, {}, ""
    score_groups([group], RewardConfig(), load_custom("reward.file", name), tools=())
    return group.trajectories[0]


@pytest.mark.parametrize("returned, words", REWARDS)
def test_a_part_of_a_reward_is_checked_like_its_score(own, returned, words):
    with pytest.raises(UserError) as caught:
        scored(own(f"def f(trajectory, prompt): return {returned}"))
    assert f"prompt p, trajectory 0: {words}" in str(caught.value)


@pytest.mark.parametrize(
    "value", ["np.float32(0.5)", "torch.tensor(0.5)", "np.array([0.5])", "torch.tensor([0.5], requires_grad=True)"]
)
def test_parts_of_numpy_and_torch_are_numbers(own, value):
    """transformers PR #10632: what np.mean returns is no float. They were dropped."""
    returned = f"{{'score': {value}, 'style': {value}, 'hit': np.bool_(True), 'accuracy': np.int64(1)}}"
    t = scored(own(f"def f(trajectory, prompt): return {returned}"))
    assert t.reward == 0.5 and t.reward_parts == {"style": 0.5, "hit": 1.0, "accuracy": 1.0}
    json.dumps(t.to_dict())


def test_texts_and_what_is_not_known_are_no_parts_and_a_reason_is_one_short_line(own):
    """verl's own functions return a text `pred` beside the score; trl #4501: a part that does not apply is None."""
    returned = "{'score': 1, 'pred': '42', 'style': None, 'reason': 'half \\ud83d\\n' + 'x' * 900}"
    t = scored(own(f"def f(trajectory, prompt): return {returned}"))
    assert t.reward_parts == {} and t.reward_reason.startswith("half � xxx") and len(t.reward_reason) == 80


def test_the_scores_of_a_batch_are_a_list(own):
    for returned in ("'11'", "{'0': 1.0, '1': 2.0}", "[1.0]", "np.ones(3)"):
        with pytest.raises(UserError, match=r"returned \d scores for 2 samples from prompt p, .*; return a list, one"):
            scored(own(f"def f(trajectories, prompts): return {returned}"))
    assert scored(own("def f(trajectories, prompts): return torch.ones(2)")).reward == 1.0


# ---- context policies, forms, orders


@pytest.mark.parametrize(
    "body, words",
    [
        ("return 7", "the token ids of the new context are 7; they must be a list of integers"),
        ("return ['a']", "entry 0 is 'a'; it must be an integer"),
        ("return [10**9]", r"entry 0 is 1000000000; it must be from 0 to \d+"),
        ("return []", "returned no token ids; return None to go on"),
        ("return 'and now a note'", "and None or token ids after an answer, not str"),
        ("return {}[0]", r"failed \(KeyError: 0, in line 8 of"),
    ],
)
def test_a_context_policy_must_return_tokens_that_there_are(own, body, words):
    cfg = RolloutConfig(context=own(f"def f(evidence):\n    {body}"))
    with pytest.raises(UserError, match=words):
        try_context(cfg, CODEC)
    good = "return tuple(np.array(evidence.prompt.token_ids)) if evidence.turn.tool_calls else None"
    try_context(replace(cfg, context=own(f"def f(evidence):\n    {good}")), CODEC)
    asks = replace(
        cfg, context=own("def f(evidence):\n    return '\\ud83d note?' if evidence.turn.tool_calls else None")
    )
    try_context(asks, CODEC)


def test_a_form_and_an_order_must_be_one(own):
    with pytest.raises(UserError, match=r"protocol\.format=mine0\.py:f is 3; it must be a Form"):
        form_of(own("f = 3"))
    with pytest.raises(UserError, match=r"data\.order=mine1\.py:f is \[\] \(list\); it must be a PromptOrder"):
        make_order(own("def f(prompts, count, seed): return []"), [], 1, 0)


@pytest.mark.parametrize(
    "method, words",
    [
        ("def queue(self, n, c): return [0, 1]", "queue: an entry is 0; it must be a tuple"),
        (
            "def queue(self, n, c): return [(0, n + 1), (0, n + 2)]",
            r"queue returned 2 prompts; it must return 2 different",
        ),
        ("def queue(self, n, c): return [(9, n + 1)]", "the index of a prompt is 9; it must be from 0 to 3"),
        ("def queue(self, n, c): return []", "queue returned 0 prompts"),
        ("def queue(self, n, c): return [(1, n)]", "num_drawn behind prompt 1 is 0"),
        ("def queue(self, n, c): 1 / 0", "queue failed (ZeroDivisionError"),
        ("def add(self, groups): return {'order/a': math.nan}", "add: the metric 'order/a' is nan; it must be finite"),
        ("def add(self, groups): return None", "add: the returned value is None; it must be a dict"),
        ("def add(self, groups): self.state = {1, 2}; return {}", "add: `state` is no JSON"),
    ],
)
def test_an_order_must_draw_prompts_that_there_are(own, method, words):
    source = "class f(PromptOrder):\n    def __init__(self, p, n, s):\n"
    source += f"        super().__init__(len(p), n, s, option='n')\n\n    {method}"
    prompts = [Prompt(str(i), [], []) for i in range(4)]
    with pytest.raises(UserError) as caught:
        add_groups(make_order(own(source), prompts, 2, 0), [])
    assert str(caught.value).startswith("data.order: f.") and words in str(caught.value)


def test_an_order_of_some_prompts_must_say_which(own):
    """verl #2314 is for such samplers. The indices of the part were taken for those of all: others were drawn."""
    source = "class f(PromptOrder):\n    def __init__(self, p, n, s):\n        super().__init__(3, n, s, option='n')\n"
    prompts = [Prompt(str(i), [], []) for i in range(4)]
    with pytest.raises(UserError, match=r"mine0\.py:f knows 3 of the 4 prompts, but its `queue` does not say which; "):
        make_order(own(source), prompts, 2, 0)
    queue = "    def queue(self, n, c): return [(i + 1, after) for i, after in super().queue(n, c)]\n"
    order = make_order(own(source + queue), prompts, 2, 0)
    assert {index for step in range(4) for index, _ in order.queue(2 * step, 2)} == {1, 2, 3}


@pytest.mark.slow
def test_a_training_says_it_before_it_loads_a_model(tmp_path):
    """A credit that is too short trained silently: tokens without a number had the advantage 0."""
    world = build_toy_world(tmp_path)
    (world / "mine.py").write_text("def f(group, cfg): return {t.trajectory_id: [0.9] * 3 for t in group.trajectories}")
    done = try_script("train_rl.py", str(world / "config.yaml"), "--advantage.tree", f"{world}/mine.py:f", ranks=1)
    said = f"error: advantage.tree={world}/mine.py:f: the credits of the tokens of prompt made up, before the run, "
    assert done.code == 2 and f"{said}trajectory 0 are 3 numbers; they must be 12 numbers" in done.output
    assert "Traceback" not in done.output and "1 rank on the CPU" not in done.output
