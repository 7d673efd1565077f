"""One vLLM over several ranks, for models whose weights one GPU cannot hold while it samples.

The ranks of a team (vLLM's tensor parallel group) hold a part of every matrix each, and run the same rollout on the
same prompts: with the same seed and the same requests in the same order, all their schedulers decide the same. Only the
moment when a tool answers would differ. So the team's first rank alone runs tools and tells the others what has
arrived; it alone also scores, counts and saves, since the others have copies of what it has.

    tensor_parallel = 2 on 4 ranks, 6 prompts: ranks 0 and 1 sample prompts 0 2 4, ranks 2 and 3 prompts 1 3 5
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch.distributed as dist

from arpo.errors import UserError
from arpo.ranks import Ranks
from arpo.tools.base import Tool, ToolContext, ToolResult, ToolRunner
from arpo.tools.sessions import make_sessions
from arpo.trajectory import Group

T = TypeVar("T")
VOCABULARY_MULTIPLE = 64  # to which vLLM pads it before it is cut


@dataclass(frozen=True)
class Team:
    """The ranks that share this rank's engine: neighbours on one node, or this rank alone (no tensor parallelism)."""

    ranks: Ranks
    size: int = 1
    group: dist.ProcessGroup | None = None
    """The team's gloo group; None if the size is 1."""

    @property
    def index(self) -> int:
        """Index of this team; its engine adds it to the seed."""
        return self.ranks.rank // self.size

    @property
    def num_teams(self) -> int:
        return self.ranks.world_size // self.size

    @property
    def is_first(self) -> bool:
        """Return whether this rank speaks for its team."""
        return self.ranks.rank % self.size == 0

    def share(self, prompts: Sequence[T]) -> Sequence[T]:
        """Return this team's part of the prompts."""
        return prompts[self.index :: self.num_teams]

    def exchange(self, groups: Sequence[Group | None], places: Sequence[int]) -> list[Group | None]:
        """Return all teams' groups in the order of their places among the prompts, as each team's first rank has them,
        `compact`. Collective. `places`: those of this team's groups."""
        own = zip(places, groups, strict=True) if self.is_first else ()
        by_place: dict[int, Group | None] = {}
        for part in self.ranks.all_gather_objects({place: group and compact(group) for place, group in own}):
            by_place |= part
        return [by_place[place] for place in sorted(by_place)]

    def from_first(self, value: T) -> T:
        """Return the value of the team's first rank on all its ranks. Collective within the team."""
        values = [value]
        if self.group is not None:
            dist.broadcast_object_list(values, group_src=0, group=self.group)
        return values[0]

    def tool_runner(self, tools: dict[str, Tool]) -> ToolRunner:
        return ToolRunner(tools) if self.group is None else TeamToolRunner(tools, self)


def compact(group: Group) -> Group:
    """Return the group with arrays for the lists of a number per token. A rank unpickles them in a fortieth of the time
    and has no object per token. Engines and trainer have logprobs in float32 too."""
    trajectories = [
        replace(
            t,
            token_ids=array("I", t.token_ids),
            loss_mask=array("B", t.loss_mask),
            rollout_logprobs=array("f", t.rollout_logprobs),
            token_chars=array("H", t.token_chars),
        )
        for t in group.trajectories
    ]
    return replace(group, trajectories=trajectories)


def form_team(ranks: Ranks, size: int, model_path: str) -> Team:
    """Make teams of `size` neighbours and return this rank's. Collective. Raises UserError if that is not possible."""
    if size == 1:
        return Team(ranks)
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))
    if ranks_per_node % size:
        raise UserError(f"engine.tensor_parallel={size} does not divide the {ranks_per_node} ranks of a node; lower it")
    check_split(model_path, size)
    return Team(ranks, size, dist.new_subgroups(size, timeout=ranks.timeout, backend="gloo")[0])


def check_split(model_path: str, size: int) -> None:
    """Raise UserError if vLLM cannot cut the model into `size` parts; reads its config alone."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=False).get_text_config()
    except (ValueError, OSError) as error:
        raise UserError(f"{model_path}: {' '.join(str(error).split())[:300]}") from None
    kv_heads = config.num_key_value_heads
    vocabulary = -(-config.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    for name, odd in {
        "num_attention_heads": config.num_attention_heads % size,
        "num_key_value_heads": kv_heads % size and size % kv_heads,  # fewer than parts: vLLM copies them
        "intermediate_size": config.intermediate_size % size,
        "vocab_size": vocabulary % size,
    }.items():
        if odd:
            reason = f"{name}={getattr(config, name)}"
            raise UserError(f"engine.tensor_parallel={size} cannot split {model_path} with {reason}; choose another")


class TeamToolRunner(ToolRunner):
    """Runs tools on the first rank of a team; all its ranks start the same calls and collect the same results."""

    def __init__(self, tools: dict[str, Tool], team: Team):
        super().__init__(tools)
        self.team = team
        if not team.is_first:
            self.sessions = make_sessions(tools, None)

    def start(self, call_id: str, tag: str, argument: str, context: ToolContext | None = None) -> None:
        if self.team.is_first:
            super().start(call_id, tag, argument, context)
        else:
            self.num_pending += 1

    def collect(self, *, block: bool) -> list[tuple[str, ToolResult]]:
        """Return (call id, result) of finished calls. Collective, unless none is pending. All raise what ends a run."""
        if not self.num_pending:
            return []
        if self.team.is_first:
            try:
                finished = super().collect(block=block)
            except Exception as error:
                self.team.from_first(f"{type(error).__name__}: {error}")
                raise
            return self.team.from_first(finished)
        finished = self.team.from_first(None)
        if isinstance(finished, str):
            raise RuntimeError(f"a tool failed on the first of the ranks that share an engine: {finished}")
        self.num_pending -= len(finished)
        return finished
