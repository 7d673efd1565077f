"""Settings without effect, and those that work against each other, are refused with the reason."""

import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
from helpers.vllm_serve import SERVER

from arpo.config.facts import Between, Decides, Needs, facts_of, ignored, leaves, of_kind, out_of_range
from arpo.config.keys import field_names
from arpo.errors import UserError
from arpo.options import AdvantageConfig, BranchingConfig, LossConfig, RolloutConfig
from arpo.start.checks import warnings_of
from arpo.start.load import load_config
from evaluate import EvalConfig
from extras.ablation.config import AblationConfig
from train_rl import RLConfig
from train_sft import SFTConfig

ROOTS = (SFTConfig, RLConfig, EvalConfig, AblationConfig)
MINIMUM = {
    SFTConfig: {"data.train": "x"},
    RLConfig: {"data.train": "x"},
    EvalConfig: {"eval.files": ("x",)},
    AblationConfig: {"ablation.train": ("x",), "ablation.eval": ("x",)},
}
GAE = ["--advantage.kind", "gae"]
KL = ["--loss.kl_coefficient", "0.1", "--loss.kl_in", "reward"]
OWN = f"{__file__}:defaults"
CARRY, TIS = ["--rollout.carry_over"], ["--loss.rollout_correction", "tis"]
NOTES = ["--rollout.context", "summary"]
READS = ["--tools.search.backend", "serper", "--tools.search.read_pages"]


def defaults(root: type) -> dict[str, object]:
    return leaves({f.name: f.default_factory() if callable(f.default_factory) else f.default for f in fields(root)})


KNOBS = {key for root in ROOTS for key, kind in field_names(root).items() if kind != "section"}
FACTS = {knob: facts for root in ROOTS for knob, facts in facts_of(root).items()}


def needs_of(knob: str) -> list[Needs]:
    return [need for need in of_kind(Needs, FACTS[knob]) if need.owner]


NEEDS = [need for knob in sorted(KNOBS) for need in needs_of(knob)]


def test_all_that_the_facts_name_exists_and_they_give_a_value_under_which_each_knob_has_its_effect():
    assert FACTS.keys() == KNOBS
    assert {need.owner for need in NEEDS} <= KNOBS
    assert {decides.when[0] for facts in FACTS.values() for decides in of_kind(Decides, facts) if decides.when} <= KNOBS

    for need in NEEDS:
        assert need.examples and all(need.is_met(value) for value in need.examples), need.wanted()


# ---- each knob that needs something: changed while what it needs is off, and while it is on
# All values follow from the facts, so that a new knob needs no line here.

WORDS = {"FILE": "x", "URL": "http://h/v1", "FILE.py:NAME=ADDRESS": f"{SERVER}=http://h"}
"""A value for each word that stands for one in the facts."""
GENERAL = {  # values that a setting of a type may have
    bool: (False, True),
    int: (0, 1, 5),
    float: (0.0, 0.25, 0.5, 1.0),
    str: ("", OWN, "x", "{}", "hard", WORDS["FILE.py:NAME=ADDRESS"]),
    tuple: ((), ("format=1",), (f"{OWN}=1",)),
}


def filled_in(value: object) -> object:
    return WORDS.get(value, value) if isinstance(value, str) else value


def values_of(root: type, knob: str) -> list[object]:
    """Values that a knob may have: those that the facts name, those of its type, and others of a number near it."""
    named = [value for need in NEEDS if need.owner == knob for value in (*need.examples, *need.not_in)]
    default = defaults(root)[knob]
    near = [default + 1, default / 2] if type(default) in (int, float) else []
    kind = next((kind for kind in GENERAL if isinstance(default, kind)), float)  # None: of a number that may be missing
    return [filled_in(value) for value in (*choices_of(root, knob), *named, *near, *GENERAL[kind])]


def can_be_built(root: type, settings: dict[str, object]) -> bool:
    try:
        return not out_of_range(build(root, settings))
    except (ValueError, UserError, ExceptionGroup):
        return False


