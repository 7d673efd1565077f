"""Sampling noise as a function of (request seed, position, token): one kernel for all rows, and no state.

vLLM draws a seeded request's noise from a generator of its own: two kernel launches per request and step. Here a row's
noise comes from its own SplitMix64 stream (Steele, Lea and Flood, 2014): it starts at a hash of seed and position, and
the token is the index into it. So a request gets the same tokens whatever else is in the batch, in which row it lies,
how its prompt was cut into chunks, and whether it was preempted.

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
MIX_1, MIX_2 = signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB)  # and its multipliers
LARGEST_UNIFORM = 1 - 2**-24  # the float32 before 1, so that no noise is infinite


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift in zeros: torch's own shift keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix64(x: Tensor) -> Tensor:
    """Return SplitMix64's hash of each element, a permutation of the 64-bit integers."""
    x = (x ^ shift_right(x, 30)) * MIX_1
    x = (x ^ shift_right(x, 27)) * MIX_2
    return x ^ shift_right(x, 31)


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return where each row's stream starts. All (N,) int64; position = index in the sequence of the token to draw."""
    return mix64(mix64(seeds + GOLDEN) + positions * GOLDEN)


def token_offsets(vocab_size: int, device: torch.device | str) -> Tensor:
    """Return (V,) int64: how far a stream has moved at each token."""
    return torch.arange(1, vocab_size + 1, device=device) * GOLDEN


def exponential_noise(keys: Tensor, offsets: Tensor) -> Tensor:
    """Return (N, V) float32 draws from Exponential(1), between 1e-10 and 17. keys (N,), offsets (V,)."""
    bits = shift_right(mix64(keys.unsqueeze(-1) + offsets), 32)
    uniform = ((bits.float() + 0.5) * 2**-32).clamp_max(LARGEST_UNIFORM)
    return -torch.log1p(-uniform)  # exact for small values, which are the ones that decide


def draw(logits: Tensor, keys: Tensor, offsets: Tensor) -> Tensor:
    """Return (N,) int64: a token per row, drawn from softmax(logits). logits (N, V) float32, -inf = never."""
    return (logits - exponential_noise(keys, offsets).log()).argmax(-1)


def compile_draw(vocab_size: int, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return `draw` as one fused kernel, compiled now, for one row and for several, instead of during the rollout."""
    compiled = torch.compile(draw, dynamic=True)
    with torch.inference_mode():  # as vLLM calls it, with tensors made here: others would be compiled for once more
        offsets = token_offsets(vocab_size, device)
        for num_rows in (1, 2):
            compiled(torch.zeros(num_rows, vocab_size, device=device), offsets[:num_rows].clone(), offsets)
    return compiled


def install_noise_hook(model_runner, draw: Callable[[Tensor, Tensor, Tensor], Tensor] = draw) -> None:
    """Let the sampler of vLLM's model runner call `draw` after its own temperature, top_k and top_p.

    A request without a seed gets a new one at each step, from torch's global generator.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    offsets: dict[tuple[int, torch.device], Tensor] = {}
    pin = torch.cuda.is_available()  # a transfer from pageable memory would wait for the GPU

    def forward(
        logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, None]:
        num_rows, vocab_size = logits.shape
        seeds = torch.randint(2**62, (num_rows,)) if len(generators) < num_rows else torch.zeros(num_rows).long()
        own = np.array([generator.initial_seed() for generator in generators.values()], dtype=np.uint64)
        seeds.numpy()[list(generators)] = own.view(np.int64)
        # Number of tokens in each row, also of those that are sampled but not yet on the CPU. In a copy: the next step
        # may write there before this one's transfer is done.
        positions = torch.from_numpy(model_runner.input_batch.num_tokens_no_spec[:num_rows].astype(np.int64))
        keys = row_keys(seeds, positions)
        keys = (keys.pin_memory() if pin else keys).to(logits.device, non_blocking=True)
        place = (vocab_size, logits.device)
        if place not in offsets:
            offsets[place] = token_offsets(*place)
        return draw(apply_top_k_top_p(logits, k, p), keys, offsets[place]), None

    model_runner.sampler.topk_topp_sampler.forward = forward
