"""Text between model and tools."""

from arpo.protocol.codec import Codec

__all__ = ["Codec"]
