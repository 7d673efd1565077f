"""Text between model and tools: calls in tags or in JSON, system prompts, and their tokens."""

from arpo.protocol.codec import Codec
from arpo.protocol.hermes_codec import HermesCodec
from arpo.protocol.llama_codec import LlamaCodec

__all__ = ["JSON_CODECS", "Codec", "HermesCodec", "LlamaCodec"]

JSON_CODECS = {"hermes": HermesCodec, "llama": LlamaCodec}
"""protocol.format -> codec of calls in JSON."""
