"""GPU memory by arithmetic, before a model is loaded: what cannot fit is refused, all else is a line of the log.

Parameters, gradients and AdamW's moments are float32 shards. While a rank trains it also gathers layers, and holds
activations; meanwhile its engine sleeps. While it samples, vLLM has its share of the GPU for weights and a KV cache,
beside the trainer's weights and moments. Sums over parameters are exact, all else is an estimate. It was compared with
what a CPU can measure (tests/benchmarks/test_scaling.py), not with a GPU.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from arpo.config.sections import EngineConfig, ModelConfig
from arpo.errors import UserError
from arpo.model.policy import HEAD_CHUNK_TOKENS

logger = logging.getLogger(__name__)
GIB = 2**30
FP32, BF16 = 4, 2
"""Bytes of a number."""
SIZE_OF = {"float32": FP32, "bfloat16": BF16}
CONTEXT_GIB = 1.0
"""CUDA's context and NCCL's buffers, of which every process has some, at the least."""


@dataclass(frozen=True)
class Shape:
    """A dense decoder with gated MLPs (Qwen2, Qwen3, Llama)."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def layer_parameters(self) -> int:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * q + 2 * kv) + self.qkv_bias * (q + 2 * kv) + self.qk_norm * 2 * self.head_dim
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def root_parameters(self) -> int:
        """Embedding, head and last norm."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.root_parameters

    @property
    def kv_numbers_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim

    def layer_activation_bytes(self, number: int) -> int:
        """Saved for the backward pass per token in one layer, when a number of the compute dtype has `number` bytes.

        Two norms (the float32 input, the normalised one, and that times the weight), q, k, v and the output of the
        attention, then gate, silu(gate), up and their product. k and v count once per query head where sdpa expands
        them.
        """
        norms = 2 * (FP32 + 2 * number) * self.hidden
        qk_norms = self.qk_norm * (FP32 + number) * (self.heads + self.kv_heads) * self.head_dim
        return norms + qk_norms + number * (4 * self.heads * self.head_dim + 4 * self.intermediate)


def shape_from_json(c: dict) -> Shape:
    """Return the shape of a config.json. Raises KeyError for one that names its sizes in another way."""
    heads = c["num_attention_heads"]
    return Shape(
        hidden=c["hidden_size"],
        intermediate=c["intermediate_size"],
        layers=c["num_hidden_layers"],
        heads=heads,
        kv_heads=c.get("num_key_value_heads", heads),
        head_dim=c.get("head_dim") or c["hidden_size"] // heads,
        vocab=c["vocab_size"],
        tied=c.get("tie_word_embeddings", False),
        qkv_bias=c["model_type"] == "qwen2",
        qk_norm=c["model_type"] == "qwen3",
    )


@dataclass(frozen=True)
class Job:
    """The settings of a run that decide how much memory a GPU needs."""

    shape: Shape
    model: ModelConfig
    num_shards: int = 1
    """Ranks that share a copy of the model."""
    max_tokens_per_microbatch: int = 0
    """0 = nothing is trained."""
    engine: EngineConfig | None = None
    max_model_len: int = 0
    """Longest row that the engine must hold."""
    critic: Shape | None = None
    reference: Shape | None = None
    """None also where it lies in CPU memory."""


@dataclass(frozen=True)
class Memory:
    """Bytes per GPU. Training and rollout do not overlap: weights and cache of the engine sleep while we train."""

    states: float = 0.0
    """Parameters, gradients and optimizer, of the critic too; parameters of the reference."""
    gradients: float = 0.0
    """Part of `states` that is gone while the engine samples."""
    gathered: float = 0.0
    """Two layers and the root whole, and the gradients of one of each before they are reduced."""
    activations: float = 0.0
    head: float = 0.0
    engine_weights: float = 0.0
    engine_activations: float = 0.0
    engine_budget: float = 0.0
    kv_bytes_per_token: float = 0.0
    reserved: float = 0.0
    """CUDA context, NCCL's buffers, fragmentation."""

    @property
    def training(self) -> float:
        return self.states + self.gathered + self.activations + self.head + self.reserved

    @property
    def rollout(self) -> float:
        return self.states - self.gradients + self.engine_budget + self.reserved

    @property
    def kv_cache(self) -> float:
        return self.engine_budget - self.engine_weights - self.engine_activations

    @property
    def kv_tokens(self) -> float:
        return max(self.kv_cache, 0.0) / self.kv_bytes_per_token


def states_bytes(shape: Shape, ranks: int) -> tuple[float, float, float]:
    """Parameters, gradients, optimizer state of one of `ranks` shards: float32, AdamW with two moments."""
    shard = FP32 * shape.parameters / ranks
    return shard, shard, 2 * shard