def another(root: type, knob: str, settings: dict[str, object], fits: Callable[[object], bool]) -> dict[str, object]:
    """These settings and the first value of a knob that fits, and with which they make a config."""
    found = ({**settings, knob: value} for value in values_of(root, knob) if fits(value))
    return next(settings for settings in found if can_be_built(root, settings))


def choices_of(root: type, knob: str) -> tuple:
    """The values of a Literal; () for other types."""
    *sections, name = knob.split(".")
    for section in sections:
        root = get_type_hints(root)[section]
    hint = get_type_hints(root)[name]
    return get_args(hint) if get_origin(hint) is Literal else ()


def build(root: type, settings: dict[str, object]) -> object:
    """The config with these settings, past the command line, which would take a second each."""

    def filled(section: object, prefix: str) -> object:
        inner = {f.name: getattr(section, f.name) for f in fields(section)}
        for name, value in inner.items():
            key = f"{prefix}{name}"
            inner[name] = filled(value, f"{key}.") if is_dataclass(value) else settings.get(key, value)
        return replace(section, **inner)

    sections = {f.name: f.default_factory() if callable(f.default_factory) else f.default for f in fields(root)}
    return root(**{name: filled(s, f"{name}.") if is_dataclass(s) else s for name, s in sections.items()})


RANGES = sorted((root.__name__, knob) for root in ROOTS for knob in defaults(root) if of_kind(Between, FACTS[knob]))


@pytest.mark.parametrize("name, knob", RANGES)
def test_a_number_is_refused_just_beyond_the_ends_of_its_range_and_taken_at_them(name, knob):
    root = next(root for root in ROOTS if root.__name__ == name)
    for span in of_kind(Between, FACTS[knob]):
        for end, beyond in ((span.low, span.low - 1), (span.high, span.high + 1)):
            if not math.isinf(end):
                assert f"{knob}={end} must" not in said_of(root, MINIMUM[root] | {knob: end})
                assert knob.rpartition(".")[2] in said_of(root, MINIMUM[root] | {knob: beyond})


def said_of(root: type, settings: dict[str, object]) -> str:
    """What a config with these settings is told about its numbers."""
    try:
        return out_of_range(build(root, settings))
    except (ValueError, UserError, ExceptionGroup) as error:  # by a check of its section
        return f"{error} {getattr(error, 'exceptions', '')}"


REFUSED = [(RLConfig, "rollout.top_p"), (EvalConfig, "rollout.dispatch")]
"""By the script itself: RL refuses temperature 0, and an evaluation any order."""
CASES = sorted(
    (root.__name__, knob, need.owner)
    for root in ROOTS
    for knob in defaults(root)
    for need in needs_of(knob)
    if need.owner in defaults(root) and (root, knob) not in REFUSED
)


def needed(root: type, knob: str) -> dict[str, object]:
    """Settings under which the knob has its effect: what it needs, and what that needs."""
    settings: dict[str, object] = {}
    for need in needs_of(knob):
        if need.owner in defaults(root):
            settings |= needed(root, need.owner) | {need.owner: filled_in(need.examples[0])}
    return settings


@pytest.mark.parametrize("name, knob, owner", CASES)
def test_a_knob_is_refused_while_what_it_needs_is_off_and_accepted_while_it_is_on(name, knob, owner):
    root = next(root for root in ROOTS if root.__name__ == name)
    default = defaults(root)[knob]
    [need] = [need for need in needs_of(knob) if need.owner == owner]
    free = (OWN,) if need.unless_custom else ()
    on = another(root, knob, MINIMUM[root] | needed(root, knob), fits=lambda value: value not in (default, *free))
    assert ignored(build(root, on)) == []
    off = another(root, owner, on, fits=lambda value: not need.is_met(value))
    assert any(one.knob == knob and f"is ignored unless {owner}" in one.message for one in ignored(build(root, off)))


def test_a_custom_tree_credit_needs_no_branches():
    """verl #7244 and SkyRL #201 want rewards by turn, with plain GRPO."""
    settings = MINIMUM[RLConfig] | {"branching.selector": "none", "advantage.tree": OWN}
    assert ignored(build(RLConfig, settings)) == []


