"""Attention row by row, against every score written down and masked. In whole models: test_families.py."""

import contextlib
import sys
import types
from dataclasses import replace

import pytest
import torch
from fake_gpu.fake_cuda import CUDA, fake_cuda
from fake_gpu.flash_kernels import flash_kernels
from helpers.models import random_rows
from torch.nn import functional as F

from arpo.batch import RowPaths
from arpo.config.sections import ModelConfig
from arpo.errors import UserError
from arpo.model import load_policy
from arpo.model.attention import (
    attend_by_flash_attn,
    attend_by_sdpa,
    attend_by_varlen,
    attention_backend,
    register,
    varlen_groups_heads,
    with_rows_only,
)
from arpo.tree import collate_tree

CPU = torch.device("cpu")
HEADS, KV_HEADS, SIZE = 4, 2, 8
TREE = RowPaths((5, 1, 3), (5, 4, 6), torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 5, 0, 1, 5, 6, 7, 8]))
PACKED = RowPaths((4, 1, 3), (4, 1, 3))
ALONE = RowPaths((1,), (1,))
"""An empty micro-batch"""
PLAIN = {"scale": None, "window": None}


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


@pytest.mark.parametrize("attend", [attend_by_sdpa, attend_by_varlen, attend_by_flash_attn])
@pytest.mark.parametrize("window", [None, 1, 2, 20])
@pytest.mark.parametrize("paths", [TREE, PACKED, ALONE], ids=["tree", "packed", "alone"])
@pytest.mark.parametrize("device", ["cpu", "pretended CUDA"])
def test_each_token_attends_to_its_row_up_to_itself(attend, window, paths, device):
    """The real kernels: tests/test_gpu_attention.py."""
    heads = random_heads(sum(paths.num_queries))
    weights = torch.randn(1, sum(paths.num_queries), HEADS, SIZE, generator=torch.Generator().manual_seed(1))
    expected = outcome(all_scores(*heads, seen_by(paths, window), 0.3), heads, weights)
    with flash_kernels(torch.float32), fake_cuda() if device != "cpu" else contextlib.nullcontext():
        if device != "cpu":
            heads = [x.detach().to(CUDA).requires_grad_() for x in heads]
            weights, paths = weights.to(CUDA), paths.to(CUDA)
        out = attend(*heads, paths.for_one_pass(), scale=0.3, window=window)
        ours = [x.cpu() for x in outcome(out, heads, weights)]
    for part, expected_part in zip(ours, expected, strict=True):
        assert part.shape == expected_part.shape
        torch.testing.assert_close(part, expected_part, atol=1e-6, rtol=1e-5)


def outcome(out, heads, weights) -> list[torch.Tensor]:
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), heads)]


def test_before_torch_2_12_varlen_attn_has_no_grouped_heads(monkeypatch):
    """Then it gets key-value heads as often as queries share them, and the same comes out."""
    heads, calls = random_heads(9), []

    def of_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
                window_size=(-1, -1)):  # fmt: skip
        assert query.shape[1] == key.shape[1] == value.shape[1]
        calls.append(key.shape)
        return varlen.varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale,
                                  window_size=window_size)  # fmt: skip

    with flash_kernels(torch.float32):
        from torch.nn.attention import varlen

        expected = attend_by_varlen(*heads, TREE, **PLAIN)
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", types.SimpleNamespace(varlen_attn=of_2_11))
        varlen_groups_heads.cache_clear()
        ours = attend_by_varlen(*heads, TREE, **PLAIN)
        varlen_groups_heads.cache_clear()
    assert len(calls) == 1
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("attend", [attend_by_varlen, attend_by_flash_attn])
def test_a_layer_need_not_wait_for_the_gpu(attend):
    """Where the rows begin goes to the GPU with the micro-batch, not with each layer."""
    with fake_cuda() as stalls, flash_kernels(torch.float32):
        heads, paths = [x.detach().to(CUDA) for x in random_heads(9)], TREE.to(CUDA)
        uploads = stalls.uploads.total()
        attend(*heads, paths, **PLAIN)
        assert not stalls.waits and stalls.uploads.total() == uploads


def test_padded_rows_stay_on_their_device():
    with fake_cuda():
        for paths, keys in ((PACKED, None), (TREE, [*TREE.keys.tolist(), 9, 10])):
            padded = paths.to(CUDA).padded(2)
            assert padded.query_starts.is_cuda and padded.key_starts.is_cuda
            assert padded.query_starts.tolist() == [*paths.query_starts.tolist(), paths.query_starts[-1] + 1,
                                                    paths.query_starts[-1] + 2]  # fmt: skip
            assert (padded.keys if keys is None else padded.keys.tolist()) == keys


