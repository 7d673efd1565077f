"""What only a GPU can show of the engine: `pytest -m gpu tests/test_gpu_engine.py`, or with the timings `make gpu`.

As in test_gpu.py, the kit runs each test in a process of its own, and its --device cpu mode runs what the CPU has.
"""

from dataclasses import replace

import pytest
import torch
from helpers.gpu import MARKS, ON_GPU

from arpo.config.sections import EngineConfig
from arpo.engine.noise import compile_draw, draw, row_keys, token_offsets

pytestmark = MARKS
CFG = EngineConfig(
    dtype="bfloat16" if ON_GPU else "float32", gpu_memory_utilization=0.2, kv_cache_gib=0.03, max_num_seqs=8
)
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="the CPU has one way only")


@pytest.fixture
def start(tiny_model_dir):
    """start(**options) -> an engine; the one before is closed."""
    pytest.importorskip("vllm", reason="vllm is not installed")
    from arpo.engine import Engine

    running = []

    def start(**options) -> Engine:
        close()
        running.append(Engine(str(tiny_model_dir), replace(CFG, **options), max_model_len=256, seed=0))
        return running[0]

    def close() -> None:
        while running:
            running.pop().close()

    yield start
    close()


def sample(engine, **options) -> dict[str, tuple[list[int], list[float]]]:
    """(tokens, logprobs) of each request; prompts and budgets differ, so that batches change from step to step."""
    from arpo.engine import SamplingSpec

    done: dict[str, tuple[list[int], list[float]]] = {}
    for i in range(12):
        spec = SamplingSpec(max_tokens=10 + 3 * i, seed=i, num_entropy_tokens=-1, **options)
        engine.submit(f"r{i}", list(range(20 + i, 40 + 3 * i)), spec)
    while engine.num_running:
        for chunk in engine.step():
            tokens, logprobs = done.setdefault(chunk.request_id, ([], []))
            tokens += chunk.token_ids
            logprobs += chunk.logprobs
    return done


def first_logprobs(done) -> torch.Tensor:
    """Of the first tokens, which depend on the prompts alone where they are greedy."""
    return torch.tensor([done[request_id][1][0] for request_id in sorted(done)])


def load_hf(model_dir):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, CFG.dtype))


def hf_logprobs(model, done) -> torch.Tensor:
    """(B,) the Hugging Face model's logprobs of those first tokens, from the same prompts."""
    found = []
    for request_id in sorted(done):
        i = int(request_id[1:])
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([list(range(20 + i, 40 + 3 * i))])).logits[0, -1].float()
        found.append(logits.log_softmax(-1)[done[request_id][0][0]])
    return torch.stack(found)


def test_vllm_has_the_models_logprobs_with_graphs_and_asynchronous_scheduling(start, tiny_model_dir):
    done = sample(start(), temperature=0.0)
    expected = hf_logprobs(load_hf(tiny_model_dir), done)
    assert (first_logprobs(done) - expected).abs().max() < (0.2 if ON_GPU else 1e-4)


@needs_gpu
@pytest.mark.parametrize(
    "options", [{"cuda_graphs": "never"}, {"async_scheduling": "never"}, {"max_num_batched_tokens": 32}], ids=str
)
def test_vllm_samples_as_before_without_graphs_or_asynchronous_scheduling_or_with_prompts_in_chunks(start, options):
    """The noise of a row depends on its seed and position alone."""
    usual, other = sample(start()), sample(start(**options))
    # float noise may turn a token, and with it all that come after it in that request
    same = sum(usual[request_id][0] == other[request_id][0] for request_id in usual)
    assert same >= len(usual) // 2, (same, len(usual))


@needs_gpu
def test_vllm_with_its_second_runner_has_the_models_logprobs_also_after_sleep(start, tiny_model_dir):
    engine, model = start(model_runner="v2"), load_hf(tiny_model_dir)
    for cycle in range(2):
        done = sample(engine, temperature=0.0)
        assert (first_logprobs(done) - hf_logprobs(model, done)).abs().max() < 0.2, cycle
        once, again = sample(engine), sample(engine)
        assert sum(once[request_id][0] == again[request_id][0] for request_id in once) >= len(once) // 2
        engine.sleep()
        engine.wake_up()
        engine.sync_weights((name, p.cuda()) for name, p in model.named_parameters())


def test_vllm_gives_a_second_engine_the_memory_of_a_closed_one(start):
    first = sample(start(), temperature=0.0)
    used = torch.cuda.mem_get_info()[0] if ON_GPU else 0
    second = sample(start(), temperature=0.0)
    torch.testing.assert_close(first_logprobs(first), first_logprobs(second), atol=0.1, rtol=0)
    if ON_GPU:
        assert used - torch.cuda.mem_get_info()[0] < 512 << 20


@needs_gpu
def test_the_noise_kernel_draws_what_the_cpu_draws():
    vocab_size, num_rows = 151_936, 64
    keys, logits = row_keys(torch.arange(num_rows), torch.arange(num_rows)), torch.randn(num_rows, vocab_size) * 3
    device = torch.device("cuda", torch.cuda.current_device())
    compiled = compile_draw(vocab_size, device)
    tokens = compiled(logits.to(device), keys.to(device), token_offsets(vocab_size, device)).cpu()
    expected = draw(logits, keys, token_offsets(vocab_size, "cpu"))
    assert (tokens != expected).sum() <= 1  # logarithms differ in the last bit


@needs_gpu
def test_vllm_in_fp8_follows_the_weights_of_each_sync(start, tiny_model_dir):
    engine, model = start(quantization="fp8"), load_hf(tiny_model_dir)
    for sync in range(3):
        with torch.no_grad():
            for parameter in model.parameters() if sync else ():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        engine.sync_weights((name, p.cuda()) for name, p in model.named_parameters())
        done = sample(engine, temperature=0.0)
        errors = (first_logprobs(done) - hf_logprobs(model, done)).abs()
        assert errors.max() < 1, "the old weights would be further away"
        engine.sleep()
        engine.wake_up()
