"""The names of options as dotted keys, and the error for an unknown key."""

from __future__ import annotations

import difflib
from dataclasses import fields, is_dataclass
from typing import Literal, get_args, get_origin, get_type_hints

from arpo.config.foreign import OTHER_MEANING, OURS, SECTIONS
from arpo.errors import UserError

Kind = Literal["section", "list", "value", "optional", "flag"]

MAX_LISTED = 20
"""Keys of a tool's options are in no --help, so they are listed. A command has more."""
GONE = "gone (CHANGELOG.md says why); drop it"
RENAMED = {
    "advantage.normalize_std": "advantage.normalize=none",
    "branching.branch_rate": GONE,
    "branching.entropy_mode": "branching.compat",
    "branching.rule": "branching.threshold, a number or None",
    "branching.signal": GONE,
    "branching.spill": GONE,
    "branching.timing": "branching.compat",
    "branching.weight_z": GONE,
    "data.overlong": "gone from SFT: conversations that are too long are left out and listed",
    "engine.enforce_eager": "engine.cuda_graphs; True is never, False is auto",
    "eval.replay": "tools.search.mode=replay_strict, and mode in tools.options of other tools (docs/evaluation.md)",
    "judge": "an object of your own, FILE.py:NAME in reward.terms (docs/training.md#rewards)",
    "judge.url": "an object of your own, FILE.py:NAME in reward.terms (docs/training.md#rewards)",
    "model.activation_checkpointing": "model.recompute_every_n_layers; True is 1, False is 0",
    "model.cpu_offload": "optim.offload, which moves the optimizer's moments only",
    "reward.function": "part of reward.file, FILE.py:NAME",
    "tools.python.cache": "tools.options of RecordedPython, a tool from a file (docs/tools.md)",
    "tools.python.max_concurrent_per_node": "tools.options of RecordedPython, a tool from a file (docs/tools.md)",
    "tools.python.mode": "tools.options of RecordedPython, a tool from a file (docs/tools.md)",
    "tools.mcp": "tools.options of mcp/servers.py:McpServers, a tool from a file (docs/tools.md)",
    "rollout.pull_order": "rollout.dispatch=pull",
    "run.overlap_validation": GONE,
}
"""Key of an earlier version -> today's key, unless the two resemble each other."""


def field_names(root: type, prefix: str = "") -> dict[str, Kind]:
    """Return the kind of each option by its dotted key. {"tools": "section", "tools.names": "list", ...}"""
    names: dict[str, Kind] = {}
    hints = get_type_hints(root)
    for f in fields(root):
        hint = hints[f.name]
        names[prefix + f.name] = "list" if get_origin(hint) is tuple else "flag" if hint is bool else "value"
        if type(None) in get_args(hint):
            names[prefix + f.name] = "optional"
        if is_dataclass(hint):
            names |= {prefix + f.name: "section"} | field_names(hint, f"{prefix}{f.name}.")
    return names


def check_known(key: str, known: dict[str, Kind], where: str) -> None:
    """Raise UserError for an unknown key. The message suggests the most similar known key."""
    if key in known:
        return
    if key in RENAMED:
        raise UserError(f"{where}: {key!r} is now {RENAMED[key]}")
    leaf = key.rsplit(".", 1)[-1]
    ours = OURS.get(leaf)
    if ours in known:
        more = "docs/training.md, since the value means something else" if leaf in OTHER_MEANING else "--help"
        raise UserError(f"{where}: unknown key {key!r}; here it is --{ours}, see {more}")
    if key in SECTIONS:
        raise UserError(f"{where}: {key!r} is a section of {SECTIONS[key]}; give the file to that")
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6) or [
        k for k in known if k.rsplit(".", 1)[-1] == leaf and known[k] != "section"
    ]
    every = "see --help for all keys" if len(known) > MAX_LISTED else f"there are {', '.join(known)}"
    hint = f"did you mean {close[0]!r}?" if close else every
    raise UserError(f"{where}: unknown key {key!r}; {hint}")
