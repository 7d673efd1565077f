"""The glossary: Prompt, Turn, ToolCall, Trajectory, Group. No torch, no I/O.

A trajectory is a response to a prompt. The token lists of a trajectory have a number for each response token:

    token_ids         <think> ... </search>    <result> ... </result>   <think> ... </answer><eos>
    loss_mask         1 1 1 1 1 1 1 1 1 1 1    0 0 0 0 0 0 0 0 0 0 0    1 1 1 1 1 1 1 1 1 1 1 1
    rollout_logprobs  -.1 -.3 ...              0 0 0 0 ...              -.2 ...
    turns             |------ Turn 0 -------------------------------|   |------ Turn 1 ------|
                      start            end               result_end     start             end = result_end

Without tags (protocol.format) a turn ends with the model's end token. The text that the chat template then adds, up to
the model's next turn, has mask 0: <tool_call> ... <eos> | <tool_response> ... assistant | It is ... <eos>
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum


class StopReason(StrEnum):
    """Why a trajectory ended."""

    EOS = "eos"
    """The policy itself decided to stop."""
    LENGTH = "length"
    """No room was left for the turn, or for an answer after a tool result."""
    TOOL_LIMIT = "tool_limit"
    """The policy read that the limit of tool calls is reached, and called again."""
    ERROR = "error"
    """An infrastructure error."""


@dataclass(frozen=True)
class Prompt:
    """A question with its accepted answers."""

    prompt_id: str
    messages: list[dict[str, str]]
    """The chat as in the file. The system message is added when `token_ids` are filled."""
    answers: list[str]
    """Accepted answers (aliases); the reward takes the best match."""
    data_source: str = ""
    tools: tuple[str, ...] | None = None
    """Tags of the tools that the prompt offers, if they are loaded; None = all loaded tools."""
    meta: dict = field(default_factory=dict)
    """`ability` ("math" | "qa") and the other columns of the data file."""
    token_ids: tuple[int, ...] = ()
    """The rendered chat, up to the first response token."""


@dataclass(frozen=True)
class ToolCall:
    """A tool call that the policy wrote, and the result that the policy read."""

    tag: str
    argument: str
    result: str
    """The text that the model read (escaped, truncated). With tags, the text between <result> and </result>."""
    ok: bool
    error_kind: str | None = None
    """Short stable name of the failure ("timeout", "error", "empty_call", "unopened_tag", "limit", ...); None if ok."""
    executed: bool = True
    """False if no tool ran: a malformed call, or a call over the limit."""
    cached: bool = False
    seconds: float = 0.0
    cost: float = 0.0
    """Money, in the currency of tools.price_per_call; 0 if a cache answered."""
    info: dict = field(default_factory=dict)
    """Further data from the tool for the reward function, like an environment's reward."""
    replayed: int = 0
    """Number of the parent's calls that were run again before this call, so that the tool has the parent's state."""
    replay_mismatches: int = 0
    """Number of replayed calls with another answer than the first time. The tool's state then differs from what the
    model read."""


@dataclass(frozen=True)
class BranchDecision:
    """The record of a branch decision: what a rule read, and what came of it."""

    entropy: float
    """H (nats): mean entropy of the first k tokens of the turn after the tool result. Under branching.compat=upstream
    it is the turn before the result; under a retrospective selector it is the chosen turn."""
    root_entropy: float
    """H_root: the same over the first k tokens of the trajectory's first turn."""
    probability: float | None
    """P(branch); None if a retrospective selector chose the turn, or if a tool refused."""
    draw: float | None
    """Uniform random number that `probability` was compared with; None under the threshold rule, or without P."""
    consecutive: int
    """Number of decisions to branch in a row before this one on the same chain (AEPO's l)."""
    budget_left: int
    """Number of children that the group may still start after all earlier decisions in canonical order (BranchBudget).
    Under a retrospective selector: number of trajectories that the group still lacks."""
    num_children: int
    outcome: str
    """"branched", "declined" (by the rule), "no_budget" (the rule was for it, but the group is full), or "refused" (by
    a tool)."""
    score: float | None = None
    """Score of the turn under a retrospective selector; the newest if the turn was chosen again."""
    refused_by: str = ""
    """With outcome "refused": the tool with an open session, which cannot be copied for a branch."""


