"""The rollout's requests to an engine of any kind, and the chunks that it gets back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal


@dataclass(frozen=True)
class SamplingSpec:
    """Settings by which one request is sampled."""

    max_tokens: int
    temperature: float = 1.0
    """Sampling temperature; 0 = greedy. All requests in flight that are not greedy share one value."""
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    """Texts that end the request. Their tokens are part of the output, with whatever else the last token holds."""
    seed: int | None = None
    """Seed of the request's own random stream: the same tokens whatever else is in the batch (up to float noise)."""
    num_entropy_tokens: int = 0
    """Number of first tokens whose entropies are wanted; 0 = none, -1 = all."""
    num_top_logprobs: int = 0
    """Number K of largest logprobs that are wanted for each of those tokens."""
    num_chunk_tokens: int = 1
    """Tokens that come together, after the first one, which comes alone; an end comes at once, and `abort` loses what
    has not come yet."""


@dataclass(frozen=True)
class Chunk:
    """The output of one step for one request."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    """The new tokens; none if the request has only got its turn."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each of those tokens under the policy at the request's temperature, before top_p; of a greedy
    one at that of the others in flight, or at 1."""
    entropies: list[float] = field(default_factory=list)
    """Next-token entropies (nats) over the full vocabulary at temperature 1, before top_p, of the first
    len(entropies) of these tokens."""
    top_logprobs: list[list[float]] = field(default_factory=list)
    """The K largest logprobs at temperature 1, descending; one list per entropy, or empty when not asked for."""
    finish: Literal["stop", "eos", "length"] | None = None
    """The reason for the end: a stop string, an end token, or max_tokens; None = the request goes on."""
    stop_string: str | None = None
    """The stop string that ended the request, or None."""

    def ended_after(self, count: int, stop_string: str) -> Chunk:
        """Return the first `count` tokens as a chunk that ends with this stop string."""
        return replace(
            self,
            token_ids=self.token_ids[:count],
            logprobs=self.logprobs[:count],
            entropies=self.entropies[:count],
            top_logprobs=self.top_logprobs[:count],
            finish="stop",
            stop_string=stop_string,
        )
