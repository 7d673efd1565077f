"""Ask a trained agent, and watch it call its tools: one question per line, each in a new conversation.

    python -m extras.ask configs/demo_eval.yaml --model.path runs/demo_arpo/hf
    echo "What is 17 * 23?" | python -m extras.ask configs/qwen2.5_7b.yaml configs/eval.yaml --model.path runs/NAME/hf

Takes the config files and flags of evaluate.py, and uses model, engine, rollout, protocol, tools and
`eval.system_prompt`. --rollout.temperature 0 asks for the likeliest answer. Tool results are printed dim.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from arpo.data import tokenize_prompts
from arpo.data.model_folder import check_model_folder
from arpo.engine import Engine
from arpo.engine.team import form_team
from arpo.errors import UserError, printable
from arpo.evals.prompts import with_benchmark_prompt
from arpo.options import BranchingConfig
from arpo.ranks import init_ranks
from arpo.rollout import Rollout
from arpo.sampling.driver import Source, drive
from arpo.sampling.environment import Environment
from arpo.start.load import load_or_exit, run_or_exit
from arpo.tools import system_prompt_for
from arpo.trajectory import Prompt, Trajectory
from evaluate import EvalConfig

DIM, PLAIN = ("\x1b[2m", "\x1b[0m") if sys.stdout.isatty() else ("", "")


@dataclass(frozen=True)
class AskConfig(EvalConfig):
    """The options of evaluate.py; the questions come from the keyboard."""

    def __post_init__(self) -> None:
        """Do not require a benchmark."""


def check(cfg: AskConfig) -> None:
    check_model_folder(cfg.model.path, max_model_len=cfg.max_model_len)


def ask(cfg: AskConfig) -> None:
    """Answer the questions of standard input until it ends."""
    ranks = init_ranks()
    team = form_team(ranks, 1, cfg.model.path)
    env = Environment(cfg.model, cfg.protocol, cfg.tools, team, cfg.rollout)
    codec = env.codec
    system_prompt = system_prompt_for(cfg.eval.system_prompt, env.schemas, form=env.codec.format)
    engine = Engine(cfg.model.path, cfg.engine, max_model_len=cfg.max_model_len, seed=cfg.run.seed)
    alone = replace(cfg.rollout, group_size=1)
    no_branching = BranchingConfig(selector="none", num_initial_rollouts=1)
    longest = cfg.eval.max_prompt_tokens

    for number, question in enumerate(questions()):
        asked = Prompt(f"question {number}", [{"role": "user", "content": question}], answers=[])
        asked = with_benchmark_prompt(asked, system_prompt, codec.format)
        try:
            prompts = tokenize_prompts(
                [asked], codec.render_prompt, max_prompt_tokens=longest, overlong="error", path="the question"
            )
        except UserError as error:
            print(error)
            continue
        printed = Printed(Rollout(engine, env.tools, codec, cfg=alone, branching=no_branching))
        source = Source(printed.loop, prompts, f"{cfg.run.seed}|{number}")
        drive(source, printed.go_on)
        printed.end(source.groups[0].trajectories[0])
    env.tools.close()
    engine.close()
    ranks.close()


class Printed:
    """Prints a trajectory as it grows."""

    def __init__(self, loop: Rollout):
        self.loop = loop
        self.num_tokens = 0
        """Tokens printed so far."""

    def go_on(self) -> None:
        """Print the new tokens of the unfinished trajectory."""
        for live in [*self.loop.decoding.values(), *(live for live, _ in self.loop.calling.values())]:
            self.write(live.trajectory)

    def write(self, trajectory: Trajectory, *, to_the_end: bool = False) -> None:
        """Print the new tokens, tool results dim. An incomplete character at the end waits for its next token."""
        while (start := self.num_tokens) < (size := len(trajectory.token_ids)):
            mask = trajectory.loss_mask
            stop = start + 1
            while stop < size and mask[stop] == mask[start]:
                stop += 1
            text = printable(self.loop.codec.decode(trajectory.token_ids[start:stop]))
            if text.endswith("\ufffd") and stop == size and not to_the_end:
                return
            self.num_tokens = stop
            print(text if mask[start] else f"{DIM}{text}{PLAIN}", end="", flush=True)

    def end(self, trajectory: Trajectory) -> None:
        """Print the rest, and the stop reason if it is not the end token."""
        self.write(trajectory, to_the_end=True)
        print("" if trajectory.stop_reason == "eos" else f"\n({trajectory.stop_reason})", flush=True)


def questions() -> Iterator[str]:
    """Yield the non-empty lines of standard input."""
    while True:
        try:
            line = input("\n> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if line:
            yield line


if __name__ == "__main__":
    run_or_exit(ask, load_or_exit(AskConfig, check))
