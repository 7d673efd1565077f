"""Process group, mesh, timers; signs of life between ranks."""

from arpo.ranks.ranks import Ranks, Timers, init, seed_everything

__all__ = ["Ranks", "Timers", "init", "seed_everything"]