@pytest.mark.parametrize(
    "flags, words",
    [
        # the eight that the review found to be accepted
        (["--run.seed", str(2**32)], ["run.seed=4294967296 must lie between 0 and 4294901760"]),
        (["--run.seed", "-1"], ["run.seed=-1 must lie between 0 and"]),
        (
            ["--branching.selector", "aepo", "--branching.compat", "upstream", "--branching.base", "0.4"],
            ["branching.base=0.4 is ignored by aepo's released gate"],
        ),
        (["--loss.kind", "reinforce", "--loss.clip_low", "0.1"], ["clip_low=0.1", "loss.kind=ppo, gspo or cispo"]),
        (["--loss.correction_high", "3"], ["correction_high=3.0", "loss.rollout_correction=tis, mis, sequence_tis"]),
        (["--loss.rollout_correction", "mis", "--loss.correction_low", "1.5"], ["correction_low=1.5", "enclose 1"]),
        (["--loss.kind", "cispo", "--loss.entropy_balanced_clipping", "True"], ["it is cispo", "loss.kind=ppo"]),
        (
            ["--model.context_parallel", "2", "--loss.rollout_correction", "geometric_mis"],
            ["context_parallel=2 cannot go with loss.rollout_correction=geometric_mis"],
        ),
        (
            ["--model.context_parallel", "2", "--loss.kind", "gspo", "--loss.ratio_over", "turn"],
            ["context_parallel=2 cannot go with loss.kind=gspo"],
        ),
        (["--loss.reference", "runs/sft"], ["loss.reference=runs/sft", "loss.kl_coefficient is above 0"]),
        # and those of the review after it
        (["--loss.dual_clip", "1"], ["loss.dual_clip=1.0 must be above 1"]),
        (["--loss.kl_coefficient", "1", "--loss.kl_estimator", "k1"], ["k1 does nothing in the loss", "kl_in=reward"]),
        (
            ["--advantage.dead_groups", "drop", "--loss.kl_coefficient", "0.1", "--loss.kl_in", "reward"],
            ["dead_groups=drop is ignored unless loss.kl_in=loss (it is reward)"],
        ),
        (["--branching.expansion_rounds", "3"], ["expansion_rounds=3", "tree_grpo, at2po or top_h"]),
        (["--branching.selector", "at2pa"], ["did you mean 'at2po'", "none, tree_grpo, at2po, top_h"]),
        (["--advantage.dead_groups", "resample", *KL], ["dead_groups=resample needs the rewards", "kl_in=reward"]),
        (["--advantage.dead_groups", "drop", "--advantage.max_resample", "3"], ["=resample (it is drop)"]),
        (["--engine.quantization", "fp8"], ["samples from another policy", "loss.rollout_correction=tis"]),
        # a reward of several terms
        (["--reward.terms", "answr=1"], ["did you mean 'answer'", "use one of answer, format", "FILE.py:NAME"]),
        (["--reward.terms", "answer"], ["'answer' is not of the form NAME=WEIGHT, like answer=1"]),
        (["--reward.terms", "answer=much"], ["'answer=much' is not of the form NAME=WEIGHT"]),
        (["--reward.terms", "answer=1", "answer=2"], ["answer stands there twice"]),
        (["--reward.terms", "answer=1", "overlong=1"], ["has overlong, but reward.overlong_buffer_tokens=0; set it"]),
        (["--reward.overlong_buffer_tokens", "9"], ["is ignored unless reward.terms=overlong=1 (it is empty)"]),
        (["--reward.terms", "overlong=1", "--reward.overlong_buffer_tokens", "4096"], ["4096 must be below rollout."]),
        (["--reward.terms", "answer=1", "--reward.file", OWN], ["defaults is ignored unless", "FILE.py:FUNCTION="]),
        (["--branching.spill", "True"], ["'branching.spill' is now gone (CHANGELOG.md says why); drop it"]),
        (["--judge.url", "http://h"], ["'judge.url' is now an object of your own, FILE.py:NAME in reward.terms"]),
        (["--reward.terms", "judge=1"], ["reward.terms='judge' is unknown; ", "or FILE.py:NAME"]),
        # groups that go on under a newer policy
        ([*CARRY, "1"], ["rollout.carry_over=1 cannot go with loss.rollout_correction=none; set it to tis or mis"]),
        ([*CARRY, "1", *TIS, "--advantage.dead_groups", "resample"], ["dead_groups=resample; set it to drop or keep"]),
        ([*CARRY, "1", *TIS, "--engine.tensor_parallel", "2"], ["engine.tensor_parallel=2; set it to 1"]),
        ([*CARRY, "1", *TIS, "--loss.old_logprobs", "rollout"], ["rollout_correction=tis is ignored", "=recompute"]),
        ([*NOTES, "--rollout.max_trajectory_tokens", "5000"], ["tokens=5000 must be more than the 5632"]),
        ([*NOTES, "--update.max_tokens_per_microbatch", "9000"], ["16384", "at most update.max_tokens_per_micro"]),
        ([*NOTES, "--rollout.note_tokens", "256"], ["=256 has no room for rollout.note_tokens=256"]),
        ([*NOTES, "--rollout.context_tokens", "3840"], ["context_tokens=3840 is never exceeded", "= 3840; lower it"]),
        ([*NOTES, "--reward.terms", "overlong=1", "--reward.overlong_buffer_tokens", "9"], ["overlong counts the tok"]),
        ([*READS, "3"], ["read_pages=3 x page_chars=3000", "max_result_tokens=1024", "raise it"]),
        # what vLLM does not sample with; hiyouga/LlamaFactory#10709 makes a top_p of 0 a 1, silently
        (["--rollout.temperature", "0.005"], ["temperature=0.005 is below 0.01, the lowest", "; set 0 (greedy)"]),
        (["--rollout.temperature", "2.5"], ["rollout.temperature=2.5 must lie between 0 and 2"]),
        (["--rollout.top_p", "0"], ["rollout.top_p=0.0 keeps no token; 1 = off"]),
    ],
)  # fmt: skip
def test_a_contradiction_is_refused_with_its_reason(flags, words):
    with pytest.raises(UserError) as caught:
        load_config(RLConfig, ["--data.train", "x", *flags])
    assert "\n" not in str(caught.value) and all(word in str(caught.value) for word in words), caught.value


