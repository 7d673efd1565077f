"""What the rollout asks of an engine, whichever it is, and what it gets back piece by piece."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class SamplingSpec:
    """How to sample one request."""

    max_tokens: int
    temperature: float = 1.0
    """0 = greedy. All requests in flight share one value."""
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    """Texts that end the request; the tokens of the text are part of the output (and the rest of its last token)."""
    seed: int | None = None
    """Own random stream: the same tokens whatever else is in the batch (up to float noise)."""
    num_entropy_tokens: int = 0
    """Entropies are wanted for the first k tokens; 0 = none, -1 = all."""
    num_top_logprobs: int = 0
    """Also the K largest logprobs of those tokens."""


@dataclass(frozen=True)
class Chunk:
    """What one step produced for one request."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    """The new tokens; none where a request has only got its turn."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each of those tokens under the policy at the request's temperature (at 1 where that is 0),
    before top_p."""
    entropies: list[float] = field(default_factory=list)
    """Next-token entropies (nats) over the full vocabulary at temperature 1, before top_p, of the first
    len(entropies) of these tokens."""
    top_logprobs: list[list[float]] = field(default_factory=list)
    """The K largest logprobs at temperature 1, descending; one list per entropy, or empty when not asked for."""
    finish: Literal["stop", "eos", "length"] | None = None
    """Why the request ended: a stop string, an end token, max_tokens; None = it goes on."""
    stop_string: str | None = None
    """The stop string that ended the request; None where something else did."""
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
