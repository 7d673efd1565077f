"""Process group, mesh and timers; heartbeats between ranks; requests to stop."""

from arpo.ranks.random_state import RandomState, seed_everything
from arpo.ranks.ranks import Ranks, Timers, init_ranks
from arpo.ranks.stop import StopRequest

__all__ = ["RandomState", "Ranks", "StopRequest", "Timers", "init_ranks", "seed_everything"]
