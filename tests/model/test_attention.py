"""Attention row by row, against every score written down and masked."""

import sys
import types

import pytest
import torch
from helpers.models import build_tiny_model, random_rows
from helpers.ranks import mesh_of_one
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from arpo.batch import RowPaths, collate
from arpo.model import load_policy
from arpo.model.attention import attend_by_flash, attend_by_sdpa
from arpo.run_options import ModelConfig
from arpo.tree import collate_tree

CPU = torch.device("cpu")
HEADS, KV_HEADS, SIZE = 4, 2, 8
TREE = RowPaths((5, 1, 3), (5, 4, 6), torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 5, 0, 1, 5, 6, 7, 8]))
PACKED = RowPaths((4, 1, 3), (4, 1, 3))


def seen_by(paths: RowPaths, window: int | None) -> torch.Tensor:
    """(N, N) bool, token by token: of its row's keys up to itself the last `window`."""
    num_tokens = sum(paths.num_queries)
    keys = torch.arange(num_tokens) if paths.keys is None else paths.keys
    seen, query = torch.zeros(num_tokens, num_tokens, dtype=torch.bool), 0
    for num_own, path in zip(paths.num_queries, keys.split(paths.num_keys), strict=True):
        for i in range(num_own):
            end = len(path) - num_own + i + 1
            seen[query, path[max(0, end - (window or end)) : end]] = True
            query += 1
    return seen


def random_heads(num_tokens: int, dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, num_tokens, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def all_scores(query, key, value, seen, scale) -> torch.Tensor:
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (key, value))
    scores = (query @ key.transpose(2, 3)) * scale
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value).transpose(1, 2)


def varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, *, dropout_p, softmax_scale, causal, window_size):
    """flash-attn's contract, from its documentation: the causal mask is aligned to the bottom right corner."""
    assert dropout_p == 0 and causal and cu_q.dtype == cu_k.dtype == torch.int32
    assert max_q == cu_q.diff().max() and max_k == cu_k.diff().max()
    outs = []
    for (q0, q1), (k0, k1) in zip(cu_q.unfold(0, 2, 1).tolist(), cu_k.unfold(0, 2, 1).tolist(), strict=True):
        places = torch.arange(k1 - k0), torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0)
        seen = places[0] <= places[1]
        if window_size[0] >= 0:
            seen &= places[0] >= places[1] - window_size[0]
        part = [x[a:b].transpose(0, 1)[None] for x, a, b in ((q, q0, q1), (k, k0, k1), (v, k0, k1))]
        outs.append(all_scores(*part, seen, softmax_scale)[0])
    return torch.cat(outs)


@pytest.mark.parametrize("attend", [attend_by_sdpa, attend_by_flash])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("paths", [TREE, PACKED], ids=["tree", "packed"])
def test_each_token_attends_to_its_row_up_to_itself(attend, window, paths, monkeypatch):
    """The real flash-attn: tests/test_gpu.py."""
    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(flash_attn_varlen_func=varlen_func))
    heads = random_heads(sum(paths.num_queries))
    weights = torch.randn(1, sum(paths.num_queries), HEADS, SIZE, generator=torch.Generator().manual_seed(1))
    outcomes = []
    for out in (
        attend(None, *heads, None, paths=paths.for_one_pass(), scaling=0.3, sliding_window=window)[0],
        all_scores(*heads, seen_by(paths, window), 0.3),
    ):
        gradients = torch.autograd.grad((out * weights).sum(), heads)
        outcomes.append([out.detach(), *gradients])
    for ours, expected in zip(*outcomes, strict=True):
        assert ours.shape == expected.shape
        torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)


def test_gradients_of_a_token_that_many_rows_see_are_summed_exactly():
    """In bfloat16 the 300th contribution would no longer move the sum of the others."""
    num_rows = 400
    keys = torch.stack([torch.zeros(num_rows, dtype=torch.long), torch.arange(1, num_rows + 1)], dim=1).flatten()[1:]
    paths = RowPaths((2,) + (1,) * (num_rows - 1), (2,) * num_rows, torch.cat([torch.tensor([0]), keys]))
    query, key, value = random_heads(num_rows + 1, torch.bfloat16)
    out, _ = attend_by_sdpa(None, 0 * query, key, value, None, paths=paths)  # all keys count the same
    [gradient] = torch.autograd.grad(out.sum(), value)
    expected = (1 + num_rows / 2) * HEADS / KV_HEADS  # its own row 0 sees it alone once, and all rows by half
    assert gradient[0, 0, 0, 0].item() == pytest.approx(expected, rel=2**-8)


def test_layers_share_the_masks_of_a_pass_and_passes_do_not():
    first, second = TREE.for_one_pass(), TREE.for_one_pass()
    heads = random_heads(9)
    for _ in range(2):
        attend_by_sdpa(None, *heads, None, paths=first)
    assert set(first.masks) == {(1, None), (2, None)} and not second.masks and not TREE.masks
    assert first.mask(1, None, heads[0]) is first.masks[1, None]


def test_what_a_layer_may_ask_for_and_rows_do_not_know_is_refused():
    with pytest.raises(AssertionError, match="does not know softcap"):
        attend_by_sdpa(None, *random_heads(8), None, paths=PACKED, softcap=30.0)


@pytest.fixture(scope="module")
def sliding(tmp_path_factory):
    """A model whose second layer sees 4 tokens back."""
    folder = build_tiny_model(tmp_path_factory.mktemp("sliding"))
    config = AutoConfig.from_pretrained(folder)
    config.use_sliding_window, config.sliding_window = True, 4
    config.layer_types = ["full_attention", "sliding_attention"] * (config.num_hidden_layers // 2)
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("cut", [collate, collate_tree], ids=["packed", "tree"])
def test_sliding_windows_are_those_of_transformers(sliding, cut):
    rows = random_rows(((6, 8), (6, 13)))
    rows[1].prompt_ids[:] = rows[0].prompt_ids
    micro = cut(rows, range(2))
    hf = AutoModelForCausalLM.from_pretrained(sliding, attn_implementation="sdpa", dtype=torch.float32)
    with mesh_of_one() as mesh, torch.no_grad():
        cfg = ModelConfig(str(sliding), compute_dtype="float32", activation_checkpointing=False)
        logprobs, _ = load_policy(cfg, mesh, device=CPU)(micro)
        for b, row_id in enumerate(micro.row_ids):
            row = rows[row_id]
            ids = torch.cat([torch.as_tensor(row.prompt_ids), torch.as_tensor(row.response_ids)])
            of_all = F.log_softmax(hf(input_ids=ids[None]).logits[0, :-1], dim=-1)
            expected = of_all.gather(1, ids[1:, None])[len(row.prompt_ids) - 1 :, 0] * torch.as_tensor(row.loss_mask)
            torch.testing.assert_close(logprobs[b, : len(expected)], expected.float(), atol=1e-5, rtol=1e-4)
