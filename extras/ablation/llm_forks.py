"""The value of forks for a frozen pretrained model: each rule's contrast per tool call and per token.

    python -m extras.ablation.llm_task --out data/llm_long        # then SFT: configs/llm_long.yaml
    python -m extras.ablation.llm_forks
    python -m extras.ablation.llm_forks --report_only

Each arm of ARMS samples its groups with the rollout of training, including tools. A request's seed depends only on the
position in the tree. So two arms sample the same trajectory at the same position, and an engine with a memory samples
this trajectory once.
After a stop, the same command continues after the last finished block of questions. DIR/results.jsonl has a line for
each group.

The contrast of a branch is |reward - parent's reward|; of a root, |reward - previous root's reward|. A group of n has
n - 1 contrasts. The report divides the contrasts by the sampled tokens or by the calls, of the branches or of all.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from arpo.engine import Chunk, Engine, SamplingSpec
from arpo.evals.tables import markdown_table
from arpo.rewards import score_groups
from arpo.start.load import load_config, run_or_exit
from arpo.trajectory import Group, Prompt
from extras.ablation.frontier_settings import RULES

ARMS = {
    "grpo": ("grpo", 8),
    "random_4": ("random", 4),
    "random_2": ("random", 2),
    "arpo": ("arpo", 4),
    "top_h_2": ("top_h", 2),
    "positions_2": ("positions", 2),
}
"""Arm -> rule (frontier_settings.py) and number of roots. A block's groups are sampled in this order."""
POSITIONS_OF = {"positions_2": "top_h_2"}
"""Arm -> the arm to take the fork positions from."""
NUM_RESAMPLES = 4000


def flags_of(arm: str) -> list[str]:
    """Return the flags of train_rl.py that distinguish an arm."""
    rule, num_roots = ARMS[arm]
    roots = [] if rule == "grpo" else ["--branching.num_initial_rollouts", str(num_roots)]
    return [*RULES[rule], *roots]


