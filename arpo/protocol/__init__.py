"""Text between model and tools: tags, system prompts, and their tokens."""

from arpo.protocol.codec import Codec

__all__ = ["Codec"]
