"""Drafts on a real engine: the numbers of what stays, and what follows the cut; whole runs of train_rl.py."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers.fakes import EchoTool
from helpers.rollout_checks import assert_rollout_logprobs, teacher_forced
from helpers.runs import differing
from helpers.toy_run import build_toy_world, dumped, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from arpo.config.sections import EngineConfig
from arpo.engine import Engine
from arpo.options import BranchingConfig, RolloutConfig
from arpo.protocol import TagsCodec
from arpo.rollout import rollout
from arpo.sampling.drafts import Drafts
from arpo.tools.base import ToolRunner
from arpo.trajectory import Prompt, StopReason

CFG = RolloutConfig(
    group_size=6, max_response_tokens=300, max_result_tokens=60, answer_reserve_tokens=20, reuse_last_epoch=True
)
BRANCHING = BranchingConfig(num_initial_rollouts=4, weight=2.0, entropy_tokens=8)
ONE = SimpleNamespace(rank=0, world_size=1, together=lambda make: make())


@pytest.fixture(scope="module")
def parts(tiny_model_dir):
    """(engine, a function that does a rollout of these prompts, the prompts)"""
    codec = TagsCodec(AutoTokenizer.from_pretrained(tiny_model_dir))
    engine_cfg = EngineConfig(dtype="float32", kv_cache_gib=0.05, max_num_seqs=32)
    engine = Engine(str(tiny_model_dir), engine_cfg, max_model_len=400, seed=0)
    runner = ToolRunner({"search": EchoTool("search", "the book"), "python": EchoTool("python", "42")})
    messages = [{"role": "user", "content": "who wrote the book?"}]
    prompts = [Prompt(f"p{i}", messages, ["42"], token_ids=tuple(codec.render_prompt(messages))) for i in range(4)]

    def play(drafts=None, cfg=CFG, branching=BRANCHING, step=1, of=prompts):
        loop = drafts and drafts.loop
        return rollout(of, engine, runner, codec, cfg, branching, seed=1, step=step, make_loop=loop)

    try:
        yield engine, play, prompts
    finally:
        runner.close()
        engine.close()


def changed_model(tiny_model_dir, folder, scale: float):
    """A copy of the model with other weights, in this folder."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += scale * parameter.std() * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model


def kept_in(tmp_path, groups, cfg=CFG, name="drafts") -> Drafts:
    drafts = Drafts(tmp_path / name, cfg, {})
    drafts.add(1, groups, ONE)
    return drafts


def roots(groups):
    return [t for group in groups for t in group.trajectories if t.parent_id is None]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_policy_that_has_not_changed_takes_over_whole_trajectories(parts, tmp_path, temperature):
    """Scored and sampled tokens have the same numbers, at the rollout's temperature."""
    engine, play, _ = parts
    cfg = replace(CFG, temperature=temperature, group_size=4)
    before = play(cfg=cfg)
    num_sampled = engine.stats.generated_tokens
    after = play(kept_in(tmp_path, before, cfg), cfg=cfg)
    num_full = 0
    for old, new in zip(roots(before), roots(after), strict=True):
        is_full = len(old.token_ids) == cfg.max_response_tokens
        end, num_full = len(old.token_ids) - is_full, num_full + is_full
        assert new.reused_until == end and new.token_ids[:end] == old.token_ids[:end]
        assert new.rollout_logprobs[:end] == pytest.approx(old.rollout_logprobs[:end], abs=1e-4)
        assert new.stop_reason == old.stop_reason and len(new.turns) == len(old.turns)
        for turn, other in zip(new.turns[:-1], old.turns[:-1], strict=True):
            assert turn.token_entropies == pytest.approx(other.token_entropies, abs=1e-4)
    assert engine.stats.generated_tokens - num_sampled == num_full < len(roots(after))
    assert any(t.tool_calls for t in roots(after))


@pytest.mark.slow
def test_all_tokens_have_the_numbers_of_the_policy_that_has_changed(parts, tiny_model_dir, tmp_path):
    engine, play, _ = parts
    before = play()
    model = changed_model(tiny_model_dir, tmp_path / "changed", scale=0.03)
    try:
        engine.sync_weights(model.named_parameters())
        after = play(kept_in(tmp_path, before))
    finally:
        original = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
        engine.sync_weights(original.named_parameters())
    for t, logprobs in teacher_forced(tmp_path / "changed", after):
        assert_rollout_logprobs(t, logprobs, atol=1e-4)
        entropy = -(logprobs.exp() * logprobs).sum(-1)  # (T,)
        for turn in t.turns:
            head = entropy[turn.start : min(turn.end, turn.start + 8)]
            assert turn.token_entropies == pytest.approx(head.tolist(), abs=1e-4)
    cuts = [t for t in roots(after) if t.reused_until > 0 and sum(t.loss_mask[: t.reused_until]) < t.num_draft_tokens]
    by_name = {(t.prompt_id, t.trajectory_id): t for t in roots(before)}
    for t in cuts:
        old = by_name[t.prompt_id, t.trajectory_id]
        assert t.token_ids[: t.reused_until] == old.token_ids[: t.reused_until]
        assert t.rollout_logprobs[: t.reused_until] != old.rollout_logprobs[: t.reused_until]
    assert len(cuts) > 8 and len({t.text for t in roots(after)}) > 12
    assert any(t.parent_id is not None for group in after for t in group.trajectories)


