"""Save and resume, verified by checksum; export to and import from other formats."""

from arpo.checkpoint.checkpoints import Checkpoints
from arpo.checkpoint.saver import Saver

__all__ = ["Checkpoints", "Saver"]