class Remembering:
    """An engine that samples no request twice: the same prompt with the same seed and settings has the same answer."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.known: dict[tuple, Chunk] = {}
        # running request -> key in `known`
        self.asked: dict[str, tuple] = {}
        self.parts: dict[str, Chunk] = {}
        self.answers: deque[Chunk] = deque()

    @property
    def num_running(self) -> int:
        return self.engine.num_running + len(self.answers)

    def submit(self, request_id: str, token_ids: list[int], spec: SamplingSpec) -> None:
        asks = (tuple(token_ids), spec)
        if asks in self.known:
            self.answers.append(replace(self.known[asks], request_id=request_id))
            return
        self.asked[request_id] = asks
        self.parts[request_id] = Chunk(request_id)
        self.engine.submit(request_id, token_ids, spec)

    def step(self) -> list[Chunk]:
        """Return a remembered answer in one chunk, if any. If not, return a chunk of each running request."""
        if self.answers:
            return [self.answers.popleft()]
        chunks = self.engine.step()
        for chunk in chunks:
            so_far = self.parts[chunk.request_id]
            lists = ("token_ids", "logprobs", "entropies", "top_logprobs")
            whole = {name: getattr(so_far, name) + getattr(chunk, name) for name in lists}
            self.parts[chunk.request_id] = replace(chunk, **whole)
            if chunk.finish:
                self.known[self.asked.pop(chunk.request_id)] = self.parts.pop(chunk.request_id)
        return chunks


# ---- sampling


class Sampling:
    """A frozen policy and its tools."""

    def __init__(self, model: str, questions: str, folder: Path, dtype: str):
        """Load the model with the configuration of training."""
        from arpo.engine.team import form_team
        from arpo.ranks import init_ranks
        from arpo.sampling.environment import Environment
        from train_rl import RLConfig

        flags = ["--model.path", model, "--data.train", questions, "--engine.dtype", dtype]
        files = ["configs/llm_arpo.yaml", "configs/llm_long.yaml"]
        self.configs = {arm: load_config(RLConfig, [*files, *flags, *flags_of(arm)]) for arm in ARMS}
        self.folder, cfg = folder, self.configs["grpo"]
        self.ranks = init_ranks()
        team = form_team(self.ranks, 1, model)
        self.env = Environment(cfg.model, cfg.protocol, cfg.tools, team, cfg.rollout)
        self.prompts = self.env.prompts(questions, cfg.data)
        self.engine = Engine(model, cfg.engine, max_model_len=cfg.max_model_len, seed=0)

    def score(self, groups: list[Group]) -> None:
        score_groups(groups, self.configs["grpo"].reward, tools=self.env.codec.tools, only_new=True)

    def block(self, prompts: Sequence[Prompt], seed: int, positions: Counter[int]) -> list[dict]:
        """Sample these questions under every arm, and return a line per group.

        Adds the forks of the arms in POSITIONS_OF's values to `positions`.
        """
        from arpo.rollout import Rollout
        from arpo.sampling.driver import Source, drive

        engine = Remembering(self.engine)
        lines = []
        for arm, cfg in self.configs.items():
            if arm in POSITIONS_OF:
                path = self.folder / f"positions_{positions.total()}.json"
                path.write_text(json.dumps(positions))
                os.environ["FORK_POSITIONS"] = str(path)
            loop = Rollout(engine, self.env.tools, self.env.codec, cfg=cfg.rollout, branching=cfg.branching)
            source = Source(loop, prompts, f"{seed}|0")
            drive(source)
            groups = [source.groups[place] for place in sorted(source.groups)]
            self.score(groups)
            found = [line_of(group, arm, seed) for group in groups]
            if arm in POSITIONS_OF.values():
                positions.update(turn for line in found for turn, *_ in line["branches"])
            lines += found
            right = np.mean([root[1] for line in found for root in line["roots"]])
            calls = [call.ok for group in groups for t in group.trajectories for call in t.own_tool_calls]
            print(f"{arm}: {right:.2f} of the roots right, {np.mean(calls):.2f} of {len(calls)} calls", flush=True)
        return lines


def line_of(group: Group, arm: str, seed: int) -> dict:
    """Return a group's line.

    Each root: [reward, accuracy, own tokens, own calls]. Each branch: [turn of the fork, number of the parent's turns,
    H at the fork, |difference of rewards|, |difference of accuracies|, own tokens, own calls].
    """
    by_id = {t.trajectory_id: t for t in group.trajectories}
    roots = []
    branches = []
    for t in group.trajectories:
        costs = [sum(t.loss_mask[t.fork_at :]), sum(call.executed for call in t.own_tool_calls)]
        if t.parent_id is None:
            roots.append([t.reward, t.accuracy, *costs])
            continue
        parent = by_id[t.parent_id]
        turn = sum(turn.inherited for turn in t.turns)
        entropy = parent.turns[turn].entropy
        differences = [abs(t.reward - parent.reward), abs(t.accuracy - parent.accuracy)]
        branches.append([turn, len(parent.turns), round(entropy, 4), *differences, *costs])
    return {"question": group.prompt.prompt_id, "seed": seed, "arm": arm, "roots": roots, "branches": branches}


# ---- the report


def sums_of(line: dict) -> np.ndarray:
    """Return (8,) sums of a group: contrast (by reward, by accuracy), tokens and calls, of branches, then of all.

    With GRPO the first four sums are over all roots except the first.
    """
    roots = np.array(line["roots"], float)
    branches = np.array(line["branches"], float).reshape(-1, 7)
    new_roots = np.concatenate([np.abs(np.diff(roots[:, :2], axis=0)), roots[1:, 2:]], axis=1).sum(axis=0)
    forked = branches[:, 3:].sum(axis=0)
    whole = new_roots + forked
    whole[2:] += roots[0, 2:]
    return np.concatenate([new_roots if line["arm"] == "grpo" else forked, whole])


RATIOS = {
    "branch, per call": (0, 3),
    "branch, per token": (0, 2),
    "group, per call": (4, 7),
    "group, per token": (4, 6),
    "group, right or wrong, per call": (5, 7),
}
"""Name -> numerator and denominator in `sums_of`."""


def totals(lines: list[dict]) -> dict[str, np.ndarray]:
    """Return arm -> (NUM_RESAMPLES + 1, 8) sums over the questions: first of the data, then of the resamples."""
    arms = [arm for arm in ARMS if any(line["arm"] == arm for line in lines)]
    questions = sorted({line["question"] for line in lines})
    own = np.zeros((len(arms), len(questions), 8))
    for line in lines:
        own[arms.index(line["arm"]), questions.index(line["question"])] += sums_of(line)
    drawn = np.random.default_rng(0).multinomial(
        len(questions), np.full(len(questions), 1 / len(questions)), NUM_RESAMPLES
    )
    weights = np.concatenate([np.ones((1, len(questions))), drawn])
    return {arm: weights @ own[number] for number, arm in enumerate(arms)}


def interval(values: np.ndarray) -> str:
    low, high = np.nanpercentile(values[1:], [2.5, 97.5])
    return f"{values[0]:.2f} [{low:.2f}, {high:.2f}]"


def report(lines: list[dict]) -> str:
    """Return the tables: the samples of each arm; each arm's contrast per cost, relative to other arms."""
    sums = totals(lines)
    tables = []
    rows = []
    for arm in sums:
        own = [line for line in lines if line["arm"] == arm]
        branches = np.array([branch for line in own for branch in line["branches"]], float).reshape(-1, 7)
        shown = [f"{branches[:, 0].mean():.2f}", f"{branches[:, 2].mean():.3f}"] if len(branches) else ["", ""]
        new = sums[arm][0]
        number = len(branches) or sum(len(line["roots"]) - 1 for line in own)
        right = np.mean([root[1] for line in own for root in line["roots"]])
        rows.append([arm, str(len(own)), str(len(branches)), *shown, f"{right:.3f}", f"{new[0] / number:.3f}",
                     f"{new[2] / number:.0f}", f"{new[3] / number:.2f}", f"{new[7] / len(own):.1f}"])  # fmt: skip
    head = ["arm", "groups", "branches", "mean turn of a fork", "mean H there", "roots right", "contrast of a new one",
            "its tokens", "its calls", "calls per group"]  # fmt: skip
    tables.append(markdown_table(head, rows))
    for reference in [name for name in ("grpo", "random_2", "random_4", "positions_2") if name in sums]:
        rows = [
            [arm, *(interval(own[:, a] / own[:, b] / (sums[reference][:, a] / sums[reference][:, b]))
                    for a, b in RATIOS.values())]
            for arm, own in sums.items() if arm != reference
        ]  # fmt: skip
        tables.append(markdown_table([f"contrast, relative to {reference} [95 %]", *RATIOS], rows))
    return "\n\n".join("\n".join(table) for table in tables) + "\n"


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(args: argparse.Namespace) -> None:
    args.dir.mkdir(parents=True, exist_ok=True)
    path = args.dir / "results.jsonl"
    lines = read_lines(path)
    if not args.report_only:
        sampling = Sampling(args.model, args.questions, args.dir, args.dtype)
        done = {(line["seed"], line["question"]) for line in lines}
        known = [line for line in lines if line["arm"] in POSITIONS_OF.values()]
        positions = Counter(turn for line in known for turn, *_ in line["branches"])
        for seed in args.seeds:
            todo = [prompt for prompt in sampling.prompts if (seed, prompt.prompt_id) not in done]
            for start in range(0, len(todo), args.block):
                found = sampling.block(todo[start : start + args.block], seed, positions)
                with path.open("a") as file:
                    file.write("".join(json.dumps(line) + "\n" for line in found))
                lines += found
                print(f"seed {seed}: {start + args.block} of {len(todo)} questions", flush=True)
    print(report(lines))
    (args.dir / "TABLE.md").write_text(report(lines))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m extras.ablation.llm_forks", description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path("runs/llm_forks"))
    parser.add_argument("--model", default="runs/llm_long_again/hf")
    parser.add_argument("--questions", default="data/llm_long/questions.jsonl")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--block", type=int, default=20, help="questions that are sampled together")
    parser.add_argument("--report_only", action="store_true", help="sample nothing; write the table of what is there")
    run_or_exit(run, parser.parse_args())


if __name__ == "__main__":
    main()
