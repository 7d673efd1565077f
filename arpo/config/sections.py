"""The config sections of the run, model, data, engine and optimizer, which scripts share. See options.py.

Imports nothing of torch, so that `--help` answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Literal

from arpo.config.facts import ALWAYS_MATTERS, DECIDES, MAY_CHANGE, AtLeast, Between, Needs
from arpo.config.named import check_name
from arpo.errors import require

LORA = Needs("model.lora_rank", use=16)


@dataclass(frozen=True)
class RunConfig:
    """The run's folder, and how often it validates and saves."""

    FACTS = (MAY_CHANGE,)

    name: str = "run"
    """The run writes to DIR/NAME: config.yaml, metrics.jsonl, tb/, trajectories/, checkpoints/."""
    dir: str = "runs"
    """Folder of all runs."""
    seed: Annotated[int, DECIDES, Between(0, 2**32 - 2**16)] = 0  # libraries take 32 bits, ranks add to it
    """Seed of data order, sampling and branch decisions."""
    num_steps: Annotated[int, AtLeast(0)] = 0
    """Training steps; 0 = as many as num_epochs over the data gives."""
    num_epochs: Annotated[int, AtLeast(1), Needs("run.num_steps", 0)] = 2
    """Passes over the training data; used when num_steps is 0."""
    validate_every: Annotated[int, AtLeast(0)] = 5
    """Steps between validations, the first of them before step 1; 0 = never."""
    save_every: Annotated[int, AtLeast(0)] = 5
    """Steps between checkpoints (the last step is always saved); 0 = only the last step."""
    keep_checkpoints: Annotated[int, AtLeast(2)] = 2
    """Number of newest checkpoints that stay on disk (at least 2, so that a broken one has a fallback)."""
    save_hf_every: Annotated[int, AtLeast(0)] = 1
    """Checkpoints of which one gets a Hugging Face folder (safetensors, tokenizer) too; the last one always does, and
    the newest that has one stays with it. 0 = none."""
    async_save: bool = False
    """Write checkpoints beside the training, from a copy in host memory (12 bytes of a trained parameter / ranks, and
    on rank 0 the Hugging Face folder): steps wait for the copy, not for the disk. The last save is waited for."""
    keep_best: bool = True
    """Keep the Hugging Face folder of the best validation too, at DIR/NAME/best: of the validated steps those that have
    one, by valid/accuracy (without one, by valid/reward; SFT: valid/nll); where two are equal, the earlier."""
    stop_on_collapse: bool = False
    """train_rl.py: end the run at an alarm (entropy, gradient norm, response length or share of calls that ran far from
    that of the last steps), without saving that step, and name the newest checkpoint from before."""
    dump_every: Annotated[int, AtLeast(0)] = 10
    """Steps between full trajectory dumps (the last step is always dumped); 0 = never."""
    trackers: tuple[str, ...] = ("tensorboard",)
    """Where numbers go besides metrics.jsonl: tensorboard (RUN/tb), or FILE.py:NAME, as for Weights & Biases
    (docs/training.md). One that fails is a warning, and is then off. Empty = none."""
    keep_dumps: Annotated[int, AtLeast(0)] = 50
    """Number of newest dumps of training that stay on disk, and as many of validation; 0 = all."""
    resume: bool = True
    """Continue from the newest intact checkpoint of DIR/NAME, if any; False = refuse to touch an existing run."""
    resume_changed: bool = False
    """Continue though settings that decide what is learnt have changed; RUN/changes.jsonl says at which step."""
    peer_timeout_minutes: Annotated[float, AtLeast(0)] = 60.0
    """Longest time that a rank waits for another in a collective; must exceed the slowest rollout of a rank."""
    silence_timeout_s: Annotated[float, AtLeast(0)] = 300.0
    """Longest silence of a rank's process before the run ends, and torchrun --max-restarts can start it again."""

    @property
    def folder(self) -> Path:
        return Path(self.dir) / self.name

    def __post_init__(self) -> None:
        parts = self.name.split("/")
        is_inside = all(part.strip(" .") for part in parts)
        require(is_inside, f"run.name={self.name!r} must name a folder inside run.dir; choose a name like grpo_7b")
        for tracker in self.trackers:
            require(tracker != "wandb", "run.trackers: wandb is now FILE.py:NAME; docs/training.md has what to write")
            check_name("run.trackers", tracker, "log/trackers", "TRACKERS")


