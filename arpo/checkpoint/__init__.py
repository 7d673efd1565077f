"""Save and resume with checksums, and export to Hugging Face folders."""

from arpo.checkpoint.checkpoints import Checkpoints
from arpo.checkpoint.saver import Saver

__all__ = ["Checkpoints", "Saver"]
