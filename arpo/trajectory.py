"""The glossary: Prompt, Turn, ToolCall, Trajectory, Group. No torch, no I/O.

One trajectory is one response. Its token lists are parallel, and cover the response only:

    token_ids         <think> ... </search>    <result> ... </result>   <think> ... </answer><eos>
    loss_mask         1 1 1 1 1 1 1 1 1 1 1    0 0 0 0 0 0 0 0 0 0 0    1 1 1 1 1 1 1 1 1 1 1 1
    rollout_logprobs  -.1 -.3 ...              0 0 0 0 ...              -.2 ...
    turns             |------ Turn 0 -------------------------------|   |------ Turn 1 ------|
                      start            end               result_end     start             end = result_end

Without tags (protocol.format) a turn ends with the model's end token, and masked behind it is all that the template
writes up to the model's next turn: <tool_call> ... <eos> | <tool_response> ... assistant | It is ... <eos>
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum


class StopReason(StrEnum):
    """The reason why a trajectory ended. Only EOS means that the policy itself decided to stop."""

    EOS = "eos"
    LENGTH = "length"
    TOOL_LIMIT = "tool_limit"
    ERROR = "error"


@dataclass(frozen=True)
class Prompt:
    """One question. `token_ids` is the rendered chat prompt up to the point where the response begins."""

    prompt_id: str
    messages: list[dict[str, str]]
    """The chat that was rendered, its system message included; before that as the file has it."""
    answers: list[str]
    """Accepted answers (aliases); the reward takes the best match."""
    data_source: str = ""
    tools: tuple[str, ...] | None = None
    """Tags of the tools that it offers, if they are loaded; None = all that are loaded."""
    meta: dict = field(default_factory=dict)
    """`ability` ("math" | "qa") and the other columns of the data file."""
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class ToolCall:
    """One call that the policy wrote, and what it read back."""

    tag: str
    argument: str
    result: str
    """The result as the model read it (escaped, truncated): with tags the text between <result> and </result>."""
    ok: bool
    error_kind: str | None = None
    """Short stable name of the failure ("timeout", "error", "empty_call", "unopened_tag", "limit", ...); None if ok."""
    executed: bool = True
    """False where no tool ran: malformed calls, calls over the limit."""
    cached: bool = False
    seconds: float = 0.0
    cost: float = 0.0
    """Money, in the currency of tools.price_per_call; 0 where a cache answered."""
    info: dict = field(default_factory=dict)
    """What the tool says of the call besides its text, for rewards: an environment's own reward, say."""
    replayed: int = 0
    """Calls of the trajectory that this one branched from, run again before this call to give it their state."""
    replay_mismatches: int = 0
    """Those of them that answered otherwise than the first time: the state is not what the model has read of it."""


@dataclass(frozen=True)
class BranchDecision:
    """The record of one branch decision, with everything needed to recompute it."""

    entropy: float
    """H: mean entropy of the first k tokens after the tool result, nats."""
    root_entropy: float
    """H_root: the same over the first k tokens of the trajectory's first turn."""
    probability: float | None
    """P(branch); None where a retrospective selector chose, after all had ended, and where a tool refused."""
    draw: float | None
    """The uniform number compared with `probability`; None under the threshold rule, and where that is None."""
    consecutive: int
    """Branching decisions in a row on this chain before this one (AEPO's l)."""
    budget_left: int
    """Trajectories the group could still start when the decision was taken."""
    num_children: int
    outcome: str
    """"branched" | "declined" | "no_budget" | "refused" """
    score: float | None = None
    """What a retrospective selector chose the turn by (the newest, where it was chosen again)."""
    refused_by: str = ""
    """refused: the tool that has a session open here, of which there can be no second one."""


