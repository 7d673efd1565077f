"""Train on the demo's task `long`, and log after each step the exact probability of the right moves.

    torchrun --nproc_per_node 1 extras/ablation/right_moves.py configs/demo_arpo.yaml configs/demo_long.yaml

This is train_rl.py with the same options. Each line of metrics.jsonl gets further numbers about the policy after the
step, on held-out trails. `right/decisive` and `right/certain`: mean probability of the right turn at places with and
without a choice. `right/trail`: mean probability of the only right trajectory (the exact held-out accuracy). `cpu_s`:
CPU seconds of the step, as wall time on a busy machine says little. One rank only.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import train_rl
from arpo.start.inputs import check_rl
from arpo.start.load import load_or_exit, run_or_exit
from extras.demo.build import TASKS
from extras.demo.long import LongTrace, LongWorld
from extras.demo.world import Question

NUM_TRAILS = 24


class RightTrace(LongTrace):
    """Always takes the right turn."""

    def pick(self, shares: dict[str, float]) -> str:
        return next(iter(shares))


def right_trajectory(world: LongWorld, question: Question) -> str:
    """Return the right trajectory's text."""

    def search(query: str) -> str:
        return f"Page 1: {query} is {world.told[query.removeprefix('trail ')]}"

    return RightTrace(search, question, random.Random(0)).write()


class RightMoves:
    """The right trajectories of held-out trails, and a copy of the policy that reads them."""

    def __init__(self, model_path: str, data: Path):
        stamp = json.loads((data / "stamp.json").read_text())
        world = TASKS[stamp["task"]][0](stamp["seed"])
        self.tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)
        self.model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=torch.float32, trust_remote_code=False
        ).eval()
        questions = [world.question_of(*trail) for trail in world.trails["test"][:NUM_TRAILS]]
        rows = [self._row(world, question) for question in questions]
        width = max(len(ids) for ids, _ in rows)
        self.ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])  # (B, T)
        self.turn = torch.tensor([turn + [-1] * (width - len(turn)) for _, turn in rows])
        """(B, T) Number of the sampled turn that a token belongs to; -1 elsewhere."""
        self.decisive: list[list[bool]] = [
            [part.startswith("<think>try") for part in self._parts(right_trajectory(world, question))[::2]]
            for question in questions
        ]

    @staticmethod
    def _parts(text: str) -> list[str]:
        """Split into turns and results, alternately."""
        return re.split(r"( <result>.*?</result>)", text, flags=re.DOTALL)

    def _row(self, world: LongWorld, question: Question) -> tuple[list[int], list[int]]:
        """Return the tokens of prompt and right trajectory, and the turn of each token (-1: not sampled)."""
        message = {"role": "user", "content": question.text}
        prompt = self.tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        ids = self._encode(prompt)
        turn = [-1] * len(ids)
        for index, part in enumerate(self._parts(right_trajectory(world, question))):
            new = self._encode(part)
            is_result = index % 2 == 1
            ids = ids + new
            turn = turn + [-1 if is_result else index // 2] * len(new)
        return [*ids, self.tokenizer.eos_token_id], [*turn, turn[-1]]

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @torch.no_grad()
    def take(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the policy's weights."""
        parameters = dict(self.model.named_parameters())
        for name, value in named_parameters:
            parameters[name].copy_(value.full_tensor() if hasattr(value, "full_tensor") else value)

    @torch.no_grad()
    def __call__(self) -> dict[str, float]:
        logprobs = torch.log_softmax(self.model(input_ids=self.ids[:, :-1], use_cache=False).logits, -1)
        taken = logprobs.gather(-1, self.ids[:, 1:, None])[..., 0]  # (B, T-1): position t scores token t+1
        decisive_turns: list[float] = []
        certain_turns: list[float] = []
        for row, turns, decisive in zip(taken, self.turn[:, 1:], self.decisive, strict=True):
            for index, is_decisive in enumerate(decisive):
                probability = row[turns == index].sum().exp().item()
                (decisive_turns if is_decisive else certain_turns).append(probability)
        is_sampled = self.turn[:, 1:] >= 0
        return {
            "right/decisive": sum(decisive_turns) / len(decisive_turns),
            "right/certain": sum(certain_turns) / len(certain_turns),
            "right/trail": torch.where(is_sampled, taken, 0.0).sum(1).exp().mean().item(),
        }


class Enough(Exception):
    """Ends a training whose watcher (`is_enough`) needs no further steps."""


def main(cfg: train_rl.RLConfig, is_enough: Callable[[Mapping[str, float]], bool] = lambda values: False) -> None:
    """Train as train_rl.py does, copy the weights at each sync, and log the additional numbers.

    `is_enough` gets the numbers of each step. If it returns True, Enough is raised and nothing is saved.
    """
    moves = RightMoves(cfg.model.path, Path(cfg.data.train).parent)
    used_s = [time.process_time()]

    class Engine(train_rl.Engine):
        def sync_weights(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
            named = list(named_parameters)
            moves.take(named)
            super().sync_weights(named)

    class RunLog(train_rl.RunLog):
        def scalars(self, step: int, values: Mapping[str, float], *more: object) -> None:
            cpu_s = time.process_time() - used_s[0]
            values = {**values, "cpu_s": cpu_s, **moves()}
            super().scalars(step, values, *more)
            used_s[0] = time.process_time()
            if is_enough(values):
                raise Enough

    train_rl.Engine, train_rl.RunLog = Engine, RunLog
    train_rl.main(cfg)


if __name__ == "__main__":
    run_or_exit(main, load_or_exit(train_rl.RLConfig, check_rl))
