"""The tool-calling, entropy-branching rollout: one event loop, no barrier between generation and tools.

This file has the event handlers: `on_chunk` for new tokens, `on_tool_result` for tool results. The loop is `drive` in
arpo/sampling/driver.py.

The calls at the end of a turn start at once, while the other trajectories keep decoding. As soon as all results of the
turn are there, the next turn is submitted (the engine's prefix cache makes this cheap). As soon as the first k tokens
of the next turn are known, the branch decision is taken, and children fork at the end of the results. Tokens in, tokens
out: sampled tokens are never tokenised again, and only sampled tokens get loss_mask 1.

Each random number is drawn from (seed, step, prompt, path in the tree, turn), and the budget is granted in canonical
order (`BranchBudget`). So the order in which tools answer changes no decision. A retrospective selector (`EXPANSIONS`)
forks only after all trajectories of the group have ended, once per round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from arpo import retrospective
from arpo.branching import Evidence, Path, tokens_to_measure, turn_entropy
from arpo.engine import Chunk, Engine, SamplingSpec
from arpo.growing import GroupState, Live, record_of, seed_from
from arpo.options import BranchingConfig, RolloutConfig, is_retrospective
from arpo.protocol import Codec
from arpo.protocol.calls import Call
from arpo.protocol.contexts import ContextEvidence, next_context
from arpo.protocol.stop_watch import StopWatch
from arpo.tools.base import ToolContext, ToolResult, ToolRunner
from arpo.trajectory import Group, Prompt, StopReason, Trajectory


class Rollout:
    """The unfinished trajectories. The methods are in the order of a trajectory's life."""

    def __init__(
        self,
        engine: Engine,
        tools: ToolRunner,
        codec: Codec,
        cfg: RolloutConfig,
        branching: BranchingConfig,
        is_mixed: Callable[[Group], bool] | None = None,
    ):
        """is_mixed: scores finished trajectories, and says whether rewards differ. branching.until_mixed needs it."""
        self.engine = engine
        self.tools = tools
        self.codec = codec
        self.cfg = cfg
        self.branching = branching
        self.is_mixed = is_mixed
        self.forks_afterwards = is_retrospective(branching.selector)
        self.num_entropy_tokens, self.num_top_logprobs = tokens_to_measure(branching)
        self.step: int | None = None
        """Training step whose policy samples now, set by `CarryOver`; None without carry-over."""
        self.decoding: dict[str, Live] = {}
        """Request -> its trajectory, for all that the engine decodes."""
        self.calling: dict[str, tuple[Live, int]] = {}
        """Call id -> (trajectory, index of the call in its turn), for calls without a result yet."""
        self.num_unfinished = 0
        """Trajectories of started groups without an end yet. Many of them have not even begun."""
        self._finished: list[GroupState] = []
        """Groups finished since the last `take_finished`."""

    def take_finished(self) -> list[GroupState]:
        """Return the groups finished since the last call."""
        taken, self._finished = self._finished, []
        return taken

    # ---- a trajectory begins

    def start_group(self, prompt: Prompt, seed: str) -> GroupState:
        """Start a prompt's first trajectories. `seed` names the random numbers of the group."""
        assert prompt.token_ids, f"{prompt.prompt_id} has no token_ids; render the prompt first"
        group, num_roots = GroupState.begin(prompt, self.cfg, self.branching, seed)
        self.num_unfinished += group.size
        self.start_roots(group, num_roots, may_branch=True)
        self.grow(group)
        return group

    def start_roots(self, group: GroupState, count: int, *, may_branch: bool) -> None:
        """Start further trajectories at the prompt. may_branch=False: no branch decision is taken on them."""
        for _ in range(count):
            path = (group.num_roots,)
            trajectory = Trajectory(group.prompt.prompt_id, _trajectory_id(path))
            group.trajectories[path] = trajectory
            if may_branch:
                group.budget.expect(path, turn=1)
            self.start_turn(Live(trajectory, group, path))

    # ---- it samples a turn

    def start_turn(self, live: Live, *, is_note: bool = False) -> None:
        """Let the trajectory sample its next turn: a note (see rollout.context), or calls or an answer."""
        live.begin_turn(is_note=is_note)
        self.decoding[live.key] = live
        if live.is_decision_due:  # a child may begin here, so tools with a state keep a copy
            self.tools.sessions.mark(live.owner, live.turn_index)
        self.submit(live)

    def submit(self, live: Live) -> None:
        """Let the engine sample the current turn, or the rest of it if the end of a step has cut it (carry-over)."""
        group = live.group
        turn = live.trajectory.turns[-1]
        sampled = live.trajectory.token_ids[turn.start :]
        max_tokens = live.room(self.cfg)
        if turn.is_note:
            # at least 1: a continued run may have a smaller rollout.note_tokens than the run that began the note
            max_tokens = max(min(max_tokens, self.cfg.note_tokens - len(sampled)), 1)
        seed = f"{group.seed}|{live.key}"
        if sampled:  # with the turn's own seed the engine would draw the same random stream again
            seed += f"|{len(sampled)}"
        spec = SamplingSpec(
            max_tokens=max_tokens,
            temperature=self.cfg.temperature,
            top_p=self.cfg.top_p,
            stop=() if turn.is_note else self.codec.stop_strings(self.offered_tools(group.prompt)),
            seed=seed_from(seed),
            num_entropy_tokens=max(self.num_entropy_tokens - len(sampled), 0),
            num_top_logprobs=self.num_top_logprobs,
            # The engine sends the first token alone, then chunks of this size. With k - 1 the second chunk completes
            # the k tokens that the entropy needs. With carry-over each token is a chunk, because cutting a turn loses
            # the tokens of an unfinished chunk.
            num_chunk_tokens=1 if self.cfg.carry_over else max(self.num_entropy_tokens - 1, 1),
        )
        live.watch = StopWatch.at_cut(sampled, spec.stop)
        self.engine.submit(live.key, live.trajectory.context(group.prompt.token_ids), spec)

    def offered_tools(self, prompt: Prompt) -> tuple[str, ...]:
        """Return the tags of the loaded tools that the prompt offers."""
        loaded = tuple(self.tools.tools)
        return loaded if prompt.tools is None else tuple(tag for tag in prompt.tools if tag in loaded)

    def on_chunk(self, chunk: Chunk) -> None:
        """Take newly sampled tokens from the engine."""
        live = self.decoding[chunk.request_id]
        live.began_at_s = live.began_at_s or time.perf_counter()
        if live.watch:
            chunk = self.end_at_stop_across_cut(live, chunk)
        live.add_sampled(chunk.token_ids, chunk.logprobs, step=self.step)
        live.entropies += chunk.entropies
        live.top_logprobs += chunk.top_logprobs
        # the first k tokens are there, or the turn has ended before
        is_measured = chunk.finish or len(live.entropies) >= self.num_entropy_tokens
        if is_measured and live.trajectory.turns[-1].entropy is None:
            entropy = turn_entropy(live.entropies, live.top_logprobs, self.branching, self.codec.vocab_size)
            live.set_entropy(entropy)
            if self.branching.compat == "paper":
                self.take_branch_decision(live)
        if chunk.finish:
            del self.decoding[chunk.request_id]
            self.end_turn(live, chunk)

    def end_at_stop_across_cut(self, live: Live, chunk: Chunk) -> Chunk:
        """Return the chunk, up to the end of a stop string if one began before the turn was cut."""
        stop = live.watch.find(chunk.token_ids, self.codec.decode)
        if stop is None:
            return chunk
        num_tokens, stop_string = stop
        self.engine.abort([chunk.request_id])
        return chunk.ended_after(num_tokens, stop_string)

    def end_turn(self, live: Live, chunk: Chunk) -> None:
        """Start the calls of the turn. Without calls the turn is a note, an answer, or text that was cut off."""
        trajectory = live.trajectory
        turn = trajectory.turns[-1]
        sampled = trajectory.token_ids[turn.start : turn.end]
        calls = self.codec.calls(sampled, chunk.finish, chunk.stop_string, self.offered_tools(live.group.prompt))
        if turn.is_note or (not calls and chunk.finish == "eos"):
            self.next_turn(live)  # which ends the trajectory after an answer
        elif not calls:
            self.end(live, StopReason.LENGTH)
        # trajectory.tool_calls does not have the calls of this turn yet. More than the limit means that an earlier call
        # was refused: the model read that it must answer, and called again.
        elif len(trajectory.tool_calls) > self.cfg.max_tool_calls:
            self.end(live, StopReason.TOOL_LIMIT)
        else:
            self.start_calls(live, calls)

    # ---- it calls tools, and reads their results

    def start_calls(self, live: Live, calls: Sequence[Call]) -> None:
        """Start all calls of the current turn. A call that is malformed or over a limit gets its error at once."""
        for index, call in enumerate(calls):
            record = record_of(call, live, self.cfg)
            live.trajectory.turns[-1].tool_calls.append(record)
            if record.executed:
                self.start_call(live, index)
        if not live.num_calling:
            self.append_results(live)

    def start_call(self, live: Live, index: int) -> None:
        """Start a call of the current turn."""
        prompt = live.group.prompt
        call = live.trajectory.turns[-1].tool_calls[index]
        call_id = f"{live.key}|{index}"
        self.calling[call_id] = (live, index)
        live.num_calling += 1
        seed = seed_from(f"{live.group.seed}|{prompt.prompt_id}")  # one world for all trajectories of the group
        context = ToolContext(*live.owner, turn=live.turn_index, seed=seed, row=prompt.meta)
        self.tools.start(call_id, call.tag, call.argument, context)

    def on_tool_result(self, call_id: str, result: ToolResult) -> None:
        """Take the result of a call. The last result of a turn continues the trajectory."""
        live, index = self.calling.pop(call_id)
        calls = live.trajectory.turns[-1].tool_calls
        calls[index] = result.of(calls[index])
        live.num_calling -= 1
        live.has_failed |= result.infra_error
        if live.num_calling:
            return
        if live.has_failed:  # an infrastructure error: the model neither reads it nor is trained on it
            self.end(live, StopReason.ERROR)
        else:
            self.append_results(live)

    def append_results(self, live: Live) -> None:
        """Append the results of the turn and start the next turn. End the trajectory if no answer would fit."""
        room = live.room(self.cfg) - self.cfg.answer_reserve_tokens
        if live.append_results_if_they_fit(self.codec, min(self.cfg.max_result_tokens, room)):
            self.next_turn(live)
        else:
            turn = live.trajectory.turns[-1]
            # the model never reads these results, so the record must not show them
            turn.tool_calls = [replace(call, result="") for call in turn.tool_calls]
            self.end(live, StopReason.LENGTH)

    # ---- it goes on

    def next_turn(self, live: Live) -> None:
        """Ask the context policy what the next turn reads, and start that turn.

        End the trajectory after an answer, or if there is no room for another turn.
        """
        prompt = live.group.prompt
        num_tokens = live.trajectory.num_context_tokens(len(prompt.token_ids))
        evidence = ContextEvidence(prompt, live.trajectory, num_tokens=num_tokens, codec=self.codec, cfg=self.cfg)
        # list: read these token ids; str: ask for a note; None: go on with all that is there, or end after an answer
        context = next_context(evidence)
        if evidence.is_answer and context is None:
            self.end(live, StopReason.EOS)
            return
        asks_for_note = isinstance(context, str)
        if asks_for_note:
            has_room = live.append_note_request(self.codec, self.cfg, context)
        elif context is not None:
            has_room = live.replace_context(context, self.cfg)
        else:
            has_room = True
        if not has_room:
            self.end(live, StopReason.LENGTH)
            return
        self.start_turn(live, is_note=asks_for_note)
        # The released code judges the turn before the tool result, which is already measured. So the decision need not
        # wait for tokens of the next turn.
        if self.branching.compat == "upstream":
            self.take_branch_decision(live)

    # ---- it is forked

    def take_branch_decision(self, live: Live) -> None:
        """Take the branch decision on the tool result before the current turn, if one is due."""
        if not live.is_decision_due:
            return
        executed = [call.tag for call in live.trajectory.tool_calls if call.executed]
        live.group.decide(live, self.branching, refused_by=self.tools.sessions.refusal(executed))
        self.grow(live.group)

    def grow(self, group: GroupState) -> None:
        """Start the children that the budget allows now. Once no tool result can branch any more, fill the group."""
        for turn, parent, children in group.budget.settle():
            evidence = group.decisions[turn, parent].evidence
            for child in children:
                # the decision to branch counts for the child as for the parent (GroupState.decide)
                child_evidence = replace(evidence, consecutive=evidence.consecutive + 1)
                self.fork(group, parent, turn=turn, path=child, evidence=child_evidence)
        if group.budget.is_settled and self.forks_afterwards:
            self.fork_finished(group)
        elif group.budget.is_settled:
            self.start_missing_roots(group)
        # tools with a state may drop the copies that no child can need any more
        undecided = ((turn, _trajectory_id(path)) for turn, path in group.budget.undecided())
        self.tools.sessions.retain(group.prompt.prompt_id, undecided)

    def fork(
        self, group: GroupState, parent_path: Path, *, turn: int, path: Path, evidence: Evidence | None = None
    ) -> None:
        """Start a child that shares everything up to the tool result before `turn`. The parent goes on undisturbed.

        evidence: the child's until its own first turn is measured. None under a retrospective selector: it reads none.
        """
        parent = group.trajectories[parent_path]
        child = parent.branch(_trajectory_id(path), turn)
        group.trajectories[path] = child
        prompt_id = group.prompt.prompt_id
        self.tools.sessions.fork((prompt_id, parent.trajectory_id), turn, (prompt_id, child.trajectory_id))
        self.start_turn(Live(child, group, path, evidence), is_note=parent.turns[turn].is_note)

    def fork_finished(self, group: GroupState) -> None:
        """Once all trajectories have ended, start the forks of a retrospective selector.

        After the last round, or after one without a fork, new roots fill the group. Under branching.until_mixed the
        group ends as it is once its rewards differ.
        """
        finished = retrospective.finished_so_far(group)
        if finished is None or len(group.trajectories) == group.size:
            return
        if self.branching.until_mixed and self.is_mixed(finished):
            # the group stays smaller than group_size, and is finished
            self.num_unfinished -= group.size - len(group.trajectories)
            group.size = len(group.trajectories)
            return
        forks = retrospective.next_forks(group, finished, self.branching, self.tools.sessions.refusal)
        for fork in forks:
            parent, child = retrospective.paths_of(group, fork)
            if parent:
                self.fork(group, parent, turn=fork.turn, path=child)
            else:
                self.start_roots(group, 1, may_branch=False)
        if not forks or group.num_rounds == self.branching.expansion_rounds:
            self.start_missing_roots(group)

    def start_missing_roots(self, group: GroupState) -> None:
        """Fill the group with roots."""
        self.start_roots(group, group.size - len(group.trajectories), may_branch=False)

    # ---- it ends

    def end(self, live: Live, reason: StopReason) -> None:
        """End the trajectory. Then start what waited for this end: children, roots, or retrospective forks."""
        group = live.group
        live.trajectory.stop_reason = reason
        live.decode(self.codec)
        group.wall_s[live.path] = time.perf_counter() - live.began_at_s if live.began_at_s else 0.0
        self.num_unfinished -= 1
        self.tools.sessions.end(live.owner)
        group.budget.close(live.path)
        if group.budget.total_children is None:  # AEPO's pre-monitoring trajectory, alone in its group until now
            num_roots = group.num_roots_after(live.trajectory, self.branching.budget_weight)
            self.start_roots(group, num_roots - 1, may_branch=True)
            group.budget.total_children = group.size - num_roots
        self.grow(group)
        if group.is_finished:
            self._finished.append(group)
            self.tools.sessions.forget(group.prompt.prompt_id)


def _trajectory_id(path: Path) -> str:
    """(2, 0) -> "2.0"."""
    return ".".join(map(str, path))
