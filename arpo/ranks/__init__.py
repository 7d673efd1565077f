"""Process group, mesh, timers; signs of life between ranks."""

from arpo.ranks.ranks import RandomState, Ranks, Timers, init, seed_everything

__all__ = ["RandomState", "Ranks", "Timers", "init", "seed_everything"]
