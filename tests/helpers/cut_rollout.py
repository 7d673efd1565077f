"""Rollouts whose turns are cut and sampled further, on a scripted engine that forgets what it is told to forget."""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

from helpers.fakes import ScriptedEngine
from helpers.scripted_rollout import CODEC, TOKENIZER

from arpo.checkpoint.checkpoints import RANK_FILE
from arpo.engine import Chunk, SamplingSpec
from arpo.engine.team import Team
from arpo.log import Console
from arpo.ranks import Ranks
from arpo.rollout import Rollout
from arpo.sampling.carried_state import restore, state_of
from arpo.sampling.carry_over import CarryOver
from arpo.sampling.sampler import Sampler
from arpo.tools.base import ToolRunner


@dataclass
class CutEngine(ScriptedEngine):
    """Goes on with a turn at the token where its prompt ends. Like vLLM it looks for stop strings in what it samples
    itself, and samples on where it finds none. A token's numbers depend on its place in the turn alone."""

    def submit(self, request_id: str, token_ids: list[int], spec: SamplingSpec) -> None:
        assert request_id not in self._running and spec.max_tokens > 0
        self.submitted.append((request_id, token_ids, spec))
        prompt_id, trajectory_id, turn = request_id.split("|")
        text = self.script(prompt_id, trajectory_id, int(turn))
        text, entropy = text if isinstance(text, tuple) else (text, 1.0)
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        newest, before = token_ids[-1], range(len(ids), 0, -1)
        done = next((n for n in before if ids[n - 1] == newest and token_ids[-n:] == ids[:n]), 0)
        rest, finish, stop = ids[done:], "eos", None
        text = self.tokenizer.decode(rest)
        if ends := [(text.find(s) + len(s), s) for s in spec.stop if s in text]:
            end, stop = min(ends)
            rest, finish = self.tokenizer.encode(text[:end], add_special_tokens=False), "stop"
        if len(rest) > spec.max_tokens:
            rest, finish, stop = rest[: spec.max_tokens], "length", None
        self._running[request_id] = [rest, entropy, finish, stop, 0, spec, done]

    def step(self) -> list[Chunk]:
        chunks = []
        for request_id, state in list(self._running.items()):
            rest, entropy, finish, stop, sent, spec, done = state
            new = rest[sent : sent + self.tokens_per_step]
            state[4] += len(new)
            places = range(done + sent, done + sent + len(new))
            measured = list(places)[: max(0, spec.num_entropy_tokens - sent)]
            is_last = state[4] >= len(rest)
            if is_last:
                del self._running[request_id]
            chunks.append(
                Chunk(
                    request_id,
                    new,
                    logprobs=[-0.01 * (place + 1) for place in places],
                    entropies=[entropy + 0.1 * (place % 7) for place in measured],
                    top_logprobs=[[-0.1, -2.5 - place] for place in measured] if spec.num_top_logprobs else [],
                    finish=finish if is_last else None,
                    stop_string=stop if is_last else None,
                )
            )
        return chunks


class PunctualRunner(ToolRunner):
    """Hands out the results of all calls at once, in the order of their start, so that a run has but one course."""

    def __init__(self, tools, prices=None):
        super().__init__(tools, prices)
        self.order: list[str] = []

    def start(self, call_id, tag, argument, context=None):
        self.order.append(call_id)
        super().start(call_id, tag, argument, context)

    def collect(self, *, block: bool):
        found = []
        while self.num_pending:
            found += super().collect(block=True)
        return sorted(found, key=lambda pair: self.order.index(pair[0]))


def sampler_with(ranks: Ranks, script, tools, cfg, branching, *, score=None, runner=ToolRunner, per_step=7) -> Sampler:
    return Sampler(
        engine=CutEngine(TOKENIZER, script, per_step),
        tools=runner({t.tag: t for t in tools}),
        codec=CODEC,
        team=Team(ranks),
        log=Console(is_main=False),
        seed=0,
        rollout=cfg,
        branching=branching,
        score=score,
    )


def random_tree(prompt_id: str, path: str, turn: int) -> tuple[str, float]:
    """A script: thoughts of all lengths, up to four calls, an answer."""
    rng = random.Random(f"{prompt_id}|{path}|{turn}")
    think = f"<think>{'word ' * rng.choice([0, 1, 8, 30])}</think>"
    call = rng.random() < 0.6 and turn < 4
    return think + (f"<search>{turn}@{path}</search>" if call else "<answer>\\boxed{1}</answer>"), rng.uniform(0.2, 2.0)


def train(carry: CarryOver, prompts: list, first: int, last: int, num_steps: int, num_drawn: int = 0) -> list[list]:
    """The groups that the steps first..last of num_steps are trained on. prompts: in the order of the draws."""
    steps = []
    for step in range(first, last + 1):
        count = carry.num_to_draw(num_steps - step + 1)
        drawn, num_drawn = prompts[num_drawn : num_drawn + count], num_drawn + count
        source = carry.begin_step(step, drawn)
        carry.sampler.run(source, "rollout", carry.num_prompts)
        if carry.sampler.score:
            carry.sampler.score(source.to_score)
        steps.append(source.exchange())
    return steps


def advance(loop: Rollout) -> None:
    """One round of what `drive` does."""
    for call_id, result in loop.tools.collect(block=not loop.engine.num_running):
        loop.on_tool_result(call_id, result)
    for chunk in loop.engine.step() if loop.engine.num_running else ():
        loop.on_chunk(chunk)


def saved(carry: CarryOver, folder: Path) -> list[Path]:
    """The checkpoint's files of this rank alone."""
    file = folder / RANK_FILE.format(rank=carry.team.ranks.rank)
    file.write_bytes(state_of(carry))
    return [file]


def moved(carry: CarryOver, fresh: CarryOver, prompts: list) -> CarryOver:
    """A fresh CarryOver that goes on from where this one is."""
    with tempfile.TemporaryDirectory() as folder:
        restore(fresh, saved(carry, Path(folder)), prompts)
    return fresh


def play_cut(loop: Rollout, prompts: list, rng: random.Random, *, share: float, between=lambda: None) -> list:
    """What `rollout` returns, with cuts at random moments; `between`: what is done while all is paused."""
    groups = [loop.start_group(prompt, "0|0") for prompt in prompts]
    while loop.num_unfinished:
        if rng.random() < share:
            loop.engine.abort(list(loop.decoding))
            loop.tools.park()
            between()
            loop.tools.unpark()
            for live in loop.decoding.values():
                loop.submit(live)
        advance(loop)
    return [group.to_group() for group in groups]


def plain(groups: list, *, without=("versions",)) -> list[dict]:
    """All of the groups but what the clock measured, and how often a session had to be replayed."""
    rows = []
    for t in (t for group in groups for t in group.trajectories):
        row = {name: value for name, value in t.to_dict().items() if name not in without}
        for turn in row["turns"]:
            for call in turn["tool_calls"]:
                call |= {"seconds": 0.0, "replayed": 0}
        rows.append(row)
    return rows


def make_punctual(_rank: int) -> None:
    """Have a script's tools answer at once: see PunctualRunner."""
    from arpo.engine import team

    team.ToolRunner = PunctualRunner
