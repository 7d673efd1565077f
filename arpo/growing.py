"""The rollout's memory of unfinished work: the trajectories that still grow, and the trees of their groups.

Nothing here reads or writes files, samples, or calls tools.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from arpo.branching import BranchBudget, Evidence, Path, decide, initial_rollouts
from arpo.options import BranchingConfig, RolloutConfig, is_retrospective
from arpo.protocol import Codec
from arpo.protocol.calls import LIMIT_REACHED, TOOL_LIMIT_REACHED, TRUNCATION_MARK, Call
from arpo.protocol.stop_watch import StopWatch
from arpo.trajectory import BranchDecision, Context, Group, Prompt, ToolCall, Trajectory, Turn


@dataclass(frozen=True)
class Decision:
    """A branch decision as taken. Later the budget settles the number of children."""

    evidence: Evidence
    wants: bool
    """True if the trajectory is to branch, as far as the budget allows."""
    probability: float | None
    """P(branch); None if a tool refused."""
    draw: float | None
    """The uniform number that was compared with P; None without a draw."""
    refused_by: str = ""
    """Tool whose open session forbids a branch; then no number was drawn."""

    def outcome(self, num_children: int) -> str:
        """Return the outcome for the record, given the number of children."""
        if self.refused_by:
            return "refused"
        if not self.wants:
            return "declined"
        return "branched" if num_children else "no_budget"


@dataclass
class Live:
    """Working state of a growing trajectory."""

    trajectory: Trajectory
    group: GroupState
    path: Path
    evidence: Evidence | None = None
    """Evidence about the newest measured turn; None before the first measurement. A branch starts with the evidence of
    its parent."""
    entropies: list[float] = field(default_factory=list)
    """Next-token entropies (nats) of the current turn's first tokens, as far as sampled."""
    top_logprobs: list[list[float]] = field(default_factory=list)
    """The largest logprobs of each of the same tokens; empty if the entropy is measured exactly."""
    began_at_s: float | None = None
    """Time of the first token that this trajectory sampled itself."""
    num_calling: int = 0
    """Number of the current turn's calls without a result yet."""
    has_failed: bool = False
    """True once a call of the current turn has ended in an infrastructure error."""
    watch: StopWatch | None = None
    """Set if the turn was cut in two, and a stop string may lie across the cut."""

    @property
    def turn_index(self) -> int:
        return len(self.trajectory.turns) - 1

    @property
    def is_decision_due(self) -> bool:
        """True if a branch decision is to be taken on the tool result before the current turn.

        None is taken at a child's first own turn, or on a root that must not branch.
        """
        return self.group.budget.next_decision.get(self.path) == self.turn_index

    @property
    def owner(self) -> tuple[str, str]:
        """Unique name of the trajectory: prompt_id and trajectory_id."""
        return self.group.prompt.prompt_id, self.trajectory.trajectory_id

    @property
    def key(self) -> str:
        """Unique name of the current turn, and of the request to the engine."""
        return f"{self.group.prompt.prompt_id}|{self.trajectory.trajectory_id}|{self.turn_index}"

    def room(self, cfg: RolloutConfig) -> int:
        """Return how many tokens can still be added to the context."""
        num_prompt = len(self.group.prompt.token_ids)
        room = cfg.max_response_tokens - self.trajectory.num_context_tokens(num_prompt)
        if cfg.context == "append":
            return room
        # A new context makes room, but every token that the model has read or sampled counts towards the total.
        num_in_contexts = sum(len(context.token_ids) for context in self.trajectory.contexts)
        total = num_prompt + len(self.trajectory.token_ids) + num_in_contexts
        return min(room, cfg.max_trajectory_tokens - total)

    def begin_turn(self, *, is_note: bool) -> None:
        """Append an empty turn to the trajectory."""
        start = len(self.trajectory.token_ids)
        self.trajectory.turns.append(Turn(start=start, end=start, result_end=start, is_note=is_note))
        self.entropies = []
        self.top_logprobs = []

    def add_sampled(self, token_ids: Sequence[int], logprobs: Sequence[float], *, step: int | None) -> None:
        """Append sampled tokens to the current turn. step: training step that samples now; None without carry-over."""
        trajectory = self.trajectory
        if step is not None and token_ids:
            trajectory.record_step(step)
        trajectory.token_ids += token_ids
        trajectory.loss_mask += [1] * len(token_ids)
        trajectory.rollout_logprobs += logprobs
        turn = trajectory.turns[-1]
        turn.end = len(trajectory.token_ids)
        turn.result_end = turn.end

    def set_entropy(self, entropy: float) -> None:
        """Set the current turn's entropy (nats). This is now the newest evidence."""
        entropies = tuple(self.entropies)
        turn = self.trajectory.turns[-1]
        turn.entropy = entropy
        turn.token_entropies = list(entropies)
        # Without earlier evidence this turn counts as the first turn. That is right for a root. It is wrong for a
        # retrospective fork, but there no rule reads the evidence.
        earlier = self.evidence or Evidence(entropies, entropies, entropy=entropy, root_entropy=entropy)
        self.evidence = replace(earlier, entropies=entropies, entropy=entropy, turn=self.turn_index)

    def append_results_if_they_fit(self, codec: Codec, room: int) -> bool:
        """Append the turn's results, cut to `room` tokens. Return False, and change nothing, if there is no room.

        Results that the turn had already are replaced.
        """
        trajectory = self.trajectory
        turn = trajectory.turns[-1]
        rendered = codec.encode_results(turn.tool_calls, room, last_token=trajectory.token_ids[turn.end - 1])
        if rendered is None:
            return False
        texts, token_ids = rendered
        turn.tool_calls = [replace(call, result=text) for call, text in zip(turn.tool_calls, texts, strict=True)]
        trajectory.token_ids[turn.end :] = token_ids
        # loss_mask 0: the policy did not sample results, so they get no gradient
        trajectory.loss_mask[turn.end :] = [0] * len(token_ids)
        trajectory.rollout_logprobs[turn.end :] = [0.0] * len(token_ids)
        turn.result_end = len(trajectory.token_ids)
        return True

    def append_note_request(self, codec: Codec, cfg: RolloutConfig, request: str) -> bool:
        """Append a request for a note to the last result. Return False, and change nothing, if not all of it fits."""
        turn = self.trajectory.turns[-1]
        calls = turn.tool_calls
        num_result_tokens = turn.result_end - turn.end
        turn.tool_calls = [*calls[:-1], replace(calls[-1], result=calls[-1].result + request)]
        # The old results are replaced, so their tokens are room too. One token is kept for the note itself.
        fits = self.append_results_if_they_fit(codec, self.room(cfg) + num_result_tokens - 1)
        # without enough room, the codec cuts the longest results
        are_earlier_unchanged = turn.tool_calls[:-1] == calls[:-1]
        if fits and are_earlier_unchanged and not turn.tool_calls[-1].result.endswith(TRUNCATION_MARK):
            return True
        # undo: write the results back as they were
        turn.tool_calls = calls
        self.append_results_if_they_fit(codec, num_result_tokens)
        return False

    def replace_context(self, token_ids: list[int], cfg: RolloutConfig) -> bool:
        """Let the next turn read `token_ids` in place of all before. Return False, and change nothing, without room."""
        contexts = self.trajectory.contexts
        contexts.append(Context(len(self.trajectory.token_ids), token_ids))
        if self.room(cfg) > 0:
            return True
        contexts.pop()
        return False

    def decode(self, codec: Codec) -> None:
        """Fill the text of the ended trajectory, and the characters that each token adds to it."""
        t = self.trajectory
        cuts = [context.start for context in t.contexts]
        t.segments = codec.segments(t.token_ids, t.loss_mask, cuts)
        t.text = "".join(text for text, _ in t.segments)
        t.token_chars = codec.token_chars(t.token_ids, t.loss_mask, t.segments, cuts)


