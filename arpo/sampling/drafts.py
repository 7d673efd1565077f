"""The rollouts of the epoch before as drafts: what the policy still agrees to is taken over, not sampled anew.

    draft    <think> a b c </search>  <result> ... </result>  <think> d e f </answer><eos>
    scored   ok      ok ok ok ok      (recorded)              ok      ok NO
    now      <think> a b c </search>  <result> ... </result>  <think> d x y z ...          x: sampled from here on

A root's draft is the root of the same name in the newest group of the prompt. The engine scores its tokens in one pass;
token t stays while a uniform draw u_t <= min(1, lenience * p_now(t) / p_then(t)) (SPEC-RL, arXiv 2509.23232). Turns
that stay whole keep the results that their tools gave then: no call is made. At the first token that does not stay the
draft is cut, and the turn is sampled on. All that stays goes through the loop as if it had been sampled: it has the
logprobs and entropies of the policy of now, and branch decisions are taken from these.

    RUN/drafts/step_000012.3.zip    the roots of a share of step 12's groups, which rank 3 wrote; one member per group

Which file and which member has a prompt's newest group every rank knows, and the checkpoint. So the draws, which come
from the seeds of the group, the path and the step, depend neither on the rank nor on a restart.
"""

from __future__ import annotations

import base64
import json
import math
import random
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from arpo.engine import Chunk, SamplingSpec
from arpo.errors import UserError
from arpo.growing import Live
from arpo.options import RolloutConfig
from arpo.ranks import Ranks
from arpo.rollout import Loop
from arpo.sampling.plain import from_plain, to_plain
from arpo.tools.sessions import Owner
from arpo.trajectory import Group, StopReason, Trajectory, Turn

COMPRESSION = 1
LARGEST = 700.0  # whose exponential is finite


@dataclass(frozen=True)
class Draft:
    """A finished root of an earlier rollout. The lists are as long as the response."""

    token_ids: list[int]
    logprobs: list[float]
    """Of the sampled tokens under the policy that sampled them, or took them over; 0 elsewhere."""
    loss_mask: list[int]
    turns: list[Turn]
    stop_reason: StopReason

    @classmethod
    def of(cls, t: Trajectory) -> Draft:
        turns = [Turn(turn.start, turn.end, turn.result_end, tool_calls=turn.tool_calls) for turn in t.turns]
        return cls(t.token_ids, t.rollout_logprobs, t.loss_mask, turns, t.stop_reason)

    def cut_to(self, num_tokens: int) -> Draft:
        """Return the draft without the tokens behind the first `num_tokens`. Its turns stay as they were."""
        lists = ("token_ids", "logprobs", "loss_mask")
        return replace(self, **{name: getattr(self, name)[:num_tokens] for name in lists})

    def packed(self) -> dict:
        """Return it in plain types. The logprobs came as float32, so nothing is lost."""
        plain = {"turns": to_plain(self.turns), "stop_reason": self.stop_reason.value}
        for name, kind in KINDS.items():
            plain[name] = base64.b64encode(np.array(getattr(self, name), kind).tobytes()).decode()
        return plain

    @classmethod
    def unpacked(cls, plain: dict) -> Draft:
        lists = {name: np.frombuffer(base64.b64decode(plain[name]), kind).tolist() for name, kind in KINDS.items()}
        return cls(turns=from_plain(list[Turn], plain["turns"]), stop_reason=StopReason(plain["stop_reason"]), **lists)


KINDS = {"token_ids": np.int32, "logprobs": np.float32, "loss_mask": np.int8}
"""Type of the numbers in a draft's lists, as they are stored."""


def num_accepted(
    now: Sequence[float], then: Sequence[float], loss_mask: Sequence[int], rng: random.Random, *, lenience: float = 1.0
) -> int:
    """Return how many of a draft's first tokens stay. `now`, `then`: logprobs of each token; results always stay.

    One draw per sampled token. p_now / p_then of 1, 2, 0.5 and draws of 0.9, 0.9, 0.9, lenience 1 -> 2 tokens
    """
    for place, is_sampled in enumerate(loss_mask):
        if is_sampled and rng.random() > lenience * math.exp(min(now[place] - then[place], LARGEST)):
            return place
    return len(loss_mask)


