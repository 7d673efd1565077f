"""Process group, mesh, timers; signs of life between ranks; the wish to stop."""

from arpo.ranks.ranks import RandomState, Ranks, Timers, init_ranks, seed_everything
from arpo.ranks.stop import StopRequest

__all__ = ["RandomState", "Ranks", "StopRequest", "Timers", "init_ranks", "seed_everything"]