def test_one_message_names_all_contradictions_with_a_line_for_each():
    flags = ["--rollout.answer_reserve_tokens", "9000", "--update.num_prompts_per_minibatch", "7", *CARRY, "1"]
    words = ["minibatch=7", "answer_reserve_tokens=9000 must lie between", "carry_over=1 cannot go with"]
    with pytest.raises(UserError) as caught:
        load_config(RLConfig, ["--data.train", "x", *flags])
    lines = str(caught.value).splitlines()
    assert len(lines) == len(words) and all(word in line for word, line in zip(words, lines, strict=True)), lines


def test_one_message_names_all_numbers_that_are_out_of_range():
    wrong = "--loss.clip_low", "-0.1", "--optim.max_grad_norm", "-1", "--tools.search.top_k", "-1"
    with pytest.raises(UserError) as error:
        load_config(RLConfig, ["--data.train", "x", *wrong])
    named = ("clip_low=-0.1", "max_grad_norm=-1.0", "tools.search.top_k=-1")
    assert all(f"{one} must be at least 0" in str(error.value) for one in named) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "flags",
    [
        [*GAE, "--critic.warmup_steps", "3", "--critic.path", "other", "--advantage.lam", "0.95"],
        ["--loss.kind", "gspo", "--loss.clip_low", "3e-4", "--loss.clip_high", "4e-4"],
        ["--loss.kl_coefficient", "0.01", "--loss.kl_in", "reward", "--loss.kl_estimator", "k1"],
        ["--loss.kl_coefficient", "0.01", "--loss.reference", "runs/sft", "--loss.kl_estimator", "k2"],
        ["--loss.rollout_correction", "tis", "--loss.entropy_coefficient", "-0.1", "--loss.dual_clip", "None"],
        ["--update.layout", "tree", "--model.attention", "flash_attention_2"],
        ["--advantage.tree", "node_parent", "--loss.kind", "gspo", "--loss.ratio_over", "turn"],
        ["--advantage.normalize", "batch", "--advantage.tree", "hard", "--loss.rollout_correction", "sequence_tis"],
        ["--advantage.tree", "hard", "--loss.kind", "cispo", "--loss.entropy_balanced_advantage", "True"],
        ["--branching.selector", "at2po", *KL, "--branching.expansion_rounds", "3", "--advantage.tree", "hard"],
        ["--branching.selector", "at2po", "--advantage.dead_groups", "resample", "--advantage.max_resample", "3"],
        [*READS, "3", "--rollout.max_result_tokens", "2048"],
        ["--reward.terms", "answer=1", "overlong=0.5", f"{OWN}=-0.2", "--reward.overlong_buffer_tokens", "512"],
        [*READS, "3", "--tools.search.summarizer_url", "http://h/v1/chat/completions"],
    ],
)
def test_what_belongs_together_is_accepted(flags):
    load_config(RLConfig, ["--data.train", "x", *flags])


