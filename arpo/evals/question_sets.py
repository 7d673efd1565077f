"""The question sets of an evaluation: benchmarks, question files, and control sets with muted tools."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from arpo.config.evals import EvalSection
from arpo.data import load_prompts, tokenize_prompts
from arpo.data.hub import local_file, source_of
from arpo.errors import UserError
from arpo.evals.benchmarks import read_benchmark, select
from arpo.evals.grading import Metric
from arpo.evals.prompts import PROMPTS, with_benchmark_prompt
from arpo.evals.scores import MUTED
from arpo.protocol import Codec, form_of
from arpo.protocol.schema import ToolSchema
from arpo.tools import check_offered, system_prompt_for
from arpo.trajectory import Prompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class QuestionSet:
    """Tokenized questions with a common score in the report."""

    name: str
    prompts: list[Prompt]
    metric: Metric
    num_overlong: int = 0
    """Number of questions left out because their prompts are too long."""
    is_muted: bool = False
    """True = every tool call is refused."""


def load_sets(cfg: EvalSection, codec: Codec, schemas: Mapping[str, ToolSchema]) -> tuple[list[QuestionSet], list[str]]:
    """Return the question sets, and the names of benchmarks without a file.

    The sets are the chosen benchmarks, the question files (named by their stems), and with eval.num_muted a muted
    control of each. Raises UserError for an unusable set.
    """
    chosen, absent = select(cfg.benchmarks, cfg.data_dir)
    prompts_by_set: dict[str, list[Prompt]] = {}
    for name, benchmark in chosen.items():
        prompts_by_set[name] = read_benchmark(
            name, benchmark, cfg.data_dir, max_questions=cfg.max_questions, form=codec.format
        )
    for file in cfg.files:
        path = local_file(file)
        if path.stem in prompts_by_set or path.stem.endswith(MUTED):
            raise UserError(f"eval.files: {file} has the name of another set; rename it, the report goes by name")
        prompts = load_prompts(path, source=source_of(file))[: cfg.max_questions or None]
        check_offered(prompts, codec.tools, file)
        if len({prompt.data_source for prompt in prompts}) > 1:
            # The report scores each data source, if the rows name no splits of their own.
            prompts = [replace(prompt, meta={"split": prompt.data_source} | prompt.meta) for prompt in prompts]
        prompts_by_set[path.stem] = prompts
    system_prompt = system_prompt_for(cfg.system_prompt, schemas, form=codec.format)
    lacking: set[str] = set()
    """Tools that are explained to the model, but not loaded."""
    sets = []
    for name, prompts in prompts_by_set.items():
        asked = [with_benchmark_prompt(prompt, system_prompt, codec.format) for prompt in prompts]
        lacking |= {tool for prompt in asked for tool in prompt.tools or ()}.difference(codec.tools)
        fitting = tokenize_prompts(
            asked, codec.render_prompt, max_prompt_tokens=cfg.max_prompt_tokens, overlong=cfg.overlong, path=name
        )
        metric = chosen[name].grader if name in chosen else "reward"
        sets.append(QuestionSet(name, fitting, metric, num_overlong=len(prompts) - len(fitting)))
    # The texts of other values, and a template, explain only loaded tools.
    if lacking and cfg.system_prompt in ("keep", *PROMPTS) and not form_of(codec.format).template_lists_tools:
        names = ", ".join(sorted(lacking))
        fix = "load it, or set eval.system_prompt (default = explain the loaded tools)"
        logger.warning("the system prompts explain %s, and tools.names lacks it; %s", names, fix)
    if cfg.num_muted:
        sets += [
            QuestionSet(plain.name + MUTED, plain.prompts[: cfg.num_muted], plain.metric, is_muted=True)
            for plain in sets
        ]
    return sets, absent