@dataclass(frozen=True)
class ModelConfig:
    """The policy."""

    path: str = "Qwen/Qwen2.5-7B-Instruct"
    """Folder with config.json, safetensors and tokenizer (or a hub name, where a hub can be reached)."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of forward and backward. Master weights and gradient reduction are always float32."""
    attention: Annotated[Literal["auto", "sdpa", "varlen", "flash_attention_2"], MAY_CHANGE] = "auto"
    """auto = varlen (torch's FlashAttention) for bfloat16 on a GPU from A100 on, else sdpa. flash_attention_2 takes the
    flash-attn package."""
    recompute_every_n_layers: Annotated[int, AtLeast(0), MAY_CHANGE] = 1
    """Activation checkpointing: recompute each n-th layer in the backward pass instead of keeping its activations. More
    than 1 takes more memory, but computes less twice; 0 = keep them all."""
    compile: Annotated[Literal["none", "layers"], MAY_CHANGE] = "none"
    """torch.compile: layers = each layer but its attention; the start takes minutes (benchmarks/update_mfu.py)."""
    reshard_after_forward: Annotated[bool, MAY_CHANGE] = True
    """False = layers stay gathered until the last backward pass of a mini-batch, and the whole model is on each GPU."""
    shard_size: Annotated[int, AtLeast(0), MAY_CHANGE] = 0
    """Ranks that share one copy of weights and optimizer (0 = those of a node); copies exchange only gradients."""
    context_parallel: Annotated[int, AtLeast(1), MAY_CHANGE] = 1
    """Ranks that share the tokens of each micro-batch (Ulysses), for long rows; must divide the key-value heads."""
    lora_rank: Annotated[int, AtLeast(0)] = 0
    """Train only low-rank adapters of this rank; 0 = train all weights. (A critic always trains all of its own.)"""
    lora_alpha: Annotated[float, AtLeast(0), LORA] = 32.0
    """The product of an adapter's matrices is multiplied by lora_alpha / lora_rank."""
    lora_targets: Annotated[tuple[str, ...], LORA] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Linear layers that get an adapter."""
    enable_thinking: bool = False
    """Thinking switch that is passed to the chat template (Qwen3); templates without the switch ignore it."""

    def __post_init__(self) -> None:
        trains = self.lora_alpha > 0 and self.lora_targets
        require(trains or not self.lora_rank, "model.lora_alpha=0, or no model.lora_targets, would train nothing")


@dataclass(frozen=True)
class ProtocolConfig:
    """The form in which the model calls tools: the same in SFT, RL and evaluation."""

    format: str = "tags"
    """tags = <python> code </python>, all within one assistant turn, as the papers' models; hermes = JSON in
    <tool_call> blocks, with the chat template's own list of tools and its turns for results, as Qwen2.5, Qwen3 and
    Hermes models were trained to; xml = the same with <function=...> in the blocks, as of Qwen3-Coder, Qwen3.5 and
    Nemotron 3; or FILE.py:NAME, a form of yours. (But for tags set system_prompt=default too: prompts of files speak of
    tags.)"""

    def __post_init__(self) -> None:
        check_name("protocol.format", self.format, "protocol/__init__", "FORMS")


@dataclass(frozen=True)
class DataConfig:
    """Prompts for RL and validation."""

    train: str = ""
    """Training prompts: a parquet or jsonl file, or OWNER/NAME[@REVISION][:FILE] of a data set on the Hub."""
    valid: Annotated[str, MAY_CHANGE] = ""
    """Validation prompts, a file or a name too; empty = no validation."""
    num_valid_prompts: Annotated[int, AtLeast(0), MAY_CHANGE, Needs("data.valid", use="FILE")] = 0
    """Use only the first N validation prompts; 0 = all."""
    num_prompts_per_step: Annotated[int, AtLeast(1)] = 128
    """Prompts per rollout, over all ranks."""
    order: str = "epochs"
    """Of training prompts: epochs = pass after pass, each in an order of its own; or yours, FILE.py:NAME."""
    max_prompt_tokens: Annotated[int, AtLeast(1)] = 1536
    """Longest prompt; data.overlong says what happens to longer ones."""
    overlong: Literal["drop", "error"] = "drop"
    """drop = leave overlong prompts out, and say how many; error = stop."""
    system_prompt: str = "keep"
    """keep = as the file has it; none = without; default = the protocol's own; anything else = that text. Where there
    is none, some chat templates (Qwen2.5's, SmolLM2's) write one of their own."""

    def __post_init__(self) -> None:
        check_name("data.order", self.order, "data/order", "ORDERS")


@dataclass(frozen=True)
class SFTDataConfig:
    """The conversations to train on, and how they become rows of tokens."""

    train: str = ""
    """File of training conversations: jsonl, json or parquet; ShareGPT `conversations` or OpenAI `messages`. Any size
    will do: it is tokenised once, into DIR/NAME/tokens, and read from there step by step. Or a data set on the Hub,
    OWNER/NAME[@REVISION][:FILE]."""
    valid: Annotated[str, MAY_CHANGE] = ""
    """Validation conversations, a file or a name too; empty = no validation."""
    num_conversations_per_step: Annotated[int, AtLeast(1)] = 16
    """Number of conversations per optimizer step, over all ranks."""
    max_tokens: Annotated[int, AtLeast(1)] = 15000
    """Longest conversation, in tokens. Longer ones are left out, counted, and listed in
    DIR/NAME/tokens/*/overlong.jsonl."""
    max_tokens_per_microbatch: Annotated[int, AtLeast(1), MAY_CHANGE] = 16384
    """Token budget of one forward/backward pass on one rank; must hold the longest conversation. Gradients of the
    passes of a step are accumulated."""
    mask_results: bool = True
    """Leave <result> spans out of the loss. False = train on them, as the released code does: the model learns to make
    up results."""
    train_turns: Literal["all", "last"] = "all"
    """all = train on every assistant turn; last = only on the last one, with earlier turns as the chat template shows
    them: for templates that rewrite these, as Qwen3's does with thinking. (A turn includes its calls and results.)"""
    tools: tuple[str, ...] = ("python", "search")
    """Tools of the later rollouts: the default system prompt offers them, and their tags are escaped in results."""
    system_prompt: str = "keep"
    """System prompt. keep = as the file has it; none = without; default = the protocol's; anything else = that text.
    Where there is none, some chat templates (Qwen2.5's, SmolLM2's) write one of their own."""


@dataclass(frozen=True)
class EngineConfig:
    """The vLLM engine that each rank runs in its own process."""

    FACTS = (Needs("eval.server", ""), MAY_CHANGE)

    tensor_parallel: Annotated[int, AtLeast(1)] = 1
    """Neighbouring ranks that share one engine (for large models); must divide a node's ranks and the model's heads."""
    dtype: Annotated[Literal["bfloat16", "float32"], DECIDES] = "bfloat16"
    """Precision of sampling."""
    gpu_memory_utilization: Annotated[float, Between(0, 1)] = 0.6
    """Share of GPU memory that vLLM may use while it is awake (GPU only)."""
    kv_cache_gib: Annotated[float, AtLeast(0)] = 0.25
    """KV cache of each rank in GiB (CPU only; on GPU it follows from gpu_memory_utilization)."""
    max_num_seqs: Annotated[int, AtLeast(1), ALWAYS_MATTERS] = 256
    """Sequences decoded at the same time, per rank."""
    max_num_batched_tokens: Annotated[int, AtLeast(1)] = 8192
    """Tokens per engine step, prefill included."""
    cuda_graphs: Literal["auto", "never"] = "auto"
    """Compile the model and replay decoding as captured CUDA graphs: faster steps, and a start that is minutes longer.
    auto = on a GPU."""
    async_scheduling: Literal["auto", "never"] = "auto"
    """Prepare a step while the GPU computes the one before. auto = on a GPU, where vLLM allows it."""
    quantization: Annotated[Literal["none", "fp8"], DECIDES] = "none"
    """fp8 = the sampler's linear layers are quantised to 8 bits at each weight sync (GPU only). That is not quite the
    policy which is trained, so train_rl asks for a loss.rollout_correction."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule."""

    lr: Annotated[float, AtLeast(0)] = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW betas."""
    weight_decay: Annotated[float, AtLeast(0)] = 0.01
    """Weight decay of matrices; norms and biases are not decayed."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up; linear and cosine end at lr * min_lr_ratio."""
    warmup_ratio: Annotated[float, Between(0, 1)] = 0.0
    """Share of all optimizer steps with linearly rising learning rate."""
    decay_ratio: Annotated[float, Between(0, 1), Needs("optim.schedule", "linear")] = 1.0
    """linear: share of all optimizer steps, at the end, over which the rate falls."""
    min_lr_ratio: Annotated[float, Between(0, 1), Needs("optim.schedule", "linear", "cosine")] = 0.0
    """Final learning rate as a share of lr."""
    max_grad_norm: Annotated[float, Between(0, inf)] = 1.0
    """Global norm to which gradients are clipped; 0 = no clipping."""
    offload: Annotated[bool, MAY_CHANGE] = False
    """AdamW's moments lie in pinned host memory, and are on the GPU for an optimizer step alone: 8 bytes of a trained
    parameter / ranks more for vLLM and activations, for a copy there and back at each step. Pays where little is left
    beside the weights (14B on 8 x 80 GB)."""

    def __post_init__(self) -> None:
        in_range = all(0 <= beta < 1 for beta in self.betas)
        require(in_range, f"optim.betas={self.betas} must be at least 0 and below 1: AdamW divides by 1 - beta")


@dataclass(frozen=True)
class UpdateConfig:
    """The way in which a rollout becomes optimizer steps."""

    num_prompts_per_minibatch: Annotated[int, AtLeast(1)] = 16
    """Prompts per optimizer step, over all ranks; num_prompts_per_step / this = optimizer steps per rollout."""
    num_epochs: Annotated[int, AtLeast(1)] = 1
    """Passes over each rollout."""
    max_tokens_per_microbatch: Annotated[int, AtLeast(1), MAY_CHANGE] = 16384
    """Token budget of one forward/backward pass on one rank; must hold the longest trajectory."""
    layout: Annotated[Literal["auto", "packed", "tree"], MAY_CHANGE] = "auto"
    """packed = trajectories one after the other; tree = the tokens that they share (prompt, before a fork) are computed
    once, with the same loss and gradients. auto = tree, but packed for groups of one."""
    measure_noise: Annotated[bool, MAY_CHANGE] = True
    """Measure how much of an update's gradient is signal, and say where a smaller or larger group would teach more per
    call (gradient/* in docs/metrics.md). It takes 2 % of a small model's update (benchmarks/gradient_noise.py)."""
