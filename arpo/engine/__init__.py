"""vLLM in the rank's process, weight sync, teams of ranks."""

from arpo.engine.requests import Chunk, SamplingSpec
from arpo.engine.vllm_engine import Engine

__all__ = ["Chunk", "Engine", "SamplingSpec"]
