"""Save and resume, verified by checksum; export to and import from other formats."""

from arpo.checkpoint.checkpoints import Checkpoints

__all__ = ["Checkpoints"]
