"""Switches that would be ignored, or work against each other, are refused with the reason."""

import pytest

from arpo.config import load_config
from arpo.errors import UserError
from evaluate import EvalConfig
from train_rl import RLConfig

GAE = ["--advantage.kind", "gae"]


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--branching.selector", "none", "--branching.dynamic_budget", "True"], ["dynamic_budget needs branching"]),
        (["--branching.selector", "none", "--advantage.tree", "hard"], ["tree=hard needs branches"]),
        (["--critic.lr", "1e-4", "--critic.warmup_steps", "3"], ["critic.lr/warmup_steps", "grpo has no critic"]),
        (["--advantage.gamma", "0.9"], ["gamma", "advantage.kind=gae"]),
        ([*GAE, "--advantage.tree", "hard"], ["tree=hard", "gae", "tree=soft"]),
        ([*GAE, "--advantage.normalize_std", "False"], ["Dr.GRPO"]),
        ([*GAE, "--advantage.dead_groups", "drop"], ["dead_groups=drop", "keep"]),
        ([*GAE, "--advantage.gamma", "1.1"], ["gamma=1.1 must lie between 0 and 1"]),
        ([*GAE, "--advantage.lam", "-0.1"], ["lam=-0.1 must lie between 0 and 1"]),
        ([*GAE, "--critic.clip_value", "0"], ["clip_value=0.0"]),
        ([*GAE, "--critic.warmup_steps", "-1"], ["warmup_steps=-1"]),
        (["--loss.rollout_correction", "tis", "--loss.old_logprobs", "rollout"], ["correction=tis", "which is 1"]),
        (["--loss.rollout_correction", "mis", "--loss.old_logprobs", "rollout"], ["correction=mis", "which is 1"]),
        (["--loss.rollout_correction", "mis", "--loss.correction_low", "1.5"], ["correction_low=1.5", "enclose 1"]),
        (["--loss.kind", "cispo", "--loss.entropy_balanced_clipping", "True"], ["cispo", "loss.kind=ppo"]),
        (["--loss.balanced_clipping_tokens", "high_entropy"], ["needs loss.entropy_balanced_clipping"]),
        (["--loss.kl_coefficient", "-0.1"], ["kl_coefficient=-0.1"]),
        (["--loss.reference", "runs/sft"], ["loss.reference=runs/sft", "kl_coefficient is 0"]),
        (["--tools.search.read_pages", "3"], ["read_pages=3 x page_chars=3000", "max_result_tokens=1024", "raise it"]),
    ],
)  # fmt: skip
def test_a_contradiction_is_refused_with_its_reason(flags, words):
    with pytest.raises(UserError) as caught:
        load_config(RLConfig, ["--data.train", "x", *flags])
    assert "\n" not in str(caught.value) and all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    "flags",
    [
        [*GAE, "--critic.warmup_steps", "3", "--critic.path", "other", "--advantage.lam", "0.95"],
        ["--loss.kind", "gspo", "--loss.clip_low", "3e-4", "--loss.clip_high", "4e-4"],
        ["--loss.kl_coefficient", "0.01", "--loss.reference", "runs/sft", "--loss.kl_in", "reward"],
        ["--loss.rollout_correction", "tis", "--loss.entropy_coefficient", "-0.1"],
        ["--update.layout", "tree", "--model.attention", "flash_attention_2"],
        ["--advantage.tree", "hard", "--loss.kind", "cispo", "--loss.entropy_balanced_advantage", "True"],
        ["--tools.search.read_pages", "3", "--rollout.max_result_tokens", "2048"],
        ["--tools.search.read_pages", "3", "--tools.search.summarizer_url", "http://h/v1/chat/completions"],
    ],
)
def test_what_belongs_together_is_accepted(flags):
    load_config(RLConfig, ["--data.train", "x", *flags])


def test_an_evaluation_too_needs_room_for_the_pages_that_its_searches_read():
    read_pages = ["--tools.search.read_pages", "3"]
    with pytest.raises(UserError, match=r"read_pages=3 x page_chars=3000 .* rollout.max_result_tokens=1024 .*raise it"):
        load_config(EvalConfig, ["--eval.files", "x", *read_pages])
    load_config(EvalConfig, ["--eval.files", "x", *read_pages, "--rollout.max_result_tokens", "2048"])
    load_config(EvalConfig, ["--eval.regrade", "runs/eval", *read_pages])  # searches nothing


def test_critic_and_reference_default_to_the_policys_model_with_their_own_settings():
    cfg = load_config(RLConfig, ["--data.train", "x", "--model.path", "m", *GAE, "--critic.lr", "2e-5"])
    assert cfg.critic_model.path == cfg.reference_model.path == "m" and not cfg.reference_model.activation_checkpointing
    assert (cfg.critic_optim.lr, cfg.optim.lr, cfg.critic_optim.betas) == (2e-5, 1e-6, cfg.optim.betas)
