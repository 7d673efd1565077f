"""Text between model and tools: calls in tags or in JSON, system prompts, and their tokens."""

from arpo.protocol.codec import Codec
from arpo.protocol.hermes_codec import HermesCodec

__all__ = ["Codec", "HermesCodec"]
