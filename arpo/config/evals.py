"""Options of an evaluation and of the judge. The docstring of a field is the `--help` text of the option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from arpo.config.bounded import parse_fields
from arpo.config.facts import ALWAYS_MATTERS, MAY_CHANGE, AtLeast, Needs


@dataclass(frozen=True)
class EvalSection:
    """The questions of an evaluation, and how to ask them."""

    benchmarks: tuple[str, ...] = ()
    """Names of benchmarks, families (math, qa, deepsearch), or all."""
    data_dir: Annotated[str, Needs("eval.benchmarks", use=(("all",),), say="all")] = "data/eval"
    """Folder of the published test sets, each as NAME/test.jsonl."""
    files: tuple[str, ...] = ()
    """Your own question files (parquet or jsonl), or data sets on the Hub, OWNER/NAME[@REVISION][:FILE]. Each file is
    reported separately, and graded by the reward of training."""
    max_questions: Annotated[int, AtLeast(0)] = 0
    """Number of questions taken from the start of each benchmark and file; 0 = all."""
    num_samples: Annotated[int, AtLeast(1)] = 1
    """Number of independent trajectories per question (n of avg@n, and the largest k of Pass@k)."""
    max_prompt_tokens: Annotated[int, AtLeast(1)] = 2048
    """Longest prompt, in tokens. eval.overlong says how to treat questions with longer prompts."""
    overlong: Literal["drop", "error"] = "error"
    """error = stop, because an average without the longest questions describes a different test set; drop = leave these
    questions out."""
    system_prompt: str = "keep"
    """System prompt of all questions. keep = the file's or the benchmark's; none = without; default = the protocol's;
    code_search, search, math, base, chinese = that prompt with its tools; anything else = that text."""
    num_muted: Annotated[int, AtLeast(0)] = 0
    """Number of questions, from the start of each set, to ask a second time with every tool call refused. This control
    shows if the agent needs its tools. Reported as SET_muted, and not part of any average."""
    server: str = ""
    """Server to sample from instead of the built-in engine: FILE.py:NAME=ADDRESS, where NAME is a class
    (docs/evaluation.md). The server's tokenizer must be the tokenizer of model.path. Each rank has at most
    engine.max_num_seqs requests under way."""
    server_model: Annotated[str, Needs("eval.server", use="FILE.py:NAME=ADDRESS")] = ""
    """Name of the model on the server. Empty = the only model on the server."""
    regrade: str = ""
    """Folder of a run to grade and report again, from the saved trajectories alone."""


@dataclass(frozen=True)
class JudgeConfig:
    """A language model that decides if an answer means the same as the reference."""

    FACTS = (Needs("judge.url", use="URL"), MAY_CHANGE)

    url: Annotated[str, ALWAYS_MATTERS] = ""
    """OpenAI-compatible server, like http://host:8001, or its chat endpoint. Empty = no judge: an evaluation then
    grades answers by rule, and says so in the report."""
    model: str = ""
    """Name of the model at judge.url. If the server needs a key, the key is read from JUDGE_API_KEY."""
    extra_body: str = ""
    """JSON object with more fields of every request, like {"reasoning_effort": "low"}. A field with null is left out:
    reasoning models of OpenAI need {"max_tokens": null, "max_completion_tokens": 8192, "temperature": null}."""
    max_concurrent: Annotated[int, AtLeast(1)] = 16
    """Number of requests under way at the same time."""
    cache: str = ""
    """SQLite file of the judge's replies; runs may share the file. Empty = judge.sqlite in the run's folder. A recorded
    question is not asked again."""

    def __post_init__(self) -> None:
        parse_fields("judge.extra_body", self.extra_body)  # which raises