@dataclass
class Turn:
    """One stretch of sampled tokens, and the tool result that followed it. Indices are response positions."""

    start: int
    end: int = 0
    result_end: int = 0
    """One past the last token of the appended tool results; equals `end` when no tool was called."""
    entropy: float | None = None
    """Mean over the first k sampled tokens of the next-token entropy, nats; None until known."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """Calls that the turn ended in, in order: none in an answer, one with tags, one or more in JSON."""
    is_note: bool = False
    """True where the policy was asked for a note: what it wrote there is neither a call nor an answer."""
    inherited: bool = False
    """True where a branch took the turn over from its parent: its tool calls were not executed again."""
    decision: BranchDecision | None = None
    token_entropies: list[float] = field(default_factory=list)
    """Next-token entropy (nats) of each of the first k sampled tokens, as far as the engine measured them."""


@dataclass
class Context:
    """Tokens that the policy read in place of the prompt and all that it had sampled before, from a turn on."""

    start: int
    """Response index of the first token that was sampled behind it."""
    token_ids: list[int]


@dataclass
class Trajectory:
    """One response of the policy to one prompt. A branch shares its parent's tokens before `fork_at`. Once
    all ranks have it (`Team.all_gather_groups`), its lists of a number per token are arrays."""

    prompt_id: str
    trajectory_id: str
    """The path in the tree: "2" is the third root, "2.0" its first child. Unique within the group."""
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    """1 = sampled by the policy (trained), 0 = tool output."""
    rollout_logprobs: list[float] = field(default_factory=list)
    """Logprob of each sampled token under the rollout policy; 0.0 where the mask is 0."""
    turns: list[Turn] = field(default_factory=list)
    parent_id: str | None = None
    fork_at: int = 0
    """Response index where the trajectory leaves its parent; 0 for roots."""
    contexts: list[Context] = field(default_factory=list)
    """Those that took the prompt's place, in order (protocol/contexts.py); none under rollout.context=append."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(first response index, step in which the tokens from there on were sampled); kept under rollout.carry_over."""
    stop_reason: StopReason | None = None
    text: str = ""
    """The decoded response, tool results included."""
    segments: list[tuple[str, bool]] = field(default_factory=list)
    """`text` cut into (text, written by the model) runs; the format reward reads only the model's."""
    token_chars: list[int] = field(default_factory=list)
    """Characters of `text` that each token adds; empty where they cannot be told apart. Those at the start that none
    adds are the prompt's (Codec.token_chars)."""
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    reward_reason: str = ""
    kl_penalty: float = 0.0
    """Number that is subtracted from the reward for the KL to the reference policy (loss.kl_in=reward)."""
    advantage: float | None = None
    """Advantage in the group; None where the trajectory teaches nothing, or each token has its own (gae)."""

    def check(self) -> None:
        """Assert the invariants that everything downstream relies on."""
        n = len(self.token_ids)
        assert n == len(self.loss_mask) == len(self.rollout_logprobs), self.trajectory_id
        assert len(self.token_chars) in (0, n), self.trajectory_id
        assert all(lp == 0.0 for lp, m in zip(self.rollout_logprobs, self.loss_mask, strict=True) if not m)
        assert not self.turns or self.turns[-1].result_end == n, (self.trajectory_id, self.turns[-1], n)
        assert {context.start for context in self.contexts} <= {turn.start for turn in self.turns}, self.trajectory_id

    @property
    def is_judged(self) -> bool:
        """True where the reward says something of the policy: not where an error of ours cut the response off."""
        return self.reward is not None and self.stop_reason != StopReason.ERROR

    @property
    def is_left_out(self) -> bool:
        """True where it must not be trained on: an error of ours cut it off, or a term of the reward has no value."""
        return self.stop_reason == StopReason.ERROR or (self.reward is None and self.reward_reason != "")

    @property
    def accuracy(self) -> float | None:
        """The answer's accuracy by the reward, 0..1; None where the reward does not say."""
        return self.reward_parts.get("accuracy")

    @property
    def is_solved(self) -> bool | None:
        """True where the answer is right, at least in part, and well-formed; None where the reward does not say."""
        return None if self.accuracy is None else self.accuracy > 0 and self.reward_parts.get("format", 1.0) > 0

    def as_seen(self) -> Trajectory:
        """Return a copy for a function of the user's: results were not sampled, so their tokens have NaN for logprobs,
        which no sum can hide."""
        logprobs = self.rollout_logprobs[:]
        for turn in self.turns:
            for position in range(turn.end, turn.result_end):
                logprobs[position] = math.nan
        return replace(self, rollout_logprobs=logprobs)

    def compact(self) -> Trajectory:
        """Return a copy with arrays in place of the lists of numbers per token.

        Arrays need no Python object per token. Nothing is lost: engines and trainer also keep logprobs in float32.
        """
        return replace(
            self,
            token_ids=array("I", self.token_ids),
            loss_mask=array("B", self.loss_mask),
            rollout_logprobs=array("f", self.rollout_logprobs),
            token_chars=array("H", self.token_chars),
        )

    def branch(self, trajectory_id: str, turn: int) -> Trajectory:
        """Return a trajectory that shares all turns before this one, and ends there for now."""
        at = self.turns[turn].start
        return Trajectory(
            self.prompt_id, trajectory_id, self.token_ids[:at], self.loss_mask[:at], self.rollout_logprobs[:at],
            turns=[replace(t, inherited=True, decision=None) for t in self.turns[:turn]],
            parent_id=self.trajectory_id, fork_at=at, versions=[v for v in self.versions if v[0] < at],
            contexts=[context for context in self.contexts if context.start <= at],
        )  # fmt: skip

    def context(self, prompt_ids: Sequence[int]) -> list[int]:
        """Return all that the policy has before it: the newest context, or the prompt, and what was sampled and read
        behind it."""
        if not self.contexts:
            return [*prompt_ids, *self.token_ids]
        return [*self.contexts[-1].token_ids, *self.token_ids[self.contexts[-1].start :]]

    def num_context_tokens(self, num_prompt_tokens: int) -> int:
        """Return the number of tokens of `context`, less those of the prompt."""
        if not self.contexts:
            return len(self.token_ids)
        newest = self.contexts[-1]
        return len(newest.token_ids) - num_prompt_tokens + len(self.token_ids) - newest.start

    def sampled_in(self, step: int) -> None:
        """Note that the tokens from here on are sampled in this step."""
        if not self.versions or self.versions[-1][1] != step:
            self.versions.append((len(self.token_ids), step))

    @property
    def num_sampled_tokens(self) -> int:
        """Number of loss tokens, the inherited ones included."""
        return sum(self.loss_mask)

    @property
    def tool_calls(self) -> list[ToolCall]:
        return [call for t in self.turns for call in t.tool_calls]

    @property
    def own_tool_calls(self) -> list[ToolCall]:
        """Calls made for this trajectory itself; a branch's inherited calls belong to its parent."""
        return [call for t in self.turns for call in t.tool_calls if not t.inherited]

    def to_dict(self) -> dict:
        """Return the fields in plain types, for the dump (jsonl). Long lists are shared, not copied."""
        mine = {name: value.tolist() if isinstance(value, array) else value for name, value in vars(self).items()}
        return mine | {name: [asdict(one) for one in mine[name]] for name in ("turns", "contexts")}


@dataclass
class Group:
    """The `group_size` trajectories of one prompt."""

    prompt: Prompt
    trajectories: list[Trajectory]
    sampled_by: int | None = None
    """Rank that sampled it (the first of those that share an engine)."""

    def as_seen(self, **unknown: float) -> Group:
        """Return a copy for a function of the user's, see `Trajectory.as_seen`; `unknown` are fields to set in all."""
        return replace(self, trajectories=[replace(t.as_seen(), **unknown) for t in self.trajectories])