def test_an_evaluation_too_needs_room_for_the_pages_that_its_searches_read():
    read_pages = [*READS, "3"]
    with pytest.raises(UserError, match=r"read_pages=3 x page_chars=3000 .* rollout.max_result_tokens=1024 .*raise it"):
        load_config(EvalConfig, ["--eval.files", "x", *read_pages])
    load_config(EvalConfig, ["--eval.files", "x", *read_pages, "--rollout.max_result_tokens", "2048"])
    load_config(EvalConfig, ["--eval.regrade", "runs/eval", *read_pages])  # searches nothing


def test_critic_and_reference_default_to_the_policys_model_with_their_own_settings():
    cfg = load_config(RLConfig, ["--data.train", "x", "--model.path", "m", *GAE, "--critic.lr", "2e-5"])
    assert cfg.critic_model.path == cfg.reference_model.path == "m" and not cfg.reference_model.recompute_every_n_layers
    assert (cfg.critic_optim.lr, cfg.optim.lr, cfg.critic_optim.betas) == (2e-5, 1e-6, cfg.optim.betas)


def test_a_kind_of_ones_own_is_not_judged_as_gae_or_grpo():
    """A loss and an estimator may read any knob of their section; but no critic is loaded."""
    for knob in ("loss.clip_low", "loss.dual_clip", "advantage.normalize"):
        assert needs_of(knob)[0].is_met("mine.py:f")
    assert not needs_of("critic.lr")[0].is_met("mine.py:f")


def test_a_group_of_one_without_a_critic_is_said():
    one, critic, others = RolloutConfig(group_size=1), AdvantageConfig(kind="gae"), (BranchingConfig(), LossConfig())
    [warning] = warnings_of(one, others[0], AdvantageConfig(), others[1])
    assert warning.startswith("warning: rollout.group_size=1: ")
    assert not [*warnings_of(one, others[0], critic, others[1])]
    assert not [*warnings_of(RolloutConfig(), others[0], AdvantageConfig(), others[1])]


@pytest.mark.parametrize(
    ("selector", "num_roots", "kind", "is_said"),
    [("top_h", 1, "grpo", True), ("top_h", 2, "grpo", False), ("at2po", 1, "grpo", False), ("top_h", 1, "gae", False)],
)
def test_a_first_turn_that_all_trajectories_share_is_said(selector, num_roots, kind, is_said):
    branching = BranchingConfig(selector=selector, num_initial_rollouts=num_roots)
    said = [*warnings_of(RolloutConfig(), branching, AdvantageConfig(kind=kind), LossConfig())]
    assert ["first turn" in warning for warning in said] == [True] * is_said


def test_a_half_chosen_aepo_says_what_is_missing():
    aepo, whole = BranchingConfig(selector="aepo", dynamic_budget=True), {"entropy_balanced_clipping": True}
    rollout, advantage = RolloutConfig(), AdvantageConfig()
    assert not [*warnings_of(rollout, aepo, advantage, LossConfig(entropy_balanced_advantage=True, **whole))]
    [warning] = warnings_of(rollout, BranchingConfig(selector="aepo"), advantage, LossConfig(**whole))
    assert "without branching.dynamic_budget, loss.entropy_balanced_advantage; " in warning
    assert "configs/aepo.yaml" in warning and "\n" not in warning
