"""Estimates GPU memory before a model is loaded. A job that cannot fit is refused; for any other, a line is logged.

Parameters, gradients and AdamW's moments are float32 shards; frozen weights (LoRA) have model.compute_dtype. While a
rank samples, vLLM has its share of the GPU for weights and a KV cache. Sums over parameters are exact. The memory of
vLLM's largest step is an estimate. Nothing here was compared with a GPU. benchmarks/scaling.py estimates the memory
that an update takes besides.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from arpo.config.sections import EngineConfig, ModelConfig
from arpo.engine.arguments import CPU_HEAD_SIZES
from arpo.engine.weight_sync import expected_parameters
from arpo.errors import UserError

logger = logging.getLogger(__name__)
GIB = 2**30
FP32 = 4
"""Bytes of a float32 number."""
BF16 = 2
NUM_STATES = 4
"""Float32 numbers per trained parameter: the parameter, its gradient, AdamW's two moments."""
SIZE_OF = {"float32": FP32, "bfloat16": BF16}
CONTEXT_GIB = 1.0
"""Least memory of a process for CUDA's context and NCCL's buffers."""


class Sizes(NamedTuple):
    """The sizes of a dense decoder with gated MLPs that decide its memory."""

    parameters: int
    kv_numbers_per_token: int
    """Over the layers with attention"""
    kv_heads: int
    hidden: int
    intermediate: int
    vocab: int
    state_numbers_per_row: int = 0
    """Over the layers with gated delta; does not depend on the row's length"""
    head_dim: int = 0


def sizes_of(path: str) -> Sizes | None:
    """Return the sizes of a model (folder or hub name), or None if this arithmetic does not know the kind of model."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config()
        kinds = getattr(config, "layer_types", None) or []
        num_recurrent = kinds.count("linear_attention")
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return Sizes(
            parameters=sum(p.numel() for p in expected_parameters(path).values()),
            kv_numbers_per_token=2 * (config.num_hidden_layers - num_recurrent) * config.num_key_value_heads * head_dim,
            kv_heads=config.num_key_value_heads,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
            state_numbers_per_row=num_recurrent and num_recurrent * state_numbers(config),
            head_dim=head_dim,
        )
    except (UserError, OSError, ValueError, AttributeError, AssertionError):  # the loader says what is wrong
        return None


def state_numbers(config: Any) -> int:
    """Return how many numbers a gated-delta layer keeps for a row: a matrix per head, and the convolution's inputs."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    return values * config.linear_key_head_dim + (config.linear_conv_kernel_dim - 1) * (2 * keys + values)


@dataclass(frozen=True)
class Job:
    """The settings of a run that decide how much memory a GPU needs."""

    sizes: Sizes | None
    """None for a model that this arithmetic does not know"""
    model: ModelConfig
    num_shards: int = 0
    """Ranks that share a copy of the model in training; 0 = nothing is trained."""
    engine: EngineConfig | None = None
    max_model_len: int = 0
    """Longest row that the engine must hold."""
    critic: Sizes | None = None
    reference: Sizes | None = None
    """None also for a reference in CPU memory"""
    offload: bool = False
    """True if the moments are on the GPU only during an optimizer step (optim.offload)"""


def training_state(job: Job, num_states: int = NUM_STATES) -> float:
    """Return the bytes of policy and critic (parameters, gradients, optimizer) and of the reference's parameters."""
    if not job.num_shards:
        return 0.0
    # frozen weights have the compute dtype (model/lora.py); the adapters' own numbers are neglected
    per_weight = SIZE_OF[job.model.compute_dtype] if job.model.lora_rank else FP32 * num_states
    total = per_weight * job.sizes.parameters
    total += FP32 * num_states * job.critic.parameters if job.critic else 0
    total += FP32 * job.reference.parameters if job.reference else 0
    return total / job.num_shards


def resting_state(job: Job) -> float:
    """Return the bytes of the training state on the GPU while vLLM samples. Gradients do not stay there."""
    return training_state(job, 1 if job.offload else NUM_STATES - 1)


@dataclass(frozen=True)
class EngineMemory:
    """The parts of vLLM's share of a GPU, in bytes."""

    budget: float
    weights: float
    kv_cache: float
    """The rest of the budget after weights and vLLM's largest step. Below 0 if weights and step exceed the budget."""
    kv_bytes_per_token: float

    @property
    def kv_tokens(self) -> float:
        return max(self.kv_cache, 0.0) / self.kv_bytes_per_token