class Drafts:
    """The newest roots of each prompt, in the run's folder. With rollout.reuse_last_epoch=False it does nothing."""

    def __init__(self, folder: Path, cfg: RolloutConfig, state: Mapping[str, Sequence[int]]):
        """`state` is what a checkpoint kept of it; {} for a new run."""
        self.folder, self.cfg = folder, cfg
        self.state = {prompt_id: tuple(place) for prompt_id, place in state.items()}
        """prompt_id -> (step, rank that wrote the file, number of the group in the step). Every rank keeps the same."""
        self._read: tuple[str, dict[str, Draft]] = "", {}

    def add(self, step: int, groups: Sequence[Group], ranks: Ranks) -> None:
        """Make these the newest groups of their prompts; each rank writes its share. Collective. Raises UserError."""
        if not self.cfg.reuse_last_epoch:
            return
        writers = [number % ranks.world_size for number in range(len(groups))]
        mine = [number for number, rank in enumerate(writers) if rank == ranks.rank]
        ranks.together(lambda: self._write(step, ranks.rank, {number: groups[number] for number in mine}))
        self.state |= {group.prompt.prompt_id: (step, writers[n], n) for n, group in enumerate(groups)}
        self._read = "", {}

    def _write(self, step: int, rank: int, groups: Mapping[int, Group]) -> None:
        path = self.path(step, rank)
        temporary = path.with_suffix(".tmp")
        try:
            self.folder.mkdir(exist_ok=True)
            with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=COMPRESSION) as file:
                for number, group in groups.items():
                    roots = [t for t in group.trajectories if t.parent_id is None and t.stop_reason != StopReason.ERROR]
                    plain = {t.trajectory_id: Draft.of(t).packed() for t in roots}
                    file.writestr(str(number), json.dumps({"prompt_id": group.prompt.prompt_id, "roots": plain}))
            temporary.replace(path)
        except OSError as error:
            reason = f"cannot write the drafts of the next epoch ({error.strerror or error})"
            raise UserError(f"{path}: {reason}; free some space, or set rollout.reuse_last_epoch=False") from None

    def prune(self, state: Mapping[str, Sequence[int]]) -> None:
        """Remove files that are older than all those of `state`, that of the oldest checkpoint that a run may need."""
        oldest = min((step for step, *_ in state.values()), default=0)
        for path in self.folder.glob("step_*.zip") if oldest else ():
            if int(path.name.split(".")[0].removeprefix("step_")) < oldest:
                path.unlink(missing_ok=True)

    def path(self, step: int, rank: int) -> Path:
        return self.folder / f"step_{step:06d}.{rank}.zip"

    def of(self, prompt_id: str, trajectory_id: str) -> Draft | None:
        """Return the draft of a root, as far as the limits allow; None where there is none. Raises UserError."""
        if prompt_id not in self.state:
            return None
        if self._read[0] != prompt_id:
            self._read = prompt_id, self._load(prompt_id)
        draft, limit = self._read[1].get(trajectory_id), self.cfg.max_response_tokens
        if draft is None or not draft.token_ids or len(draft.token_ids) > limit:  # the limit may have been changed
            return None
        return draft.cut_to(limit - 1)  # the engine cannot score a prompt without room for one token more

    def _load(self, prompt_id: str) -> dict[str, Draft]:
        *place, number = self.state[prompt_id]
        path = self.path(*place)
        try:
            with zipfile.ZipFile(path) as file:
                plain = json.loads(file.read(str(number)))
            if plain["prompt_id"] != prompt_id:
                raise ValueError(f"group {number} is of {plain['prompt_id']}")
            return {name: Draft.unpacked(root) for name, root in plain["roots"].items()}
        except (OSError, zipfile.BadZipFile, KeyError, TypeError, ValueError) as error:
            reason = f"cannot read the draft of {prompt_id} ({error})"
            fix = "put the file back (all nodes must see run.dir), or set rollout.reuse_last_epoch=False"
            raise UserError(f"{path}: {reason}; {fix}, with run.resume_changed True") from None

    def loop(self, *args: object) -> DraftLoop:
        """Return a rollout's loop that uses the drafts. Arguments: see Loop."""
        return DraftLoop(self, *args)


