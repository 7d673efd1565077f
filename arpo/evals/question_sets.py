"""The sets of questions of an evaluation: benchmarks, question files, and the controls that ask with tools refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from arpo.config.evals import EvalSection
from arpo.data import load_prompts, tokenize_prompts
from arpo.data.hub import local_file, source_of
from arpo.errors import UserError
from arpo.evals.benchmarks import questions, select
from arpo.evals.grading import Metric
from arpo.evals.prompts import asked_as
from arpo.evals.scores import MUTED
from arpo.protocol import Codec
from arpo.protocol.schema import ToolSchema
from arpo.tools import check_offered, system_prompt_for
from arpo.trajectory import Prompt


@dataclass(frozen=True)
class QuestionSet:
    """Tokenized questions that are reported together, under a name."""

    name: str
    prompts: list[Prompt]
    metric: Metric
    num_overlong: int = 0
    """Number of questions that were left out as too long."""
    is_muted: bool = False
    """True = every tool call is refused."""


def load_sets(cfg: EvalSection, codec: Codec, schemas: Mapping[str, ToolSchema]) -> tuple[list[QuestionSet], list[str]]:
    """Return the chosen benchmarks, the question files by their stems, and a muted control of each where it is wanted.

    Also the names of the benchmarks that are left out because their files are not there. Raises UserError for a set
    that cannot be used.
    """
    chosen, absent = select(cfg.benchmarks, cfg.data_dir)
    found: dict[str, list[Prompt]] = {}
    for name, benchmark in chosen.items():
        found[name] = questions(name, benchmark, cfg.data_dir, max_questions=cfg.max_questions, form=codec.format)
    for file in cfg.files:
        path = local_file(file)
        if path.stem in found or file.endswith(f"{MUTED}{path.suffix}"):
            raise UserError(f"eval.files: {file} has the name of another set; rename it, the report goes by name")
        prompts = load_prompts(path, source=source_of(file))[: cfg.max_questions or None]
        check_offered(prompts, codec.tools, file)
        if len({prompt.data_source for prompt in prompts}) > 1:  # which are reported one by one
            prompts = [replace(p, meta={"split": p.data_source} | p.meta) for p in prompts]
        found[path.stem] = prompts
    system_prompt = system_prompt_for(cfg.system_prompt, schemas, form=codec.format)
    sets = []
    for name, prompts in found.items():
        asked = [asked_as(prompt, system_prompt, codec.format) for prompt in prompts]
        fitting = tokenize_prompts(asked, codec.render_prompt, cfg.max_prompt_tokens, cfg.overlong, name)
        metric = chosen[name].grader if name in chosen else "reward"
        sets.append(QuestionSet(name, fitting, metric, len(prompts) - len(fitting)))
    for plain in list(sets) if cfg.num_muted else ():
        sets.append(QuestionSet(plain.name + MUTED, plain.prompts[: cfg.num_muted], plain.metric, is_muted=True))
    return sets, absent
