"""The policy: a Hugging Face causal LM under FSDP2, and a head that never holds all logits.

Shapes: N tokens of a micro-batch, B rows, T response tokens, D hidden size, V vocabulary (see batch.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from arpo.batch import MicroBatch
from arpo.config import UserError
from arpo.options import ModelConfig


class Policy(nn.Module):
    """Wraps the HF model so that the head runs inside the FSDP2 root's forward, where its weight is whole."""

    def __init__(self, hf: nn.Module, head_chunk_tokens: int):
        super().__init__()
        self.hf = hf
        self.head_chunk_tokens = head_chunk_tokens

    def forward(self, micro: MicroBatch, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs of the response tokens and entropies (nats) of their distributions, (B, T) float32 each.

        0 where the loss mask is 0: the head is only computed for tokens that count.
        """
        # Position ids alone make the block-diagonal mask; a cache or a mask of ones would let rows see each other.
        hidden = self.hf.base_model(
            input_ids=micro.input_ids, position_ids=micro.position_ids, use_cache=False
        ).last_hidden_state[0]  # (N, D)
        mask = micro.loss_mask if micro.loss_mask.any() else torch.ones_like(micro.loss_mask)
        logprobs, entropies = token_logprobs(
            hidden[micro.predict_from[mask]],
            self.hf.lm_head.weight,
            micro.targets[mask],
            temperature=temperature,
            chunk_tokens=self.head_chunk_tokens,
        )
        # An empty micro-batch still runs the head (the ranks' collectives must match), times 0.
        scale = micro.loss_mask[mask].float()
        rows = torch.zeros(micro.targets.shape, dtype=torch.float32, device=hidden.device)
        return rows.masked_scatter(mask, logprobs * scale), rows.masked_scatter(mask, entropies * scale)

    def hf_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in the HF checkpoint, parameter or its shard), a tied head once; for weight sync and export."""
        self.reshard_all()
        yield from self.hf.named_parameters()

    def reshard_all(self) -> None:
        """FSDP2 may leave modules unsharded after a forward without backward."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, D), (V, D), (N,) -> logprob of each target, entropy of each distribution: (N,), (N,) float32.

    Logits exist for `chunk_tokens` positions at a time, in float32, and are recomputed in the backward pass.
    """

    def chunk(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.log_softmax((hidden @ weight.T).float() / temperature, dim=-1)  # (chunk, V)
        return logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)

    parts = [
        checkpoint(chunk, h, weight, t, use_reentrant=False)
        for h, t in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
    ]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def load_policy(cfg: ModelConfig, mesh: DeviceMesh, *, device: torch.device) -> Policy:
    """Load, wrap, shard. Master weights and gradient reduction in float32, compute in `cfg.compute_dtype`."""
    from transformers import AutoModelForCausalLM

    check_model_folder(cfg.path)
    hf = AutoModelForCausalLM.from_pretrained(
        cfg.path, dtype=torch.float32, attn_implementation=attention_backend(cfg, device)
    )
    if cfg.activation_checkpointing:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
    policy = Policy(hf, cfg.head_chunk_tokens).to(device).train()
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, cfg.compute_dtype), reduce_dtype=torch.float32, cast_forward_inputs=True
    )
    for layer in hf.base_model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    # The root too: else it stays unsharded after a forward without gradients, and an optimizer would miss its shards.
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    return policy


def attention_backend(cfg: ModelConfig, device: torch.device) -> str:
    from transformers.utils import is_flash_attn_2_available

    flash = device.type == "cuda" and is_flash_attn_2_available()
    if cfg.attention == "auto":
        return "flash_attention_2" if flash else "sdpa"
    if cfg.attention == "flash_attention_2" and not flash:
        raise UserError("model.attention=flash_attention_2 needs a GPU and the flash-attn package; use auto or sdpa")
    return cfg.attention


def load_tokenizer(path: str):
    """The model folder's tokenizer. Raises UserError where there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot load the tokenizer ({' '.join(str(error).split())[:200]})") from None


def check_model_folder(path: str, *, max_model_len: int = 0) -> None:
    """Name what is missing before anything is loaded; a path that is no folder, and does not look local, is a hub name.

    Raises UserError: no folder, no config.json, no weights, no chat template, `max_model_len` beyond the positions.
    """
    folder = Path(path)
    if not folder.is_dir():
        if folder.is_absolute() or path.startswith((".", "runs/")) or path.count("/") != 1:
            raise UserError(f"model.path={path}: no such folder; train or download the model first")
        return
    if not (folder / "config.json").exists():
        raise UserError(f"model.path={path}: no config.json; it must be a Hugging Face model folder")
    if not [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]:
        raise UserError(f"model.path={path}: no weights (*.safetensors); was the model saved completely?")
    tokenizer_config = folder / "tokenizer_config.json"
    if not tokenizer_config.exists():
        raise UserError(f"model.path={path}: no tokenizer_config.json; save the tokenizer into the folder")
    if not (folder / "chat_template.jinja").exists() and "chat_template" not in json.loads(
        tokenizer_config.read_text()
    ):
        raise UserError(f"model.path={path}: the tokenizer has no chat template; add chat_template.jinja")
    positions = json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
    if positions and max_model_len > positions:
        raise UserError(
            f"model.path={path}: data.max_prompt_tokens + rollout.max_response_tokens = {max_model_len} exceeds the "
            f"model's max_position_embeddings = {positions}; lower one of them"
        )
