"""The cost of a training step in memory and time, by formula: the model behind benchmarks/scaling.py.

Parameters, gradients and AdamW's moments are float32 shards; each GPU also gathers layers in bfloat16, holds
activations, and has an engine with all weights in bfloat16 and a KV cache. Decoding is bound by memory traffic, all
else by arithmetic; collectives hide behind compute as far as `Hardware.overlap` says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GIB = 2**30
FP32, BF16 = 4, 2
"""Bytes of a number."""


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
    def kv_bytes_per_token(self) -> int:
        return 2 * BF16 * self.layers * self.kv_heads * self.head_dim

    def forward_flops(self, num_tokens: float, mean_context: float) -> float:
        """FLOPs of matrices (2 per weight and token; the embedding is a lookup) and causal attention."""
        matrices = self.parameters - (0 if self.tied else self.vocab * self.hidden)
        return num_tokens * (2 * matrices + 4 * self.layers * self.heads * self.head_dim * mean_context)

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


MODELS = {
    "Qwen2.5-3B": Shape(2048, 11008, 36, 16, 2, 128, 151_936, tied=True, qkv_bias=True),
    "Qwen2.5-7B": Shape(3584, 18944, 28, 28, 4, 128, 152_064, qkv_bias=True),
    "Llama-3.1-8B": Shape(4096, 14336, 32, 32, 8, 128, 128_256),
    "Qwen3-8B": Shape(4096, 12288, 36, 32, 8, 128, 151_936, qk_norm=True),
    "Qwen3-14B": Shape(5120, 17408, 40, 40, 8, 128, 151_936, qk_norm=True),
}


@dataclass(frozen=True)
class Hardware:
    """A node, and the shares of its data sheet that we assume to reach. Nothing here was measured on such a node."""

    gpus_per_node: int
    memory_gib: float
    """Per GPU, as the driver reports it."""
    bf16_tflops: float
    """Dense, data sheet."""
    memory_gb_s: float
    link_gb_s: float
    """Per GPU and direction, inside the node."""
    network_gb_s: float
    """Per GPU and direction, between nodes."""
    train_share: float = 0.40
    """Share of bf16_tflops reached in forward and backward of long packed batches."""
    prefill_share: float = 0.50
    memory_share: float = 0.60
    """Share of memory_gb_s reached while decoding."""
    link_share: float = 0.70
    overlap: float = 0.80
    """Share of the collectives' time that hides behind compute, while there is enough of it."""
    step_overhead_ms: float = 6.0
    """Overhead of one engine step: Python and kernel launches (eager)."""
    overhead_ms_per_sequence: float = 0.03
    reserved_gib: float = 3.0
    """CUDA context, NCCL buffers, fragmentation."""


HARDWARE = {
    "8xH100-80GB": Hardware(8, 79.1, 989, 3350, 450, 50),
    "8xH200-141GB": Hardware(8, 139.7, 989, 4800, 450, 50),
    "8xA100-80GB": Hardware(8, 79.1, 312, 2039, 300, 25),
}


@dataclass(frozen=True)
class Workload:
    """One step. The defaults are those of train_rl.py; the last block is what trajectories are assumed to be like."""

    num_prompts: int = 128
    group_size: int = 16
    max_prompt_tokens: int = 1536
    max_response_tokens: int = 4096
    num_prompts_per_minibatch: int = 16
    num_epochs: int = 1
    max_tokens_per_microbatch: int = 16_384
    head_chunk_tokens: int = 1024
    activation_checkpointing: bool = True
    reference: bool = False
    critic: bool = False
    first_update_fills: bool = True
    """The first mini-batch has no forward pass before its update (arpo/update.py)."""
    max_num_seqs: int = 256
    gpu_memory_utilization: float = 0.6
    shard_gpus: int = 0
    """GPUs that share one copy of weights and optimizer state; 0 = those of a node."""
    lora: bool = False
    """Adapters only: their gradients and optimizer state are taken as nothing."""

    prompt_tokens: float = 400.0
    sampled_tokens: float = 900.0
    result_tokens: float = 600.0
    longest_sampled_tokens: float = 3000.0
    """Tokens of the trajectory that the rollout waits for."""
    longest_tool_seconds: float = 20.0
    """Seconds of all tool calls of that trajectory."""
    tree_token_ratio: float = 1.5
    """Tokens of all rows / tokens computed."""
    rollout_over_bound: float = 1.15
    """The streaming loop against its bound (benchmarks/rollout_streaming.py)."""

    @property
    def row_tokens(self) -> float:
        return self.prompt_tokens + self.sampled_tokens + self.result_tokens


