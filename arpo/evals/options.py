"""The knobs of an evaluation and of its judge; a field's docstring is its `--help`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EvalSection:
    """What to evaluate, and how."""

    benchmarks: tuple[str, ...] = ()
    """Names of benchmarks, families (math, qa, deepsearch), or all."""
    data_dir: str = "data/eval"
    """Folder of the published test sets, each as NAME/test.jsonl."""
    files: tuple[str, ...] = ()
    """Question files of your own (parquet or jsonl), each reported on its own and graded by the reward of training."""
    max_questions: int = 0
    """Only the first N questions of each benchmark and file; 0 = all."""
    num_samples: int = 1
    """Independent trajectories per question (n of avg@n, and the largest k of Pass@k)."""
    max_prompt_tokens: int = 2048
    """Questions with longer prompts are left out, and counted."""
    system_prompt: str = "keep"
    """keep = as the file has it, and each benchmark's own; none = without; default = the protocol's own; code_search,
    search, math, base, chinese = that prompt with its tools; anything else = that text."""
    mute_tools: bool = False
    """Every tool call is refused: the control that shows whether the agent needs its tools."""
    server: str = ""
    """Sample from this OpenAI-compatible server, like http://host:8000, instead of an engine of our own. model.path
    says whose tokenizer it has; a key, if it needs one, is read from POLICY_API_KEY. engine.max_num_seqs requests are
    under way at a time, per rank."""
    server_model: str = ""
    """Name of the model there; empty = the only one that it serves."""
    server_timeout_s: float = 1800.0
    """Longest time of one turn in seconds."""
    replay: bool = False
    """Only recorded tool results: tools.search.mode and tools.python.cache_mode are replay_strict, and a call that
    tools.search.cache or tools.python.cache does not hold stops the run."""
    regrade: str = ""
    """Grade and report this run's folder again, from its records alone."""
    compare: tuple[str, ...] = ()
    """Compare the runs in these folders with the first of them, question by question; written to the last."""


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
