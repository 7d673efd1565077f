"""The worlds of the frontier (frontier.py), its rules, and the settings of a run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GROUP_SIZES = (2, 3, 4, 6, 8, 16)


@dataclass(frozen=True)
class World:
    """A variant of the task, and the settings shared by all runs on this variant."""

    task: str = "long"
    """Name of the task in extras/demo/build.py."""
    num_sft_steps: int = 500
    num_prompts: int = 8
    """Number of prompts of a step."""
    rates: tuple[float, ...] = (1, 2, 4)
    """Factors of the learning rate 7e-4 to try."""
    max_steps: int = 72


WORLDS = {
    "steps": World(),  # limited by the number of steps
    "signal": World(num_prompts=2, rates=(0.5, 1, 2), max_steps=80),  # limited by the noise of its gradients
    # limited by a move missing in the demonstrations: success is rare at first
    "unready": World("long_unready"),
    # like the first world, but a wrong way does not end the trail
    "silent": World("long_silent"),
    # like the first world, but the first turn decides, too
    "first": World("long_first"),
}
POSITIONS = f"{ROOT / 'extras/ablation/positions.py'}:positions"
ROOTS = f"{ROOT / 'extras/ablation/positions.py'}:roots"
DR_GRPO = ["--advantage.dead_groups", "keep", "--advantage.normalize", "none"]
"""Dr. GRPO (arXiv 2503.20783): rewards minus the mean of the group, not divided by the standard deviation."""
DECAY = ["--optim.schedule", "linear"]
"""A learning rate that falls to a tenth at World.max_steps (optim.min_lr_ratio of configs/demo_arpo.yaml)."""
UNTIL_MIXED = ["--branching.until_mixed", "True", "--branching.expansion_rounds", "3"]
"""A group gets no further trajectories once its rewards differ."""
ANCHOR = ["--loss.kl_coefficient", "0.1"]
"""A penalty for the distance to the policy before RL (k3)."""
CLIP = ["--optim.max_grad_norm", "0.1"]
"""Gradients are clipped at the usual norm of the first steps."""
ANCHORED = [*DECAY, *ANCHOR, *CLIP]
"""All three together: what docs/branching.md calls an anchor."""
RULES: dict[str, list[str]] = {
    "grpo": ["--branching.selector", "none"],
    "top_h": ["--branching.selector", "top_h"],
    "at2po": ["--branching.selector", "at2po"],
    "random": ["--branching.selector", "random"],
    "arpo": ["--branching.selector", "arpo"],
    "threshold": ["--branching.selector", "arpo", "--branching.weight", "1.0", "--branching.threshold", "0.55"],
    "aepo": [
        *("--branching.selector", "aepo", "--branching.dynamic_budget", "True"),
        *("--loss.entropy_balanced_clipping", "True", "--loss.entropy_balanced_advantage", "True"),
    ],
    "positions": ["--branching.selector", POSITIONS],
    "grpo_keep": ["--branching.selector", "none", "--advantage.dead_groups", "keep"],
    "top_h_keep": ["--branching.selector", "top_h", "--advantage.dead_groups", "keep"],
    "grpo_dr": ["--branching.selector", "none", *DR_GRPO],
    "top_h_dr": ["--branching.selector", "top_h", *DR_GRPO],
    "grpo_decay": ["--branching.selector", "none", *DECAY],
    "top_h_decay": ["--branching.selector", "top_h", *DECAY],
    "top_h_mixed": ["--branching.selector", "top_h", *UNTIL_MIXED],
    "top_h_mixed_decay": ["--branching.selector", "top_h", *UNTIL_MIXED, *DECAY],
    "grpo_anchored": ["--branching.selector", "none", *ANCHORED],
    "top_h_anchored": ["--branching.selector", "top_h", *ANCHORED],
    "top_h_mixed_decay_kl": ["--branching.selector", "top_h", *UNTIL_MIXED, *DECAY, *ANCHOR],
    "top_h_mixed_anchored": ["--branching.selector", "top_h", *UNTIL_MIXED, *ANCHORED],
    "roots_mixed": ["--branching.selector", ROOTS, *UNTIL_MIXED],
}
"""Rule -> the flags of train_rl.py. Rules with "keep" in the name count groups with all rewards equal in the mean of
the loss; the other rules leave these groups out. `positions` is the blind control: it forks as often at each turn as
top_h, and ignores the entropies. It must run after top_h. `roots_mixed` is the control of `top_h_mixed`: its groups
grow by new roots."""
RULES |= {f"{rule}_anchored": [*RULES[rule], *ANCHORED] for rule in ("at2po", "random", "arpo", "threshold", "aepo")}
WITHOUT_ROOTS = ("grpo", "grpo_keep", "grpo_dr", "grpo_decay", "grpo_anchored", "aepo", "aepo_anchored")


def is_custom(rule: str) -> bool:
    """Return whether a rule is a custom branching rule or selector, FILE.py:NAME."""
    return ".py:" in rule


@dataclass(frozen=True)
class Setting:
    """The rule, group size, roots and learning rate of a run."""

    rule: str
    group_size: int
    num_roots: int
    """Number of independent trajectories of a group; the group size for a rule without forks."""
    rate: float
    """Factor of the learning rate 7e-4."""

    @property
    def name(self) -> str:
        roots = "" if self.rule in WITHOUT_ROOTS else f"_r{self.num_roots}"
        return f"{self.rule}_g{self.group_size}{roots}_x{self.rate:g}"

    @property
    def folder_name(self) -> str:
        """The name without the folders of a custom rule's file. "a/rules.py:deep_g8_r2_x1" -> "deep_g8_r2_x1" """
        return self.name.rpartition(":")[2]

    @staticmethod
    def named(name: str) -> Setting:
        """Return the setting of a name. Raises ValueError.

        "top_h_g8_r2_x1" -> top_h, groups of 8 with 2 roots, rate 1.
        "rules.py:deep_g8_r2_x1" -> the same with `deep` of rules.py as branching.selector.
        """
        match = re.fullmatch(r"(\w+?|\S+\.py:\w+?)_g(\d+)(?:_r(\d+))?_x([\d.]+)", name)
        if not match:
            raise ValueError(
                f"{name!r} is no setting; write it like grpo_g8_x1, top_h_g8_r2_x1 or FILE.py:NAME_g8_r2_x1"
            )
        rule, group_size, num_roots, rate = match.groups()
        if rule not in RULES and not is_custom(rule):
            raise ValueError(f"{rule!r} is no rule; the rules are {', '.join(RULES)}, and FILE.py:NAME")
        if (num_roots is None) != (rule in WITHOUT_ROOTS):
            raise ValueError(f"{name!r}: {rule} has {'no' if num_roots else 'a'} number of roots (_rN)")
        if is_custom(rule):
            file, _, function = rule.rpartition(":")
            if not Path(file).is_file():
                raise ValueError(f"{name!r}: there is no file {file}")
            rule = f"{Path(file).resolve()}:{function}"
        return Setting(rule, int(group_size), int(num_roots or group_size), float(rate))

    @property
    def flags(self) -> list[str]:
        roots = [] if self.rule in WITHOUT_ROOTS else ["--branching.num_initial_rollouts", str(self.num_roots)]
        rate = ["--optim.lr", str(7e-4 * self.rate)]
        selector = ["--branching.selector", self.rule] if is_custom(self.rule) else RULES[self.rule]
        return [*selector, *roots, "--rollout.group_size", str(self.group_size), *rate]