@pytest.mark.parametrize(
    "dtype, mask, heads", [("float32", 0, 4), ("float32", 1, 4), ("bfloat16", 0, 2), ("bfloat16", 1, 4)]
)
def test_a_gpu_gets_key_value_heads_that_one_of_its_kernels_takes(monkeypatch, dtype, mask, heads):
    """Flash knows grouped heads, but neither masks nor float32; with the memory-efficient one it is the reverse."""
    seen = []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **options: seen.append(k.shape[1]) or q)
    with fake_cuda():
        tensors = [x.detach().to(CUDA, getattr(torch, dtype)) for x in random_heads(9)]
        attend_by_sdpa(*tensors, (TREE if mask else RowPaths((9,), (9,))).to(CUDA), **PLAIN)
    assert seen[-1] == heads


def test_gradients_of_a_token_that_many_rows_see_are_summed_exactly():
    """In bfloat16 the 300th contribution would no longer move the sum of the others."""
    num_rows = 400
    keys = torch.stack([torch.zeros(num_rows, dtype=torch.long), torch.arange(1, num_rows + 1)], dim=1).flatten()[1:]
    paths = RowPaths((2,) + (1,) * (num_rows - 1), (2,) * num_rows, torch.cat([torch.tensor([0]), keys]))
    query, key, value = random_heads(num_rows + 1, torch.bfloat16)
    out = attend_by_sdpa(0 * query, key, value, paths, **PLAIN)  # all keys count the same
    [gradient] = torch.autograd.grad(out.sum(), value)
    expected = (1 + num_rows / 2) * HEADS / KV_HEADS  # its own row 0 sees it alone once, and all rows by half
    assert gradient[0, 0, 0, 0].item() == pytest.approx(expected, rel=2**-8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_share_the_masks_of_a_pass(tiny_model_dir, monkeypatch, dtype, mesh):
    """FSDP2 copies dataclasses, and what is in them, in front of each layer."""
    rows = random_rows(((6, 8), (6, 13)))
    rows[1].prompt_ids[:] = rows[0].prompt_ids
    micro, masks, attend = collate_tree(rows, range(2)), [], F.scaled_dot_product_attention

    def spy(*args, attn_mask, **options):
        masks.append(attn_mask)
        return attend(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    cfg = ModelConfig(str(tiny_model_dir), compute_dtype=dtype)
    policy = load_policy(cfg, mesh, device=CPU)
    assert len(policy.hf.base_model.layers) == 2
    policy(micro)[0].sum().backward()
    used = [mask for mask in masks if mask is not None]
    assert len(masks) == 8 and len(used) == 4, (
        "2 rows, of which the second needs one, in 2 layers, twice with recomputing"
    )
    assert all(mask is used[0] for mask in used) and not micro.paths.masks


def test_no_row_length_waits_for_a_plan_of_cudnns():
    torch.backends.cuda.enable_cudnn_sdp(True)
    register("sdpa")
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_what_a_layer_may_ask_for_and_rows_do_not_know_is_refused():
    with pytest.raises(AssertionError, match="does not know softcap"):
        with_rows_only(attend_by_sdpa)(None, *random_heads(8), None, paths=PACKED, softcap=30.0)


# ------------------------------------------------------------------------------------------------- which one is taken


@pytest.mark.parametrize("attention", ["varlen", "flash_attention_2"])
def test_kernels_of_gpus_are_refused_without_one(attention):
    with pytest.raises(UserError, match=rf"model.attention={attention} needs a GPU; use auto or sdpa"):
        attention_backend(ModelConfig(attention=attention), CPU)


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize(
    "capability, hip, auto",
    [((9, 0), None, "varlen"), ((8, 0), None, "varlen"), ((7, 5), None, "sdpa"), ((9, 4), "7.0", "sdpa")],
)
def test_auto_takes_torchs_flash_attention_where_it_can_compute(installed, capability, hip, auto, monkeypatch):
    monkeypatch.setattr("torch.version.hip", hip)
    monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda: installed)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    gpu = torch.device("cuda")  # only its name is asked
    assert attention_backend(ModelConfig(), gpu) == auto
    assert attention_backend(ModelConfig(compute_dtype="float32"), gpu) == "sdpa"
    assert attention_backend(ModelConfig(), CPU) == "sdpa"
    for attention, is_there in (("varlen", True), ("flash_attention_2", installed)):
        wish = ModelConfig(attention=attention)
        if is_there and auto == "varlen":
            assert attention_backend(wish, gpu) == attention
            with pytest.raises(UserError, match=f"attention={attention} needs model.compute_dtype=bfloat16"):
                attention_backend(replace(wish, compute_dtype="float32"), gpu)
        else:
            fix = (
                r"compute capability 8\.0 \(A100\) or newer" if is_there else "the flash-attn package; use auto or sdpa"
            )
            with pytest.raises(UserError, match=fix):
                attention_backend(wish, gpu)
