"""What only a GPU can show: `pytest -m gpu tests/test_gpu.py`, or, with the timings, `make gpu`.

benchmarks/gpu_report.py runs each test in a process of its own. Its --device cpu mode (ARPO_GPU_KIT=cpu) runs the same
lines on the CPU, so that they are known to work where there is no GPU; what it leaves out, a test says.
"""

import gc

import numpy as np
import pytest
import torch
from helpers.gpu import MARKS, ON_GPU, assert_close, skip_unless_here, some_rows
from helpers.models import row_by_row

from arpo.batch import MicroBatch, Row, collate
from arpo.checkpoint import Checkpoints
from arpo.checkpoint.snapshot import snapshot
from arpo.config.sections import EngineConfig, ModelConfig, OptimConfig
from arpo.model import Policy, load_policy
from arpo.model.attention import register
from arpo.model.head import token_logprobs
from arpo.model.optim import MOMENTS, build_optimizer
from arpo.ranks import init_ranks
from arpo.tree import tree_microbatches

pytestmark = MARKS
# float32 products on a GPU are sums in another order, so are its attention kernels
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15}


@pytest.fixture(scope="module")
def ranks():
    ranks = init_ranks()
    yield ranks
    ranks.close()


@pytest.fixture
def load(ranks, tiny_model_dir):
    """load(dtype, attention) -> the tiny policy on the device."""

    def load(dtype: str = "float32", attention: str = "sdpa", **options) -> Policy:
        cfg = ModelConfig(str(tiny_model_dir), compute_dtype=dtype)
        policy = load_policy(cfg, ranks.mesh, device=ranks.device, **options)
        policy.head_chunk_tokens = 64
        policy.hf.set_attn_implementation(register(attention))
        return policy

    return load


def scores(policy: Policy, micro: MicroBatch, *, backward: bool = True) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(logprobs on the CPU, gradients of their weighted sum on the CPU)"""
    policy.zero_grad()
    with torch.set_grad_enabled(backward):
        logprobs, entropies = policy(micro)
    if backward:
        weighted_sum(logprobs, entropies).backward()
    parameters = policy.hf_parameters() if backward else ()
    return logprobs.detach().cpu(), {name: p.grad.full_tensor().float().cpu() for name, p in parameters}


def weighted_sum(logprobs: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
    weights = 1 + torch.arange(logprobs.numel(), device=logprobs.device).view_as(logprobs) % 3
    return (logprobs * weights).sum() + 0.1 * entropies.sum()


def used_bytes() -> int:
    """Of the whole GPU, vLLM's own allocator and NCCL included; on the CPU of this process."""
    if not ON_GPU:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


# ------------------------------------------------------------------------------------------------------- the trainer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fsdp2_on_the_device_computes_what_the_plain_model_does(load, ranks, tiny_model_dir, dtype):
    from transformers import AutoModelForCausalLM

    rows = some_rows(3, 20, 40)
    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32, attn_implementation="eager")
    ours, gradients = scores(load(dtype), collate(rows, range(3)).to(ranks.device))
    pairs = zip(*row_by_row(plain, rows, 1.0), strict=True)
    expected = [torch.nn.utils.rnn.pad_sequence(part, batch_first=True) for part in pairs]
    weighted_sum(*expected).backward()
    assert_close(ours, expected[0].detach(), TOLERANCE[dtype])
    for name, parameter in plain.named_parameters():
        assert_close(gradients[name], parameter.grad, TOLERANCE[dtype] * 2)


@pytest.mark.parametrize("attention", ["varlen", "flash_attention_2"])
@pytest.mark.parametrize("layout", ["packed", "tree", "empty"])
def test_flash_attention_equals_sdpa(load, ranks, attention, layout):
    """Logprobs and gradients; a tree's queries are fewer than its keys, and an empty micro-batch has one token."""
    skip_unless_here(attention)
    rows = some_rows(5, 100, 120, shared=60)
    if layout == "tree":
        [micro] = tree_microbatches(rows, 0, 1, 4096, device=ranks.device)
    else:
        micro = collate(rows if layout == "packed" else [], range(5) if layout == "packed" else ()).to(ranks.device)
    expected, expected_gradients = scores(load("bfloat16", "sdpa"), micro)
    ours, gradients = scores(load("bfloat16", attention), micro)
    if layout == "empty":
        assert not any(gradient.any() for gradient in gradients.values())
        return
    assert_close(ours, expected, TOLERANCE["bfloat16"])
    for name, gradient in gradients.items():
        assert_close(gradient, expected_gradients[name], TOLERANCE["bfloat16"])


