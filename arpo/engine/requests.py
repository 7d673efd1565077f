"""The rollout's requests to an engine, and the chunks of tokens that the engine returns."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal


@dataclass(frozen=True)
class SamplingSpec:
    """Sampling settings of a request."""

    max_tokens: int
    temperature: float = 1.0
    """Sampling temperature; 0 = greedy. All requests in flight that are not greedy share one value."""
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    """Texts that end the request. The output includes all tokens of this text; the last token may go on after it."""
    seed: int | None = None
    """Seed of the request's random stream. With a seed the sampled tokens do not depend on the rest of the batch (up to
    float noise)."""
    num_entropy_tokens: int = 0
    """Entropies are computed for this many first tokens; 0 = none, -1 = all."""
    num_top_logprobs: int = 0
    """Number K of largest logprobs for each token with an entropy."""
    num_chunk_tokens: int = 1
    """Number of tokens per chunk. The first token has a chunk for itself, and the end of a request comes at once.
    `abort` loses the tokens of an unfinished chunk."""


@dataclass(frozen=True)
class Chunk:
    """The output of a request in a step of the engine."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    """The new tokens. Empty if the request was only scheduled."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each new token under the policy at the request's temperature, before top_p. A greedy request
    takes the temperature of the other requests in flight, or 1 if all are greedy."""
    entropies: list[float] = field(default_factory=list)
    """Next-token entropies (nats) over the full vocabulary at temperature 1, before top_p, for the first
    len(entropies) new tokens."""
    top_logprobs: list[list[float]] = field(default_factory=list)
    """The K largest logprobs at temperature 1, descending. One list per entropy, or empty if not requested."""
    finish: Literal["stop", "eos", "length"] | None = None
    """Reason for the end: a stop string, an end token, or max_tokens. None = the request goes on."""
    stop_string: str | None = None
    """The stop string that ended the request, or None."""

    def ended_after(self, count: int, stop_string: str) -> Chunk:
        """Return the first `count` tokens as a chunk with this stop string at its end."""
        return replace(
            self,
            token_ids=self.token_ids[:count],
            logprobs=self.logprobs[:count],
            entropies=self.entropies[:count],
            top_logprobs=self.top_logprobs[:count],
            finish="stop",
            stop_string=stop_string,
        )