def engine_memory(sizes: Sizes, engine: EngineConfig, gpu_bytes: float) -> EngineMemory:
    parts = engine.tensor_parallel
    number = SIZE_OF[engine.dtype]  # bytes of a number
    budget = engine.gpu_memory_utilization * gpu_bytes
    # Under fp8 this is a lower bound: embedding and head stay as they are.
    weights = (1 if engine.quantization == "fp8" else number) * sizes.parameters / parts
    # vLLM keeps room for its largest step: gate and up of all tokens beside three hidden states, and the sampler's
    # float32 logits, their log-softmax, and the sorted ones with their int64 indices.
    tokens = engine.max_num_batched_tokens * number * (2 * sizes.intermediate / parts + 3 * sizes.hidden)
    sampler = engine.max_num_seqs * sizes.vocab * (3 * FP32 + 8)
    states = engine.max_num_seqs * FP32 * sizes.state_numbers_per_row / parts
    kv_bytes_per_token = number * sizes.kv_numbers_per_token / min(parts, sizes.kv_heads)
    return EngineMemory(budget, weights, budget - weights - tokens - sampler - states, kv_bytes_per_token)


def misfits(job: Job, gpu_bytes: float) -> list[str]:
    """Return the reasons why the job cannot run, each with the fix; [] if the job can run."""
    total = f"{gpu_bytes / GIB:.1f} GiB"
    state = training_state(job)
    reasons: list[str] = []
    if state + CONTEXT_GIB * GIB > gpu_bytes:
        reasons.append(
            f"the training state needs {state / GIB:.1f} GiB of a GPU's {total}; use more GPUs, or model.lora_rank"
        )
    if not job.engine:
        return reasons
    vllm = engine_memory(job.sizes, job.engine, gpu_bytes)
    share = job.engine.gpu_memory_utilization
    resting = resting_state(job)
    if vllm.kv_tokens < job.max_model_len:
        reasons.append(
            f"engine.gpu_memory_utilization={share:g} of {total} leaves "
            f"{max(vllm.kv_cache, 0) / GIB:.1f} GiB for vLLM's KV cache, beside {vllm.weights / GIB:.1f} of "
            f"weights: less than one row of {job.max_model_len} tokens; raise it, or engine.tensor_parallel"
        )
    if resting and resting + vllm.budget + CONTEXT_GIB * GIB > gpu_bytes:
        offload = "" if job.offload or job.model.lora_rank else ", or set optim.offload=True"
        reasons.append(
            f"engine.gpu_memory_utilization={share:g} of {total} leaves no room for the {resting / GIB:.1f} GiB of the "
            f"training state that stay on the GPU while vLLM samples; lower it{offload}"
        )
    return reasons


def describe(job: Job, gpu_bytes: float) -> str:
    """Return the line for the log. "memory per GPU (79.1 GiB): training state 14.2, vLLM 55.4 while it samples: KV
    cache about 39.7 = 743k tokens = 132 full rows (engine.max_num_seqs=256)"."""
    parts = []
    if job.num_shards:
        state = f"training state {training_state(job) / GIB:.1f}"
        parts.append(f"{state} ({resting_state(job) / GIB:.1f} between optimizer steps)" if job.offload else state)
    if job.engine:
        vllm = engine_memory(job.sizes, job.engine, gpu_bytes)
        parts.append(
            f"vLLM {vllm.budget / GIB:.1f} while it samples: KV cache about {vllm.kv_cache / GIB:.1f} = "
            f"{vllm.kv_tokens / 1000:.0f}k tokens = {vllm.kv_tokens / job.max_model_len:.0f} full rows "
            f"(engine.max_num_seqs={job.engine.max_num_seqs})"
        )
    return f"memory per GPU ({gpu_bytes / GIB:.1f} GiB): {', '.join(parts)}"


def check_memory(job: Job, device: torch.device) -> None:
    """Log the memory need of this job on this GPU. Raises UserError if the job does not fit, or if vLLM has no CPU
    kernel for the model's head size."""
    if not job.sizes:
        return
    if job.engine and device.type == "cpu" and job.sizes.head_dim not in CPU_HEAD_SIZES:
        raise UserError(
            f"model.path={job.model.path}: heads of {job.sizes.head_dim} numbers, and vLLM's CPU kernels have "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}; take another model, or a GPU"
        )
    if device.type != "cuda":
        return
    gpu_bytes = torch.cuda.get_device_properties(device).total_memory
    reasons = misfits(job, gpu_bytes)
    if reasons:
        raise UserError("; ".join(reasons))
    logger.info(describe(job, gpu_bytes))
