"""vLLM in the rank's process, an OpenAI-compatible server in its place, weight sync, teams of ranks."""

from arpo.engine.vllm_engine import Chunk, Engine, SamplingSpec

__all__ = ["Chunk", "Engine", "SamplingSpec"]
