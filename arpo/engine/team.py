"""A vLLM engine over several ranks, for models that do not fit on one GPU during sampling.

A team is vLLM's tensor parallel group. Each rank of a team keeps a part of every matrix, and all ranks run the same
rollout on the same prompts. With the same seed and the same requests in the same order, all schedulers decide the
same. Only the moment of a tool's answer would differ. So only the team's first rank runs tools, and sends the
results to the others. The first rank also scores, counts and saves alone, since all ranks have copies of the same
groups.

    tensor_parallel = 2 on 4 ranks, 6 prompts: ranks 0 and 1 sample prompts 0 2 4, ranks 2 and 3 prompts 1 3 5
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch.distributed as dist

from arpo.errors import UserError
from arpo.ranks import Ranks
from arpo.tools.base import Tool, ToolContext, ToolResult, ToolRunner
from arpo.tools.sessions import make_sessions
from arpo.trajectory import Group

T = TypeVar("T")
VOCABULARY_MULTIPLE = 64  # vLLM pads the vocabulary to a multiple of this before it splits it


@dataclass(frozen=True)
class Team:
    """The ranks that share this rank's engine: neighbours on one node, or this rank alone (no tensor parallelism)."""

    ranks: Ranks
    size: int = 1
    group: dist.ProcessGroup | None = None
    """The team's gloo group; None if the size is 1."""

    @property
    def index(self) -> int:
        """Index of this team. The team's engine adds the index to the seed."""
        return self.ranks.rank // self.size

    @property
    def num_teams(self) -> int:
        return self.ranks.world_size // self.size

    @property
    def is_first(self) -> bool:
        """True if this rank runs tools, scores and saves for its team."""
        return self.ranks.rank % self.size == 0

    def share(self, prompts: Sequence[T]) -> Sequence[T]:
        """Return this team's part of the prompts."""
        return prompts[self.index :: self.num_teams]

    def all_gather_groups(self, groups: Sequence[Group | None], indices: Sequence[int]) -> list[Group | None]:
        """Return the groups of all teams, `compact`, in the order of the prompts. Collective.

        groups: the groups of this team. Only those of its first rank are sent. indices: index of each group's prompt.
        """
        sent: dict[int, Group | None] = {}
        if self.is_first:
            for index, group in zip(indices, groups, strict=True):
                sent[index] = compact(group) if group is not None else None
        all_groups: dict[int, Group | None] = {}
        for groups_of_rank in self.ranks.all_gather_objects(sent):
            all_groups |= groups_of_rank
        return [all_groups[index] for index in sorted(all_groups)]

    def broadcast_from_first(self, value: T) -> T:
        """Return the value of the team's first rank. Collective within the team."""
        values = [value]
        if self.group is not None:
            dist.broadcast_object_list(values, group_src=0, group=self.group)
        return values[0]

    def tool_runner(self, tools: dict[str, Tool], prices: Mapping[str, float] | None = None) -> ToolRunner:
        """Return what runs the tools for this team. `prices`: price of a call, by tag."""
        return ToolRunner(tools, prices) if self.group is None else TeamToolRunner(tools, prices, self)


def compact(group: Group) -> Group:
    """Return the group with compact trajectories. A rank unpickles these 40 times faster."""
    return replace(group, trajectories=[t.compact() for t in group.trajectories])


def form_team(ranks: Ranks, size: int, model_path: str) -> Team:
    """Form teams of `size` neighbouring ranks and return this rank's team. Collective. Raises UserError if the node or
    the model cannot be split into teams of this size."""
    if size == 1:
        return Team(ranks)
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))
    if ranks_per_node % size:
        raise UserError(f"engine.tensor_parallel={size} does not divide the {ranks_per_node} ranks of a node; lower it")
    check_split(model_path, size)
    group, _ = dist.new_subgroups(size, timeout=ranks.timeout, backend="gloo")
    return Team(ranks, size, group)


def check_split(model_path: str, size: int) -> None:
    """Raise UserError if vLLM cannot split the model into `size` parts. Reads only the model's config."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=False).get_text_config()
    except (ValueError, OSError) as error:
        raise UserError(f"{model_path}: {' '.join(str(error).split())[:300]}") from None
    kv_heads = config.num_key_value_heads
    vocabulary = -(-config.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    remainders = {
        "num_attention_heads": config.num_attention_heads % size,
        # If there are fewer KV heads than parts, vLLM copies them.
        "num_key_value_heads": kv_heads % size and size % kv_heads,
        "intermediate_size": config.intermediate_size % size,
        "vocab_size": vocabulary % size,
    }
    for name, remainder in remainders.items():
        if remainder:
            reason = f"{name}={getattr(config, name)}"
            raise UserError(f"engine.tensor_parallel={size} cannot split {model_path} with {reason}; choose another")


class TeamToolRunner(ToolRunner):
    """Runs tools on the first rank of a team. All ranks of the team start the same calls and collect the same
    results."""

    def __init__(self, tools: dict[str, Tool], prices: Mapping[str, float] | None, team: Team):
        super().__init__(tools, prices)
        self.team = team
        if not team.is_first:
            self.sessions = make_sessions(tools, None, self.prices)

    def start(self, call_id: str, tag: str, argument: str, context: ToolContext | None = None) -> None:
        if self.team.is_first:
            super().start(call_id, tag, argument, context)
        else:
            self.num_pending += 1

    def collect(self, *, block: bool) -> list[tuple[str, ToolResult]]:
        """Return (call id, result) of finished calls. Collective, unless no call is pending.

        An exception on the first rank is raised on all ranks of the team.
        """
        if not self.num_pending:
            return []
        if self.team.is_first:
            try:
                finished = super().collect(block=block)
            except Exception as error:
                # The other ranks wait in their broadcast. A text instead of a list tells them of the error.
                self.team.broadcast_from_first(f"{type(error).__name__}: {error}")
                raise
            return self.team.broadcast_from_first(finished)
        finished = self.team.broadcast_from_first(None)
        if isinstance(finished, str):
            raise RuntimeError(f"a tool failed on the first of the ranks that share an engine: {finished}")
        self.num_pending -= len(finished)
        return finished
