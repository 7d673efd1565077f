"""What vLLM's GPU sources make of our engine: run by test_vllm_gpu_sources.py with those sources first in the path.

python engine_on_fake_h100.py MODEL_DIR        the last line is JSON: {section: result, or the error's text}
"""

import dataclasses
import inspect
import json
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace

from fake_gpu.vllm_sources import pretend_h100

from arpo.engine.containment import START_FAILURES, explain_failed_start, prepare_for_vllm

prepare_for_vllm()
pretend_h100()

import torch
import vllm
from fake_gpu.fake_cuda import CUDA, FakeCuda, fake_cuda, real_of

from arpo.config.sections import EngineConfig
from arpo.engine import Engine
from arpo.engine.arguments import llm_arguments
from arpo.engine.noise import draw, install_noise_hook, row_keys, token_offsets
from arpo.engine.requests import SamplingSpec
from arpo.engine.vllm_engine import RunningRequest

V, N = 151936, 6  # Qwen's vocabulary; rows


def engine_config(**options):
    """vLLM's config of our arguments."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    cfg = EngineConfig(gpu_memory_utilization=0.7, **options)
    arguments = llm_arguments(sys.argv[1], cfg, max_model_len=256, seed=0, load_weights=False, on_gpu=True)
    unknown = arguments.keys() - inspect.signature(vllm.LLM).parameters.keys() - EngineArgs.__dataclass_fields__.keys()
    assert not unknown, unknown
    args = EngineArgs(**arguments, distributed_executor_backend="external_launcher")
    return args.create_engine_config(UsageContext.LLM_CLASS)


def config(**options) -> dict:
    from vllm.v1.executor import Executor

    found = engine_config(**options)
    return {
        "v2_runner": getattr(found, "use_v2_model_runner", False),
        "worker": found.parallel_config.worker_cls,
        "executor": Executor.get_class(found).__name__,
        "sleep": found.model_config.enable_sleep_mode,
        "cumem": found.model_config.enable_cumem_allocator,
        "async": found.scheduler_config.async_scheduling,
        "graphs": found.compilation_config.cudagraph_mode.name,
        "quantization": type(found.quant_config).__name__,
        "prefix_caching": found.cache_config.enable_prefix_caching,
        "chunked": found.scheduler_config.enable_chunked_prefill,
        "autotune": found.kernel_config.enable_flashinfer_autotune,
        "largest_graph": found.compilation_config.max_cudagraph_capture_size,
    }


# ------------------------------------------------------------------------------------------------ the sampler


def metadata(temperature: float, num_logprobs: int, top_p: float | None):
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    zeros = torch.zeros(N).to(CUDA)
    values = {
        "temperature": zeros + temperature if temperature else None,
        "all_greedy": temperature == 0,
        "all_random": temperature > 0,
        "top_p": None if top_p is None else zeros + top_p,
        "top_k": None,
        "generators": {row: torch.Generator().manual_seed(100 + row) for row in range(N)},
        "max_num_logprobs": num_logprobs,
        "no_penalties": True,
        "prompt_token_ids": None,
        "frequency_penalties": zeros,
        "presence_penalties": zeros,
        "repetition_penalties": zeros + 1,
        "output_token_ids": [[] for _ in range(N)],
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(),
    }
    known = {field.name for field in dataclasses.fields(SamplingMetadata)}
    return SamplingMetadata(**{name: value for name, value in values.items() if name in known})


def compared(tokens, rows, logits, positions, *, temperature: float, one_token: bool) -> dict:
    """Compare sampled tokens and their columns (logprob, entropy, three top logprobs) with our own arithmetic.

    one_token: the sampler can only take the likeliest token (greedy, or a nucleus of one token).
    """
    tempered = (logits.float() / (temperature or 1)).log_softmax(-1)
    logprobs = logits.float().log_softmax(-1)
    if one_token:
        expected = tempered.argmax(-1)
    else:
        keys = row_keys(torch.arange(100, 100 + N), positions)
        expected = draw(logits.float() / temperature, keys, token_offsets(V, "cpu"))
    errors = [
        tempered.gather(1, tokens[:, None])[:, 0] - rows[:, 0],
        -(logprobs.exp() * logprobs).sum(-1) - rows[:, 1],
        logprobs.topk(3).values - rows[:, 2:],
    ]
    return {
        "same_tokens": torch.equal(tokens, expected),
        "errors": [float(error.abs().max()) for error in errors],
    }


def sampler(temperature: float, top_p: float | None = None) -> dict:
    """Sample with both hooks in the real Sampler, on the pretended device; compare with our own arithmetic."""
    from vllm.v1.sample.sampler import Sampler

    logits = (torch.randn(N, V, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
    positions = torch.arange(N) * 7 + 3
    runner = SimpleNamespace(
        sampler=Sampler(logprobs_mode="raw_logprobs"),
        input_batch=SimpleNamespace(num_tokens_no_spec=positions.int().numpy()),
    )
    native = runner.sampler.topk_topp_sampler.forward.__name__
    runner.sampler.gather_logprobs = lambda *args, **kwargs: Engine.gather_logprobs(
        SimpleNamespace(temperature=temperature), runner, *args, **kwargs
    )
    install_noise_hook(runner)
    with fake_cuda() as stalls:
        out = runner.sampler(logits=logits.to(CUDA), sampling_metadata=metadata(temperature, 1 + 3, top_p))
        waits = dict(stalls.waits)
        # as asynchronous scheduling does it: copy now, read later
        later = out.logprobs_tensors.to_cpu_nonblocking()
        rows = torch.from_numpy(later.tolists().logprobs)
    tokens = real_of(out.sampled_token_ids)[:, 0].long()
    one_token = top_p is not None or temperature == 0
    found = compared(tokens, rows, logits, positions, temperature=temperature, one_token=one_token)
    return found | {"waits": waits, "without_flashinfer": native == "forward_native"}


# --------------------------------------------------------------------------- the second runner and its sampler


def config_v2() -> dict:
    import vllm.config.vllm as checked_there

    prepare_for_vllm(model_runner="v2")
    checked_there.HAS_TRITON = True  # as on every GPU host; here it is not installed
    try:
        return config(model_runner="v2")
    finally:
        prepare_for_vllm()


class PlainBuffer:
    """In place of vLLM's pinned memory that the GPU can read: the same numbers on both sides."""

    def __init__(self, size, dtype):
        self.cpu = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()
        self.uva = Uva(self.cpu)


