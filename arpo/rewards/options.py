"""The knobs of the judge. A section like those of arpo/options.py: a field's docstring is its `--help`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class JudgeConfig:
    """A language model that says whether an answer means the same as the reference."""

    url: str = ""
    """OpenAI-compatible chat endpoint, like http://host:8001/v1/chat/completions; empty = no judge: the rule-based
    metric is what counts, and the report says so."""
    model: str = ""
    """Name of the model there."""
    temperature: float = 0.0
    """Of the judge; 0 = greedy."""
    max_tokens: int = 2048
    """Longest reply; a reasoning judge thinks first. A reply that is cut before its verdict is unparsable."""
    concurrency: int = 16
    """Requests on their way at the same time."""
    timeout_s: float = 120.0
    """Longest time of one judgement in seconds: all tries and the pauses between them; one try has half of it."""
    retries: int = 4
    """Tries after the first, where the endpoint is busy, broken or silent."""
    key_env: str = "JUDGE_API_KEY"
    """Environment variable that holds the key, where the endpoint wants one."""
    cache: str = ""
    """SQLite file of the judge's replies, which runs may share; empty = judge.sqlite in the run's folder. What is in
    there is not asked again."""
