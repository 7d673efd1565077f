"""The policy: a Hugging Face causal LM under FSDP2, with a head that computes logits in chunks.

Shapes: N tokens of a micro-batch, B rows, T response tokens, D hidden size, V vocabulary (see batch.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from arpo.batch import MicroBatch
from arpo.config.sections import ModelConfig
from arpo.data.model_folder import check_model_folder
from arpo.errors import UserError
from arpo.model import lora
from arpo.model.attention import attention_backend, register
from arpo.model.chat_template import excess_of
from arpo.model.context_parallel import check_model, ulysses
from arpo.model.head import scored_logprobs
from arpo.model.loading import build_on_meta, logits_divisor, materialize, read_weights
from arpo.model.mixers import masks
from arpo.model.settled import read_model_config
from arpo.model.sketch import GradientSketch

Micro = TypeVar("Micro")
HEAD_CHUNK_TOKENS = 1024
"""Number of tokens whose logits exist at the same time."""


class Policy(nn.Module):
    """The Hugging Face model. Its head runs within the forward of FSDP2's root, which gathers the head's weight."""

    def __init__(self, hf: nn.Module):
        super().__init__()
        self.hf = hf
        self.logits_divisor = logits_divisor(hf)
        self.head_chunk_tokens = HEAD_CHUNK_TOKENS
        self.sketch: GradientSketch | None = None
        """If set, forward passes with gradients fill it (update.measure_noise)."""

    def forward(self, micro: MicroBatch, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logprobs of the response tokens and entropies (nats) of their distributions, (B, T) float32 each.

        0 where the loss mask is 0, since the head runs only on loss tokens. Do not read float fields of `micro` here
        (advantages, other logprobs): FSDP2 has copied the dataclass, and cast these fields to model.compute_dtype.
        """
        hidden = hidden_states(self.hf.base_model, micro)
        # Also without loss tokens the head runs (on none). So its gradients are 0, and the ranks' collectives match.
        positions, targets = micro.head_inputs()
        inputs = hidden[positions]
        sketch = self.sketch if torch.is_grad_enabled() else None
        logprobs, entropies, scores = scored_logprobs(
            inputs,
            self.hf.lm_head.weight,  # gathered once by the root's forward, whatever the number of chunks
            targets,
            sketch.directions if sketch else None,
            temperature=temperature * self.logits_divisor,
            chunk_tokens=self.head_chunk_tokens,
        )
        if sketch:
            sketch.take_tokens(micro, inputs, scores)
        return micro.to_rows(logprobs), micro.to_rows(entropies)

    def hf_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name in the text model, parameter or its shard), for weight sync and export. A tied head comes once.

        Adapters are merged, one matrix at a time. Collective.
        """
        reshard_all(self)
        yield from lora.merged_parameters(self.hf)

    def trained_parameters(self) -> dict[str, torch.Tensor]:
        """Return name -> trained parameter (or a shard), for a checkpoint. With LoRA only adapters are trained."""
        reshard_all(self)
        return {name: p for name, p in self.hf.named_parameters() if p.requires_grad}


def hidden_states(backbone: nn.Module, micro: MicroBatch) -> torch.Tensor:
    """Return the last layer's hidden states (N, D). Without a cache, since rows would see each other through it."""
    return backbone(
        input_ids=micro.input_ids,
        position_ids=micro.position_ids,
        attention_mask=masks(backbone, micro),
        use_cache=False,
        **micro.attention_options(),
    ).last_hidden_state[0]


def load_policy(
    cfg: ModelConfig,
    mesh: DeviceMesh,
    *,
    device: torch.device,
    max_model_len: int = 0,
    offload: bool = False,
    seed: int = 0,
) -> Policy:
    """Build and shard the policy, then load each rank's rows. Collective.

    Master weights and gradient reduction are in float32, computation in `cfg.compute_dtype`.

    max_model_len: tokens of the longest row, prompt and response; some RoPE depends on it. 0 = vLLM's default.
    offload: shards stay in CPU memory, and each layer is copied to the GPU, if there is one, for its forward pass.
    seed: for LoRA's adapters, which are not in the folder.
    Raises UserError for missing or broken weights, and if the head is not a single matrix.
    """
    hf = build_on_meta(cfg.path, attention_implementation(cfg, device), max_model_len=max_model_len)
    if cfg.context_parallel > 1:
        check_model(hf.config, cfg.context_parallel)
    if cfg.lora_rank:
        lora.add_lora(hf, cfg)
    policy = Policy(hf).train()
    shard(policy, hf, cfg, mesh, device, offload=offload)
    read_weights(lora.base_parameters(hf), cfg.path)
    lora.initialize(hf, seed)
    return policy