class Uva:
    """The GPU's view of such memory: buffer.uva[:n] in vLLM 0.22, buffer.uva(n) in 0.33."""

    def __init__(self, cpu):
        self.cpu = cpu

    def __getitem__(self, rows):
        return FakeCuda(self.cpu[rows])

    def __call__(self, n=None):
        return self[:n]


class NoKernel:
    """In place of a kernel that computes nothing we read (the ranks of the sampled tokens)."""

    def __getitem__(self, grid):
        return lambda *args, **kwargs: None


def pretend_kernels() -> None:
    """Do in torch what the Triton kernels of V2's sampler do. The noise is ours, of its seeds and positions."""
    from vllm.v1.worker.gpu import buffer_utils
    from vllm.v1.worker.gpu.sample import logprob, states
    from vllm.v1.worker.gpu.sample import sampler as v2

    def gumbel_sample(logits, mapping, temperature, seeds, pos, apply_temperature, **options):
        assert not apply_temperature
        drawn = draw(logits.float(), row_keys(seeds[mapping], pos), token_offsets(V, "cpu").to(CUDA))
        return torch.where(temperature[mapping] == 0, logits.argmax(-1), drawn)

    def temper(logits, mapping, temperature):
        divisor = temperature[mapping]
        logits.div_(torch.where(divisor == 0, torch.ones_like(divisor), divisor)[:, None])

    buffer_utils.UvaBuffer = PlainBuffer
    buffer_utils.is_uva_available = lambda: True
    states.apply_temperature = temper
    logprob.compute_token_logprobs = lambda logits, ids: logits.float().log_softmax(-1).gather(-1, ids.long())
    logprob._ranks_kernel = NoKernel()
    v2.gumbel_sample = gumbel_sample
    v2.get_num_sampled_and_rejected = lambda num_sampled, *args: (num_sampled, torch.zeros_like(num_sampled))


