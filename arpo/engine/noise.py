"""Sampling noise as a function of (request seed, position, token): one kernel for all rows, and no state.

vLLM keeps a random generator per seeded request: two kernel launches per request and step. Here each row reads its
noise from a SplitMix64 stream (Steele, Lea and Flood, 2014). The stream starts at a hash of seed and position, and the
token is the index into the stream. So the tokens of a request do not depend on the other requests in the batch, on
the request's row, on the chunks of the prompt, or on preemption.

    token = argmax over v of  logits[v] - log(E[v])       E[v] ~ Exponential(1), independent   (the Gumbel-max trick)

Legend: N rows, V vocabulary. Integers are uint64 values in int64 tensors: products wrap around.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


def signed(constant: int) -> int:
    """Return the int64 with the bits of a uint64."""
    return constant - (1 << 64) if constant >> 63 else constant


GOLDEN = signed(0x9E3779B97F4A7C15)  # SplitMix64's increment
MIX_1 = signed(0xBF58476D1CE4E5B9)  # SplitMix64's multipliers
MIX_2 = signed(0x94D049BB133111EB)
LARGEST_UNIFORM = 1 - 2**-24  # the largest float32 below 1, so that no noise is infinite


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros. (torch's >> would fill with the sign bit.)"""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix64(x: Tensor) -> Tensor:
    """Return SplitMix64's hash of each element, a permutation of the 64-bit integers."""
    x = (x ^ shift_right(x, 30)) * MIX_1
    x = (x ^ shift_right(x, 27)) * MIX_2
    return x ^ shift_right(x, 31)


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return the start of each row's stream. All (N,) int64. position = index of the next token in the sequence."""
    return mix64(mix64(seeds + GOLDEN) + positions * GOLDEN)


def token_offsets(vocab_size: int, device: torch.device | str) -> Tensor:
    """Return (V,) int64: the distance from the stream's start to each token's random number."""
    return torch.arange(1, vocab_size + 1, device=device) * GOLDEN


def exponential_noise(keys: Tensor, offsets: Tensor) -> Tensor:
    """Return (N, V) float32 draws from Exponential(1), between 1e-10 and 17. keys (N,), offsets (V,)."""
    bits = shift_right(mix64(keys.unsqueeze(-1) + offsets), 32)
    uniform = ((bits.float() + 0.5) * 2**-32).clamp_max(LARGEST_UNIFORM)
    # log1p is exact for small values, and the smallest noise decides the draw.
    return -torch.log1p(-uniform)


def draw(logits: Tensor, keys: Tensor, offsets: Tensor) -> Tensor:
    """Draw a token per row from softmax(logits): (N,) int64. logits (N, V) float32, -inf = never drawn."""
    return (logits - exponential_noise(keys, offsets).log()).argmax(-1)


def compile_draw(vocab_size: int, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Compile `draw` to a fused kernel, for one row and for several: so the rollout need not wait for the compiler."""
    compiled = torch.compile(draw, dynamic=True)
    # vLLM calls the sampler in inference mode. Tensors made outside of it would cause a second compilation later.
    with torch.inference_mode():
        offsets = token_offsets(vocab_size, device)
        for num_rows in (1, 2):
            compiled(torch.zeros(num_rows, vocab_size, device=device), offsets[:num_rows].clone(), offsets)
    return compiled


def install_noise_hook(model_runner, draw: Callable[[Tensor, Tensor, Tensor], Tensor] = draw) -> None:
    """Make vLLM's sampler call `draw` after it has applied temperature, top_k and top_p.

    A request without a seed gets a new seed at each step, from torch's global generator.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    cached_offsets: dict[tuple[int, torch.device], Tensor] = {}
    pin = torch.cuda.is_available()  # a transfer from pageable memory would wait for the GPU

    def forward(
        logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, None]:
        num_rows, vocab_size = logits.shape
        seeds = torch.zeros(num_rows).long()
        if len(generators) < num_rows:
            seeds = torch.randint(2**62, (num_rows,))
        request_seeds = np.array([generator.initial_seed() for generator in generators.values()], dtype=np.uint64)
        seeds.numpy()[list(generators)] = request_seeds.view(np.int64)
        # num_tokens_no_spec counts the tokens of each row, including sampled tokens that are not yet on the CPU.
        # astype copies: the next step may change the counts before the transfer of this step is done.
        positions = torch.from_numpy(model_runner.input_batch.num_tokens_no_spec[:num_rows].astype(np.int64))
        keys = row_keys(seeds, positions)
        if pin:
            keys = keys.pin_memory()
        keys = keys.to(logits.device, non_blocking=True)
        key = (vocab_size, logits.device)
        if key not in cached_offsets:
            cached_offsets[key] = token_offsets(vocab_size, logits.device)
        return draw(apply_top_k_top_p(logits, k, p), keys, cached_offsets[key]), None

    model_runner.sampler.topk_topp_sampler.forward = forward