@dataclass
class GroupState:
    """The growing tree of a prompt."""

    prompt: Prompt
    size: int
    budget: BranchBudget
    seed: str = ""
    """Name of the group's random numbers: the run's seed and the rollout in which the group began."""
    trajectories: dict[Path, Trajectory] = field(default_factory=dict)
    decisions: dict[tuple[int, Path], Decision] = field(default_factory=dict)
    """(turn, path) -> decision."""
    wall_s: dict[Path, float] = field(default_factory=dict)
    """Seconds of each finished trajectory, from the first token that is not inherited to the end. `is_finished`
    counts these."""
    num_rounds: int = 0
    """Rounds of forks that a retrospective selector has chosen."""

    @classmethod
    def begin(cls, prompt: Prompt, rollout: RolloutConfig, cfg: BranchingConfig, seed: str) -> tuple[GroupState, int]:
        """Return a group without trajectories, and the number of roots to start."""
        size = rollout.group_size
        # with a dynamic budget AEPO's pre-monitoring trajectory comes first, and decides about the other roots
        num_roots = 1 if cfg.dynamic_budget else min(cfg.num_initial_rollouts, size)
        never_branches = cfg.selector == "none" or is_retrospective(cfg.selector)
        budget = BranchBudget(
            total_children=None if cfg.dynamic_budget else size - num_roots,
            max_children=cfg.max_branches_per_turn,
            # turn 0 comes before the first tool result, so it has no decision
            last_turn=0 if never_branches else rollout.max_turns - 1,
        )
        return cls(prompt, size, budget, seed), num_roots

    def num_roots_after(self, pilot: Trajectory, beta: float) -> int:
        """AEPO: return the number of roots, from the entropies of the finished pre-monitoring trajectory, root 0."""
        root_entropy = pilot.turns[0].entropy or 0.0
        after_tools = [turn.entropy for turn in pilot.turns[1:] if turn.entropy is not None]
        # Without a tool call there is no H_tool: taken as equal, so half the group (plus one) starts as roots.
        tool_entropy = sum(after_tools) / len(after_tools) if after_tools else root_entropy
        return initial_rollouts(self.size, root_entropy, tool_entropy, beta=beta)

    def decide(self, live: Live, cfg: BranchingConfig, *, refused_by: str) -> None:
        """Take the branch decision on the tool result before the current turn of `live`, and claim the budget.

        refused_by: tool whose open session forbids a branch, or "".
        """
        evidence = live.evidence
        turn = live.turn_index
        if refused_by:
            decision = Decision(evidence, wants=False, probability=None, draw=None, refused_by=refused_by)
        else:
            answered = tuple(live.trajectory.turns[turn - 1].tool_calls)
            rng = random.Random(f"{self.seed}|{live.key}")
            wants, probability, draw = decide(replace(evidence, calls=answered), cfg, rng)
            decision = Decision(evidence, wants=wants, probability=probability, draw=draw)
        self.decisions[turn, live.path] = decision
        live.evidence = replace(evidence, consecutive=evidence.consecutive + 1 if decision.wants else 0)
        self.budget.decided(turn, live.path, wants=decision.wants)

    @property
    def seconds(self) -> list[float]:
        """`wall_s` in the order of the paths."""
        return [seconds for _, seconds in sorted(self.wall_s.items())]

    @property
    def num_roots(self) -> int:
        return sum(len(path) == 1 for path in self.trajectories)

    @property
    def is_finished(self) -> bool:
        """True once all trajectories of the group have ended."""
        return len(self.wall_s) == self.size

    def to_group(self) -> Group:
        """Write the branch decisions into the turns, check the invariants, and return the finished group."""
        for (turn, path), decision in self.decisions.items():
            num_children = self.budget.granted.get((turn, path), 0)
            self.trajectories[path].turns[turn].decision = BranchDecision(
                entropy=decision.evidence.entropy,
                root_entropy=decision.evidence.root_entropy,
                probability=decision.probability,
                draw=decision.draw,
                consecutive=decision.evidence.consecutive,
                budget_left=self.budget.budget_before(turn, path),
                num_children=num_children,
                outcome=decision.outcome(num_children),
                refused_by=decision.refused_by,
            )
        trajectories = [self.trajectories[path] for path in sorted(self.trajectories)]
        assert len(trajectories) == self.size, (self.prompt.prompt_id, len(trajectories))
        for trajectory in trajectories:
            trajectory.check()
        return Group(self.prompt, trajectories)


def record_of(call: Call, live: Live, cfg: RolloutConfig) -> ToolCall:
    """Return the record of a new call. If the call must not run (malformed, over a limit), the result says why."""
    over_limit = limit_message(live, call.tag, cfg)
    error_kind = "limit" if over_limit else call.error_kind
    return ToolCall(
        call.tag,
        call.argument,
        result=over_limit or call.error,
        ok=False,
        error_kind=error_kind,
        executed=not error_kind,
    )


def limit_message(live: Live, tag: str, cfg: RolloutConfig) -> str:
    """Return "", or, if a further call is over a limit, the text that the model reads in place of a result."""
    tags = [call.tag for call in live.trajectory.tool_calls]
    if len(tags) >= cfg.max_tool_calls:
        return LIMIT_REACHED.format(limit=cfg.max_tool_calls)
    limit = cfg.call_limits.get(tag)
    if limit is not None and tags.count(tag) >= limit:
        return TOOL_LIMIT_REACHED.format(limit=limit, tag=tag)
    return ""


def seed_from(text: str) -> int:
    """Return a seed of 32 bits from a text.

    Of 100 requests in a group, two get the same seed, and so the same noise, with a probability of 1e-6.
    """
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest())
