"""The tool-calling, entropy-branching rollout: one event loop, no barrier between generation and tools.

A trajectory whose turn ends in calls starts them at once while the others keep decoding; the moment all results of the
turn are there its continuation is submitted (the engine's prefix cache makes that cheap); the moment the first k tokens
after them are known the branch decision is taken, and children fork at the end of the results. Tokens in, tokens out:
nothing the model sampled is re-tokenised, nothing it did not sample gets loss_mask 1.

Every random number is drawn from (seed, step, prompt, path in the tree, turn), and budget is granted in canonical
order (`BranchBudget`), so the order in which tools answer changes no decision. A retrospective selector (`EXPANSIONS`)
forks only after all trajectories of the group have ended, once per round.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace

from arpo import branching as br
from arpo import retrospective
from arpo.engine import Chunk, Engine, SamplingSpec
from arpo.errors import UserError
from arpo.growing import Decision, GroupState, Live, number_of, refused
from arpo.options import BranchingConfig, RolloutConfig, is_retrospective
from arpo.protocol import Codec
from arpo.protocol.calls import TRUNCATION_MARK
from arpo.protocol.contexts import ContextEvidence, next_context
from arpo.protocol.stop_watch import StopWatch
from arpo.tools.base import ToolContext, ToolResult, ToolRunner
from arpo.trajectory import Context, Prompt, StopReason, ToolCall, Trajectory, Turn


class Rollout:
    """The trajectories that are under way, and the handlers for tokens and tool results that arrive."""

    def __init__(
        self,
        engine: Engine,
        tools: ToolRunner,
        codec: Codec,
        cfg: RolloutConfig,
        branching: BranchingConfig,
    ):
        self.engine, self.tools, self.codec = engine, tools, codec
        self.cfg, self.branching = cfg, branching
        self.forks_afterwards = is_retrospective(branching.selector)
        self.step: int | None = None  # that which samples, for Trajectory.versions; None where no group is carried over
        self.num_entropy_tokens, self.num_top_logprobs = br.tokens_to_measure(branching)
        self.decoding: dict[str, Live] = {}
        self.calling: dict[str, tuple[Live, int]] = {}  # call id -> (live, number of the call in its turn)
        self.num_unfinished = 0
        self._whole: list[GroupState] = []

    def take_whole(self) -> list[GroupState]:
        """Return the groups that have become whole since the last call."""
        taken, self._whole = self._whole, []
        return taken

    def start_group(self, prompt: Prompt, seed: str) -> GroupState:
        """Start a prompt's first trajectories. `seed` names the random numbers of the group."""
        assert prompt.token_ids, f"{prompt.prompt_id} has no token_ids; render the prompt first"
        group, roots = GroupState.begin(prompt, self.cfg, self.branching, seed)
        self.num_unfinished += group.size
        self.start_roots(group, roots, may_branch=True)
        self.grow(group)
        return group

    def start_roots(self, group: GroupState, count: int, *, may_branch: bool) -> None:
        for _ in range(count):
            path = (group.num_roots,)
            trajectory = group.trajectories[path] = Trajectory(group.prompt.prompt_id, _name(path))
            if may_branch:
                group.budget.expect(path, turn=1)
            self.start_turn(Live(trajectory, group, path))

    def fork(
        self, group: GroupState, parent_path: br.Path, turn: int, path: br.Path, evidence: br.Evidence | None = None
    ) -> None:
        """A child shares everything up to the end of the tool result before `turn`; the parent goes on undisturbed."""
        parent = group.trajectories[parent_path]
        child = group.trajectories[path] = parent.branch(_name(path), turn)
        name = group.prompt.prompt_id
        self.tools.sessions.fork((name, parent.trajectory_id), turn, (name, child.trajectory_id))
        self.start_turn(Live(child, group, path, evidence), is_note=parent.turns[turn].is_note)

    def grow(self, group: GroupState) -> None:
        """Start what the budget allows now: children; and, once nothing can branch any more, the missing roots."""
        for turn, parent, children in group.budget.settle():
            evidence = group.decisions[turn, parent].evidence
            for child in children:
                self.fork(group, parent, turn, child, replace(evidence, consecutive=evidence.consecutive + 1))
        if group.budget.is_settled and self.forks_afterwards:
            self.expand(group)
        elif group.budget.is_settled:
            self.start_roots(group, group.size - len(group.trajectories), may_branch=False)
        undecided = ((turn, _name(path)) for turn, path in group.budget.undecided())
        self.tools.sessions.retain(group.prompt.prompt_id, undecided)

    def expand(self, group: GroupState) -> None:
        """Once all trajectories have ended, fork them as a retrospective selector says; fresh roots are the rest."""
        finished = retrospective.finished_part(group)
        if finished is None or len(group.trajectories) == group.size:
            return
        forks = retrospective.next_forks(group, finished, self.branching, group.seed, self.tools.sessions.refusal)
        for fork in forks:
            parent, child = retrospective.place(group, fork)
            if parent:
                self.fork(group, parent, fork.turn, child)
            else:
                self.start_roots(group, 1, may_branch=False)
        if not forks or group.num_rounds == self.branching.expansion_rounds:
            self.start_roots(group, group.size - len(group.trajectories), may_branch=False)

    def start_turn(self, live: Live, *, is_note: bool = False) -> None:
        trajectory, start = live.trajectory, len(live.trajectory.token_ids)
        trajectory.turns.append(Turn(start=start, end=start, result_end=start, is_note=is_note))
        live.entropies, live.top_logprobs = [], []
        self.decoding[live.key] = live
        if live.group.budget.open.get(live.path) == live.turn_index:
            self.tools.sessions.mark(live.owner, live.turn_index)
        self.submit(live)

    def submit(self, live: Live) -> None:
        """Have the engine sample the current turn, or the rest of it after a cut."""
        group, turn, room = live.group, live.trajectory.turns[-1], live.room(self.cfg)
        sampled = live.trajectory.token_ids[turn.start :]
        spec = SamplingSpec(
            max_tokens=max(min(room, self.cfg.note_tokens - len(sampled)), 1) if turn.is_note else room,
            temperature=self.cfg.temperature,
            top_p=self.cfg.top_p,
            stop=() if turn.is_note else self.codec.stop_strings(self.offered_tools(group.prompt)),
            # the rest's own: the engine would begin the turn's random stream anew
            seed=number_of(f"{group.seed}|{live.key}" + (f"|{len(sampled)}" if sampled else "")),
            num_entropy_tokens=max(self.num_entropy_tokens - len(sampled), 0),
            num_top_logprobs=self.num_top_logprobs,
            num_chunk_tokens=1 if self.cfg.carry_over else max(self.num_entropy_tokens - 1, 1),
        )
        live.watch = StopWatch.at_cut(sampled, spec.stop)
        self.engine.submit(live.key, live.trajectory.context(group.prompt.token_ids), spec)

    def offered_tools(self, prompt: Prompt) -> tuple[str, ...]:
        loaded = tuple(self.tools.tools)
        return loaded if prompt.tools is None else tuple(tag for tag in prompt.tools if tag in loaded)

    def on_chunk(self, chunk: Chunk) -> None:
        live = self.decoding[chunk.request_id]
        live.began_at_s = live.began_at_s or time.perf_counter()
        trajectory, turn = live.trajectory, live.trajectory.turns[-1]
        if live.watch:
            chunk = self.end_across_cut(live, chunk)
        if self.step is not None and chunk.token_ids:
            trajectory.sampled_in(self.step)
        trajectory.token_ids += chunk.token_ids
        trajectory.loss_mask += [1] * len(chunk.token_ids)
        trajectory.rollout_logprobs += chunk.logprobs
        live.entropies += chunk.entropies
        live.top_logprobs += chunk.top_logprobs
        turn.end = turn.result_end = len(trajectory.token_ids)
        if turn.entropy is None and (chunk.finish or len(live.entropies) >= self.num_entropy_tokens):
            live.measured(br.turn_entropy(live.entropies, live.top_logprobs, self.branching, self.codec.vocab_size))
            if self.branching.compat == "paper":
                self.decide(live)
        if chunk.finish:
            del self.decoding[chunk.request_id]
            self.end_turn(live, chunk)

    def end_across_cut(self, live: Live, chunk: Chunk) -> Chunk:
        """Return the chunk, or its part up to the end of a stop string that began before the turn was cut."""
        stops = self.codec.stop_strings(self.offered_tools(live.group.prompt))
        if not (found := live.watch.find(chunk.token_ids, self.codec.decode, stops)):
            return chunk
        self.engine.abort([chunk.request_id])
        return chunk.ended_after(*found)

    def decide(self, live: Live) -> None:
        """Take the branch decision of the tool result before the current turn, if it is this trajectory's to take."""
        group, turn = live.group, live.turn_index
        if group.budget.open.get(live.path) != turn:
            return
        rng = random.Random(f"{group.seed}|{live.key}")
        if refused_by := self.tools.sessions.refusal([c.tag for c in live.trajectory.tool_calls if c.executed]):
            decision = Decision(live.evidence, False, None, None, refused_by)
        else:
            evidence = replace(live.evidence, calls=tuple(live.trajectory.turns[turn - 1].tool_calls))
            decision = Decision(live.evidence, *br.decide(evidence, self.branching, rng))
        group.decisions[turn, live.path] = decision
        live.evidence = replace(live.evidence, consecutive=live.evidence.consecutive + 1 if decision.wants else 0)
        group.budget.decided(turn, live.path, wants=decision.wants)
        self.grow(group)

    def end_turn(self, live: Live, chunk: Chunk) -> None:
        """End the trajectory with its answer, or start all calls of the turn."""
        trajectory, turn = live.trajectory, live.trajectory.turns[-1]
        sampled, offered = trajectory.token_ids[turn.start : turn.end], self.offered_tools(live.group.prompt)
        calls = self.codec.calls(sampled, chunk.finish, chunk.stop_string, offered)
        if turn.is_note or (not calls and chunk.finish == "eos"):
            self.next_turn(live)
            return
        if not calls:
            self.end(live, StopReason.LENGTH)
            return
        if len(trajectory.tool_calls) > self.cfg.max_tool_calls:  # it was told to answer, and called again
            self.end(live, StopReason.TOOL_LIMIT)
            return
        for number, call in enumerate(calls):
            refusal = refused(trajectory, call.tag, self.cfg)
            error, kind = (refusal, "limit") if refusal else (call.error, call.error_kind)
            turn.tool_calls.append(ToolCall(call.tag, call.argument, error, False, kind, executed=not kind))
            if not kind:
                self.call(live, number)
        if not live.num_calling:
            self.append_results(live)

    def call(self, live: Live, number: int) -> None:
        """Start a call of the current turn."""
        prompt, call, call_id = live.group.prompt, live.trajectory.turns[-1].tool_calls[number], f"{live.key}|{number}"
        self.calling[call_id] = (live, number)
        live.num_calling += 1
        at = ToolContext(*live.owner, live.turn_index, number_of(f"{live.group.seed}|{prompt.prompt_id}"), prompt.meta)
        self.tools.start(call_id, call.tag, call.argument, at)

    def on_tool_result(self, call_id: str, result: ToolResult) -> None:
        live, number = self.calling.pop(call_id)
        calls = live.trajectory.turns[-1].tool_calls
        calls[number] = result.of(calls[number])
        live.num_calling -= 1
        live.has_failed |= result.infra_error
        if not live.num_calling:
            if live.has_failed:  # our failure, not the model's: it neither reads it nor is trained on it
                self.end(live, StopReason.ERROR)
            else:
                self.append_results(live)

    def append_results(self, live: Live) -> None:
        turn, room = live.trajectory.turns[-1], live.room(self.cfg) - self.cfg.answer_reserve_tokens
        if self.has_read(live, min(self.cfg.max_result_tokens, room)):
            self.next_turn(live)
        else:  # no room for results and an answer
            turn.tool_calls = [replace(call, result="") for call in turn.tool_calls]
            self.end(live, StopReason.LENGTH)

    def has_read(self, live: Live, room: int) -> bool:
        """Have the results of the turn's calls stand behind it, and return True, if they fit."""
        trajectory, turn = live.trajectory, live.trajectory.turns[-1]
        rendered = self.codec.encode_results(turn.tool_calls, room, last_token=trajectory.token_ids[turn.end - 1])
        if rendered is None:
            return False
        texts, token_ids = rendered
        turn.tool_calls = [replace(call, result=text) for call, text in zip(turn.tool_calls, texts, strict=True)]
        trajectory.token_ids[turn.end :] = token_ids
        trajectory.loss_mask[turn.end :] = [0] * len(token_ids)
        trajectory.rollout_logprobs[turn.end :] = [0.0] * len(token_ids)
        turn.result_end = len(trajectory.token_ids)
        return True

    def next_turn(self, live: Live) -> None:
        """Begin a turn behind what the context policy leaves of all before it; end with the answer, or without room."""
        trajectory, turn, prompt = live.trajectory, live.trajectory.turns[-1], live.group.prompt
        num_tokens = trajectory.num_context_tokens(len(prompt.token_ids))
        evidence = ContextEvidence(prompt, trajectory, num_tokens, self.codec, self.cfg)
        found = next_context(evidence)
        if evidence.is_answer and found is None:
            self.end(live, StopReason.EOS)
            return
        if not turn.tool_calls and not isinstance(found, list):
            raise UserError(
                f"rollout.context={self.cfg.context} must return token ids here, not {type(found).__name__}"
            )
        fits, asks = True, isinstance(found, str)
        if asks:
            *others, last = calls = turn.tool_calls
            turn.tool_calls, size = [*others, replace(last, result=last.result + found)], turn.result_end - turn.end
            fits = self.has_read(live, live.room(self.cfg) + size - 1)
            if not fits or turn.tool_calls[-1].result.endswith(TRUNCATION_MARK):  # the end of the request was cut off
                turn.tool_calls, fits = calls, False
                self.has_read(live, size)
        elif found is not None:
            trajectory.contexts.append(Context(len(trajectory.token_ids), found))
            if not (fits := live.room(self.cfg) > 0):
                trajectory.contexts.pop()
        if not fits:
            self.end(live, StopReason.LENGTH)
            return
        self.start_turn(live, is_note=asks)
        if self.branching.compat == "upstream":  # by the turn before the call, before a token of the next is sampled
            self.decide(live)

    def end(self, live: Live, reason: StopReason) -> None:
        trajectory, group = live.trajectory, live.group
        trajectory.stop_reason = reason
        tokens, cuts = (trajectory.token_ids, trajectory.loss_mask), [c.start for c in trajectory.contexts]
        trajectory.segments = self.codec.segments(*tokens, cuts)
        trajectory.text = "".join(text for text, _ in trajectory.segments)
        trajectory.token_chars = self.codec.token_chars(*tokens, trajectory.segments, cuts)
        self.num_unfinished -= 1
        self.tools.sessions.end(live.owner)
        group.budget.close(live.path)
        if group.budget.budget is None:  # the pre-monitoring trajectory: it is alone until now
            roots = group.roots_after(trajectory, self.branching.budget_weight)
            self.start_roots(group, roots - 1, may_branch=True)
            group.budget.budget = group.size - roots
        self.grow(group)
        group.wall_s[live.path] = time.perf_counter() - live.began_at_s if live.began_at_s else 0.0
        if len(group.wall_s) == group.size:
            self._whole.append(group)
            self.tools.sessions.forget(group.prompt.prompt_id)


def _name(path: br.Path) -> str:
    return ".".join(map(str, path))
