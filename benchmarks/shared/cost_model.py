"""The cost of a training step in memory and time, by formula: the model behind benchmarks/scaling.py.

Training state and KV cache are computed as at the start of a run (arpo/start/memory.py). The other memory of an update
is added here. Decoding is bound by memory traffic, everything else by arithmetic. A share of the collectives
(`Hardware.overlap`) hides behind compute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import arpo.start.memory
from arpo.config.sections import EngineConfig, ModelConfig
from arpo.model.policy import HEAD_CHUNK_TOKENS
from arpo.start.memory import BF16, FP32, GIB, SIZE_OF, Job, engine_memory, resting_state, training_state
from benchmarks.shared.hardware import Hardware
from benchmarks.shared.shapes import Shape


@dataclass(frozen=True)
class Workload:
    """One step. The defaults are those of train_rl.py. The last block has assumptions about the trajectories."""

    num_prompts: int = 128
    group_size: int = 16
    max_prompt_tokens: int = 1536
    max_response_tokens: int = 4096
    num_prompts_per_minibatch: int = 16
    num_epochs: int = 1
    max_tokens_per_microbatch: int = 16_384
    recompute_every_n_layers: int = 1
    reference: bool = False
    critic: bool = False
    first_update_computes_old_logprobs: bool = True
    """The first mini-batch has no forward pass before its update (arpo/update.py)."""
    max_num_seqs: int = 256
    gpu_memory_utilization: float = 0.6
    shard_gpus: int = 0
    """GPUs that share one copy of weights and optimizer state; 0 = all GPUs of a node."""
    lora: bool = False
    """Train adapters only; their gradients and optimizer state count as 0 bytes."""
    offload: bool = False
    """AdamW's moments are in host memory except during the optimizer step (optim.offload)."""

    prompt_tokens: float = 400.0
    sampled_tokens: float = 900.0
    result_tokens: float = 600.0
    longest_sampled_tokens: float = 3000.0
    """Tokens of the longest trajectory. The rollout waits for this trajectory."""
    longest_tool_seconds: float = 20.0
    """Seconds of all tool calls of that trajectory."""
    tree_token_ratio: float = 1.5
    """Tokens of all rows / tokens computed."""
    rollout_over_bound: float = 1.15
    """Time of the streaming loop over its bound (benchmarks/rollout_streaming.py)."""

    @property
    def row_tokens(self) -> float:
        return self.prompt_tokens + self.sampled_tokens + self.result_tokens


# ---------------------------------------------------------------------------------------------------------- memory


def num_shards(work: Workload, hw: Hardware) -> int:
    return work.shard_gpus or hw.gpus_per_node


def job(shape: Shape, work: Workload, hw: Hardware) -> Job:
    model = ModelConfig(recompute_every_n_layers=work.recompute_every_n_layers, lora_rank=int(work.lora))
    return Job(
        sizes=shape.sizes,
        model=model,
        num_shards=num_shards(work, hw),
        engine=EngineConfig(gpu_memory_utilization=work.gpu_memory_utilization, max_num_seqs=work.max_num_seqs),
        max_model_len=work.max_prompt_tokens + work.max_response_tokens,
        critic=shape.sizes if work.critic else None,
        reference=shape.sizes if work.reference else None,
        offload=work.offload,
    )


@dataclass(frozen=True)
class Memory:
    """Bytes per GPU. Training and rollout do not overlap: weights and cache of the engine sleep while we train."""

    states: float
    """`training_state`."""
    resting: float
    """Part of `states` that stays while the engine samples: `resting_state`."""
    gathered: float
    """Two unsharded layers and the root module, and unreduced gradients of the largest of them."""
    activations: float
    head: float
    engine_budget: float
    kv_cache: float
    reserved: float
    """CUDA context, NCCL's buffers, fragmentation."""

    @property
    def training(self) -> float:
        return self.states + self.gathered + self.activations + self.head + self.reserved

    @property
    def rollout(self) -> float:
        return self.resting + self.engine_budget + self.reserved


