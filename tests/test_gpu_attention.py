"""Attention's kernels on a GPU, without a model; see test_gpu.py, which also has those of whole models."""

import inspect

import numpy as np
import pytest
import torch
from helpers.gpu import MARKS, ON_GPU, assert_close, missing, skip_unless_here, some_rows

from arpo.batch import Row, collate
from arpo.config.sections import ModelConfig
from arpo.errors import UserError
from arpo.model.attention import attention_backend, register
from arpo.tree import tree_microbatches

pytestmark = MARKS
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")


def test_attention_is_torchs_own_flash_kernel_and_an_impossible_wish_is_named():
    new_enough = ON_GPU and torch.cuda.get_device_capability() >= (8, 0)
    assert attention_backend(ModelConfig(), DEVICE) == ("varlen" if new_enough else "sdpa")
    assert attention_backend(ModelConfig(compute_dtype="float32"), DEVICE) == "sdpa"
    for attention in ("varlen", "flash_attention_2"):
        if missing(attention):
            with pytest.raises(UserError, match=rf"model\.attention={attention} needs .*; use auto or sdpa"):
                attention_backend(ModelConfig(attention=attention), DEVICE)


def test_float32_attention_with_grouped_heads_does_not_write_all_scores_down():
    """8 heads, 16k tokens: the scores would be 8 GiB."""
    if not ON_GPU:
        pytest.skip("the CPU has one kernel for all")
    heads = [torch.randn(1, n, 16_384, 64, device=DEVICE, requires_grad=True) for n in (8, 2, 2)]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    micro = collate([Row(np.zeros(1, np.int64), np.zeros(16_383, np.int64), np.ones(16_383, np.int64))])
    by_row("sdpa")(None, *heads, None, **micro.attention_options())[0].square().sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 1 << 30


@pytest.mark.parametrize("attention", ["varlen", "flash_attention_2"])
@pytest.mark.parametrize("window", [None, 1, 50])
def test_flash_attention_sees_the_same_window_as_sdpa(attention, window):
    """One layer's attention on a tree, with grouped heads."""
    skip_unless_here(attention)
    [tree] = tree_microbatches(some_rows(5, 100, 120, shared=60), 0, 1, 4096, device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, tree.input_ids.shape[1], 64) for heads in (4, 2, 2)]
    heads = [torch.randn(shape, generator=generator).to(DEVICE, torch.bfloat16).requires_grad_() for shape in shapes]
    outcomes = []
    for attend in (by_row(attention), by_row("sdpa")):
        out, _ = attend(None, *heads, None, sliding_window=window, **tree.attention_options())
        weights = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
        outcomes.append([out.detach(), *torch.autograd.grad((out * weights).sum(), heads)])
    for ours, expected in zip(*outcomes, strict=True):
        assert_close(ours.float(), expected.float(), 0.05)


def by_row(attention: str):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS[register(attention)]


def test_the_flash_attn_package_has_the_signature_that_our_tests_pretend():
    from fake_gpu.flash_kernels import flash_attn_varlen_func

    flash_attn = pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    real, pretended = (inspect.signature(f) for f in (flash_attn.flash_attn_varlen_func, flash_attn_varlen_func))
    defaults = [{name: p.default for name, p in signature.parameters.items()} for signature in (real, pretended)]
    assert defaults[0] == defaults[1]