@pytest.mark.slow
def test_the_token_at_the_cut_is_one_of_the_policy(parts, tiny_model_dir, tmp_path):
    """Drafts that were certain of their third token, which the policy is not: what comes in its place."""
    _, play, prompts = parts
    cfg = replace(CFG, group_size=256, max_response_tokens=24, answer_reserve_tokens=2, max_result_tokens=20)
    none = BranchingConfig(selector="none", num_initial_rollouts=256)
    [group] = play(cfg=replace(cfg, group_size=1), branching=none, of=prompts[:1])
    [t] = group.trajectories
    assert t.loss_mask[:4] == [1] * 4
    t.rollout_logprobs = [0.0 if place == 2 else -1e3 * m for place, m in enumerate(t.loss_mask)]
    group.trajectories = [replace(t, trajectory_id=str(number)) for number in range(256)]
    counts, model = Counter(), AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    drafts = kept_in(tmp_path, [group], cfg)
    for step in range(2, 6):
        [after] = play(drafts, cfg=cfg, branching=none, step=step, of=prompts[:1])
        counts.update(t.token_ids[2] for t in after.trajectories if t.reused_until == 2)
    with torch.no_grad():
        p = model(torch.tensor([[*prompts[0].token_ids, *t.token_ids[:2]]])).logits[0, -1].softmax(-1)  # (V,)
    total = sum(counts.values())
    assert total > 900  # the policy keeps the third token only as often as it would sample it
    assert p[t.token_ids[2]] < 0.1
    # total variation to p of `total` draws from p: its mean is about sum sqrt(p (1 - p) / total) / sqrt(2 pi)
    expected = float((p * (1 - p) / total).sqrt().sum()) / (2 * torch.pi) ** 0.5
    distance = sum(abs(counts[token] / total - float(p[token])) for token in range(len(p))) / 2
    assert distance < 1.3 * expected
    assert StopReason.ERROR not in {t.stop_reason for t in after.trajectories}


# ---- whole runs: 16 prompts, 4 a step, so the second epoch begins with step 5

SIZES = ("--run.num_steps", "9", "--run.validate_every", "0", "--run.save_every", "1", "--run.dump_every", "1",
         "--data.valid", "", "--rollout.group_size", "4", "--branching.num_initial_rollouts", "3",
         "--rollout.reuse_last_epoch", "True", "--optim.lr", "1e-3")  # fmt: skip
COUNTS = ("drafts/reused_tokens", "drafts/accepted_share", "drafts/whole_share", "tokens/sampled", "reward/mean")
KEYS = ("prompt_id", "trajectory_id", "token_ids", "rollout_logprobs", "num_draft_tokens", "reused_until")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return build_toy_world(tmp_path_factory.mktemp("world"))


def run(world, name: str, *flags: str, ranks: int = 1) -> list[dict]:
    return train(world, name, *SIZES, *flags, ranks=ranks)


@pytest.mark.slow
def test_a_run_reuses_from_the_second_epoch_on_and_goes_on_alike_from_a_checkpoint(world):
    whole = run(world, "whole")
    assert not any("drafts/reused_tokens" in row for row in whole[:4])
    assert all(row["drafts/reused_tokens"] > 0 and row["mismatch/kl"] < 1e-6 for row in whole[4:])
    run(world, "cut", "--run.num_steps", "5")
    run(world, "cut")
    assert differing(world / "runs" / "whole", world / "runs" / "cut") == []
    for name in ("whole", "cut"):  # the older of two checkpoints is of step 8, the second epoch's last
        files = sorted(path.name for path in (world / "runs" / name / "drafts").iterdir())
        assert files == [f"step_{step:06d}.0.zip" for step in range(5, 10)]
    assert [[row[key] for key in KEYS] for row in dumped(world, "whole", 7)] == [
        [row[key] for key in KEYS] for row in dumped(world, "cut", 7)
    ]
    roots = [t for t in dumped(world, "whole", 6) if t["parent_id"] is None]
    first = {(t["prompt_id"], t["trajectory_id"]): t for step in range(1, 5) for t in dumped(world, "whole", step)}
    assert len(roots) >= 12
    for t in roots:
        draft, end = first[t["prompt_id"], t["trajectory_id"]], t["reused_until"]
        if draft["parent_id"] is None and t["num_draft_tokens"]:
            assert t["token_ids"][:end] == draft["token_ids"][:end]


@pytest.mark.slow
def test_two_ranks_decide_what_one_does_whoever_samples_it(world):
    """The second epoch's prompts come to other ranks than in the first. Only its first step, and a small rate: what two
    ranks and one have trained differs by rounding, which may become another token."""
    flags = "--rollout.dispatch", "pull", "--run.num_steps", "5", "--optim.lr", "1e-4"
    alone, both = run(world, "alone", *flags), run(world, "both", *flags, ranks=2)
    assert [alone[4][name] for name in COUNTS] == pytest.approx([both[4][name] for name in COUNTS], rel=1e-3)
    rows, others = dumped(world, "alone", 5), dumped(world, "both", 5)
    for key in ("prompt_id", "trajectory_id", "token_ids", "num_draft_tokens", "reused_until"):
        assert [row[key] for row in rows] == [row[key] for row in others], key
    assert {row["sampled_by"] for row in others} == {0, 1}


@pytest.mark.slow
def test_ranks_that_share_an_engine_take_over_the_same(world):
    """Five steps: the last is the first of the second epoch."""
    rows = run(world, "team", "--engine.tensor_parallel", "2", "--run.num_steps", "5", ranks=2)
    assert rows[4]["drafts/reused_tokens"] > 0 and rows[4]["mismatch/abs"] < 1e-4
