"""A world in which a random model learns in seconds: model, prompts, corpus, a reward, and the config of a run."""

import json
from collections.abc import Iterable
from pathlib import Path

from helpers.files import read_jsonl
from helpers.kill import run_until_killed
from helpers.models import build_tiny_model
from helpers.ranks import run_script

from arpo.log import read_metrics

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    \"\"\"Share of characters that are the letter e or a: easy to learn, hard to hit by chance.\"\"\"
    return sum(c in "ea" for c in solution_str) / max(len(solution_str), 1)


def compute_hit(data_source, solution_str, ground_truth, extra_info):
    \"\"\"1 for one response in eight, by chance: so of groups of eight about two in three are mixed.\"\"\"
    return float(len(solution_str) % 8 == 0)
"""
CONFIG = """
run: {name: rl, num_steps: 12, validate_every: 6, save_every: 2, dump_every: 4, dir: @DIR@/runs}
model: {path: @DIR@/model, compute_dtype: float32, recompute_every_n_layers: 0}
data: {train: @DIR@/train.jsonl, valid: @DIR@/valid.jsonl, num_prompts_per_step: 4, max_prompt_tokens: 64}
engine: {dtype: float32, kv_cache_gib: 0.05, max_num_seqs: 32}
rollout: {group_size: 8, max_response_tokens: 48, max_tool_calls: 2, max_result_tokens: 28, answer_reserve_tokens: 8}
branching: {selector: arpo, num_initial_rollouts: 6, entropy_tokens: 4}
tools:
  names: [search]  # a jail for python takes as long to start as all the rest
  search: {backend: local, corpus: @DIR@/corpus.jsonl, mode: live}
reward: {file: @DIR@/reward.py}
update: {num_prompts_per_minibatch: 2, max_tokens_per_microbatch: 256}
optim: {lr: 1.0e-2}
"""


def build_toy_world(folder: Path, config: str = CONFIG) -> Path:
    """Write everything that `config` (with @DIR@ for the folder) needs, and config.yaml itself; returns the folder."""
    build_tiny_model(folder / "model")
    rows = [{"prompt": f"say e {i}", "answer": "e", "data_source": "toy"} for i in range(16)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "valid.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
    (folder / "corpus.jsonl").write_text('{"title": "e", "text": "eeee"}\n{"title": "a", "text": "aaaa"}\n')
    (folder / "reward.py").write_text(REWARD)
    (folder / "config.yaml").write_text(config.replace("@DIR@", str(folder)))
    return folder


def train(world: Path, name: str, *flags: str, ranks: int) -> list[dict]:
    """Run train_rl.py in that world, and return the metrics of its steps."""
    run_script("train_rl.py", str(world / "config.yaml"), "--run.name", name, *flags, ranks=ranks)
    return read_metrics(world / "runs" / name)


def train_and_kill(world: Path, name: str, *flags: str, places: Iterable[tuple], ranks: int = 2) -> list[dict]:
    """The same, but first it is killed at each of the places, one after the other. A place is (words, *kill_at's)."""
    argv = (str(world / "config.yaml"), "--run.name", name, *flags)
    for _, *place in places:
        run_until_killed(tuple(place), "train_rl.py", *argv, ranks=ranks)
    return train(world, name, *flags, ranks=ranks)


def dumped(world: Path, name: str, step: int) -> list[dict]:
    """Return the trajectories that a run dumped in a step."""
    return read_jsonl(world / "runs" / name / "trajectories" / f"step_{step:06d}.jsonl.gz")