# ---------------------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class Memory:
    """Bytes per GPU. Training and rollout do not overlap: weights and cache of the engine sleep while we train."""

    parameters: float
    gradients: float
    optimizer: float
    others: float
    """Critic (parameters, gradients, optimizer) and reference (parameters)."""
    gathered: float
    """Two layers and the root whole, and the gradients of one of each before they are reduced."""
    activations: float
    head: float
    engine_weights: float
    engine_budget: float
    reserved: float

    @property
    def training(self) -> float:
        states = self.parameters + self.gradients + self.optimizer + self.others
        return states + self.gathered + self.activations + self.head + self.reserved

    @property
    def rollout(self) -> float:
        return self.parameters + self.optimizer + self.others + self.engine_budget + self.reserved

    @property
    def kv_cache(self) -> float:
        """Return the rest of the engine's budget beside weights and a tenth for its own activations."""
        return 0.9 * self.engine_budget - self.engine_weights


def states_bytes(shape: Shape, ranks: int) -> tuple[float, float, float]:
    """Parameters, gradients, optimizer state of one of `ranks` shards: float32, AdamW with two moments."""
    shard = FP32 * shape.parameters / ranks
    return shard, shard, 2 * shard


def activation_bytes(shape: Shape, num_tokens: int, number: int, *, checkpointing: bool) -> float:
    """Held at the start of the backward pass; with checkpointing: the input of each layer, and one layer recomputed."""
    layer = num_tokens * shape.layer_activation_bytes(number)
    if not checkpointing:
        return shape.layers * layer
    return shape.layers * num_tokens * number * shape.hidden + layer


def num_shards(work: Workload, hw: Hardware) -> int:
    return work.shard_gpus or hw.gpus_per_node


def memory(shape: Shape, work: Workload, hw: Hardware) -> Memory:
    shards = num_shards(work, hw)
    parameters, gradients, optimizer = states_bytes(shape, shards)
    everything = parameters + gradients + optimizer  # of the critic, which is always trained whole
    if work.lora:
        gradients = optimizer = 0.0
    return Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        others=work.critic * everything + work.reference * parameters,
        gathered=BF16 * (2 * shape.layer_parameters + shape.root_parameters)
        + (BF16 + FP32) * max(shape.layer_parameters, shape.root_parameters),
        activations=activation_bytes(
            shape, work.max_tokens_per_microbatch, BF16, checkpointing=work.activation_checkpointing
        ),
        head=3 * FP32 * work.head_chunk_tokens * shape.vocab,  # logits, their softmax, their gradient
        engine_weights=BF16 * shape.parameters,
        engine_budget=work.gpu_memory_utilization * hw.memory_gib * GIB,
        reserved=hw.reserved_gib * GIB,
    )


def misfits(shape: Shape, work: Workload, hw: Hardware, num_gpus: int) -> list[str]:
    """Why it cannot run; empty where it can."""
    m, total = memory(shape, work, hw), hw.memory_gib * GIB
    reasons = []
    if m.training > total:
        reasons.append(f"training needs {m.training / GIB:.0f} of {hw.memory_gib:.0f} GiB per GPU")
    if m.rollout > total:
        reasons.append(
            f"trainer and engine need {m.rollout / GIB:.0f} of {hw.memory_gib:.0f} GiB per GPU during the rollout; "
            "lower engine.gpu_memory_utilization"
        )
    longest = work.max_prompt_tokens + work.max_response_tokens
    if m.kv_cache < shape.kv_bytes_per_token * longest:
        reasons.append(
            f"the engine has {max(m.kv_cache, 0) / GIB:.1f} GiB for its KV cache, less than one trajectory of "
            f"{longest} tokens; raise engine.gpu_memory_utilization"
        )
    if work.num_prompts % num_gpus:
        reasons.append(f"data.num_prompts_per_step={work.num_prompts} is not a multiple of {num_gpus} ranks")
    return reasons


# ------------------------------------------------------------------------------------------------------------ time


@dataclass(frozen=True)
class Seconds:
    """Seconds of one step, by phase."""

    rollout: float
    tail: float
    """Part of `rollout`: what the longest trajectory takes beyond the engine's own time."""
    old_logprobs: float
    update: float
    collectives: float
    """Part of old_logprobs and update: what of gathers and reductions does not hide behind compute."""
    sync: float

    @property
    def step(self) -> float:
        return self.rollout + self.old_logprobs + self.update + self.sync


