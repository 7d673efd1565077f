"""Log-probabilities, entropies and top K from vLLM's second model runner (engine.model_runner=v2).

This runner prepares a step on the GPU, and so needs less of the host's time. The runner's sampler calls functions of a
module, not a method that we could replace. So we wrap the sampler, and compute our columns from the same logits.

The runner's noise needs no hook. As in noise.py, the noise is a function of seed, position and token, in a single
kernel for all rows. But the numbers differ: a seed gives other tokens than with the first runner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class SamplerWithEntropies:
    """vLLM's sampler with our logprobs in the output. All other behaviour is unchanged."""

    def __init__(self, sampler, gather_logprobs: Callable[[Tensor, Tensor], Any]) -> None:
        """gather_logprobs: (N, V) log-softmax and (N,) sampled tokens -> vLLM's LogprobsTensors."""
        self.sampler = sampler
        self.gather_logprobs = gather_logprobs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    def __call__(self, logits: Tensor, input_batch):
        output = self.sampler(logits, input_batch)
        # None in a step without a request that asks for logprobs; each of our requests does.
        if output.logprobs_tensors is not None:
            # The sampler leaves the logits as they are, in the model's dtype: it changes a float32 copy.
            logprobs = logits.float().log_softmax(-1)
            output.logprobs_tensors = self.gather_logprobs(logprobs, output.sampled_token_ids[:, 0])
        return output
