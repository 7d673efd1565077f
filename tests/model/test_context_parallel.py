"""Rows spread over real gloo ranks; the reference is one rank that has them whole, in float32."""

import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from helpers.models import assert_close_by_name, build, cfg_of, random_rows
from helpers.ranks import mesh_of_one, run_ranks

from arpo.batch import MicroBatch, collate, microbatches
from arpo.config.sections import ModelConfig
from arpo.errors import UserError
from arpo.model import load_policy
from arpo.model.context_parallel import local_shares
from arpo.options import AdvantageConfig, LossConfig
from arpo.ranks.ranks import make_group
from arpo.start.checks import check_parallel
from arpo.tree import tree_microbatches

pytestmark = pytest.mark.slow  # no config uses it
CPU = torch.device("cpu")
MAX_TOKENS = 44
ROWS = {"several": ((5, 9), (1, 4), (7, 13), (3, 1), (2, 30)), "one": ((4, 17),), "tree": ((6, 8), (6, 13), (6, 11))}


def micros_of(name: str, ranks) -> list[MicroBatch]:
    rows = random_rows(ROWS[name])
    if name == "tree":  # all share a prompt, the last two also what follows
        for row, origin in ((rows[1], rows[0]), (rows[2], rows[1])):
            row.prompt_ids[:] = origin.prompt_ids
        rows[2].response_ids[:7] = rows[1].response_ids[:7]
    cut = tree_microbatches if name == "tree" else microbatches
    return local_shares(cut(rows, ranks.data_rank, ranks.data_size, MAX_TOKENS), ranks.group)


def outcome(ranks, folder: str, num_parts: int, name: str) -> dict:
    """Loss, gradients and, by target token, what the head says of a batch whose rows are spread over `num_parts`."""
    ranks = replace(ranks, group=make_group(num_parts) if num_parts > 1 else None)
    cfg = cfg_of(folder, context_parallel=num_parts, recompute_every_n_layers=1)
    policy = load_policy(cfg, ranks.mesh, device=CPU)
    micros = micros_of(name, ranks)
    loss, logprobs, entropies, num_tokens = 0.0, [], [], 0
    for micro in micros:
        of_tokens, entropy = policy(micro)
        weights = torch.sin(micro.targets.float())  # every token counts, each differently
        part = ((weights * of_tokens + (0.5 - weights) * entropy) * micro.loss_mask).sum()
        (part * ranks.world_size).backward()
        loss += part.item()
        num_tokens += micro.num_loss_tokens
        logprobs += [of_tokens.detach()]
        entropies += [entropy.detach()]
    gradients = {n: p.grad.full_tensor().numpy() for n, p in policy.hf.named_parameters()}
    total, num_tokens = ranks.all_reduce_sum(loss, num_tokens)
    if ranks.data_size == 1:  # then all have the same micro-batches, and each token belongs to one of them
        for values in (*logprobs, *entropies):
            dist.all_reduce(values)
    return {"loss": total, "num_tokens": num_tokens, "gradients": gradients, "logprobs": logprobs,
            "entropies": entropies, "lengths": [micro.input_ids.shape[1] for micro in micros]}  # fmt: skip


def one_and_two(ranks, folders: list[str], num_parts: int) -> list[dict]:
    return [outcome(ranks, folder, num_parts, name) for folder in folders for name in ROWS]


KINDS = ("qwen2", "qwen3", "llama")  # 4 heads, 2 key-value heads
CASES = [f"{kind}, {name}" for kind in KINDS for name in ROWS]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """(ranks, parts) -> case -> this of rank 0"""
    folders = [str(build(kind, tmp_path_factory.mktemp(kind))) for kind in KINDS]
    runs = {key: run_ranks(key[0], one_and_two, folders, key[1]) for key in ((1, 1), (2, 2), (4, 2))}
    return {key: dict(zip(CASES, by_rank[0], strict=True)) for key, by_rank in runs.items()}


@pytest.mark.parametrize("layout", [(2, 2), (4, 2)], ids=["one group", "two groups"])
@pytest.mark.parametrize("case", CASES)
def test_loss_gradients_and_the_scores_of_each_token_are_those_of_one_rank(outcomes, case, layout):
    alone, spread = outcomes[1, 1][case], outcomes[layout][case]
    assert spread["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert spread["num_tokens"] == alone["num_tokens"]
    assert_close_by_name(spread["gradients"], alone["gradients"])
    if layout == (2, 2):
        torch.testing.assert_close(spread["logprobs"], alone["logprobs"], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(spread["entropies"], alone["entropies"], atol=1e-5, rtol=1e-5)
        assert spread["lengths"] == [-(-n // 2) for n in alone["lengths"]], "half of the tokens, rounded up"


def test_without_a_group_micro_batches_stay_as_they_are():
    micros = [collate(random_rows())]
    assert local_shares(micros, None) is micros


# ------------------------------------------------------------------------------------------------------ what is refused


def test_more_ranks_than_key_value_heads_are_refused_with_what_is_possible(tiny_model_dir):
    with mesh_of_one() as mesh, pytest.raises(UserError, match=r"4 heads and 2 key-value heads .* allows 1, 2"):
        load_policy(cfg_of(tiny_model_dir, context_parallel=4), mesh, device=CPU)


def test_ranks_that_are_left_over_are_refused():
    with mesh_of_one(), pytest.raises(UserError, match=r"context_parallel=2 does not divide the 1 ranks"):
        make_group(2)


@pytest.mark.parametrize(
    "advantage, loss, words",
    [
        (AdvantageConfig(kind="gae"), LossConfig(), r"advantage\.kind=gae"),
        (AdvantageConfig(), LossConfig(kind="gspo"), r"loss\.kind=gspo"),
        (AdvantageConfig(), LossConfig(aggregation="sequence_mean_token_sum"), r"loss\.aggregation"),
        (AdvantageConfig(), LossConfig(kl_coefficient=0.1, kl_in="reward"), r"loss\.kl_in=reward"),
    ],
)
def test_what_needs_whole_rows_is_refused_with_parts(advantage, loss, words):
    assert not [*check_parallel(ModelConfig(), advantage, loss)]
    [message] = check_parallel(ModelConfig(context_parallel=2), advantage, loss)
    assert re.search(words, message)
