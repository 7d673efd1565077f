"""The data sets and models that the papers published on the Hub or began with: link, size, licence, and the next step.

Sizes and licences are those of the pages as far as they could be read; "see the page" stands where they could not. The
sizes of models are their parameters times two bytes.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from arpo.errors import UserError


@dataclass(frozen=True)
class Entry:
    """A repository of the Hub."""

    kind: Literal["dataset", "model"]
    what: str
    size: str
    licence: str
    train: str = ""
    """Pattern of the file to train on, where the repository may have others beside it."""
    command: str = ""
    """Command line to run with it next; {path} is the file or folder."""

    def url(self, repo: str) -> str:
        return f"https://huggingface.co/{'datasets/' if self.kind == 'dataset' else ''}{repo}"


PAGE = "see the page"


def _train_sft(config: str, option: str) -> str:
    return f"arpo-sft configs/{config}.yaml configs/sft.yaml --{option} {{path}}"


def _train_rl(config: str) -> str:
    files = f"configs/{config}.yaml configs/arpo.yaml"
    return f"arpo-rl {files} --tools.search.zone ZONE --data.train {{path}}"


def _evaluate(config: str, protocol: str = "eval") -> str:
    files = f"configs/{config}.yaml configs/{protocol}.yaml"
    return f"arpo-eval {files} --tools.search.zone ZONE --model.path {{path}}"


def _base(config: str, size: str, licence: str = "Apache-2.0") -> Entry:
    what = f"what configs/{config}.yaml begins with"
    return Entry("model", what, size, licence, command=_train_sft(config, "model.path"))


def _released(base: str, size: str, config: str, licence: str = PAGE, method: str = "ARPO") -> Entry:
    deep = config.startswith("qwen3")
    command = _evaluate(config, "eval_deepsearch" if deep else "eval")
    return Entry("model", f"{base} after {method}", size, licence, command=command)


CATALOG: dict[str, Entry] = {
    "dongguanting/ARPO-SFT-54K": Entry(
        "dataset", "cold-start conversations, 54k", PAGE, "MIT", "final_*.jsonl",
        _train_sft("qwen2.5_7b", "data.train"),
    ),
    "dongguanting/ARPO-RL-Reasoning-10K": Entry(
        "dataset", "questions, 5,000 math and 5,000 knowledge", "2.8 MB", "MIT", "train_10k.parquet",
        _train_rl("qwen2.5_7b"),
    ),
    "dongguanting/ARPO-RL-DeepSearch-1K": Entry(
        "dataset", "questions for deep search, 1,071", "0.2 MB", "MIT", "hard_search*.parquet", _train_rl("qwen3_8b"),
    ),
    "dongguanting/Qwen2.5-3B-ARPO": _released("Qwen2.5-3B", "6.2 GB", "qwen2.5_3b", "MIT"),
    "dongguanting/Qwen2.5-7B-ARPO": _released("Qwen2.5-7B", "15.2 GB", "qwen2.5_7b", "MIT"),
    "dongguanting/Qwen2.5-7B-AEPO": _released("Qwen2.5-7B", "15.2 GB", "qwen2.5_7b", method="AEPO"),
    "dongguanting/Llama3.1-8B-ARPO": _released("Llama-3.1-8B", "16.1 GB", "llama3.1_8b"),
    "dongguanting/Qwen3-8B-ARPO-DeepSearch": _released("Qwen3-8B", "16.4 GB", "qwen3_8b"),
    "dongguanting/Qwen3-8B-AEPO-DeepSearch": _released("Qwen3-8B", "16.4 GB", "qwen3_8b", method="AEPO"),
    "dongguanting/Qwen3-14B-ARPO-DeepSearch": _released("Qwen3-14B", "29.5 GB", "qwen3_14b", "MIT"),
    "dongguanting/Qwen3-14B-AEPO-DeepSearch": _released("Qwen3-14B", "29.5 GB", "qwen3_14b", method="AEPO"),
    "dongguanting/QwQ-32B-ARPO-DeepSearch": _released("QwQ-32B", "65.5 GB", "qwen3_14b"),
    "dongguanting/QwQ-32B-AEPO-DeepSearch": _released("QwQ-32B", "65.5 GB", "qwen3_14b", method="AEPO"),
    "Qwen/Qwen2.5-0.5B-Instruct": Entry(
        "model", "for configs/smoke.yaml", "1.0 GB", "Apache-2.0",
        command="arpo-rl configs/smoke.yaml --model.path {path}",
    ),
    "Qwen/Qwen2.5-3B-Instruct": _base("qwen2.5_3b", "6.2 GB", "Qwen Research: no commercial use"),
    "Qwen/Qwen2.5-7B-Instruct": _base("qwen2.5_7b", "15.2 GB"),
    "meta-llama/Llama-3.1-8B-Instruct": _base("llama3.1_8b", "16.1 GB", "Llama 3.1 Community, behind a form"),
    "Qwen/Qwen3-8B": _base("qwen3_8b", "16.4 GB"),
    "Qwen/Qwen3-14B": _base("qwen3_14b", "29.5 GB"),
}  # fmt: skip
"""OWNER/NAME -> what it is. A repository that is not here can be fetched too."""


def find(name: str) -> str:
    """Return OWNER/NAME of a name, whose owner may be left out where the catalogue has it. Raises UserError."""
    for repo in CATALOG:
        if name.lower() in (repo.lower(), repo.partition("/")[2].lower()):
            return repo
    if name.count("/") == 1:
        return name
    names = {repo.partition("/")[2].lower(): repo.partition("/")[2] for repo in CATALOG}
    close = difflib.get_close_matches(name.lower(), names, n=1)
    hint = f"did you mean {names[close[0]]}? " if close else ""
    raise UserError(f"{name}: not in the catalogue; {hint}`python -m arpo.hub list` shows it, or give OWNER/NAME")