def activation_bytes(shape: Shape, num_tokens: float, number: int, *, every: int) -> float:
    """Held at the start of the backward pass; of each `every`-th layer its input alone (0 = of none), and one of
    those layers recomputed."""
    layer = num_tokens * shape.layer_activation_bytes(number)
    if not every:
        return shape.layers * layer
    num_light = -(-shape.layers // every)
    return num_light * num_tokens * number * shape.hidden + (shape.layers - num_light + 1) * layer


def memory(job: Job, gpu_bytes: float, reserved: float = CONTEXT_GIB * GIB) -> Memory:
    """Return what the job needs of a GPU of so many bytes."""
    need = Memory(reserved=reserved)
    if job.max_tokens_per_microbatch:
        need = _with_training(need, job)
    return _with_engine(need, job.shape, job.engine, gpu_bytes) if job.engine else need


def _with_training(need: Memory, job: Job) -> Memory:
    model, shape, number = job.model, job.shape, SIZE_OF[job.model.compute_dtype]
    parameters, gradients, optimizer = states_bytes(shape, job.num_shards)
    if model.lora_rank:  # those of the adapters are taken as nothing
        gradients = optimizer = 0.0
    states = parameters + gradients + optimizer
    states += sum(states_bytes(job.critic, job.num_shards)) if job.critic else 0.0
    states += states_bytes(job.reference, job.num_shards)[0] if job.reference else 0.0
    num_whole = 2 if model.reshard_after_forward else shape.layers
    largest = max(shape.layer_parameters, shape.root_parameters)
    num_tokens = job.max_tokens_per_microbatch / model.context_parallel
    return replace(
        need,
        states=0.0 if model.cpu_offload else states,
        gradients=0.0 if model.cpu_offload else gradients,
        gathered=number * (num_whole * shape.layer_parameters + shape.root_parameters) + (number + FP32) * largest,
        activations=activation_bytes(shape, num_tokens, number, every=model.recompute_every_n_layers),
        head=3 * FP32 * HEAD_CHUNK_TOKENS * shape.vocab,  # logits, their softmax, their gradient
    )


def _with_engine(need: Memory, shape: Shape, engine: EngineConfig, gpu_bytes: float) -> Memory:
    parts, number = engine.tensor_parallel, SIZE_OF[engine.dtype]
    # vLLM keeps room for its largest step: gate and up of all tokens beside three hidden states, and the sampler's
    # float32 logits, their log-softmax, and the sorted ones with their int64 indices.
    tokens = engine.max_num_batched_tokens * number * (2 * shape.intermediate / parts + 3 * shape.hidden)
    return replace(
        need,
        engine_weights=number * shape.parameters / parts,
        engine_activations=tokens + engine.max_num_seqs * shape.vocab * (3 * FP32 + 8),
        engine_budget=engine.gpu_memory_utilization * gpu_bytes,
        kv_bytes_per_token=number * shape.kv_numbers_per_token / min(parts, shape.kv_heads),
    )


def misfits(job: Job, need: Memory, gpu_bytes: float) -> list[str]:
    """Return why the job cannot run, and what to change; nothing where it can."""
    total, reasons = f"{gpu_bytes / GIB:.1f} GiB", []
    if need.states + need.reserved > gpu_bytes:
        reasons.append(
            f"the training state needs {need.states / GIB:.1f} GiB of a GPU's {total}; use more GPUs, "
            "model.cpu_offload=True, or model.lora_rank"
        )
    if job.engine and need.kv_tokens < job.max_model_len:
        reasons.append(
            f"engine.gpu_memory_utilization={job.engine.gpu_memory_utilization:g} of {total} leaves "
            f"{max(need.kv_cache, 0) / GIB:.1f} GiB for vLLM's KV cache, beside {need.engine_weights / GIB:.1f} of "
            f"weights: less than one row of {job.max_model_len} tokens; raise it, or engine.tensor_parallel"
        )
    return reasons


def describe(job: Job, need: Memory, gpu_bytes: float) -> str:
    """Return the line for the log. "memory per GPU (79.1 GiB): training state 14.2, update about 32, vLLM 55.4 while it
    samples: KV cache about 39.7 = 743k tokens = 132 full rows (engine.max_num_seqs=256)"."""
    parts = []
    if job.max_tokens_per_microbatch:
        too_much = ", which may not fit (lower update.max_tokens_per_microbatch)" if need.training > gpu_bytes else ""
        update = f"update about {(need.training - need.reserved) / GIB:.0f}{too_much}"
        parts.append(f"training state {need.states / GIB:.1f}, {update}")
    if job.engine:
        too_much = ", which may not fit (lower engine.gpu_memory_utilization)" if need.rollout > gpu_bytes else ""
        parts.append(
            f"vLLM {need.engine_budget / GIB:.1f} while it samples{too_much}: KV cache about "
            f"{need.kv_cache / GIB:.1f} = {need.kv_tokens / 1000:.0f}k tokens = "
            f"{need.kv_tokens / job.max_model_len:.0f} full rows (engine.max_num_seqs={job.engine.max_num_seqs})"
        )
    return f"memory per GPU ({gpu_bytes / GIB:.1f} GiB): {', '.join(parts)}"


def check_memory(job: Job | None, device: torch.device) -> None:
    """Log what the job needs of this GPU. Raises UserError where that cannot be. Does nothing on a CPU."""
    if job is None or device.type != "cuda":
        return
    gpu_bytes = torch.cuda.get_device_properties(device).total_memory
    need = memory(job, gpu_bytes)
    if reasons := misfits(job, need, gpu_bytes):
        raise UserError("; ".join(reasons))
    logger.info(describe(job, need, gpu_bytes))


def read_job(
    model: ModelConfig,
    num_shards: int = 1,
    max_tokens_per_microbatch: int = 0,
    engine: EngineConfig | None = None,
    max_model_len: int = 0,
    *,
    critic_path: str = "",
    reference_path: str = "",
) -> Job | None:
    """Return the job with the shapes of these models; None for a model that this arithmetic does not know."""
    shapes = [shape_of(path) if path else None for path in (model.path, critic_path, reference_path)]
    if shapes[0] is None:
        return None
    return Job(shapes[0], model, num_shards, max_tokens_per_microbatch, engine, max_model_len, shapes[1], shapes[2])


def shape_of(path: str) -> Shape | None:
    """Return the shape of a model's folder, or hub name; None for one that this arithmetic does not know."""
    from transformers import AutoConfig

    try:
        return shape_from_json(AutoConfig.from_pretrained(path).to_dict())
    except (OSError, ValueError, KeyError):  # what is wrong with the folder is the loader's to say
        return None