def shard(
    model: nn.Module, hf: nn.Module, cfg: ModelConfig, mesh: DeviceMesh, device: torch.device, *, offload: bool = False
) -> None:
    """Shard `model` with FSDP2, one unit per layer. Collective.

    `hf` is the part of `model` on the meta device. Afterwards it has memory for its shards, with arbitrary content.
    """
    if cfg.recompute_every_n_layers:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
        for index, layer in enumerate(hf.base_model.layers):
            layer.gradient_checkpointing = index % cfg.recompute_every_n_layers == 0
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, cfg.compute_dtype), reduce_dtype=torch.float32, cast_forward_inputs=True
    )
    offload = offload and device.type == "cuda"
    placement = CPUOffloadPolicy() if offload else OffloadPolicy()
    for layer in hf.base_model.layers:
        if cfg.compile == "layers":
            layer.compile(dynamic=True)
        fully_shard(
            layer,
            mesh=mesh,
            reshard_after_forward=cfg.reshard_after_forward,
            mp_policy=precision,
            offload_policy=placement,
        )
    # reshard_after_forward also for the root. Otherwise it stays unsharded after a forward without gradients, and an
    # optimizer would not see its shards.
    fully_shard(model, mesh=mesh, reshard_after_forward=True, mp_policy=precision, offload_policy=placement)
    # `accumulating` reads these two.
    model.is_whole = mesh.shape[-1] == 1  # each rank has a full copy
    model.reshards = cfg.reshard_after_forward
    materialize(hf, device, parameter_device=torch.device("cpu") if offload else device)


def accumulating(model: nn.Module, micros: Sequence[Micro]) -> Iterator[Micro]:
    """Yield the micro-batches of an optimizer step, for one forward and backward pass each. Same number on all ranks.

    Copies of the model exchange gradients only at the last micro-batch. With model.reshard_after_forward=False, layers
    stay gathered until then. This needs no more memory than a single micro-batch.
    """
    if not isinstance(model, FSDPModule):
        yield from micros
        return
    for number, micro in enumerate(micros, start=1):
        is_last = number == len(micros)
        model.set_requires_all_reduce(is_last)  # between copies, if each copy is spread over several ranks
        if model.is_whole:
            model.set_requires_gradient_sync(is_last)
        if not model.reshards:
            model.set_reshard_after_backward(is_last)
        yield micro


def reshard_all(model: nn.Module) -> None:
    """Shard again the modules that FSDP2 left unsharded after a forward without backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def attention_implementation(cfg: ModelConfig, device: torch.device) -> str:
    """Register the attention backend with transformers, and return its name there. Raises UserError."""
    attention = attention_backend(cfg, device)
    return ulysses(attention) if cfg.context_parallel > 1 else register(attention)


def load_tokenizer(path: str, *, option: str = "model.path"):
    """Return the model folder's tokenizer. Raises UserError if there is none, or if the chat template does not end.

    option: the option that names the folder, for errors.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())
        if not Path(path).is_dir():  # a name on the Hub, or a folder that does not exist
            reason = f"there is no such folder here, and the hub does not answer or has no such model: {reason}"
        raise UserError(f"{option}={path}: cannot load the tokenizer ({reason[:200]})") from None
    templates = tokenizer.chat_template or ""
    for template in templates.values() if isinstance(templates, dict) else [templates]:
        excess = excess_of(template)
        if excess:
            raise UserError(
                f"{option}={path}: its chat template (chat_template.jinja, or in tokenizer_config.json) needs more "
                f"than {excess} for a question; take that of the model's publisher"
            )
    check_vocabulary(path, tokenizer, option)
    return tokenizer


def check_vocabulary(path: str, tokenizer, option: str) -> None:
    """Raise UserError if the tokenizer has ids without a row in the embeddings: tokens were added, but no rows."""
    if not (Path(path) / "config.json").exists():  # only a tokenizer, for a model on a server
        return
    num_rows = read_model_config(path).get_text_config().vocab_size
    beyond = {token_id: token for token, token_id in tokenizer.get_vocab().items() if token_id >= num_rows}
    if beyond:
        raise UserError(
            f"{option}={path}: the tokenizer has {len(beyond)} tokens without a row of the model's {num_rows} "
            f"embeddings, {beyond[min(beyond)]!r} first; give it rows with transformers, "
            "model.resize_token_embeddings(len(tokenizer)), and save both into the folder"
        )


def check_companion(path: str, tokenizer, *, max_model_len: int, option: str) -> None:
    """Raise UserError if the folder of a critic or reference is not complete, or has another vocabulary."""
    check_model_folder(path, max_model_len=max_model_len, option=option)
    if load_tokenizer(path, option=option).get_vocab() != tokenizer.get_vocab():
        raise UserError(f"{option}={path}: its tokenizer is not that of model.path; use a model of the same family")