def v2_sampler(num_slots: int):
    """The real sampler of the second runner, whatever this version's arguments are."""
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState

    sizes = {"max_num_reqs": num_slots, "max_model_len": 256, "max_num_batched_tokens": 64, "vocab_size": V}
    states = RequestState(**sizes, num_speculative_steps=0, device=CUDA)
    values = {"vllm_config": engine_config(model_runner="v2"), "max_num_reqs": num_slots, "vocab_size": V}
    values |= {"device": CUDA, "req_states": states, "logprobs_mode": "raw_logprobs"}
    return Sampler(**{name: values[name] for name in inspect.signature(Sampler).parameters.keys() & values.keys()})


def sampler_v2(temperature: float, top_p: float = 1.0) -> dict:
    """Sample with our hook around the second runner's real sampler; compare with our own arithmetic."""
    pretend_kernels()
    engine = object.__new__(Engine)
    engine.cfg = EngineConfig(model_runner="v2")
    engine.temperature, engine.device, engine.running = temperature, CUDA, {}
    logits = (torch.randn(N, V, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
    # Request i is in slot slots[i], and its last token is at the end of its part of the step's tokens.
    slots = torch.tensor([3, 0, 5, 1, 6, 2])
    positions = torch.arange(N) * 7 + 3
    with fake_cuda() as stalls:
        runner = SimpleNamespace(sampler=v2_sampler(N + 1))
        engine.install_sampler_hooks(SimpleNamespace(model_runner=runner))
        for row, slot in enumerate(slots.tolist()):
            num_top = 3 if row == 2 else 0
            spec = SamplingSpec(8, temperature, top_p, seed=100 + row, num_top_logprobs=num_top)
            engine.running[f"{row}"] = RunningRequest(spec, 4)
            arguments = {"req_idx": slot, "prompt_len": 4, "sampling_params": engine.sampling_params(spec)}
            taken = inspect.signature(runner.sampler.add_request).parameters
            runner.sampler.add_request(**{name: arguments[name] for name in taken})
        runner.sampler.apply_staged_writes()
        on_gpu = slots.to(CUDA)
        batch = SimpleNamespace(
            idx_mapping=on_gpu, expanded_idx_mapping=on_gpu, idx_mapping_np=slots.numpy(), num_reqs=N,
            cu_num_logits=torch.arange(N + 1).to(CUDA), cu_num_logits_np=torch.arange(N + 1).numpy(),
            expanded_local_pos=torch.zeros(N).int().to(CUDA), positions=positions.repeat_interleave(2).to(CUDA),
            input_ids=torch.zeros(2 * N).int().to(CUDA), logits_indices=(2 * torch.arange(N) + 1).to(CUDA),
            seq_lens=(positions + 1).to(CUDA), seq_lens_cpu_upper_bound=positions + 1,
        )  # fmt: skip
        stalls.clear()
        out = runner.sampler(logits.to(CUDA), batch)
        waits = dict(stalls.waits)
        rows = torch.from_numpy(out.logprobs_tensors.to_cpu_nonblocking().tolists().logprobs)
    tokens = real_of(out.sampled_token_ids)[:, 0].long()
    one_token = top_p < 1 or temperature == 0
    found = compared(tokens, rows, logits, positions, temperature=temperature, one_token=one_token)
    return found | {"columns": rows.shape[1], "waits": waits}


def interface_v2() -> list[str]:
    """Return what of the second runner our engine needs, and is not there as it needs it."""
    from vllm.v1.worker.gpu import async_utils, model_runner
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

    texts = {
        model_runner.GPUModelRunner: ("self.sampler(logits, input_batch)", "self.attn_groups", "def reload_weights("),
        async_utils: ("sampler_output.logprobs_tensors.to_cpu_nonblocking()", "self.logprobs_tensors.tolists()"),
    }
    wrong = [f"no {t!r} in {o}" for o, found in texts.items() for t in found if t not in inspect.getsource(o)]
    fields = SamplerOutput.__dataclass_fields__.keys()
    wrong += [f"no {name} in SamplerOutput" for name in ("sampled_token_ids", "logprobs_tensors") if name not in fields]
    return wrong + (["SamplerOutput is frozen"] if SamplerOutput.__dataclass_params__.frozen else [])


# ------------------------------------------------------------------------------------- what the engine calls


def interface() -> list[str]:
    """Return what of vLLM our engine calls, and is not there as it calls it."""
    from vllm.device_allocator.cumem import CuMemAllocator
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers import rotary_embedding
    from vllm.outputs import RequestOutput
    from vllm.v1.engine import core, core_client
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    calls = {
        (vllm.LLM, "sleep"): {"level": 2},
        (vllm.LLM, "wake_up"): {"tags": ["weights"]},
        (vllm.LLM, "collective_rpc"): {"method": "reload_weights", "kwargs": {}},
        (vllm.LLM, "apply_model"): {"func": len},
        (vllm.LLM, "reset_prefix_cache"): {},
        (GPUModelRunner, "reload_weights"): {"weights_iterator": iter(()), "is_checkpoint_format": True},
        (Worker, "reload_weights"): {"weights_iterator": iter(()), "is_checkpoint_format": True},
        (LLMEngine, "add_request"): {"request_id": "a", "prompt": {}, "params": None},
        (LLMEngine, "abort_request"): {"request_ids": []},
        (LLMEngine, "step"): {},
        (core.EngineCore, "shutdown"): {},
        (CuMemAllocator, "get_current_usage"): {},
    }
    wrong = []
    for (owner, name), kwargs in calls.items():
        try:
            inspect.signature(getattr(owner, name)).bind(None, **kwargs)
        except (AttributeError, TypeError) as error:
            wrong.append(f"{owner.__name__}.{name}: {error}")
    names = {
        parallel_state: ("_WORLD", "_NODE_COUNT", "destroy_model_parallel", "destroy_distributed_environment"),
        core: ("cleanup_dist_env_and_memory",),
        rotary_embedding: ("_ROPE_DICT",),
        UniProcExecutor: ("supports_async_scheduling",),
    }
    wrong += [f"no {owner}.{name}" for owner, found in names.items() for name in found if not hasattr(owner, name)]
    texts = {
        core_client.InprocClient: ("self.engine_core = EngineCore",),
        core.EngineCore: ("self.batch_queue", "freeze_gc_heap()"),
        OutputProcessor: ("self.request_states",),
        RequestState: ("logprobs_processor",),
        RequestOutput: ("num_cached_tokens",),
        GPUModelRunner: (
            "self.sampler(",
            "self.attn_groups: list[list[AttentionGroup]]",
            "self.input_batch.num_tokens_no_spec[req_idx] = end_idx",
        ),
    }
    wrong += [f"no {t!r} in {o}" for o, found in texts.items() for t in found if t not in inspect.getsource(o)]
    logprobs = ("logprob_token_ids", "logprobs", "selected_token_ranks")
    wrong += [] if LogprobsTensors._fields[:3] == logprobs else [f"LogprobsTensors: {LogprobsTensors._fields}"]
    return wrong


# -------------------------------------------------------------------------------------------------- FP8


def fp8_reload() -> dict:
    """Return how well a linear layer in FP8 has the weights that a reload brought, and whether its storage stayed."""
    from vllm import _custom_ops
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.layers.quantization.online import fp8
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )

    def scaled_fp8_quant(weight, scale=None, **options):  # what the kernel of this name does
        largest = torch.finfo(torch.float8_e4m3fn).max
        scale = weight.abs().max().float().reshape(1) / largest if scale is None else scale
        return (weight.float() / scale).clamp(-largest, largest).to(torch.float8_e4m3fn), scale

    class Kernel:
        def process_weights_after_loading(self, layer) -> None: ...

    _custom_ops.scaled_fp8_quant = scaled_fp8_quant
    fp8.init_fp8_linear_kernel = lambda **options: Kernel()
    found = engine_config(quantization="fp8")
    with set_current_vllm_config(found), tempfile.TemporaryDirectory() as folder:
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        parallel_state.initialize_model_parallel(1)
        linear = ReplicatedLinear(64, 32, bias=True, quant_config=found.quant_config, prefix="model.layers.0.mlp.down")
        model = torch.nn.Module()
        model.linear = linear
        head = object.__new__(ParallelLMHead)
        head_method = found.quant_config.get_quant_method(head, "lm_head")
        record_metadata_for_reloading(model)
        DummyModelLoader(found.load_config).load_weights(model, found.model_config)
        dtype, address = str(linear.weight.dtype), linear.weight.data_ptr()
        errors = []
        for seed in (0, 1):
            generator = torch.Generator().manual_seed(seed)
            new = {name: torch.randn(*shape, generator=generator) for name, shape in SHAPES.items()}
            initialize_layerwise_reload(model)
            for name, value in new.items():
                parameter = getattr(linear, name)
                parameter.weight_loader(parameter, value.to(torch.bfloat16))
            finalize_layerwise_reload(model, found.model_config)
            weight = linear.weight.float()
            weight = (weight if weight.shape == new["weight"].shape else weight.t()) * linear.weight_scale
            errors.append(float((weight - new["weight"]).abs().max() / new["weight"].abs().max()))
            errors.append(float((linear.bias.detach() - new["bias"]).abs().max()))
        same_storage = linear.weight.data_ptr() == address
        torch.distributed.destroy_process_group()
    return {"dtype": dtype, "errors": errors, "same_storage": same_storage, "head": head_method and str(head_method)}


SHAPES = {"weight": (32, 64), "bias": (32,)}


# -------------------------------------------------------------------------------------------------- failures


def failures() -> dict:
    """Return our messages for errors that vLLM's own functions raise, and our patterns of vLLM's that it never says."""
    from vllm.v1.worker.utils import request_memory

    snapshot = SimpleNamespace(total_memory=80 << 30, free_memory=10 << 30, device_="cuda:0")
    try:
        request_memory(snapshot, SimpleNamespace(gpu_memory_utilization=0.7))
    except ValueError as error:
        message = str(explain_failed_start(error, on_gpu=True))
    root = Path(vllm.__file__).parent
    files = [file for folder in ("v1", "config", "distributed") for file in (root / folder).rglob("*.py")]
    text = "\n".join(file.read_text() for file in files)
    own = [pattern for pattern in START_FAILURES if pattern.replace(" ", "").replace("'", "").isalpha()]
    outside = {"out of memory", "no kernel image is available"}  # CUDA's
    return {"message": message, "unknown": [p for p in own if p not in text and p not in outside], "own": len(own)}


SECTIONS = {
    "version": lambda: vllm.__version__,
    "config": config,
    "config_without": lambda: config(cuda_graphs="never", async_scheduling="never"),
    "config_fp8": lambda: config(quantization="fp8"),
    "sampler_1": lambda: sampler(1.0),
    "sampler_0.6": lambda: sampler(0.6),
    "sampler_0": lambda: sampler(0.0),
    "sampler_top_p": lambda: sampler(1.0, 1e-6),
    "config_v2": config_v2,
    "sampler_v2_1": lambda: sampler_v2(1.0),
    "sampler_v2_0.6": lambda: sampler_v2(0.6),
    "sampler_v2_0": lambda: sampler_v2(0.0),
    "sampler_v2_top_p": lambda: sampler_v2(1.0, 1e-6),
    "interface_v2": interface_v2,
    "interface": interface,
    "failures": failures,
    "fp8": fp8_reload,
}

if __name__ == "__main__":
    report = {}
    for name, section in SECTIONS.items():
        try:
            report[name] = section()
        except Exception:
            report[name] = f"failed: {traceback.format_exc()}"
    print(json.dumps(report))
