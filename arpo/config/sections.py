"""Config sections of the run, model, data, engine and optimizer. Several scripts share these sections: see options.py.

The module does not import torch, so `--help` answers at once.
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
    """Training steps. 0 = the number of steps in num_epochs passes over the data."""
    num_epochs: Annotated[int, AtLeast(1), Needs("run.num_steps", 0)] = 2
    """Passes over the training data; used when num_steps is 0."""
    validate_every: Annotated[int, AtLeast(0)] = 5
    """Steps between validations; the first validation runs before step 1. 0 = never."""
    save_every: Annotated[int, AtLeast(0)] = 5
    """Steps between checkpoints (the last step is always saved); 0 = only the last step."""
    keep_checkpoints: Annotated[int, AtLeast(2)] = 2
    """Number of newest checkpoints to keep on disk: at least 2, so that a broken checkpoint has a fallback."""
    save_hf_every: Annotated[int, AtLeast(0)] = 1
    """Write a Hugging Face folder (safetensors, tokenizer) with every n-th checkpoint, and always with the last one.
    The newest checkpoint with such a folder stays on disk, and so does its folder. 0 = none."""
    async_save: bool = False
    """Write checkpoints while training goes on, from a copy in host memory. The copy takes 12 bytes per trained
    parameter / ranks, and on rank 0 the Hugging Face folder too. A step waits for the copy, not for the disk. The run
    waits for the last save."""
    keep_best: bool = True
    """Also keep the Hugging Face folder of the best validation, at DIR/NAME/best. Only validated steps with a Hugging
    Face folder count. Best = highest valid/accuracy (if there is none, valid/reward; SFT: best valid/nll). On a tie,
    the earlier step is kept."""
    stop_on_collapse: bool = False
    """train_rl.py: end the run at an alarm: entropy, gradient norm, response length, share of calls that ran, or spread
    of a group's rewards is far from the values of the last steps. That step is not saved. The message names the newest
    checkpoint from before the alarm."""
    stop_at_accuracy: Annotated[
        float | None, Between(0, 1), Needs("data.valid", use="FILE"), Needs("run.validate_every", use=5)
    ] = None
    """train_rl.py: end the run, as after its last step, once a validation has this valid/accuracy; None = never."""
    dump_every: Annotated[int, AtLeast(0)] = 10
    """Steps between full trajectory dumps (the last step is always dumped); 0 = never."""
    trackers: tuple[str, ...] = ("tensorboard",)
    """Where to write metrics besides metrics.jsonl: tensorboard (RUN/tb), or FILE.py:NAME, for example for Weights &
    Biases (docs/training.md). A tracker that fails gives a warning, and is off from then on. Empty = none."""
    keep_dumps: Annotated[int, AtLeast(0)] = 50
    """Number of newest training dumps to keep on disk, and of newest validation dumps. 0 = all."""
    resume: bool = True
    """Continue from the newest intact checkpoint of DIR/NAME, if any; False = refuse to touch an existing run."""
    resume_changed: bool = False
    """Continue even if settings have changed that decide the result of training. RUN/changes.jsonl records the step of
    each change."""
    peer_timeout_minutes: Annotated[float, AtLeast(0)] = 60.0
    """Longest time in minutes for a rank to wait for another rank in a collective. Must exceed the slowest rollout of a
    rank."""
    silence_timeout_s: Annotated[float, AtLeast(0)] = 300.0
    """Longest silence of a rank's process in seconds. After it the run ends, and torchrun --max-restarts can start the
    run again."""

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
    """auto = varlen (torch's FlashAttention) for bfloat16 on an A100 or newer GPU, sdpa in all other cases.
    flash_attention_2 needs the flash-attn package."""
    recompute_every_n_layers: Annotated[int, AtLeast(0), MAY_CHANGE] = 1
    """Activation checkpointing: recompute every n-th layer in the backward pass instead of keeping its activations. A
    value above 1 takes more memory and computes fewer layers twice. 0 = keep all activations."""
    compile: Annotated[Literal["none", "layers"], MAY_CHANGE] = "none"
    """torch.compile: layers = compile each layer except its attention. The start then takes minutes
    (benchmarks/update_mfu.py)."""
    reshard_after_forward: Annotated[bool, MAY_CHANGE] = True
    """False = layers stay gathered until the last backward pass of a mini-batch. Each GPU then holds the whole
    model."""
    shard_size: Annotated[int, AtLeast(0), MAY_CHANGE] = 0
    """Number of ranks that share one copy of the weights and of the optimizer. 0 = all ranks of a node. Copies exchange
    only gradients."""
    context_parallel: Annotated[int, AtLeast(1), MAY_CHANGE] = 1
    """Number of ranks that share the tokens of each micro-batch (Ulysses), for long rows. Must divide the number of
    key-value heads."""
    lora_rank: Annotated[int, AtLeast(0)] = 0
    """Train only low-rank adapters of this rank. 0 = train all weights. (A critic always trains all its weights.)"""
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
    """Linear layers with an adapter."""
    enable_thinking: bool = False
    """Thinking switch for the chat template (Qwen3, where True is the template's own default). False puts an empty
    thought into each prompt, also before an answer of SFT data that begins with a thought. Templates without the switch
    ignore it."""

    def __post_init__(self) -> None:
        trains = self.lora_alpha > 0 and self.lora_targets
        require(trains or not self.lora_rank, "model.lora_alpha=0, or no model.lora_targets, would train nothing")


@dataclass(frozen=True)
class ProtocolConfig:
    """The format of the model's tool calls: the same in SFT, RL and evaluation."""

    format: str = "tags"
    """tags = <python> code </python>, all within one assistant turn, as in the papers' models; hermes = JSON in
    <tool_call> blocks, with the chat template's list of tools and its turns for results, as Qwen2.5, Qwen3 and Hermes
    models were trained; xml = like hermes, but with <function=...> in the blocks, as in Qwen3-Coder, Qwen3.5 and
    Nemotron 3; FILE.py:NAME = your own format. (With any format except tags, also set system_prompt=default: prompts in
    data files describe tags.)"""

    def __post_init__(self) -> None:
        check_name("protocol.format", self.format, "protocol/__init__", "FORMS")


@dataclass(frozen=True)
class DataConfig:
    """Prompts for RL and validation."""

    train: str = ""
    """Training prompts: a parquet or jsonl file, or a data set on the Hub, OWNER/NAME[@REVISION][:FILE]."""
    valid: Annotated[str, MAY_CHANGE] = ""
    """Validation prompts: a file or a data set on the Hub, like data.train. Empty = no validation."""
    num_valid_prompts: Annotated[int, AtLeast(0), MAY_CHANGE, Needs("data.valid", use="FILE")] = 0
    """Use only the first N validation prompts; 0 = all."""
    num_prompts_per_step: Annotated[int, AtLeast(1)] = 128
    """Prompts per rollout, over all ranks."""
    order: str = "epochs"
    """Order of the training prompts: epochs = pass after pass, each pass in a new order; FILE.py:NAME = your own
    order."""
    max_prompt_tokens: Annotated[int, AtLeast(1)] = 1536
    """Longest prompt, in tokens. data.overlong says how to treat longer prompts."""
    overlong: Literal["drop", "error"] = "drop"
    """drop = leave overlong prompts out, and report their number; error = stop."""
    system_prompt: str = "keep"
    """keep = the system prompt of the file; none = no system prompt; default = the protocol's system prompt; anything
    else = that text. If there is no system prompt, some chat templates (Qwen2.5's, SmolLM2's) add a default one."""

    def __post_init__(self) -> None:
        check_name("data.order", self.order, "data/order", "ORDERS")


@dataclass(frozen=True)
class SFTDataConfig:
    """The conversations to train on, and how to turn conversations into rows of tokens."""

    train: str = ""
    """Training conversations: a jsonl, json or parquet file with ShareGPT `conversations` or OpenAI `messages`; or a
    data set on the Hub, OWNER/NAME[@REVISION][:FILE]. The file may have any size: it is tokenised once into
    DIR/NAME/tokens, and each step reads its rows from there."""
    valid: Annotated[str, MAY_CHANGE] = ""
    """Validation conversations: a file or a data set on the Hub, like data.train. Empty = no validation."""
    num_conversations_per_step: Annotated[int, AtLeast(1)] = 16
    """Number of conversations per optimizer step, over all ranks."""
    max_tokens: Annotated[int, AtLeast(1)] = 15000
    """Longest conversation, in tokens. Longer ones are left out, counted, and listed in
    DIR/NAME/tokens/*/overlong.jsonl."""
    max_tokens_per_microbatch: Annotated[int, AtLeast(1), MAY_CHANGE] = 16384
    """Token budget of one forward/backward pass on one rank; must hold the longest conversation. A step adds up the
    gradients of its passes."""
    mask_results: bool = True
    """Leave <result> spans out of the loss. False = train on <result> spans, like the released code: the model then
    learns to make up results."""
    train_turns: Literal["all", "last"] = "all"
    """all = train on every assistant turn; last = train only on the last assistant turn, with earlier turns as the chat
    template shows them. Use last for templates that rewrite earlier turns, as Qwen3's does with thinking. (A turn
    includes its calls and results.)"""
    tools: tuple[str, ...] = ("python", "search")
    """Tools of the later rollouts. The default system prompt offers these tools, and their tags are escaped in
    results."""
    system_prompt: str = "keep"
    """keep = the system prompt of the file; none = no system prompt; default = the protocol's system prompt; anything
    else = that text. If there is no system prompt, some chat templates (Qwen2.5's, SmolLM2's) add a default one."""


@dataclass(frozen=True)
class EngineConfig:
    """The vLLM engine. Each rank runs an engine in a separate process."""

    FACTS = (Needs("eval.server", ""), MAY_CHANGE)

    tensor_parallel: Annotated[int, AtLeast(1)] = 1
    """Number of neighbouring ranks that share one engine, for large models. Must divide the ranks of a node and the
    heads of the model."""
    dtype: Annotated[Literal["bfloat16", "float32"], DECIDES] = "bfloat16"
    """Precision of sampling."""
    gpu_memory_utilization: Annotated[float, Between(0, 1)] = 0.6
    """Share of GPU memory for vLLM while vLLM is awake (GPU only)."""
    kv_cache_gib: Annotated[float, AtLeast(0)] = 0.25
    """KV cache of each rank in GiB (CPU only; on a GPU, gpu_memory_utilization decides the size)."""
    max_num_seqs: Annotated[int, AtLeast(1), ALWAYS_MATTERS] = 256
    """Sequences decoded at the same time, per rank."""
    max_num_batched_tokens: Annotated[int, AtLeast(1)] = 8192
    """Tokens per engine step, prefill included."""
    cuda_graphs: Literal["auto", "never"] = "auto"
    """auto = on a GPU, compile the model and replay decoding as captured CUDA graphs: steps are faster, but the start
    takes minutes longer; never = do neither."""
    async_scheduling: Literal["auto", "never"] = "auto"
    """auto = on a GPU, and where vLLM allows it, prepare a step while the GPU computes the step before; never = do
    not."""
    model_runner: Literal["v1", "v2"] = "v1"
    """Part of vLLM that prepares a step and samples. v2 = the newer one, which needs less of the host's time: worth
    trying where the host limits a small model on a fast GPU (docs/scale.md). It has not run on a GPU with our
    logprobs yet (GPU only, without tensor_parallel). The same seed then gives other tokens."""
    quantization: Annotated[Literal["none", "fp8"], DECIDES] = "none"
    """fp8 = quantise the sampler's linear layers to 8 bits at each weight sync (GPU only). The sampler then differs
    slightly from the trained policy, so train_rl asks for a loss.rollout_correction."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule."""

    lr: Annotated[float, AtLeast(0)] = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW betas."""
    weight_decay: Annotated[float, AtLeast(0)] = 0.01
    """Weight decay of matrices. Norms and biases have no weight decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up; linear and cosine end at lr * min_lr_ratio."""
    warmup_ratio: Annotated[float, Between(0, 1)] = 0.0
    """Share of all optimizer steps, at the start, over which the learning rate rises linearly."""
    decay_ratio: Annotated[float, Between(0, 1), Needs("optim.schedule", "linear")] = 1.0
    """linear: share of all optimizer steps, at the end, over which the learning rate falls."""
    min_lr_ratio: Annotated[float, Between(0, 1), Needs("optim.schedule", "linear", "cosine")] = 0.0
    """Final learning rate as a share of lr."""
    max_grad_norm: Annotated[float, Between(0, inf)] = 1.0
    """Limit on the global gradient norm; larger gradients are clipped to it. 0 = no clipping."""
    offload: Annotated[bool, MAY_CHANGE] = False
    """Keep AdamW's moments in pinned host memory, and on the GPU only during an optimizer step. This frees 8 bytes per
    trained parameter / ranks for vLLM and activations, but each step copies the moments there and back. Worth it where
    the weights leave little memory (14B on 8 x 80 GB)."""

    def __post_init__(self) -> None:
        in_range = all(0 <= beta < 1 for beta in self.betas)
        require(in_range, f"optim.betas={self.betas} must be at least 0 and below 1: AdamW divides by 1 - beta")


@dataclass(frozen=True)
class UpdateConfig:
    """How to turn a rollout into optimizer steps."""

    num_prompts_per_minibatch: Annotated[int, AtLeast(1)] = 16
    """Prompts per optimizer step, over all ranks; num_prompts_per_step / this = optimizer steps per rollout."""
    num_epochs: Annotated[int, AtLeast(1)] = 1
    """Passes over each rollout."""
    max_tokens_per_microbatch: Annotated[int, AtLeast(1), MAY_CHANGE] = 16384
    """Token budget of one forward/backward pass on one rank; must hold the longest trajectory."""
    layout: Annotated[Literal["auto", "packed", "tree"], MAY_CHANGE] = "auto"
    """packed = trajectories one after the other; tree = compute shared tokens (the prompt, the tokens before a fork)
    only once, with the same loss and gradients. auto = tree, but packed for groups of one."""
    measure_noise: Annotated[bool, MAY_CHANGE] = True
    """Measure the share of signal in an update's gradient, and report if a smaller or larger group would teach more per
    call (gradient/* in docs/metrics.md). This takes 2 % of a small model's update time
    (benchmarks/gradient_noise.py)."""
