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
    replay: bool = False
    """Only recorded tool results: tools.search.mode and tools.python.mode are replay_strict, and a call that
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
    """Name of the model there. Its key, if it needs one, is read from JUDGE_API_KEY."""
    max_concurrent: int = 16
    """Requests under way at the same time."""
    cache: str = ""
    """SQLite file of the judge's replies, which runs may share; empty = judge.sqlite in the run's folder. What is in
    there is not asked again."""