class DraftLoop(Loop):
    """A loop in which each root first takes over what stays of its draft."""

    def __init__(self, drafts: Drafts, *args: object):
        super().__init__(*args)
        self.drafts = drafts
        self.scoring: dict[Owner, Draft] = {}
        """Those that the engine scores."""
        self.playing: dict[Owner, Draft] = {}
        """Those that are being taken over."""

    def submit(self, live: Live) -> None:
        if live.owner in self.playing:
            return  # `play` goes on with the turn
        t = live.trajectory
        draft = self.drafts.of(*live.owner) if len(live.path) == 1 and not (t.token_ids or t.num_draft_tokens) else None
        if draft is None:
            super().submit(live)
            return
        self.scoring[live.owner] = draft
        numbers = {"num_top_logprobs": self.num_top_logprobs, "num_scored_tokens": len(draft.token_ids)}
        spec = SamplingSpec(max_tokens=1, temperature=self.cfg.temperature, **numbers)
        self.engine.submit(live.key, [*live.group.prompt.token_ids, *draft.token_ids], spec)

    def on_chunk(self, chunk: Chunk) -> None:
        if chunk.finish == "scored":
            self.play(self.decoding[chunk.request_id], chunk)
        else:
            super().on_chunk(chunk)

    def play(self, live: Live, scored: Chunk) -> None:
        """Let the trajectory grow by what stays of its draft, and have the rest sampled."""
        t, draft = live.trajectory, self.scoring.pop(live.owner)
        rng = random.Random(f"{live.group.seed}|{live.key}|draft")
        now, lenience = scored.logprobs, self.cfg.reuse_lenience
        end = num_accepted(now, draft.logprobs, draft.loss_mask, rng, lenience=lenience)
        t.num_draft_tokens, t.reused_until = sum(draft.loss_mask), end
        self.playing[live.owner] = draft
        for turn in draft.turns:
            if turn.start >= end:
                break
            # one that the length ended goes on: its last token was cut off (`Drafts.of`), or the limit has been raised
            is_whole = turn.end <= end and (turn.tool_calls or draft.stop_reason != StopReason.LENGTH)
            part = slice(turn.start, min(turn.end, end))
            head = slice(turn.start, min(part.stop, turn.start + self.num_entropy_tokens))
            numbers = {"entropies": scored.entropies[head], "top_logprobs": scored.top_logprobs[head]}
            finish = "stop" if is_whole else None
            self.on_chunk(Chunk(live.key, draft.token_ids[part], now[part], **numbers, finish=finish))
        del self.playing[live.owner]
        if t.stop_reason is None:
            self.submit(live)

    def end_turn(self, live: Live, chunk: Chunk) -> None:
        draft, turn = self.playing.get(live.owner), live.trajectory.turns[-1]
        if draft is None:
            super().end_turn(live, chunk)
            return
        for call in draft.turns[live.turn_index].tool_calls:
            answered = {"cached": True, "seconds": 0.0, "cost": 0.0, "replayed": 0, "replay_mismatches": 0}
            turn.tool_calls.append(replace(call, **answered) if call.executed else call)
        if turn.tool_calls:
            self.append_results(live)
        else:
            self.end(live, draft.stop_reason)

    def render_results(self, live: Live) -> tuple[list[str], list[int]] | None:
        if (draft := self.playing.get(live.owner)) is None:
            return super().render_results(live)
        turn = draft.turns[live.turn_index]
        token_ids = draft.token_ids[turn.end : turn.result_end]
        return ([call.result for call in turn.tool_calls], token_ids) if token_ids else None  # none: there was no room