@pytest.mark.parametrize("num_rows", [2, 5])
def test_a_tree_equals_packed_rows(load, ranks, num_rows):
    rows = some_rows(num_rows, 100, 120, shared=60)
    [tree] = tree_microbatches(rows, 0, 1, 4096, device=ranks.device)
    packed = collate([rows[i] for i in tree.row_ids], tree.row_ids).to(ranks.device)
    assert tree.input_ids.numel() < packed.input_ids.numel()
    expected, expected_gradients = scores(load(), packed)
    ours, gradients = scores(load(), tree)
    assert_close(ours, expected, TOLERANCE["float32"])
    for name, gradient in gradients.items():
        assert_close(gradient, expected_gradients[name], TOLERANCE["float32"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_chunked_head_equals_full_logits(ranks, dtype):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(n, 64, generator=generator) for n in (300, 1000)]
    targets = torch.randint(0, 1000, (300,), generator=generator).to(ranks.device)
    hidden, weight = (t.to(ranks.device, getattr(torch, dtype)).requires_grad_() for t in tensors)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    logprobs, entropy = token_logprobs(hidden, weight, targets, temperature=0.7, chunk_tokens=128)
    log_p = torch.log_softmax(exact[0] @ exact[1].T / 0.7, dim=-1)
    expected = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    (logprobs.mean() + entropy.mean()).backward()
    (expected[0].mean() + expected[1].mean()).backward()
    # On a GPU the head takes float32 out of bfloat16 products: the values are as exact, only gradients are rounded.
    exactness = 1e-4 if ON_GPU or dtype == "float32" else 0.1
    assert_close(logprobs.detach().double(), expected[0].detach(), exactness)
    assert_close(entropy.detach().double(), expected[1].detach(), exactness)
    for ours, double in zip((hidden, weight), exact, strict=True):
        assert_close(ours.grad.double(), double.grad, 1e-3 if dtype == "float32" else 0.1)


def test_a_model_offloaded_to_the_cpu_computes_the_same(load, ranks):
    micro = collate(some_rows(2, 20, 40), range(2)).to(ranks.device)
    expected, _ = scores(load(), micro, backward=False)
    offloaded = load(offload=True).requires_grad_(False)
    assert all(p.device.type == "cpu" for p in offloaded.parameters())
    ours, _ = scores(offloaded, micro, backward=False)
    assert_close(ours, expected, 1e-5)


@pytest.mark.parametrize("on_host", [False, True])
def test_a_checkpoint_continues_where_it_was_taken(load, ranks, tmp_path, on_host):
    """Parameters, AdamW's moments and the GPU's own random state. on_host: of a copy, with moments that live there."""
    micro, cfg = collate(some_rows(2, 20, 40), range(2)).to(ranks.device), OptimConfig(lr=1e-3, offload=on_host)
    policy = load()
    optimizer = build_optimizer(policy, cfg)
    checkpoints = Checkpoints(tmp_path, ranks)

    def step(policy, optimizer) -> dict[str, torch.Tensor]:
        scores(policy, micro)
        optimizer.step()
        return {name: p.full_tensor().cpu() for name, p in policy.hf_parameters()}

    step(policy, optimizer)
    moment = snapshot(policy, optimizer)
    if on_host:
        moment = moment.copy_to_host(None)
    else:
        checkpoints.write(1, moment)
    drawn, whole = torch.rand(4, device=ranks.device), step(policy, optimizer)
    if on_host:  # as a thread would, once training has gone on
        checkpoints.write(1, moment)
    again = load()
    again_optimizer = build_optimizer(again, cfg)
    assert checkpoints.resume(again, again_optimizer) == 1
    assert torch.equal(torch.rand(4, device=ranks.device), drawn)
    for name, parameter in step(again, again_optimizer).items():
        torch.testing.assert_close(parameter, whole[name], rtol=1e-4, atol=1e-5)


def test_moments_in_host_memory_give_their_gpu_memory_back_and_change_no_digit(ranks):
    """64 MiB of parameters: 128 of moments. (CPU: what the process holds is not what it uses, so only the digits.)"""
    weights = []
    for offload in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(4096, 4096, bias=False, device=ranks.device)
        before = used_bytes()
        optimizer = build_optimizer(model, OptimConfig(lr=1e-3, offload=offload))
        for step in range(3):
            model.weight.grad = torch.full_like(model.weight, 0.1 * step) + model.weight.detach()
            optimizer.step()
            optimizer.zero_grad()
            if ON_GPU:
                held = used_bytes() - before
                assert (held < 16 * 2**20) if offload else (held > 112 * 2**20)
        moments = [optimizer.state[model.weight][name] for name in MOMENTS]
        if ON_GPU:
            assert all(m.is_pinned() and m.device.type == "cpu" for m in moments) == offload
            torch.cuda.synchronize()
        weights.append([t.detach().cpu() for t in (model.weight, *moments)])
        del model, optimizer, moments
    assert all(map(torch.equal, *weights))


# -------------------------------------------------------------------------------------------------------- the engine


@pytest.fixture
def engine(ranks, tiny_model_dir):
    pytest.importorskip("vllm", reason="vllm is not installed")
    from arpo.engine import Engine

    cfg = EngineConfig(dtype=engine_dtype(), gpu_memory_utilization=0.2, kv_cache_gib=0.03, max_num_seqs=8)
    engine = Engine(str(tiny_model_dir), cfg, max_model_len=256, seed=0, load_weights=False)
    yield engine
    engine.close()


def engine_dtype() -> str:
    return "bfloat16" if ON_GPU else "float32"


def mismatch(engine, policy: Policy, device: torch.device) -> float:
    """Mean absolute difference of vLLM's logprobs of a sampled response from the policy's."""
    from arpo.engine import SamplingSpec

    prompt = list(range(20, 60))
    engine.submit("a", prompt, SamplingSpec(max_tokens=64, seed=0))
    ids, logprobs = [], []
    while engine.num_running:
        for chunk in engine.step():
            ids += chunk.token_ids
            logprobs += chunk.logprobs
    row = Row(np.array(prompt), np.array(ids), np.ones(len(ids), np.int64))
    ours, _ = scores(policy, collate([row]).to(device), backward=False)
    return float((ours[0] - torch.tensor(logprobs)).abs().mean())


def test_vllm_samples_from_the_weights_that_were_synced(engine, load, ranks):
    limit = 0.1 if ON_GPU else 1e-4
    policy = load(engine_dtype())
    engine.sync_weights(policy.hf_parameters())
    assert mismatch(engine, policy, ranks.device) < limit
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.to_local().add_(torch.randn_like(parameter.to_local()) * 0.1)
    assert mismatch(engine, policy, ranks.device) > 2 * limit, "the new weights must differ for this test to see them"
    engine.sync_weights(policy.hf_parameters())
    assert mismatch(engine, policy, ranks.device) < limit


def test_fifty_cycles_of_sleep_training_and_waking_do_not_grow_memory(engine, load, ranks):
    """On the CPU, where sleep does nothing, five."""
    policy = load(engine_dtype())
    micro = collate(some_rows(4, 20, 100), range(4)).to(ranks.device)
    engine.sync_weights(policy.hf_parameters())
    awake, asleep = [], []
    for cycle in range(50 if ON_GPU else 5):
        micro_of_cycle = collate(some_rows(2 + cycle % 3, 20, 60 + cycle), range(2 + cycle % 3)).to(ranks.device)
        mismatch(engine, policy, ranks.device)
        awake.append(used_bytes())
        engine.sleep()
        asleep.append(used_bytes())
        scores(policy, micro if cycle % 2 else micro_of_cycle)
        engine.wake_up()
        engine.sync_weights(policy.hf_parameters())
    warm, grown = min(5, len(awake) - 2), 64 << 20
    assert awake[-1] - awake[warm] < grown and asleep[-1] - asleep[warm] < grown, (awake, asleep)
    if ON_GPU:
        assert asleep[-1] < awake[-1] - (1 << 30), "asleep, the engine must give its KV cache back"
    assert mismatch(engine, policy, ranks.device) < (0.1 if ON_GPU else 1e-4)