def rollout_seconds(shape: Shape, work: Workload, hw: Hardware, num_gpus: int) -> tuple[float, float]:
    """(seconds, of which tail). Decoding is bound by memory: the weights once per step, each sequence's cache."""
    sequences = work.num_prompts * work.group_size / num_gpus
    context = work.prompt_tokens + (work.sampled_tokens + work.result_tokens) / 2
    fitting = memory(shape, work, hw).kv_cache / (shape.kv_bytes_per_token * context)
    at_once = max(1.0, min(sequences, work.max_num_seqs, fitting))

    def step_seconds(batch: float) -> float:
        read = BF16 * shape.parameters + batch * context * shape.kv_bytes_per_token
        moved = read / (hw.memory_share * hw.memory_gb_s * 1e9)
        return moved + (hw.step_overhead_ms + batch * hw.overhead_ms_per_sequence) / 1e3

    decode = sequences * work.sampled_tokens / at_once * step_seconds(at_once)
    prefilled = sequences * work.result_tokens + sequences / work.group_size * work.prompt_tokens
    prefill = shape.forward_flops(prefilled, context) / (hw.prefill_share * hw.bf16_tflops * 1e12)
    engine = decode + prefill
    chain = work.longest_sampled_tokens * step_seconds(1) + work.longest_tool_seconds
    seconds = work.rollout_over_bound * max(engine, chain)
    return seconds, max(0.0, seconds - engine)


def gather_seconds(shape: Shape, number: int, hw: Hardware, shards: int) -> float:
    """One all-gather (or reduce-scatter) of all parameters; across nodes the network is the slower part."""
    inside = shards <= hw.gpus_per_node
    rate = hw.link_share * 1e9 * (hw.link_gb_s if inside else hw.network_gb_s)
    return number * shape.parameters * (1 - 1 / shards) / rate


def train_seconds(shape: Shape, work: Workload, hw: Hardware, num_gpus: int) -> tuple[float, float, float]:
    """(old logprobs with reference and values, update, collectives within both that do not hide)."""
    rows = work.num_prompts * work.group_size / num_gpus * work.row_tokens
    tokens = rows / work.tree_token_ratio
    forward = shape.forward_flops(tokens, work.row_tokens / 2) / (hw.train_share * hw.bf16_tflops * 1e12)
    minibatches = work.num_prompts / work.num_prompts_per_minibatch
    micros = minibatches * max(1, math.ceil(tokens / minibatches / work.max_tokens_per_microbatch))
    shards = num_shards(work, hw)
    gather = gather_seconds(shape, BF16, hw, shards)
    reduce = gather_seconds(shape, FP32, hw, shards)
    if shards < num_gpus:  # copies: the shards' gradients are summed over them, once per micro-batch
        copies = num_gpus / shards
        reduce += 2 * FP32 * shape.parameters / shards * (1 - 1 / copies) / (hw.link_share * hw.network_gb_s * 1e9)

    def exposed(compute: float, collectives: float) -> float:
        return collectives - min(hw.overlap * collectives, compute)

    models = 1 + work.reference + work.critic - work.first_update_fills / minibatches
    old_exposed = exposed(forward, micros * gather)
    passes = (4 if work.activation_checkpointing else 3) * (1 + work.critic) * work.num_epochs
    update = passes * forward
    update_exposed = exposed(update, work.num_epochs * (1 + work.critic) * micros * (2 * gather + reduce))
    optimizer = minibatches * work.num_epochs * 7 * FP32 * shape.parameters / shards / (hw.memory_gb_s * 1e9)
    old = models * (forward + old_exposed)
    return old, update + update_exposed + optimizer, models * old_exposed + update_exposed


def seconds(shape: Shape, work: Workload, hw: Hardware, num_gpus: int) -> Seconds:
    rollout, tail = rollout_seconds(shape, work, hw, num_gpus)
    old_logprobs, update, collectives = train_seconds(shape, work, hw, num_gpus)
    copied = 3 * BF16 * shape.parameters / (hw.memory_gb_s * 1e9)  # out of the shards, into buckets, into the engine
    sync = gather_seconds(shape, BF16, hw, num_shards(work, hw)) + copied + 1.0  # 1 s: memory mapped again
    return Seconds(rollout, tail, old_logprobs, update, collectives, sync)