@dataclass
class Turn:
    """A run of sampled tokens and the tool results after it. Indices are response positions."""

    start: int
    end: int = 0
    """One past the last sampled token."""
    result_end: int = 0
    """One past the last token of the tool results; equals `end` if no tool was called."""
    entropy: float | None = None
    """Mean next-token entropy (nats) over the first k sampled tokens; None before the measurement."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """Calls at the end of the turn, in order: none in an answer, one with tags, one or more in JSON."""
    is_note: bool = False
    """True if the policy was asked for a note. The turn's text is then neither a call nor an answer."""
    inherited: bool = False
    """True if a branch copied the turn from its parent. The tool calls were not executed again."""
    decision: BranchDecision | None = None
    token_entropies: list[float] = field(default_factory=list)
    """Next-token entropy (nats) of each of the first k sampled tokens that the engine measured."""


@dataclass
class Context:
    """Tokens that the policy read from some turn on, in place of the prompt and the response so far."""

    start: int
    """Response index of the first token sampled after this context."""
    token_ids: list[int]


@dataclass
class Trajectory:
    """A response of the policy to a prompt. A branch has the tokens of its parent before `fork_at`.

    After the ranks have exchanged trajectories (`Team.all_gather_groups`), lists with a number per token are arrays.
    """

    prompt_id: str
    trajectory_id: str
    """Path in the tree: "2" is the third root, "2.0" its first child. Unique within the group."""
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    """1 = sampled by the policy, trained on; 0 = tool output."""
    rollout_logprobs: list[float] = field(default_factory=list)
    """Log-probability of each sampled token under the rollout policy; 0.0 where the mask is 0."""
    turns: list[Turn] = field(default_factory=list)
    parent_id: str | None = None
    fork_at: int = 0
    """Response index where a branch leaves its parent; 0 for roots."""
    contexts: list[Context] = field(default_factory=list)
    """Contexts after the prompt, in order (protocol/contexts.py); none under rollout.context=append."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(first response index, training step that sampled the tokens from there on); filled under rollout.carry_over."""
    stop_reason: StopReason | None = None
    text: str = ""
    """The decoded response, tool results included."""
    segments: list[tuple[str, bool]] = field(default_factory=list)
    """`text` cut into runs (text, written by the model). The format reward reads only the model's runs."""
    token_chars: list[int] = field(default_factory=list)
    """Number of characters that each token adds to `text`; empty if they cannot be attributed. `text` may begin with
    characters of the prompt, which no token adds (Codec.token_chars)."""
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    reward_reason: str = ""
    kl_penalty: float = 0.0
    """Subtracted from the reward: the KL to the reference policy times its coefficient (loss.kl_in=reward)."""
    advantage: float | None = None
    """Advantage within the group; None if the trajectory is not trained on, or if each token has its own (gae)."""

    def check(self) -> None:
        """Assert the invariants of a finished trajectory."""
        n = len(self.token_ids)
        assert n == len(self.loss_mask) == len(self.rollout_logprobs), self.trajectory_id
        assert len(self.token_chars) in (0, n), self.trajectory_id
        assert all(lp == 0.0 for lp, m in zip(self.rollout_logprobs, self.loss_mask, strict=True) if not m)
        assert not self.turns or self.turns[-1].result_end == n, (self.trajectory_id, self.turns[-1], n)
        assert {context.start for context in self.contexts} <= {turn.start for turn in self.turns}, self.trajectory_id

    @property
    def is_judged(self) -> bool:
        """True if there is a reward, and no infrastructure error cut the response off. False before scoring."""
        return self.reward is not None and self.stop_reason != StopReason.ERROR

    @property
    def is_scored(self) -> bool:
        """True after scoring, even if a function of the user gave no reward; then `reward_reason` says why."""
        return self.reward is not None or self.reward_reason != ""

    @property
    def is_left_out(self) -> bool:
        """True if not to be trained on: after an infrastructure error, or if a term of the reward has no value.

        False before scoring, unless there was an infrastructure error.
        """
        return self.stop_reason == StopReason.ERROR or (self.reward is None and self.is_scored)

    @property
    def accuracy(self) -> float | None:
        """Accuracy of the answer, from 0 to 1; None for a reward without an accuracy."""
        return self.reward_parts.get("accuracy")

    @property
    def is_solved(self) -> bool | None:
        """True if the answer is at least partly right, and well-formed; None if the reward has no accuracy."""
        if self.accuracy is None:
            return None
        return self.accuracy > 0 and self.reward_parts.get("format", 1.0) > 0

    @property
    def num_sampled_tokens(self) -> int:
        """Number of loss tokens, inherited tokens included."""
        return sum(self.loss_mask)

    @property
    def tool_calls(self) -> list[ToolCall]:
        return [call for t in self.turns for call in t.tool_calls]

    @property
    def own_tool_calls(self) -> list[ToolCall]:
        """Calls of this trajectory without the calls inherited from the parent."""
        return [call for t in self.turns for call in t.tool_calls if not t.inherited]

    def for_custom_code(self) -> Trajectory:
        """Return a copy for a custom function (FILE.py:NAME), with NaN for the logprobs of tool results.

        Tool results were not sampled. A sum that includes them by mistake would look right with zeros; with NaN it is
        NaN.
        """
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
        """Return a new branch, with a copy of all turns before `turn`."""
        fork_at = self.turns[turn].start
        return Trajectory(
            prompt_id=self.prompt_id,
            trajectory_id=trajectory_id,
            token_ids=self.token_ids[:fork_at],
            loss_mask=self.loss_mask[:fork_at],
            rollout_logprobs=self.rollout_logprobs[:fork_at],
            turns=[replace(t, inherited=True, decision=None) for t in self.turns[:turn]],
            parent_id=self.trajectory_id,
            fork_at=fork_at,
            versions=[(start, step) for start, step in self.versions if start < fork_at],
            # <=: a context that starts at the fork is what the branch's first turn reads.
            contexts=[context for context in self.contexts if context.start <= fork_at],
        )

    def context(self, prompt_ids: Sequence[int]) -> list[int]:
        """Return the tokens that the policy reads now: the newest context, or else the prompt, and all response tokens
        after it."""
        if not self.contexts:
            return [*prompt_ids, *self.token_ids]
        newest = self.contexts[-1]
        return [*newest.token_ids, *self.token_ids[newest.start :]]

    def num_context_tokens(self, num_prompt_tokens: int) -> int:
        """Return the length of `context` minus the length of the prompt. Negative for a new, shorter context."""
        if not self.contexts:
            return len(self.token_ids)
        newest = self.contexts[-1]
        return len(newest.token_ids) - num_prompt_tokens + len(self.token_ids) - newest.start

    def record_step(self, step: int) -> None:
        """Record that the tokens from here on are sampled in this training step."""
        if not self.versions or self.versions[-1][1] != step:
            self.versions.append((len(self.token_ids), step))

    def to_dict(self) -> dict:
        """Return the fields in plain types, for the dump (jsonl). Long lists are shared, not copied."""
        fields = {name: value.tolist() if isinstance(value, array) else value for name, value in vars(self).items()}
        # asdict copies, so only the two lists of dataclasses go through it.
        fields["turns"] = [asdict(turn) for turn in self.turns]
        fields["contexts"] = [asdict(context) for context in self.contexts]
        return fields


@dataclass
class Group:
    """The trajectories of a prompt: `group_size`, or fewer (branching.until_mixed, or a group that still grows)."""

    prompt: Prompt
    trajectories: list[Trajectory]
    sampled_by: int | None = None
    """Rank that sampled the group; if ranks share an engine, the first rank of the team."""

    def for_custom_code(self, **overrides: object) -> Group:
        """Return a copy for a custom function, see `Trajectory.for_custom_code`.

        overrides: values of fields to set in every trajectory, like reward=nan.
        """
        return replace(self, trajectories=[replace(t.for_custom_code(), **overrides) for t in self.trajectories])
