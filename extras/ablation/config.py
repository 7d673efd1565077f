"""The options of an ablation, and its algorithms by name."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field

from arpo.errors import require

# Name -> the flags of train_rl.py that distinguish the algorithm.
ALGORITHMS: dict[str, list[str]] = {
    "grpo": ["--branching.selector", "none"],
    "arpo": ["--branching.selector", "arpo"],
    "aepo": [
        *("--branching.selector", "aepo", "--branching.dynamic_budget", "True"),
        *("--loss.entropy_balanced_clipping", "True", "--loss.entropy_balanced_advantage", "True"),
    ],
    "random": ["--branching.selector", "random"],
    "top_h": ["--branching.selector", "top_h"],
    "at2po": ["--branching.selector", "at2po"],
    "tree_grpo": ["--branching.selector", "tree_grpo"],
    "arpo_threshold": ["--branching.selector", "arpo", "--branching.threshold", "0.5"],
    "node_parent": ["--branching.selector", "arpo", "--advantage.tree", "node_parent"],
}


@dataclass(frozen=True)
class AblationRunSection:
    """The folder of the ablation's results."""

    name: str = "ablation"
    """Name of the ablation's folder, DIR/NAME."""
    dir: str = "runs"
    """Folder of all runs."""


@dataclass(frozen=True)
class AblationSection:
    """The runs of an ablation."""

    train: tuple[str, ...] = ()
    """Config files of train_rl.py that all runs share; later ones win."""
    eval: tuple[str, ...] = ()
    """Config files of evaluate.py; use temperature 1, because RL trains the policy as it is sampled."""
    algorithms: tuple[str, ...] = ("grpo", "arpo", "aepo", "random")
    """Names in ALGORITHMS (extras/ablation/config.py); "name=--flags of train_rl.py" adds a custom algorithm."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Seeds of training: data order, sampling, branch decisions. Evaluations all use ablation.eval_seed."""
    eval_seed: int = 0
    """Seed of the evaluation's sampling."""
    num_steps: int = 30
    """Number of training steps of each run."""
    nproc_per_node: int = 1
    """Number of ranks of each run."""
    validate_every: int = 0
    """Steps between greedy validations (data.valid), for the tables at equal calls and tokens and at the end of the
    runs; 0 = no such tables."""
    references: tuple[str, ...] = ("random", "grpo")
    """Algorithms to compare the others with, seed by seed. Without a finished run a reference is left out."""
    num_parallel: int = 1
    """Number of runs at the same time. With more than one, the seconds in the table are those of a shared machine."""
    target_reward: float = 0.8
    """Training reward; the table has the number of steps until a run reaches it."""

    @property
    def overrides(self) -> dict[str, list[str]]:
        """Algorithm -> flags of train_rl.py. "x=--a 1" -> {"x": ["--a", "1"]}; ValueError for an unknown name."""
        flags: dict[str, list[str]] = {}
        for spec in self.algorithms:
            name, has_flags, words = spec.partition("=")
            if not has_flags and name not in ALGORITHMS:
                known = ", ".join(ALGORITHMS)
                raise ValueError(f"ablation.algorithms: {name!r} is none of {known}; write 'name=--flags' to add it")
            if name in flags or not name.isidentifier():
                raise ValueError(f"ablation.algorithms: {name!r} occurs twice or is no plain name; rename it")
            flags[name] = shlex.split(words) if has_flags else ALGORITHMS[name]
        return flags


@dataclass(frozen=True)
class AblationConfig:
    """All options of an ablation."""

    run: AblationRunSection = field(default_factory=AblationRunSection)
    ablation: AblationSection = field(default_factory=AblationSection)
    report_only: bool = False
    """Run nothing; write the table and the picture of the finished runs."""

    def __post_init__(self) -> None:
        a = self.ablation
        needed = {"train": all(a.train) and a.train, "eval": all(a.eval) and a.eval, "seeds": a.seeds}
        for name, value in (needed | {"algorithms": a.overrides}).items():
            require(value, f"ablation.{name} is empty; see python -m extras.ablation --help")
        require(len(set(a.seeds)) == len(a.seeds), f"ablation.seeds={a.seeds} has a seed twice; drop it")
        for name in ("num_steps", "nproc_per_node", "num_parallel"):
            require(getattr(a, name) >= 1, f"ablation.{name}={getattr(a, name)} must be at least 1")