def layer_activation_bytes(shape: Shape, dtype_bytes: int) -> int:
    """Return the bytes per token that one layer saves for the backward pass.

    Two norms (the float32 input, the normalised input, and its product with the weight); q, k, v and the output of the
    attention; gate, silu(gate), up and their product. k and v count once per query head, as sdpa expands them.
    """
    norms = 2 * (FP32 + 2 * dtype_bytes) * shape.hidden
    qk_norms = shape.qk_norm * (FP32 + dtype_bytes) * (shape.heads + shape.kv_heads) * shape.head_dim
    return norms + qk_norms + dtype_bytes * (4 * shape.heads * shape.head_dim + 4 * shape.intermediate)


def activation_bytes(shape: Shape, num_tokens: float, dtype_bytes: int, *, every: int) -> float:
    """Return the bytes of activations at the start of the backward pass.

    Every `every`-th layer keeps only its input and is recomputed (0 = no layer). One of these layers is recomputed at a
    time.
    """
    layer = num_tokens * layer_activation_bytes(shape, dtype_bytes)
    if not every:
        return shape.layers * layer
    num_light = -(-shape.layers // every)
    return num_light * num_tokens * dtype_bytes * shape.hidden + (shape.layers - num_light + 1) * layer


def memory_of_job(
    shape: Shape, job: Job, max_tokens_per_microbatch: int, gpu_bytes: float, reserved: float = GIB
) -> Memory:
    """Return the memory that a job with a model of this shape needs on a GPU with `gpu_bytes`."""
    model = job.model
    dtype_bytes = SIZE_OF[model.compute_dtype]
    num_unsharded = 2 if model.reshard_after_forward else shape.layers
    largest = 0 if model.lora_rank else max(shape.layer_parameters, shape.root_parameters)  # with a gradient
    engine = engine_memory(job.sizes, job.engine, gpu_bytes) if job.engine else None
    return Memory(
        states=training_state(job),
        resting=resting_state(job),
        gathered=dtype_bytes * (num_unsharded * shape.layer_parameters + shape.root_parameters)
        + (dtype_bytes + FP32) * largest,
        activations=activation_bytes(
            shape,
            max_tokens_per_microbatch / model.context_parallel,
            dtype_bytes,
            every=model.recompute_every_n_layers,
        ),
        head=3 * FP32 * HEAD_CHUNK_TOKENS * shape.vocab,  # logits, their softmax, their gradient
        engine_budget=engine.budget if engine else 0.0,
        kv_cache=engine.kv_cache if engine else 0.0,
        reserved=reserved,
    )


def memory(shape: Shape, work: Workload, hw: Hardware) -> Memory:
    return memory_of_job(
        shape,
        job(shape, work, hw),
        max_tokens_per_microbatch=work.max_tokens_per_microbatch,
        gpu_bytes=hw.memory_gib * GIB,
        reserved=hw.reserved_gib * GIB,
    )


def misfits(shape: Shape, work: Workload, hw: Hardware, num_gpus: int) -> list[str]:
    """Return the reasons why the step cannot run; [] if it can."""
    m = memory(shape, work, hw)
    total = hw.memory_gib * GIB
    reasons = []
    if m.training > total:
        reasons.append(f"training needs {m.training / GIB:.0f} of {hw.memory_gib:.0f} GiB per GPU")
    reasons += arpo.start.memory.misfits(job(shape, work, hw), total)
    if work.num_prompts % num_gpus:
        reasons.append(f"data.num_prompts_per_step={work.num_prompts} is not a multiple of {num_gpus} ranks")
    return reasons


# ------------------------------------------------------------------------------------------------------------ time


@dataclass(frozen=True)
class Seconds:
    """Seconds of one step, by phase."""

    rollout: float
    tail: float
    """Part of `rollout`: the wait for the longest trajectory after the engine's own time."""
    old_logprobs: float
    update: float
    collectives: float
    """Part of old_logprobs and update: gathers and reductions that do not hide behind compute."""
    sync: float

    @property
    def step(self) -> float:
        return self.rollout + self.old_logprobs + self.update + self.sync


def kv_bytes_per_token(shape: Shape) -> int:
    return BF16 * shape.kv_numbers_per_token


def forward_flops(shape: Shape, num_tokens: float, mean_context: float) -> float:
    """Return the FLOPs of matrices (2 per weight and token; the embedding is a lookup) and causal attention."""
    matrices = shape.parameters - (0 if shape.tied else shape.vocab * shape.hidden)
    return num_tokens * (2 * matrices + 4 * shape.layers * shape.heads * shape.head_dim * mean_context)


def decode_seconds(shape: Shape, hw: Hardware, batch: float, num_cached: float) -> float:
    """Return the seconds of one token for each of `batch` sequences, with `num_cached` tokens in the cache together.

    A decode step reads the weights once, and the entire cache.
    """
    read = BF16 * shape.parameters + num_cached * kv_bytes_per_token(shape)
    moved = read / (hw.memory_share * hw.memory_gb_s * 1e9)
    return moved + (hw.step_overhead_ms + batch * hw.overhead_ms_per_sequence) / 1e3


def rollout_seconds(shape: Shape, work: Workload, hw: Hardware, num_gpus: int) -> tuple[float, float]:
    """Return (seconds, seconds of the tail among them). Decoding is bound by reading weights and caches."""
    sequences = work.num_prompts * work.group_size / num_gpus
    context = work.prompt_tokens + (work.sampled_tokens + work.result_tokens) / 2
    fitting = memory(shape, work, hw).kv_cache / (kv_bytes_per_token(shape) * context)
    at_once = max(1.0, min(sequences, work.max_num_seqs, fitting))

    decode = sequences * work.sampled_tokens / at_once * decode_seconds(shape, hw, at_once, at_once * context)
    prefilled = sequences * work.result_tokens + sequences / work.group_size * work.prompt_tokens
    prefill = forward_flops(shape, prefilled, context) / (hw.prefill_share * hw.bf16_tflops * 1e12)
    engine = decode + prefill
    chain = work.longest_sampled_tokens * decode_seconds(shape, hw, 1, context) + work.longest_tool_seconds
    seconds = work.rollout_over_bound * max(engine, chain)
    return seconds, max(0.0, seconds - engine)


def gather_seconds(shape: Shape, dtype_bytes: int, hw: Hardware, shards: int) -> float:
    """Return the seconds of one all-gather (or reduce-scatter) of all parameters."""
    # across nodes the network is the slower part
    inside = shards <= hw.gpus_per_node
    rate = hw.link_share * 1e9 * (hw.link_gb_s if inside else hw.network_gb_s)
    return dtype_bytes * shape.parameters * (1 - 1 / shards) / rate


def train_seconds(shape: Shape, work: Workload, hw: Hardware, num_gpus: int) -> tuple[float, float, float]:
    """Return seconds: (old logprobs with reference and values, update, exposed collectives within both)."""
    rows = work.num_prompts * work.group_size / num_gpus * work.row_tokens
    tokens = rows / work.tree_token_ratio
    forward = forward_flops(shape, tokens, work.row_tokens / 2) / (hw.train_share * hw.bf16_tflops * 1e12)
    minibatches = work.num_prompts / work.num_prompts_per_minibatch
    micros = minibatches * max(1, math.ceil(tokens / minibatches / work.max_tokens_per_microbatch))
    shards = num_shards(work, hw)
    gather = gather_seconds(shape, BF16, hw, shards)
    reduce = gather_seconds(shape, FP32, hw, shards)
    # copies of the model: the shards' gradients are summed over them, once per mini-batch (0 where there is one copy)
    sent = 2 * FP32 * shape.parameters / shards * (1 - shards / num_gpus)
    between = sent / (hw.link_share * hw.network_gb_s * 1e9)

    def exposed(compute: float, collectives: float) -> float:
        return collectives - min(hw.overlap * collectives, compute)

    models = 1 + work.reference + work.critic - work.first_update_computes_old_logprobs / minibatches
    old_exposed = exposed(forward, micros * gather)
    passes = (4 if work.recompute_every_n_layers else 3) * (1 + work.critic) * work.num_epochs
    update = passes * forward
    collectives = micros * (2 * gather + reduce) + minibatches * between
    update_exposed = exposed(update, work.num_epochs * (1 + work.critic) * collectives)
    optimizer = minibatches * work.num_epochs * 7 * FP32 * shape.parameters / shards / (hw.memory_gb_s * 1e9)
    old = models * (forward + old_exposed)
    return old, update + update_exposed + optimizer, models * old_exposed + update_exposed


@dataclass(frozen=True)
class SftWorkload:
    """One step of train_sft.py."""

    model: ModelConfig
    num_conversations: int
    max_tokens_per_microbatch: int
    offload: bool = False
    """AdamW's moments are in host memory except during the optimizer step."""
    conversation_tokens: float = 2000.0
    """Mean tokens of a conversation, with prompt and results."""
    imbalance: float = 1.3
    """Tokens of the slowest rank / mean of all ranks. Conversations differ in length."""


def sft_memory(shape: Shape, work: SftWorkload, hw: Hardware) -> Memory:
    """Return the memory of SFT on a GPU, without an engine."""
    one = Job(shape.sizes, work.model, num_shards=work.model.shard_size or hw.gpus_per_node, offload=work.offload)
    return memory_of_job(
        shape,
        one,
        max_tokens_per_microbatch=work.max_tokens_per_microbatch,
        gpu_bytes=hw.memory_gib * GIB,
        reserved=hw.reserved_gib * GIB,
    )


def sft_seconds(shape: Shape, work: SftWorkload, hw: Hardware, num_gpus: int) -> tuple[float, float]:
    """Return (seconds of a step, part of exposed collectives). With LoRA no gradient of a full matrix is reduced, and
    the optimizer's step counts as 0."""
    tokens = work.imbalance * work.num_conversations * work.conversation_tokens / num_gpus
    forward = forward_flops(shape, tokens, work.conversation_tokens / 2) / (hw.train_share * hw.bf16_tflops * 1e12)
    compute = (4 if work.model.recompute_every_n_layers else 3) * forward
    micros = max(1, math.ceil(tokens / work.max_tokens_per_microbatch))
    shards = work.model.shard_size or hw.gpus_per_node
    gather = gather_seconds(shape, BF16, hw, shards)
    collectives = 2 * micros * gather
    optimizer = 0.0
    if not work.model.lora_rank:
        sent = 2 * FP32 * shape.parameters / shards * (1 - shards / num_gpus)
        collectives += micros * gather_seconds(shape, FP32, hw, shards) + sent / (hw.link_share * hw.network_gb_s * 1e9)
        optimizer = 7 * FP32 * shape.parameters / shards / (hw.memory_gb_s * 1e9)
    exposed = collectives - min(hw.overlap * collectives, compute)
    return compute + exposed + optimizer, exposed


def seconds(shape: Shape, work: Workload, hw: Hardware, num_gpus: int) -> Seconds:
    rollout, tail = rollout_seconds(shape, work, hw, num_gpus)
    old_logprobs, update, collectives = train_seconds(shape, work, hw, num_gpus)
    # three copies: out of the shards, into buckets, into the engine
    copied = 3 * BF16 * shape.parameters / (hw.memory_gb_s * 1e9)
    # 1 s to map the engine's memory again
    sync = gather_seconds(shape, BF16, hw, num_shards(work, hw)) + copied + 1.0
    return Seconds(
        rollout=rollout,
        tail=tail,
        old_logprobs=old_logprobs,
        update=update,
        collectives=collectives,
        sync=sync,
    )
